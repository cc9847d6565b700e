"""Triton kernels of `divergences`: a divergence and its gradient, without log-probabilities in memory.

One program reads a row of the drafter's logits and one of the target's: once for the softmax, once for the loss, once
for the gradient, which takes the place of the drafter's logits. The specification is `divergences.Teacher`.

Shapes: R rows of the drafter, S rows of the target, V target vocabulary, Vd draft vocabulary. Logits are stored in fp32
or half precision; all arithmetic is fp32. Tensors lie on one CUDA device, or in Triton's interpreter on the CPU. No
launch waits for the device.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.losses.divergences import CROSS_ENTROPY_SHARE, LK_DECAY, Comparison, Divergence

BLOCK = 4096  # logits that a program reads at once
NUM_WARPS = 8
LOG_2 = tl.constexpr(0.6931471805599453)
DECAY = tl.constexpr(LK_DECAY)
OF_ENTROPY, OF_L1 = tl.constexpr(CROSS_ENTROPY_SHARE), tl.constexpr(2 * (1 - CROSS_ENTROPY_SHARE))


@dataclass
class FusedTeacher:
    """`divergences.Teacher`, of which only sums are kept beside the logits."""

    logits: Tensor  # [S, Vd] as the target's head made them, within the draft vocabulary
    log_sum: Tensor  # [S, 2] fp32 of exp(logits): the largest logit, and the log of the sum relative to it
    label: Tensor  # [S] int64 their likeliest token
    whole_log_sum: Tensor  # [S, 2] fp32, as `log_sum`, of all V logits
    rows: Tensor  # [R] int64 which of the S rows are meant
    choice: Tensor  # [R] int64 the likeliest token of the whole vocabulary

    @classmethod
    def from_logits(
        cls, logits: Tensor, draft_to_target: Tensor | None, tells_acceptance: bool = True
    ) -> "FusedTeacher":
        """Return the target at the rows of its logits [S, V]. It tells acceptance in any case: that costs nothing."""
        logits = logits.contiguous()
        whole_log_sum, choice = read_rows(logits)
        log_sum, label = whole_log_sum, choice
        if draft_to_target is not None:
            logits = logits.index_select(1, draft_to_target)
            log_sum, label = read_rows(logits)
        return cls(logits, log_sum, label, whole_log_sum, torch.arange(len(logits), device=logits.device), choice)

    def __getitem__(self, rows: slice | Tensor) -> "FusedTeacher":
        return replace(self, rows=self.rows[rows], choice=self.choice[rows])

    def compare(self, logits: Tensor, weights: Tensor, divergence: Divergence, with_gradient: bool) -> Comparison:
        """Do what `Teacher.compare` does; the gradient, where it is asked for, overwrites contiguous logits."""
        logits = logits.contiguous()
        loss = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        acceptance, choice = torch.empty_like(loss), torch.empty_like(self.rows)
        teacher = self.logits, self.log_sum, self.label, self.whole_log_sum, self.rows.contiguous()
        sizes = {"V": logits.shape[1], "BLOCK": BLOCK, "num_warps": NUM_WARPS}
        outputs = loss, acceptance, choice
        _compare[(len(logits),)](logits, *teacher, weights, *outputs, divergence, with_gradient, **sizes)
        return Comparison(loss, acceptance, choice, logits if with_gradient else None)


def read_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return of logits [S, V] the largest and the log of the sum of exp(logit - largest), [S, 2] fp32, and the place
    of the largest, [S] int64, the first of equal ones.
    """
    log_sum = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    choice = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _read_rows[(len(logits),)](logits, log_sum, choice, logits.shape[1], BLOCK, num_warps=NUM_WARPS)
    return log_sum, choice


