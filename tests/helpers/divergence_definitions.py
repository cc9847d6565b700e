"""The divergences by their definitions, for autograd: what `draftsmith.models.losses.divergences` is tested against.

Each takes fp32 log-probabilities of the drafter and of the target [R, V] and returns one value a row [R].
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from draftsmith.models.losses.divergences import LK_DECAY, LOWEST, Divergence


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_p.exp() * (log_p.clamp(min=LOWEST) - log_q)).sum(-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jensen_shannon(log_q: Tensor, log_p: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * ((log_p.exp() * (log_p - log_m)) + log_q.exp() * (log_q - log_m)).sum(-1)


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True))[..., 0]


def lk_hybrid(log_q: Tensor, log_p: Tensor) -> Tensor:
    rejection = total_variation(log_q, log_p)
    weight = torch.exp(-LK_DECAY * (1 - rejection.detach()))
    return weight * forward_kl(log_q, log_p) + (1 - weight) * rejection


def cross_entropy_and_l1(log_q: Tensor, log_p: Tensor) -> Tensor:
    return 0.1 * cross_entropy(log_q, log_p) + 0.9 * (log_p.exp() - log_q.exp()).abs().sum(-1)


DEFINITIONS: dict[Divergence, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
    "cross_entropy_and_l1": cross_entropy_and_l1,
}
