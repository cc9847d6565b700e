"""Predicts the costs of a round where nothing was measured, by a roofline, in steps of plain decoding.

A pass of the target takes the longer of two times: to read its weights and the keys and values of all texts, or to
compute its tokens (Williams, Waterman and Patterson, Roofline, CACM 2009). The unit is the time that reading the
target's weights takes. While reading is longer, more tokens in a pass cost nothing; from `ridge` tokens on each costs,
and speculation soon stops paying. recipes/pages/templates/playground.js computes the same.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundCosts:
    """The cost of a round at one batch size, in steps of plain decoding, by draft length from 0 on."""

    batch_size: int
    draft: list[float]
    verify: list[float]
    host: float


@dataclass(frozen=True)
class Roofline:
    """A target, its drafter and a device, in times of reading the target's weights and in tokens."""

    draft_cost: float  # of one pass of the drafter
    parallel: bool  # one pass drafts all tokens; else one pass drafts one
    ridge: float  # tokens of a pass that take as long to compute as the weights take to read
    cache_share: float  # of reading the keys and values of one token
    host: float  # of the host's own work in a round


def pass_time(model: Roofline, tokens: int, cached: int) -> float:
    """Return the time of a pass of the target over so many tokens, with so many tokens in the caches of all texts."""
    return max(1.0 + cached * model.cache_share, tokens / model.ridge)


def roofline_costs(model: Roofline, batch_size: int, context: int, longest: int) -> RoundCosts:
    """Return the costs of rounds with chains of 0 to `longest` tokens, each text having `context` tokens."""
    cached = batch_size * context
    plain = pass_time(model, batch_size, cached)
    draft_pass = model.draft_cost * max(1.0, batch_size / model.ridge)  # reads the drafter's weights, or computes
    return RoundCosts(
        batch_size,
        [(min(length, 1) if model.parallel else length) * draft_pass / plain for length in range(longest + 1)],
        [pass_time(model, batch_size * (length + 1), cached) / plain for length in range(longest + 1)],
        model.host / plain,
    )
