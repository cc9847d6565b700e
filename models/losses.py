"""Divergences between the target's distribution p and the drafter's q, and their sum over many rows at little memory.

Each divergence takes fp32 log-probabilities of the drafter and of the target [R, V] and returns one value a row [R]. No
gradient flows into the target's side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.models.layers import shift_left

Divergence = Literal["cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "lk_hybrid"]

LossSums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), reduced over all ranks before dividing

CHUNK_ELEMENTS = 1 << 24  # rows x vocabulary of logits that exist at once: 64 MiB a tensor in fp32
LOWEST = torch.finfo(torch.float32).min  # for the log of a chance of 0, which times 0 is then 0
LK_DECAY = 3.0  # eta of the LK hybrid for EAGLE-3-like drafters (arXiv 2602.23881)


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """sum p log(p / q)"""
    return (log_p.exp() * (log_p.clamp(min=LOWEST) - log_q)).sum(-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """sum q log(q / p)"""
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Half KL(p | m) plus half KL(q | m), m the mean of p and q"""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * ((log_p.exp() * (log_p - log_m)) + log_q.exp() * (log_q - log_m)).sum(-1)


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """1 - sum min(p, q): exactly the rejection rate of one token (DistillSpec, arXiv 2310.08461)"""
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-log q of the target's likeliest token"""
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True))[..., 0]


def lk_hybrid(log_q: Tensor, log_p: Tensor) -> Tensor:
    """w KL + (1 - w) TV with w = exp(-eta * acceptance) a row, no gradient through w (arXiv 2602.23881).

    KL leads while little is accepted, where the gradient of TV vanishes; TV takes over as acceptance grows.
    """
    rejection = total_variation(log_q, log_p)
    weight = torch.exp(-LK_DECAY * (1 - rejection.detach()))
    return weight * forward_kl(log_q, log_p) + (1 - weight) * rejection


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
}


@dataclass
class RowLosses:
    """Over R rows of hidden states."""

    loss: Tensor  # scalar sum, with gradient
    correct: Tensor  # [R] bool: the drafter's likeliest token is the target's
    acceptance: Tensor  # scalar sum of min(p, q) over tokens, the chance that a sampled draft is accepted


def divergence_over_rows(
    drafter_hidden: Tensor,
    drafter_head: Callable[[Tensor], Tensor],
    target_hidden: Tensor,
    target_head: Callable[[Tensor], Tensor],
    divergence: Divergence,
    draft_to_target: Tensor | None = None,
) -> RowLosses:
    """Sum a divergence over rows of hidden states [R, H], applying both heads in chunks of rows.

    Logits exist for one chunk at a time and are made again in the backward pass, unless one chunk holds everything.
    `draft_to_target` [Vd] gives the target ids of a reduced draft vocabulary: the divergence then compares within it
    (the target renormalised), while `correct` and `acceptance` count the mass outside it as lost.
    """
    measure = DIVERGENCES[divergence]

    def chunk_losses(drafter_rows: Tensor, target_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_q = drafter_head(drafter_rows).float().log_softmax(-1)
        with torch.no_grad():
            log_p = full = target_head(target_rows).float().log_softmax(-1)
            choice = log_q.argmax(-1)
            if draft_to_target is not None:
                choice, inside = draft_to_target[choice], full[:, draft_to_target]
                log_p = inside.log_softmax(-1)
            else:
                inside = full
            correct = choice == full.argmax(-1)
            acceptance = torch.minimum(inside, log_q).exp().sum()
        return measure(log_q, log_p).sum(), correct, acceptance

    vocabulary = target_head(target_hidden[:1]).shape[-1] if len(target_hidden) else 1
    rows_per_chunk = max(1, CHUNK_ELEMENTS // vocabulary)
    pairs = list(zip(drafter_hidden.split(rows_per_chunk), target_hidden.split(rows_per_chunk), strict=True))
    if len(pairs) == 1:
        return RowLosses(*chunk_losses(*pairs[0]))
    results = [checkpoint(chunk_losses, *pair, use_reentrant=False) for pair in pairs]
    losses, correct, acceptance = zip(*results, strict=True)
    return RowLosses(torch.stack(losses).sum(), torch.cat(correct), torch.stack(acceptance).sum())


class ChainLoss:
    """Adds up the losses of a chain of predictions: depth i at slot t predicts x_{t+2+i}.

    A prediction counts when every token from x_{t+1} to the predicted one was written by the target, because only then
    would it be drafted. Call `next_depth`, compute the losses of the slots it marks, `add` them; `sums` at the end.
    """

    def __init__(self, loss_mask: Tensor) -> None:
        """loss_mask [B, T]: the tokens that the target wrote"""
        self.loss_mask = loss_mask
        self.counted = shift_left(loss_mask, 1)  # [B, T] slots whose newest token the target wrote
        self._num_roots = self.counted.sum()
        self._leading = self.counted.clone()  # all predictions so far are right
        self._accepted = self._num_roots.clone()
        self._total = torch.zeros((), device=loss_mask.device)
        self._depths: LossSums = {}
        self._num_depths = 0
        self._share = 1.0

    def next_depth(self, kept: Tensor | None = None, share: float = 1.0) -> Tensor:
        """The slots [B, T] that count at the next depth.

        A family that trains a depth on some slots only names those that are kept, among what counted at the depth
        before, and how likely a slot was to be kept: what is left out then counts by what is kept.
        """
        self.counted = self.counted & shift_left(self.loss_mask, 2 + self._num_depths)
        if kept is not None:
            self.counted = self.counted & kept
        self._share = share
        return self.counted

    def add(self, rows: RowLosses, weight: float) -> None:
        """The losses of the counted slots, in row-major order."""
        self._total = self._total + weight / self._share * rows.loss
        self._leading = self._leading & torch.zeros_like(self._leading).masked_scatter(self.counted, rows.correct)
        self._accepted = self._accepted + self._leading.sum() / self._share
        num_counted = self.counted.sum()
        self._depths[f"accuracy_{self._num_depths}"] = (rows.correct.sum(), num_counted)
        self._depths[f"sampled_acceptance_{self._num_depths}"] = (rows.acceptance, num_counted)
        self._num_depths += 1

    def sums(self) -> LossSums:
        """The loss over the trained tokens; of each depth the accuracy and the chance that a sampled draft is accepted;
        and the acceptance length that greedy decoding would have if all of it followed the training text.
        """
        return {
            "loss": (self._total, self.loss_mask.sum()),
            "simulated_acceptance_length": (self._accepted, self._num_roots),
            **self._depths,
        }
