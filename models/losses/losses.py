"""Divergences between the target's distribution p and the drafter's q, and their sum over many rows at little memory.

Each divergence takes fp32 log-probabilities of the drafter and of the target [R, V] and returns one value a row [R]. No
gradient flows into the target's side.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from draftsmith.models.layers import shift_left

if TYPE_CHECKING:
    from draftsmith.models.losses.loss_kernels import FusedTeacher

Divergence = Literal["cross_entropy", "forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "lk_hybrid"]

LossSums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), reduced over all ranks before dividing

CHUNK_ELEMENTS, CHUNK_ROWS = 1 << 21, 256  # logits that exist at once, 8 MiB a tensor in fp32, or so many rows of them
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


def _forward_kl(log_q: Tensor, q: Tensor, teacher: "Teacher") -> tuple[Tensor, Tensor]:
    return teacher.negative_entropy - torch.linalg.vecdot(teacher.p, log_q), q - teacher.p


def _reverse_kl(log_q: Tensor, q: Tensor, teacher: "Teacher") -> tuple[Tensor, Tensor]:
    ratio = log_q - teacher.log_p
    loss = torch.linalg.vecdot(q, ratio)
    return loss, q * (ratio - loss[:, None])


def _jensen_shannon(log_q: Tensor, q: Tensor, teacher: "Teacher") -> tuple[Tensor, Tensor]:
    log_m = torch.logaddexp(teacher.log_p, log_q) - math.log(2)
    ratio = log_q - log_m
    of_q = torch.linalg.vecdot(q, ratio)
    of_p = teacher.negative_entropy - torch.linalg.vecdot(teacher.p, log_m)
    return 0.5 * (of_p + of_q), 0.5 * q * (ratio - of_q[:, None])


def _total_variation(log_q: Tensor, q: Tensor, teacher: "Teacher") -> tuple[Tensor, Tensor]:
    below = torch.where(q < teacher.p, q, 0.0)
    return 1 - torch.minimum(q, teacher.p).sum(-1), q * below.sum(-1, keepdim=True) - below


def _cross_entropy(log_q: Tensor, q: Tensor, teacher: "Teacher") -> tuple[Tensor, Tensor]:
    label = teacher.log_p.argmax(-1, keepdim=True)
    return -log_q.gather(-1, label)[:, 0], q.scatter_add(-1, label, -torch.ones_like(q[:, :1]))


def _lk_hybrid(log_q: Tensor, q: Tensor, teacher: "Teacher") -> tuple[Tensor, Tensor]:
    (kl, of_kl), (rejection, of_rejection) = _forward_kl(log_q, q, teacher), _total_variation(log_q, q, teacher)
    weight = torch.exp(-LK_DECAY * (1 - rejection))
    return weight * kl + (1 - weight) * rejection, torch.lerp(of_rejection, of_kl, weight[:, None])


# The divergences again, each with its gradient in the drafter's logits: [R], [R, V]
WITH_GRADIENT: dict[str, Callable[[Tensor, Tensor, "Teacher"], tuple[Tensor, Tensor]]] = {
    "cross_entropy": _cross_entropy,
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
    "lk_hybrid": _lk_hybrid,
}


@dataclass
class Comparison:
    """What rows of the drafter's logits [R, Vd] come to beside their teachers."""

    loss: Tensor  # [R] fp32, the divergence
    acceptance: Tensor  # [R] fp32, sum of min(p, q) over the whole vocabulary
    choice: Tensor  # [R] int64, the drafter's likeliest token by its draft id
    gradient: Tensor | None  # [R, Vd] of the loss in the logits; it may lie where they lay. None: not asked for


