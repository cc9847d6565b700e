"""What a round costs on this device: milliseconds of drafting, of verification, of the host, and of a plain step.

Short measurements with the real target, drafter and decoder are fitted by sums of few terms that are not negative.
Part of the settings is left out of the fit, and the error of the predicted speedup there is kept with the costs.

Of a pass of the target over T = batch x (nodes + 1) tokens the terms are those of a roofline: a fixed part (weights
read, kernels launched), a part for each token, which may grow or shrink at powers of 2 (from where on the weights'
reading hides no more; up to where products of few rows are slow), and the keys and values that attention reads, batch x
context and T x context.
Drafting has the same terms for each of its steps. docs/cost_model.md explains them.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.measuring.environment import device_name
from draftsmith.inference.planning.least_squares import nonnegative_least_squares
from draftsmith.inference.replay.forced_decoding import ForcedBatchEngine, start_forced
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain, Shape, StaticTree, likeliest_tree
from draftsmith.models.training_free.cascade import Cascade

SLOW_STARTS = (2, 4, 8, 16)  # tokens of a pass up to which each may cost more
KINKS = (4, 8, 16, 32, 64, 128, 256)  # from which on each may cost more
VISIT, LEAST_VISITS, MOST_VISITS = 4, 4, 12  # rounds of a setting in a row, the first of them not counted; visits
MOST_ROUNDS = VISIT * MOST_VISITS
GOAL = 0.05  # error of a predicted speedup that is as good as measuring
TREE_PROFILE = (
    [0.6, 0.15, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01],
) * 8  # a usual accuracy of each rank, for the shape of a tree

Terms = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """Of one round: how many requests run, tokens of each by now, and the draft. Draft length 0 is a plain step."""

    draft_length: int
    batch: int
    context: int
    tree: StaticTree | None = None

    @property
    def nodes(self) -> int:
        return self.tree.num_nodes if self.tree else self.draft_length

    @property
    def shape(self) -> Shape:
        return self.tree or Chain(self.draft_length)


@dataclass(frozen=True)
class RoundTimes:
    """Milliseconds of one setting's rounds."""

    setting: Setting
    draft: float
    verify: float
    whole: float

    def as_dict(self) -> dict[str, Any]:
        s = self.setting
        where = {"draft_length": s.draft_length, "batch": s.batch, "context": s.context, "nodes": s.nodes}
        times = {"draft_ms": self.draft, "verify_ms": self.verify, "round_ms": self.whole}
        return {**where, "tree": s.tree is not None, **times}


