"""Divergences between the target's distribution p and the drafter's q, each with its gradient.

They are computed in fp32, from log q and q [R, Vd], which they may overwrite, and the target at the same rows. They
return the divergence of each row [R] and its gradient in the drafter's logits [R, Vd]. `Teacher.compare` is the
specification of the kernels in `divergence_kernels` and of `Teacher.compare_in_blocks`, the path of a CPU.
tests/helpers/divergence_definitions.py has the same formulas for autograd.

Shapes: R rows, V vocabulary of the target, Vd draft vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from draftsmith.models.drafter_configs import Divergence

LOWEST = torch.finfo(torch.float32).min  # for the logarithm of a probability of 0, which times 0 is then 0
CROSS_ENTROPY_SHARE = 0.1  # of DSpark's divergence, whose rest is the L1 distance (arXiv 2607.05147)
CACHED = 1 << 17  # logits of a block of rows, which a core's cache holds together with all that is made of them
GROUPS = 64  # of the logits of a row, where the largest is searched for
LK_DECAY = 3.0  # eta of the LK hybrid for EAGLE-3-like drafters (arXiv 2602.23881)


@dataclass
class Comparison:
    """Measures by which rows of the drafter's logits [R, Vd] compare with the target at these rows."""

    loss: Tensor  # [R] fp32, the divergence
    acceptance: Tensor | None  # [R] fp32, sum of min(p, q) over the whole vocabulary; None: the teacher tells none
    choice: Tensor | None  # [R] int64, the drafter's likeliest token by its draft id; None with `acceptance`
    gradient: Tensor | None  # [R, Vd] of the weighted loss in the logits; it may overwrite them. None: not asked for


@dataclass
class Teacher:
    """The target at some rows, within the draft vocabulary unless a field says otherwise. Floats are fp32."""

    p: Tensor  # [R, Vd] renormalised
    logits: Tensor  # [R, Vd] in their own dtype
    log_sum: Tensor  # [R, 1] the log of the sum of exp(logits)
    negative_entropy: Tensor  # [R] sum p log p
    inside: Tensor  # [R, 1] the draft vocabulary's share of the whole distribution
    choice: Tensor | None  # [R] int64 the likeliest token of the whole vocabulary; None: acceptance is not told

    @classmethod
    def from_logits(cls, logits: Tensor, draft_to_target: Tensor | None, tells_acceptance: bool = True) -> "Teacher":
        """Return the target at the rows of its logits [R, V].

        It keeps them, or with a draft vocabulary a copy of that part, so they must not be overwritten.
        """
        drafted = logits if draft_to_target is None else logits.index_select(1, draft_to_target)
        empty = partial(torch.empty, dtype=torch.float32, device=logits.device)
        p, log_sum, negative_entropy = empty(drafted.shape), empty(len(logits), 1), empty(len(logits))
        inside = torch.ones(len(logits), 1, device=logits.device)
        for rows in blocks(logits):
            block = drafted[rows].float()
            softmax_into(p[rows], block)
            log_sum[rows] = log_sum_of(block, p[rows])
            negative_entropy[rows] = torch.linalg.vecdot(p[rows], (block - log_sum[rows]).clamp_(min=LOWEST))
            if draft_to_target is not None:
                inside[rows] = (log_sum[rows] - logits[rows].float().logsumexp(-1, keepdim=True)).exp()
        choice = largest(logits) if tells_acceptance else None
        return cls(p, drafted, log_sum, negative_entropy, inside, choice)

    @property
    def log_p(self) -> Tensor:
        """The logarithm of `p`, [R, Vd]."""
        return self.logits - self.log_sum

    def __getitem__(self, rows: slice | Tensor) -> "Teacher":
        choice = None if self.choice is None else self.choice[rows]
        p, logits, log_sum = self.p[rows], self.logits[rows], self.log_sum[rows]
        return Teacher(p, logits, log_sum, self.negative_entropy[rows], self.inside[rows], choice)

    def compare(self, logits: Tensor, weights: Tensor, divergence: Divergence, with_gradient: bool) -> Comparison:
        """Compare the drafter's logits [R, Vd] with these rows; `weights` [R] fp32 multiply the gradient alone.

        This is the specification, and what is compiled.
        """
        log_q, q = logits.float().log_softmax(-1), logits.float().softmax(-1)
        acceptance = choice = None
        if self.choice is not None:
            acceptance, choice = torch.minimum(q, self.p * self.inside).sum(-1), log_q.argmax(-1)
        loss, gradient = DIVERGENCES[divergence](log_q, q, self)
        return Comparison(loss, acceptance, choice, gradient * weights[:, None] if with_gradient else None)

    def compare_in_blocks(
        self, logits: Tensor, weights: Tensor, divergence: Divergence, with_gradient: bool
    ) -> Comparison:
        """Do what `compare` does, block by block, and overwrite the logits."""
        acceptance = choice = None
        if self.choice is not None:
            acceptance, choice = torch.empty(len(logits), device=logits.device), largest(logits)
        loss = torch.empty(len(logits), device=logits.device)
        buffers = torch.empty(2, rows_of_block(logits), logits.shape[1], device=logits.device)
        for rows in blocks(logits):
            teacher, log_q = self[rows], logits[rows].float()
            q, other = buffers[:, : len(log_q)]
            softmax_into(q, log_q)
            log_q -= log_sum_of(log_q, q)
            if acceptance is not None:
                torch.mul(teacher.p, teacher.inside, out=other)
                acceptance[rows] = torch.minimum(q, other, out=other).sum(-1)
            loss[rows], gradient = DIVERGENCES[divergence](log_q, q, teacher)
            if with_gradient:
                torch.mul(gradient, weights[rows, None], out=logits[rows])
        return Comparison(loss, acceptance, choice, logits if with_gradient else None)