@triton.jit
def _read_rows(logits, log_sums, choices, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # int64: R * V may pass 2^31
    largest, log_sum, choice = _read_row(logits + row * V, V, BLOCK)
    tl.store(log_sums + 2 * row, largest)
    tl.store(log_sums + 2 * row + 1, log_sum)
    tl.store(choices + row, choice)


@triton.jit
def _read_row(logits, V, BLOCK: tl.constexpr):
    """Do what `read_rows` does for one row."""
    largest, total, choice = float("-inf"), 0.0, 0
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        of_block = tl.max(x, 0)
        choice = tl.where(of_block > largest, start + tl.argmax(x, 0), choice)
        new = tl.maximum(largest, of_block)
        base = tl.where(new == float("-inf"), 0.0, new)  # nothing but -inf so far
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = new
    return largest, tl.log(total), choice


@triton.jit
def _log_probabilities(logits, largest, log_sum, ids, V):
    """Return log-probabilities of the tokens `ids` of a row, -1e30 where there are none and in place of -inf."""
    x = tl.load(logits + ids, mask=ids < V, other=-1e30).to(tl.float32)
    return tl.maximum((x - largest) - log_sum, -1e30)


@triton.jit
def _log_mean(log_q, log_p):
    """log((p + q) / 2)"""
    above = tl.maximum(log_q, log_p)
    return above + tl.log(1.0 + tl.exp(tl.minimum(log_q, log_p) - above)) - LOG_2


@triton.jit
def _compare(
    logits,
    teachers,
    log_sums,
    labels,
    whole_log_sums,
    teacher_rows,
    weights,
    losses,
    acceptances,
    choices,
    DIVERGENCE: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    teacher_row = tl.load(teacher_rows + row)
    logits, teacher = logits + row * V, teachers + teacher_row * V
    label = tl.load(labels + teacher_row)
    largest_p, log_sum_p = tl.load(log_sums + 2 * teacher_row), tl.load(log_sums + 2 * teacher_row + 1)
    whole, whole_log_sum = tl.load(whole_log_sums + 2 * teacher_row), tl.load(whole_log_sums + 2 * teacher_row + 1)
    inside = tl.exp((largest_p - whole) + (log_sum_p - whole_log_sum))  # the draft vocabulary's share of the whole
    largest_q, log_sum_q, choice = _read_row(logits, V, BLOCK)

    zeros = tl.zeros([BLOCK], tl.float32)
    accepted, overlap, below, of_p, of_q = zeros, zeros, zeros, zeros, zeros
    for start in range(0, V, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        log_q = _log_probabilities(logits, largest_q, log_sum_q, ids, V)
        log_p = _log_probabilities(teacher, largest_p, log_sum_p, ids, V)
        q, p = tl.exp(log_q), tl.exp(log_p)
        accepted += tl.minimum(q, p * inside)
        if DIVERGENCE == "cross_entropy":
            of_q -= tl.where(ids == label, log_q, 0.0)
        elif DIVERGENCE == "reverse_kl":
            of_q += q * (log_q - log_p)
        elif DIVERGENCE == "jensen_shannon":
            log_m = _log_mean(log_q, log_p)
            of_q += q * (log_q - log_m)
            of_p += p * (log_p - log_m)
        else:
            overlap += tl.minimum(q, p)
            below += tl.where(q < p, q, 0.0)
            of_p += p * (log_p - log_q)
            if DIVERGENCE == "cross_entropy_and_l1":
                of_q -= tl.where(ids == label, log_q, 0.0)
    rejection, of_below, kl, other = 1.0 - tl.sum(overlap, 0), tl.sum(below, 0), tl.sum(of_p, 0), tl.sum(of_q, 0)
    weight = tl.exp((rejection - 1.0) * DECAY)
    if DIVERGENCE == "forward_kl":
        loss = kl
    elif DIVERGENCE == "jensen_shannon":
        loss = 0.5 * (kl + other)
    elif DIVERGENCE == "total_variation":
        loss = rejection
    elif DIVERGENCE == "lk_hybrid":
        loss = weight * kl + (1.0 - weight) * rejection
    elif DIVERGENCE == "cross_entropy_and_l1":
        loss = OF_ENTROPY * other + OF_L1 * rejection
    else:
        loss = other
    tl.store(losses + row, loss)
    tl.store(acceptances + row, tl.sum(accepted, 0))
    tl.store(choices + row, choice)

    if WITH_GRADIENT:
        row_weight = tl.load(weights + row)
        for start in range(0, V, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            log_q = _log_probabilities(logits, largest_q, log_sum_q, ids, V)
            log_p = _log_probabilities(teacher, largest_p, log_sum_p, ids, V)
            q, p = tl.exp(log_q), tl.exp(log_p)
            if DIVERGENCE == "forward_kl":
                gradient = q - p
            elif DIVERGENCE == "cross_entropy":
                gradient = q - tl.where(ids == label, 1.0, 0.0)
            elif DIVERGENCE == "reverse_kl":
                gradient = q * (log_q - log_p - other)
            elif DIVERGENCE == "jensen_shannon":
                gradient = 0.5 * q * (log_q - _log_mean(log_q, log_p) - other)
            else:
                gradient = q * of_below - tl.where(q < p, q, 0.0)
                if DIVERGENCE == "lk_hybrid":
                    gradient += weight * (q - p - gradient)
                elif DIVERGENCE == "cross_entropy_and_l1":
                    gradient = OF_ENTROPY * (q - tl.where(ids == label, 1.0, 0.0)) + OF_L1 * gradient
            tl.store(logits + ids, gradient * row_weight, mask=ids < V)