@dataclass
class Teacher:
    """The target at some rows, within the draft vocabulary unless it says otherwise. All fp32.

    The specification and CPU path of `loss_kernels.FusedTeacher`.
    """

    p: Tensor  # [R, Vd] renormalised
    log_p: Tensor  # [R, Vd]
    negative_entropy: Tensor  # [R] sum p log p
    mass: Tensor  # [R, Vd] as in the whole vocabulary, not renormalised
    choice: Tensor  # [R] int64 the likeliest token of the whole vocabulary

    @classmethod
    def of(cls, logits: Tensor, draft_to_target: Tensor | None) -> "Teacher":
        """From the target's logits [R, V]."""
        choice, logits = logits.argmax(-1), logits.float()
        drafted = logits if draft_to_target is None else logits.index_select(1, draft_to_target)
        inside = drafted.logsumexp(-1, keepdim=True)
        log_p = drafted - inside
        mass = p = log_p.exp()
        if draft_to_target is not None:
            mass = p * (inside - logits.logsumexp(-1, keepdim=True)).exp()
        return cls(p, log_p, torch.linalg.vecdot(p, log_p.clamp(min=LOWEST)), mass, choice)

    def __getitem__(self, rows: slice | Tensor) -> "Teacher":
        return Teacher(self.p[rows], self.log_p[rows], self.negative_entropy[rows], self.mass[rows], self.choice[rows])

    def compare(self, logits: Tensor, divergence: Divergence, with_gradient: bool) -> Comparison:
        """The drafter's logits [R, Vd] with these rows."""
        log_q = logits.float().log_softmax(-1)
        q, choice = log_q.exp(), log_q.argmax(-1)
        acceptance = torch.minimum(q, self.mass).sum(-1)
        loss, gradient = WITH_GRADIENT[divergence](log_q, q, self)
        return Comparison(loss, acceptance, choice, gradient if with_gradient else None)


def teacher_of(logits: Tensor, draft_to_target: Tensor | None) -> "Teacher | FusedTeacher":
    """The target at the rows of its logits [R, V], in the form for their device."""
    if not logits.is_cuda:
        return Teacher.of(logits, draft_to_target)
    from draftsmith.models.losses.loss_kernels import FusedTeacher  # needs triton

    return FusedTeacher.of(logits, draft_to_target)


@dataclass
class RowLosses:
    """Over R rows of hidden states."""

    loss: Tensor  # scalar sum
    correct: Tensor  # [R] bool: the drafter's likeliest token is the target's
    acceptance: Tensor  # scalar sum of min(p, q) over tokens, the chance that a sampled draft is accepted


@dataclass
class Depth:
    """Hidden states of one depth of a chain, and which of the target's rows teach them."""

    hidden: Tensor  # [R, H]
    head: Callable[
        [Tensor], Tensor
    ]  # a module, or a function that holds nothing to train; its backward keeps no logits
    teachers: Tensor  # [R] int64, ascending
    weight: float = 1.0  # of its loss in the total


def divergence_over_rows(
    drafter_hidden: Tensor,
    drafter_head: Callable[[Tensor], Tensor],
    target_hidden: Tensor,
    target_head: Callable[[Tensor], Tensor],
    divergence: Divergence,
    draft_to_target: Tensor | None = None,
) -> RowLosses:
    """Sum a divergence over rows of hidden states [R, H], each with its own teacher; the loss has a gradient."""
    teachers = torch.arange(len(target_hidden), device=target_hidden.device)
    depth = Depth(drafter_hidden, drafter_head, teachers)
    total, (rows,) = divergence_over_depths([depth], target_hidden, target_head, divergence, draft_to_target)
    return replace(rows, loss=total)


