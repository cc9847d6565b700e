"""Divergences between the target's distribution p and the drafter's q, each with its gradient.

They are computed in fp32, from log q and q [R, Vd] and the target at the same rows, and return the divergence of each
row [R] and its gradient in the drafter's logits [R, Vd]. This is the specification of the kernels in
`divergence_kernels`, and the path of a CPU. tests/helpers/divergence_definitions.py has the same formulas for autograd.

Shapes: R rows, V vocabulary of the target, Vd draft vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftsmith.models.drafter_configs import Divergence

LOWEST = torch.finfo(torch.float32).min  # for the logarithm of a probability of 0, which times 0 is then 0
CROSS_ENTROPY_SHARE = 0.1  # of DSpark's divergence, whose rest is the L1 distance (arXiv 2607.05147)
LK_DECAY = 3.0  # eta of the LK hybrid for EAGLE-3-like drafters (arXiv 2602.23881)


@dataclass
class Comparison:
    """Measures by which rows of the drafter's logits [R, Vd] compare with the target at these rows."""

    loss: Tensor  # [R] fp32, the divergence
    acceptance: Tensor  # [R] fp32, sum of min(p, q) over the whole vocabulary
    choice: Tensor  # [R] int64, the drafter's likeliest token by its draft id
    gradient: Tensor | None  # [R, Vd] of the weighted loss in the logits; it may overwrite them. None: not asked for


@dataclass
class Teacher:
    """The target at some rows, within the draft vocabulary unless a field says otherwise. Floats are fp32."""

    p: Tensor  # [R, Vd] renormalised
    log_p: Tensor  # [R, Vd]
    negative_entropy: Tensor  # [R] sum p log p
    mass: Tensor  # [R, Vd] probabilities in the whole vocabulary, not renormalised
    choice: Tensor  # [R] int64 the likeliest token of the whole vocabulary

    @classmethod
    def from_logits(cls, logits: Tensor, draft_to_target: Tensor | None) -> "Teacher":
        """Return the target at the rows of its logits [R, V]."""
        choice, logits = logits.argmax(-1), logits.float()
        drafted = logits if draft_to_target is None else logits.index_select(1, draft_to_target)
        log_sum = drafted.logsumexp(-1, keepdim=True)
        log_p = drafted - log_sum
        mass = p = log_p.exp()
        if draft_to_target is not None:
            mass = p * (log_sum - logits.logsumexp(-1, keepdim=True)).exp()
        return cls(p, log_p, torch.linalg.vecdot(p, log_p.clamp(min=LOWEST)), mass, choice)

    def __getitem__(self, rows: slice | Tensor) -> "Teacher":
        return Teacher(self.p[rows], self.log_p[rows], self.negative_entropy[rows], self.mass[rows], self.choice[rows])

    def compare(self, logits: Tensor, weights: Tensor, divergence: Divergence, with_gradient: bool) -> Comparison:
        """Compare the drafter's logits [R, Vd] with these rows; `weights` [R] fp32 multiply the gradient alone."""
        log_q = logits.float().log_softmax(-1)
        q, choice = log_q.exp(), log_q.argmax(-1)
        acceptance = torch.minimum(q, self.mass).sum(-1)
        loss, gradient = DIVERGENCES[divergence](log_q, q, self)
        return Comparison(loss, acceptance, choice, gradient * weights[:, None] if with_gradient else None)


@cache
def compiled_compare() -> Callable[[Teacher, Tensor, Tensor, Divergence, bool], Comparison]:
    """Return `Teacher.compare` compiled for any number of rows; torch compiles it when it is first called."""
    return torch.compile(Teacher.compare, dynamic=True)


def forward_kl(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """sum p log(p / q)"""
    return teacher.negative_entropy - torch.linalg.vecdot(teacher.p, log_q), q - teacher.p


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
    label = teacher.log_p.argmax(-1, keepdim=True)
    return -log_q.gather(-1, label)[:, 0], q.scatter_add(-1, label, -torch.ones_like(q[:, :1]))


def lk_hybrid(log_q: Tensor, q: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w) TV with w = exp(-eta * acceptance) a row, no gradient through w (arXiv 2602.23881).

    KL leads while little is accepted, where the gradient of TV vanishes; TV takes over as acceptance grows.
    """
    kl, kl_gradient = forward_kl(log_q, q, teacher)
    rejection, rejection_gradient = total_variation(log_q, q, teacher)
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
