"""The costs of a round on a device: milliseconds of drafting, of verification, of the host, and of a plain step.

Times of short measurements (cost_measurement.py) are fitted by sums of a few terms, none of them negative. Some
settings are left out of the fit; the errors of the speedups that are predicted for them are kept with the costs.

A pass of the target over T = batch x (nodes + 1) tokens has the terms of a roofline: a fixed part (weights are read,
kernels launched), a part for each token, and a part for the keys and values that attention reads (batch x context and
T x context). The part for each token may change at powers of 2: products of few rows are slow, and from some number of
tokens on their arithmetic takes longer than reading the weights. Drafting has the same terms for each of its steps.
docs/cost_model.md explains them.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field
from scipy.optimize import brentq, nnls
from scipy.special import stdtrit

from draftsmith.inference.decoding.counters import DraftLength, Interval, Stats
from draftsmith.models.ranges import Natural, NonNegative, Share

SLOW_STARTS = (2, 4, 8, 16)  # tokens of a pass up to which each may cost more
SLOW_WIDTHS = (2, 3)  # tokens of a row whose attention may cost more: a CPU's products take 4 at a time
KINKS = (4, 8, 16, 32, 64, 128, 256)  # tokens of a pass from which on each may cost more
GOAL = 0.05  # error of a predicted speedup that is as good as measuring

Terms = dict[str, NonNegative]  # by the name of a term: how often it is paid, or its milliseconds


@dataclass(frozen=True)
class DraftChances:
    """Chances of the lengths of a request's drafts: lookups often find less than was asked for, or nothing.

    A round has a draft with the chance `drafted`, and each drafted token is followed by another one with `continued`.
    """

    drafted: Share = 1.0
    continued: Share = 1.0

    @classmethod
    def of(cls, stats: Stats) -> "DraftChances":
        """Return the chances that give as many drafts, and as many tokens in a draft, as were counted."""
        if not stats.num_drafts:
            return cls(0.0)
        mean, longest = stats.num_draft_tokens / stats.num_drafts, stats.draft_length
        return cls(min(1.0, stats.num_drafts / stats.num_rounds), continued_chance(mean, longest))

    def longest_of(self, batch: int, draft_length: int) -> list[float]:
        """Return the chance of each length, from 0 to `draft_length`, to be that of a batch's longest draft."""
        at_least = [1 - (1 - self.drafted * self.continued**more) ** batch for more in range(draft_length)]
        return [now - later for now, later in itertools.pairwise([1.0, *at_least, 0.0])]


def continued_chance(mean: float, longest: int) -> float:
    """Return the chance r of another token with which drafts have a mean of 1 + r + ... + r^(longest - 1) tokens."""
    if mean >= longest:
        return 1.0
    if mean <= 1:
        return 0.0
    return float(brentq(lambda chance: sum(chance**more for more in range(longest)) - mean, 0.0, 1.0))