def divergence_over_depths(
    depths: list[Depth],
    target_hidden: Tensor,
    target_head: Callable[[Tensor], Tensor],
    divergence: Divergence,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, list[RowLosses]]:
    """The weighted sum of a divergence over all depths, with its gradient, and the sums of each depth without.

    Logits exist for a chunk of the target's rows [S, H] at a time. The chunk's teachers are made once for all depths,
    and its part of the gradient at once, so nothing is kept or made again for the backward pass.
    `draft_to_target` [Vd] gives the target ids of a reduced draft vocabulary: the divergence then compares within it
    (the target renormalised), while `correct` and `acceptance` count the mass outside it as lost.
    """
    heads = {id(depth.head): depth.head for depth in depths}.values()
    parameters = [p for head in heads if isinstance(head, nn.Module) for p in head.parameters() if p.requires_grad]
    tensors = [*(depth.hidden for depth in depths), *parameters]
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    task = _Task(depths, parameters, target_hidden, target_head, divergence, draft_to_target, with_gradient)
    total = _Divergence.apply(task, *tensors)
    return total, task.losses


def chunk_rows(vocabulary: int) -> int:
    """How many of the target's rows have their logits made at once."""
    return max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


@dataclass
class _Task:
    """The sums over all chunks, with gradients beside them."""

    depths: list[Depth]
    parameters: list[nn.Parameter]  # of the drafter's heads
    target_hidden: Tensor
    target_head: Callable[[Tensor], Tensor]
    divergence: Divergence
    draft_to_target: Tensor | None
    with_gradient: bool

    def run(self) -> Tensor:
        used, places = torch.cat([depth.teachers for depth in self.depths]).unique(return_inverse=True)
        places_of_depth = places.split([len(depth.teachers) for depth in self.depths])
        zero = torch.zeros((), device=used.device)
        self.losses = [
            RowLosses(zero.clone(), torch.empty_like(d.teachers, dtype=torch.bool), zero.clone()) for d in self.depths
        ]
        self.hidden_gradients = [torch.zeros_like(depth.hidden) for depth in self.depths] if self.with_gradient else []
        self.parameter_gradients = [torch.zeros_like(p) for p in self.parameters] if self.with_gradient else []
        if not len(used):
            return zero
        step = chunk_rows(self.target_head(self.target_hidden[:1]).shape[-1])
        edges = torch.tensor([*range(0, len(used), step), len(used)], device=used.device)
        bounds = [torch.searchsorted(p, edges).tolist() for p in places_of_depth]
        # teachers without a gap are taken as a slice, which is a view
        firsts = [int(p[0]) if len(p) and bool((p.diff() == 1).all()) else None for p in places_of_depth]
        for chunk, start in enumerate(range(0, len(used), step)):
            teacher = teacher_of(self.target_head(self.target_hidden[used[start : start + step]]), self.draft_to_target)
            for number, (places, bound, first) in enumerate(zip(places_of_depth, bounds, firsts, strict=True)):
                rows = slice(bound[chunk], bound[chunk + 1])
                if rows.start == rows.stop:
                    continue
                if first is None:
                    seen = teacher[places[rows] - start]
                else:
                    seen = teacher[first + rows.start - start : first + rows.stop - start]
                self._compare(number, rows, seen)
        return sum((d.weight * rows.loss for d, rows in zip(self.depths, self.losses, strict=True)), start=zero)

    def _compare(self, number: int, rows: slice, teacher: "Teacher | FusedTeacher") -> None:
        """Add what some rows of a depth come to."""
        depth, losses = self.depths[number], self.losses[number]
        with torch.set_grad_enabled(self.with_gradient):
            hidden = depth.hidden[rows].detach().requires_grad_(self.with_gradient)
            logits = depth.head(hidden)
        found = teacher.compare(logits.detach(), self.divergence, self.with_gradient)
        choice = found.choice if self.draft_to_target is None else self.draft_to_target[found.choice]
        losses.correct[rows] = choice == teacher.choice
        losses.acceptance += found.acceptance.sum()
        losses.loss += found.loss.sum()
        if found.gradient is not None:
            own = {id(p) for p in depth.head.parameters()} if isinstance(depth.head, nn.Module) else set()
            indices = [i for i, p in enumerate(self.parameters) if id(p) in own]
            inputs = [hidden, *(self.parameters[i] for i in indices)]
            gradients = torch.autograd.grad(logits, inputs, found.gradient.to(logits.dtype))
            torch.mul(gradients[0], depth.weight, out=self.hidden_gradients[number][rows])
            for i, of_parameter in zip(indices, gradients[1:], strict=True):
                self.parameter_gradients[i].add_(of_parameter, alpha=depth.weight)