def softmax_into(out: Tensor, logits: Tensor) -> None:
    """Write the softmax of each row of logits [R, V].

    Rows that do not lie side by side torch would first copy to new memory.
    """
    torch.softmax(out.copy_(logits), -1, out=out)


def log_sum_of(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Return the log of the sum of exp(logit) of each row, [R, 1], given the softmax of the logits [R, V].

    On a CPU torch's softmax takes less time than exponentials alone, and the largest logit with its probability tells
    the sum.
    """
    return logits.amax(-1, keepdim=True) - probabilities.amax(-1, keepdim=True).log()


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield all rows of logits [R, V], a block at a time."""
    step = rows_of_block(logits)
    return (slice(start, start + step) for start in range(0, len(logits), step))


def rows_of_block(logits: Tensor) -> int:
    return max(1, CACHED // logits.shape[1])


def largest(logits: Tensor) -> Tensor:
    """Return the place of the largest logit of each row [R], the first of equal ones.

    torch's own `argmax` is many times slower on a CPU than its `amax`, which finds the group of logits first. Groups
    overlap where the vocabulary is no multiple of their number.
    """
    width = logits.shape[1]
    number = min(GROUPS, width)
    groups = logits.unfold(1, width - (number - 1) * (width // number), width // number)  # [R, number, logits of one]
    group = groups.amax(2).argmax(1)
    return groups[torch.arange(len(group)), group].argmax(1) + group * (width // number)


@cache
def compiled_compare() -> Callable[[Teacher, Tensor, Tensor, Divergence, bool], Comparison]:
    """Return `Teacher.compare` compiled for any number of rows; torch compiles it when it is first called."""
    return torch.compile(Teacher.compare, dynamic=True)


def forward_kl(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """sum p log(p / q)"""
    return teacher.negative_entropy - log_q.mul_(teacher.p).sum(-1), q.sub_(teacher.p)


def reverse_kl(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """sum q log(q / p)"""
    ratio = log_q - teacher.log_p
    loss = torch.linalg.vecdot(q, ratio)
    return loss, q * (ratio - loss[:, None])


def jensen_shannon(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """(KL(p | m) + KL(q | m)) / 2, where m is the mean of p and q"""
    log_m = torch.logaddexp(teacher.log_p, log_q) - math.log(2)
    ratio = log_q - log_m
    kl_q = torch.linalg.vecdot(q, ratio)
    kl_p = teacher.negative_entropy - torch.linalg.vecdot(teacher.p, log_m)
    return 0.5 * (kl_p + kl_q), 0.5 * q * (ratio - kl_q[:, None])


def total_variation(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): exactly the rejection rate of one token (DistillSpec, arXiv 2310.08461)"""
    below = torch.where(q < teacher.p, q, 0.0)
    return 1 - torch.minimum(q, teacher.p).sum(-1), q * below.sum(-1, keepdim=True) - below


def cross_entropy(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """-log q of the target's likeliest token"""
    label = teacher.logits.argmax(-1, keepdim=True)
    return -log_q.gather(-1, label)[:, 0], q.scatter_add(-1, label, -torch.ones_like(q[:, :1]))


def lk_hybrid(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w) TV with w = exp(-eta * acceptance) a row, no gradient through w (arXiv 2602.23881).

    KL leads while little is accepted, where the gradient of TV vanishes; TV takes over as acceptance grows.
    """
    rejection, rejection_gradient = total_variation(log_q, q, teacher)
    kl, kl_gradient = forward_kl(log_q, q, teacher)
    weight = torch.exp(-LK_DECAY * (1 - rejection))
    gradient = torch.lerp(rejection_gradient, kl_gradient, weight[:, None])
    return weight * kl + (1 - weight) * rejection, gradient


def cross_entropy_and_l1(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """0.1 * cross-entropy + 0.9 * sum |p - q|, which is twice the total variation (DSpark, arXiv 2607.05147)"""
    entropy, entropy_gradient = cross_entropy(log_q, q, teacher)
    rejection, rejection_gradient = total_variation(log_q, q, teacher)
    of_l1 = 2 * (1 - CROSS_ENTROPY_SHARE)
    return (
        CROSS_ENTROPY_SHARE * entropy + of_l1 * rejection,
        CROSS_ENTROPY_SHARE * entropy_gradient + of_l1 * rejection_gradient,
    )


DIVERGENCES: dict[Divergence, Callable[[Tensor, Tensor, Teacher], tuple[Tensor, Tensor]]] = {
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
    "cross_entropy_and_l1": cross_entropy_and_l1,
}