class CostModel(Protocol):
    """Whatever predicts the milliseconds of rounds: from measurements as `Costs` does, or by a roofline.

    Its methods are those of `Costs`.
    """

    def plain(self, batch: int, context: int) -> float: ...

    def round(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float: ...

    def break_even(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float: ...

    def speedup(
        self, acceptance_length: float, draft_length: int, batch: int, context: int, nodes: int | None = None
    ) -> float: ...


@dataclass(frozen=True)
class RoundTimes:
    """Median milliseconds of the rounds at one setting. Draft length 0 is a plain step."""

    draft_length: DraftLength
    batch: Annotated[Natural, Field(ge=1)]  # running requests
    context: Natural  # tokens of each request
    nodes: Natural  # drafted tokens of each request
    tree: bool
    draft_ms: NonNegative
    verify_ms: NonNegative
    round_ms: NonNegative

    @property
    def tree_nodes(self) -> int | None:
        """Nodes of the tree; None for a chain."""
        return self.nodes if self.tree else None


@dataclass(frozen=True)
class HeldOutRound(RoundTimes):
    """A setting that was left out of the fit, the time of its plain step, and the error of its predicted speedup."""

    plain_ms: float
    speedup_error: float  # relative


@dataclass(frozen=True)
class HeldOutErrors:
    """Sizes of the relative errors of predicted speedups at settings that were left out of the fit."""

    settings: Natural = 0
    median_error: NonNegative = 0.0
    p90_error: NonNegative = 0.0
    share_within_5_percent: Share = 0.0
    rows: list[HeldOutRound] = field(default_factory=list)


@dataclass(frozen=True)
class Costs:
    """The fitted costs of rounds in milliseconds, as costs.json holds them."""

    device: str
    target: str
    drafter: str
    drafter_kind: str
    draft_ms: Terms
    verify_ms: Terms  # the target's pass, also that of a plain step
    host: NonNegative  # of a round, beside its draft and its verification
    held_out: HeldOutErrors = HeldOutErrors()
    fitted_on: list[RoundTimes] = field(default_factory=list)
    drops_columns: bool = False  # a CPU verifies as many tokens as the longest draft has; a GPU the usual shape
    plain_host: NonNegative | None = None  # of a plain step, beside the pass; None in older files: that of a round
    chances: DraftChances = DraftChances()

    def drafting_with(self, chances: DraftChances) -> "Costs":
        """Return these costs for a drafter whose drafts have these lengths; a GPU verifies all at full length."""
        return replace(self, chances=chances if self.drops_columns else DraftChances())

    def plain(self, batch: int, context: int) -> float:
        """Return the time of one plain step of the whole batch, each request having `context` tokens."""
        return self.verify(0, batch, context) + (self.host if self.plain_host is None else self.plain_host)

    def draft(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Return the time of drafting for all requests: chains, or trees of `nodes` nodes and depth `draft_length`."""
        return total_cost(self.draft_ms, draft_terms(draft_length, batch, context, nodes))

    def verify(self, nodes: int, batch: int, context: int, tree: bool = False) -> float:
        """Return the mean time of the target's pass over `nodes` + 1 tokens of each request, with their verification.

        Where `drops_columns` it is the mean over rounds: a pass is as wide as the longest draft of the batch.
        """
        if tree:
            return total_cost(self.verify_ms, pass_terms(nodes, batch, context, tree))
        chances = self.chances.longest_of(batch, nodes)
        return sum(
            chance * total_cost(self.verify_ms, pass_terms(length, batch, context, tree))
            for length, chance in enumerate(chances)
            if chance
        )

    def round(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Return the time of a whole round, which at `draft_length` 0 is a plain step.

        With `nodes` the draft is a tree of depth `draft_length`.
        """
        if draft_length == 0:
            return self.plain(batch, context)
        verify = self.verify(nodes or draft_length, batch, context, nodes is not None)
        return self.draft(draft_length, batch, context, nodes) + verify + self.host

    def speedup(
        self, acceptance_length: float, draft_length: int, batch: int, context: int, nodes: int | None = None
    ) -> float:
        """Return the speedup over plain decoding of rounds that emit `acceptance_length` tokens of each request."""
        return acceptance_length / self.break_even(draft_length, batch, context, nodes)

    def break_even(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Return the acceptance length at which the speedup is 1: the plain steps that a round costs."""
        return self.round(draft_length, batch, context, nodes) / self.plain(batch, context)

    def interval(self, speedup: float, length_reach: float = 0.0) -> Interval:
        """Return the 95 % interval of a predicted speedup, by how far predictions at settings left out were off.

        `length_reach` is half the interval of the logarithm of the acceptance length that the speedup was predicted
        with; 0 where the length is known, infinite where too little was measured. Returns None where that is so, and
        where fewer than two settings were left out of the fit.
        """
        errors = [math.log1p(row.speedup_error) for row in self.held_out.rows]
        if len(errors) < 2 or math.isinf(length_reach):
            return None
        reach = math.hypot(float(stdtrit(len(errors), 0.975)) * math.sqrt(np.mean(np.square(errors))), length_reach)
        return speedup * math.exp(-reach), speedup * math.exp(reach)


# --- terms


def tokens_of_pass(tokens: int) -> Terms:
    """Return how often a pass over so many tokens pays each term that depends on their number alone."""
    starts = {f"token up to {kink}": min(tokens, kink) for kink in SLOW_STARTS}
    kinks = {f"token from {kink} on": max(0, tokens - kink) for kink in KINKS}
    return {"pass": 1.0, "token": tokens, **starts, **kinks}


def pass_terms(nodes: int, batch: int, context: int, tree: bool) -> Terms:
    """Return how often a pass of the target pays each term."""
    tokens = batch * (nodes + 1)
    attention: Terms = {"row x context": batch * context, "token x context": tokens * context}
    for width in SLOW_WIDTHS:
        attention[f"row x context, {width} tokens"] = float(nodes + 1 == width) * batch * context
    drafts = {"drafts": float(nodes > 0), "draft token": batch * nodes}
    return {**tokens_of_pass(tokens), **attention, **drafts, "tree": float(tree), "tree token": float(tree) * tokens}


def draft_terms(draft_length: int, batch: int, context: int, nodes: int | None) -> Terms:
    """Return how often drafting pays each term; the first step reads what the last round committed."""
    steps = {f"step: {name}": draft_length * count for name, count in tokens_of_pass(batch).items()}
    first = {f"first: {name}": count for name, count in tokens_of_pass(batch * (draft_length + 1)).items()}
    attention = {"row x context": batch * context, "step x row x context": draft_length * batch * context}
    tree = {"tree": float(nodes is not None), "tree node": batch * (nodes or 0.0)}
    return {**first, **steps, **attention, **tree}


def total_cost(costs: Terms, terms: Terms) -> float:
    """Return the milliseconds of all terms together."""
    return sum(costs[name] * terms[name] for name in costs)


# --- the fit


def fit_costs(times: list[RoundTimes]) -> Costs:
    """Return the costs that fit measured rounds and plain steps; the names of device and models are left empty."""
    rounds, steps = [row for row in times if row.draft_length], [row for row in times if not row.draft_length]
    return Costs(
        device="",
        target="",
        drafter="",
        drafter_kind="",
        draft_ms=fit_terms(
            [draft_terms(row.draft_length, row.batch, row.context, row.tree_nodes) for row in rounds],
            [row.draft_ms for row in rounds],
        ),
        verify_ms=fit_terms(
            [pass_terms(row.nodes, row.batch, row.context, row.tree) for row in times], [row.verify_ms for row in times]
        ),
        host=statistics.median(max(0.0, row.round_ms - row.draft_ms - row.verify_ms) for row in rounds),
        plain_host=statistics.median(max(0.0, row.round_ms - row.verify_ms) for row in steps),
        fitted_on=times,
    )


def fit_terms(rows: list[Terms], milliseconds: Sequence[float]) -> Terms:
    """Return the milliseconds of each term that costs any, by non-negative least squares of the relative errors."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    measured = np.maximum(np.asarray(milliseconds, dtype=float), 1e-6)
    matrix = np.array([[row[name] for name in names] for row in rows], dtype=float) / measured[:, None]
    lengths = np.linalg.norm(matrix, axis=0)  # scales columns alike: terms are paid once, or a million times
    fitted = nnls(matrix / lengths, np.ones(len(measured)))[0] / lengths
    return {name: float(cost) for name, cost in zip(names, fitted, strict=True) if cost > 0}


def speedup_errors(costs: Costs, times: list[RoundTimes]) -> HeldOutErrors:
    """Return the relative errors of predicted speedups at measured settings.

    The acceptance cancels out, which leaves those of the ratio of a round to a plain step. `times` hold a plain step of
    each batch size and context.
    """
    plain = {(row.batch, row.context): row.round_ms for row in times if row.draft_length == 0}
    rows = []
    for row in times:
        if row.draft_length:
            plain_ms = plain[row.batch, row.context]
            predicted = costs.break_even(row.draft_length, row.batch, row.context, row.tree_nodes)
            error = row.round_ms / plain_ms / predicted - 1
            rows.append(HeldOutRound(**vars(row), plain_ms=plain_ms, speedup_error=error))
    sizes = np.abs([row.speedup_error for row in rows])
    return HeldOutErrors(
        settings=len(rows),
        median_error=float(np.median(sizes)),
        p90_error=float(np.quantile(sizes, 0.9)),
        share_within_5_percent=float((sizes <= GOAL).mean()),
        rows=rows,
    )