class _Divergence(torch.autograd.Function):
    """The total of a task, which makes the gradients of hidden states and parameters on its way."""

    @staticmethod
    def forward(ctx: Any, task: _Task, *tensors: Tensor) -> Tensor:
        total = task.run()
        ctx.save_for_backward(*task.hidden_gradients, *task.parameter_gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(tensor * grad.to(tensor.dtype) for tensor in ctx.saved_tensors)


def teachers_of(counted: Tensor, depth: int) -> Tensor:
    """The target's rows [R] among B * T that teach the slots [B, T] which count at a depth."""
    return counted.flatten().nonzero()[:, 0] + 1 + depth


class ChainLoss:
    """Adds up the losses of a chain of predictions: depth i at slot t predicts x_{t+2+i}.

    A prediction counts when every token from x_{t+1} to the predicted one was written by the target, and those between
    are in the draft vocabulary, because only then would it be drafted. `next_depth` marks the slots that count, `add`
    takes which of them were right, `total` the weighted loss of all depths; `sums` at the end.
    """

    def __init__(self, loss_mask: Tensor, draftable: Tensor | None = None) -> None:
        """loss_mask [B, T]: the tokens that the target wrote; draftable [B, T]: those of the draft vocabulary,
        None: all
        """
        self.loss_mask, self.draftable = loss_mask, draftable
        self._roots = self._chains = shift_left(loss_mask, 1)  # [B, T] slots whose newest token the target wrote
        self._marked: list[tuple[Tensor, float]] = []  # which slots count at a depth, and the share of what there is
        self._leading = self._roots  # all predictions so far are right
        self.followed = torch.zeros_like(loss_mask, dtype=torch.int64)  # [B, T] right predictions in a row
        self._accepted = self._roots.sum()
        self.total = torch.zeros((), device=loss_mask.device)  # weighted loss of all depths
        self._depths: LossSums = {}
        self._num_added = 0

    def next_depth(self, kept: Tensor | None = None, share: float = 1.0) -> Tensor:
        """The slots [B, T] that count at the next depth.

        A family that trains a depth on some slots only names those that are kept, fewer at each depth, and how likely a
        slot was to be kept: what is left out then counts by what is kept.
        """
        predicted = 2 + len(self._marked)
        counted = self._chains & shift_left(self.loss_mask, predicted)
        if kept is not None:
            counted = counted & kept
        self._chains = counted if self.draftable is None else counted & shift_left(self.draftable, predicted)
        self._marked.append((counted, share))
        return counted

    def add(self, rows: RowLosses) -> None:
        """What was right, in row-major order, of the slots that count at the first depth that has none yet."""
        depth, (counted, share) = self._num_added, self._marked[self._num_added]
        self._leading = self._leading & torch.zeros_like(counted).masked_scatter(counted, rows.correct)
        self.followed += self._leading
        self._accepted = self._accepted + self._leading.sum() / share
        self._depths[f"accuracy_{depth}"] = (rows.correct.sum(), counted.sum())
        self._depths[f"sampled_acceptance_{depth}"] = (rows.acceptance, counted.sum())
        self._num_added += 1

    def sums(self) -> LossSums:
        """The loss over the trained tokens; of each depth the accuracy and the chance that a sampled draft is accepted;
        and the acceptance length that greedy decoding would have if all of it followed the training text.
        """
        return {
            "loss": (self.total, self.loss_mask.sum()),
            "simulated_acceptance_length": (self._accepted, self._roots.sum()),
            **self._depths,
        }