@dataclass(frozen=True)
class Costs:
    """Fitted costs, all in milliseconds. Of `draft_length` 0 a round is a plain step."""

    device: str
    target: str
    drafter: str
    drafter_kind: str
    draft_ms: Terms
    verify_ms: Terms  # of the target's pass in a plain step, too
    host: float  # of a round, beside its draft and its verification
    held_out: dict[str, Any] = field(default_factory=dict)  # error of the speedup at settings left out of the fit
    fitted_on: list[dict[str, Any]] = field(default_factory=list)
    drops_columns: bool = False  # where no request has a draft, a CPU verifies a plain step; a GPU the usual shape
    drafted: float = 1.0  # share of a request's rounds that have a draft, which looked-up ones may not

    def drafting_in(self, share: float) -> "Costs":
        """Of a drafter that has a draft in this share of a request's rounds."""
        return replace(self, drafted=share if self.drops_columns else 1.0)

    def plain(self, batch: int, context: int) -> float:
        """One plain step of the whole batch, each request having `context` tokens."""
        return self.verify(0, batch, context) + self.host

    def draft(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Drafts for all requests: chains, or trees of `nodes` nodes and depth `draft_length`."""
        return value(self.draft_ms, draft_terms(draft_length, batch, context, nodes))

    def verify(self, nodes: int, batch: int, context: int, tree: bool = False) -> float:
        """The target's pass over `nodes` + 1 tokens of each request, with verification; the mean over all rounds."""
        whole = value(self.verify_ms, pass_terms(nodes, batch, context, tree))
        none_drafted = (1 - self.drafted) ** batch
        if not nodes or not none_drafted:
            return whole
        return whole + none_drafted * (self.verify(0, batch, context) - whole)

    def round(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """Draft, verification and host. With `nodes` the draft is a tree of depth `draft_length`."""
        if draft_length == 0:
            return self.plain(batch, context)
        verify = self.verify(nodes or draft_length, batch, context, nodes is not None)
        return self.draft(draft_length, batch, context, nodes) + verify + self.host

    def speedup(
        self, acceptance_length: float, draft_length: int, batch: int, context: int, nodes: int | None = None
    ) -> float:
        """Over plain decoding, of rounds that emit `acceptance_length` tokens of each request."""
        return acceptance_length / self.break_even(draft_length, batch, context, nodes)

    def break_even(self, draft_length: int, batch: int, context: int, nodes: int | None = None) -> float:
        """The acceptance length at which the speedup is 1: plain steps that a round costs."""
        return self.round(draft_length, batch, context, nodes) / self.plain(batch, context)

    def to_json(self) -> dict[str, Any]:
        """What costs.json holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Costs":
        return cls(**content)


# --- terms


def tokens_of_pass(tokens: int) -> Terms:
    """Of a pass over so many tokens in all."""
    starts = {f"token up to {kink}": min(tokens, kink) for kink in SLOW_STARTS}
    kinks = {f"token from {kink} on": max(0, tokens - kink) for kink in KINKS}
    return {"pass": 1.0, "token": tokens, **starts, **kinks}


def pass_terms(nodes: int, batch: int, context: int, tree: bool) -> Terms:
    """How often each cost is paid by a pass of the target."""
    tokens = batch * (nodes + 1)
    attention = {"row x context": batch * context, "token x context": tokens * context}
    drafts = {"drafts": float(nodes > 0), "draft token": batch * nodes}
    return {**tokens_of_pass(tokens), **attention, **drafts, "tree": float(tree), "tree token": float(tree) * tokens}


def draft_terms(draft_length: int, batch: int, context: int, nodes: int | None) -> Terms:
    """How often each cost is paid by drafting; the first step reads what the last round committed."""
    steps = {f"step: {name}": draft_length * count for name, count in tokens_of_pass(batch).items()}
    first = {f"first: {name}": count for name, count in tokens_of_pass(batch * (draft_length + 1)).items()}
    attention = {"row x context": batch * context, "step x row x context": draft_length * batch * context}
    tree = {"tree": float(nodes is not None), "tree node": batch * (nodes or 0.0)}
    return {**first, **steps, **attention, **tree}


def value(costs: Terms, terms: Terms) -> float:
    return sum(costs[name] * terms[name] for name in costs)


def fit(rows: list[Terms], milliseconds: Sequence[float]) -> Terms:
    """Cost of each term that has one, by least squares of the relative error."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    matrix = np.array([[row[name] for name in names] for row in rows], dtype=float)
    measured = np.maximum(np.asarray(milliseconds, dtype=float), 1e-6)
    found = nonnegative_least_squares(matrix / measured[:, None], np.ones(len(measured)))
    return {name: float(cost) for name, cost in zip(names, found, strict=True) if cost > 0}


# --- measuring


@dataclass(frozen=True)
class CostRange:
    """Up to where costs are measured, and for how long."""

    batch: int = 16
    context: int = 256
    draft_length: int = 8  # or as far as the drafter goes
    tree_nodes: int = 0  # of the largest tree; 0: chains only
    seconds: float = 30.0  # about, for each drafter

    def settings(self, drafter: Drafter) -> tuple[list[Setting], list[Setting]]:
        """To fit on: every few batches, contexts, draft lengths, trees; and those between, to test the fit on."""
        most = self.draft_length if drafter.max_draft_length is None else drafter.max_draft_length
        longest = min(self.draft_length, most)
        fitted, between = [], []
        batches, contexts = powers(2, self.batch), sorted({max(1, self.context // 8), self.context})
        for batch in batches:
            for context in contexts:
                fitted += self._drafts(
                    powers(2, longest), batch, context, self._trees(drafter, (4, 16, 64, self.tree_nodes))
                )
        left_out = [low + (high - low) // 2 for low, high in itertools.pairwise(batches) if high - low > 1]
        left_out = left_out or [self.batch]
        lengths = [k for k in range(1, longest + 1) if k not in powers(2, longest)] or [longest]
        for batch in left_out:  # at a context between, too
            between += self._drafts(lengths, batch, max(1, self.context // 2), self._trees(drafter, (8, 32)))
        return fitted, between

    def _trees(self, drafter: Drafter, sizes: Sequence[int]) -> list[StaticTree]:
        if not drafter.can_branch:
            return []
        most = self.draft_length if drafter.max_draft_length is None else drafter.max_draft_length
        depth = min(self.draft_length, most)
        possible = len(TREE_PROFILE[0]) if depth == 1 else self.tree_nodes
        wanted = sorted({size for size in sizes if 0 < size <= min(self.tree_nodes, possible)})
        return [usual_tree(size, depth) for size in wanted]

    def _drafts(self, lengths: list[int], batch: int, context: int, trees: list[StaticTree]) -> list[Setting]:
        chains = [Setting(length, batch, context) for length in [0, *lengths]]
        return chains + [Setting(tree.depth, batch, context, tree) for tree in trees]


def usual_tree(num_nodes: int, depth: int) -> StaticTree:
    """Of nodes right as often as is usual, paths up to so long; `UserError` for more nodes than there can be."""
    return likeliest_tree(TREE_PROFILE[:depth], num_nodes)


def powers(base: int, most: int) -> list[int]:
    """1, base, base squared, ... below `most`, then `most` itself."""
    found = [1]
    while found[-1] * base < most:
        found.append(found[-1] * base)
    return sorted({*found, most})


def measure_costs(
    target: Target,
    drafter: Drafter,
    reach: CostRange = CostRange(),
    name: str = "",
    on_progress: Callable[[float], None] = lambda share: None,
) -> Costs:
    """Costs of a drafter, which need not be trained, for its target on this device.

    `on_progress` gets the share that is done. Raises `UserError` where the target's context is too short.
    """
    room = MOST_ROUNDS + reach.draft_length + reach.tree_nodes
    if reach.context + room > target.context:
        raise UserError(
            f"context {reach.context}: measuring needs {room} tokens beyond it, and the target's context is "
            f"{target.context}: give at most {target.context - room}"
        )
    fitted, left_out = reach.settings(drafter)
    times = time_rounds(target, drafter, fitted + left_out, reach.seconds, on_progress)
    costs = fit_costs(times[: len(fitted)])
    return replace(
        costs,
        device=device_name(target),
        target=target.name,
        drafter=name or drafter.kind,
        drafter_kind=drafter.kind,
        drops_columns=target.device.type == "cpu",
        held_out=speedup_errors(costs, times[len(fitted) :]),
    )


def fit_costs(times: list[RoundTimes]) -> Costs:
    """Costs that explain measured rounds, plain steps among them."""
    rounds = [one for one in times if one.setting.draft_length]
    host = statistics.median(max(0.0, one.whole - one.draft - one.verify) for one in rounds)

    def pass_of(s: Setting) -> Terms:
        return pass_terms(s.nodes, s.batch, s.context, s.tree is not None)

    def draft_of(s: Setting) -> Terms:
        return draft_terms(s.draft_length, s.batch, s.context, s.nodes if s.tree else None)

    passes = [one.verify if one.setting.draft_length else max(0.0, one.whole - host) for one in times]
    return Costs(
        device="",
        target="",
        drafter="",
        drafter_kind="",
        draft_ms=fit([draft_of(one.setting) for one in rounds], [one.draft for one in rounds]),
        verify_ms=fit([pass_of(one.setting) for one in times], passes),
        host=host,
        fitted_on=[one.as_dict() for one in times],
    )


def speedup_errors(costs: Costs, times: list[RoundTimes]) -> dict[str, Any]:
    """Relative error of predicted speedups. Whatever the acceptance is, it is that of the two times' ratio."""
    plain = {(one.setting.batch, one.setting.context): one.whole for one in times if one.setting.draft_length == 0}
    rows, errors = [], []
    for one in times:
        s = one.setting
        if s.draft_length:
            predicted = costs.break_even(s.draft_length, s.batch, s.context, s.nodes if s.tree else None)
            measured = one.whole / plain[s.batch, s.context]
            errors.append(measured / predicted - 1)
            rows.append({**one.as_dict(), "plain_ms": plain[s.batch, s.context], "speedup_error": errors[-1]})
    sizes = np.abs(errors)
    return {
        "settings": len(sizes),
        "median_error": float(np.median(sizes)),
        "p90_error": float(np.quantile(sizes, 0.9)),
        "share_within_5_percent": float((sizes <= GOAL).mean()),
        "rows": rows,
    }


def time_rounds(
    target: Target,
    drafter: Drafter,
    settings: list[Setting],
    seconds: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> list[RoundTimes]:
    """Rounds of each setting for about so many seconds in all, the settings in turns, some rounds a visit.

    A machine that gets slower or faster meanwhile then does so for all. Of a setting's rounds the median counts.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, setting in enumerate(settings):
        groups.setdefault((setting.batch, setting.context), []).append(index)
    watched = []
    for group in groups.values():
        watched += [Watched(one) for one in start_group(target, drafter, [settings[index] for index in group])]
    begin = time.perf_counter()
    for visit in range(1, MOST_VISITS + 1):
        place = 0
        for group in groups.values():
            for _ in range(VISIT):
                for one in watched[place : place + len(group)]:
                    one.step()
            place += len(group)
        done = max(visit / MOST_VISITS, (time.perf_counter() - begin) / seconds)
        on_progress(min(1.0, done))
        if done >= 1 and visit >= LEAST_VISITS:
            break
    order = [index for group in groups.values() for index in group]
    found = {index: one.times(settings[index]) for index, one in zip(order, watched, strict=True)}
    return [found[index] for index in range(len(settings))]


def start_group(target: Target, drafter: Drafter, group: list[Setting]) -> list[Generation]:
    """Rounds of settings of one batch and context, at whose middle the texts have about `context` tokens."""
    batch, context = group[0].batch, group[0].context
    start = max(1, context - MOST_ROUNDS // 2)
    most_nodes = max(setting.nodes for setting in group)
    length = start + MOST_ROUNDS + most_nodes + 2
    # texts repeat themselves, so that n-grams are found, too; not for a cascade, whose trained half is to be asked
    period = length if isinstance(drafter, Cascade) else most_nodes + 1
    pieces = torch.randint(target.vocab_size, (batch, period), generator=torch.Generator().manual_seed(0))
    texts = pieces.repeat(1, -(-length // period))[:, :length].tolist()
    plain, cache = load_drafter("none", target), None
    running = []
    for setting in group:
        used = drafter if setting.draft_length else plain
        engine = ForcedBatchEngine(target, used, setting.shape, texts, MOST_ROUNDS, cache)
        cache = engine.cache  # all read the same text: one cache serves them, as warm as it would be alone
        running.append(start_forced(engine, [text[:start] for text in texts]))
    return running


class Watched:
    """A generation and how long its rounds took."""

    def __init__(self, generation: Generation) -> None:
        self.generation, self.walls = generation, list[float]()

    def step(self) -> None:
        begin = time.perf_counter()
        self.generation.step()
        self.walls.append((time.perf_counter() - begin) * 1000)

    def times(self, setting: Setting) -> RoundTimes:
        phases: dict[str, list[float]] = {"draft": [], "verify": []}
        for phase, milliseconds in self.generation.clock.intervals():
            phases.setdefault(phase, []).append(milliseconds)
        return RoundTimes(setting, *(counted_median(part) for part in (phases["draft"], phases["verify"], self.walls)))


def counted_median(milliseconds: list[float]) -> float:
    """Of a setting's rounds, without the first one of each visit."""
    return statistics.median(value for number, value in enumerate(milliseconds) if number % VISIT)
