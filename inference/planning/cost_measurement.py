"""Short measurements of rounds with the real target, drafter and decoder, from which costs.py fits what rounds cost."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.measuring.environment import device_name
from draftsmith.inference.planning.costs import Costs, RoundTimes, fit_costs, speedup_errors
from draftsmith.inference.replay.forced_decoding import ForcedBatchEngine, start_forced
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain, Shape, StaticTree, likeliest_tree
from draftsmith.models.slots.cache import SlotCache

LEAST_VISITS, MOST_VISITS = 2, 4
TURNS = 3  # of each drafter, where several are measured to be compared
TREE_SIZES, TREE_SIZES_BETWEEN = (4, 16, 64), (8, 32)  # nodes of trees to fit on, and to test the fit on
USUAL_ACCURACIES = [[0.6, 0.15, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01]] * 8  # by depth and rank, for the shape of a tree


@dataclass(frozen=True)
class Visit:
    """Rounds of a setting in a row. The first do not count: the rounds of other settings still slow them down."""

    rounds: int
    warm_up: int


# For 80 milliseconds after rounds with a draft, plain steps take longer than in the middle of an answer on a CPU: the
# first one up to 1.4 times, the tenth still 1.04 times. Rounds with a draft hardly do.
PLAIN_VISIT, DRAFT_VISIT = Visit(24, 14), Visit(12, 5)
MOST_ROUNDS = PLAIN_VISIT.rounds * MOST_VISITS


@dataclass(frozen=True)
class RoundSetting:
    """The number of running requests, the tokens of each, and the draft of a round. Draft length 0 is a plain step."""

    draft_length: int
    batch: int
    context: int
    tree: StaticTree | None = None

    @property
    def shape(self) -> Shape:
        return self.tree or Chain(self.draft_length)

    @property
    def nodes(self) -> int:
        return self.shape.num_nodes

    @property
    def visit(self) -> Visit:
        return DRAFT_VISIT if self.draft_length else PLAIN_VISIT


@dataclass(frozen=True)
class CostRange:
    """The range in which costs are measured, and for how long."""

    batch: int = 16
    context: int = 256
    draft_length: int = 8  # or as far as the drafter goes
    tree_nodes: int = 0  # of the largest tree; 0: chains only
    seconds: float = 30.0  # about, for each drafter

    def settings(self, drafter: Drafter) -> tuple[list[RoundSetting], list[RoundSetting]]:
        """Return a coarse grid of settings to fit on, and settings between them to test the fit on."""
        longest = self._longest(drafter)
        batches, contexts = powers_of_2(self.batch), sorted({max(1, self.context // 8), self.context})
        trees = self._trees(drafter, (*TREE_SIZES, self.tree_nodes))
        fitted = [
            setting
            for batch, context in itertools.product(batches, contexts)
            for setting in drafts_at(batch, context, powers_of_2(longest), trees)
        ]
        left_out = [low + (high - low) // 2 for low, high in itertools.pairwise(batches) if high - low > 1]
        lengths = [length for length in range(1, longest + 1) if length not in powers_of_2(longest)] or [longest]
        trees = self._trees(drafter, TREE_SIZES_BETWEEN)
        between = [
            setting
            for batch in left_out or [self.batch]
            for setting in drafts_at(batch, max(1, self.context // 2), lengths, trees)
        ]
        return fitted, between

    def _longest(self, drafter: Drafter) -> int:
        most = drafter.max_draft_length
        return self.draft_length if most is None else min(self.draft_length, most)

    def _trees(self, drafter: Drafter, sizes: Sequence[int]) -> list[StaticTree]:
        if not drafter.can_branch:
            return []
        depth = self._longest(drafter)
        possible = sum(len(USUAL_ACCURACIES[0]) ** level for level in range(1, depth + 1))
        wanted = sorted({size for size in sizes if 0 < size <= min(self.tree_nodes, possible)})
        return [usual_tree(size, depth) for size in wanted]


def drafts_at(batch: int, context: int, lengths: list[int], trees: list[StaticTree]) -> list[RoundSetting]:
    """Return a plain step, chains of the given lengths and trees at one batch size and context."""
    chains = [RoundSetting(length, batch, context) for length in [0, *lengths]]
    return chains + [RoundSetting(tree.depth, batch, context, tree) for tree in trees]


def usual_tree(num_nodes: int, depth: int) -> StaticTree:
    """Return the best tree for ranks that are right as often as is usual, with paths of at most `depth` nodes.

    Raises `UserError` for more nodes than there can be.
    """
    return likeliest_tree(USUAL_ACCURACIES[:depth], num_nodes)


def powers_of_2(most: int) -> list[int]:
    """Return 1, 2, 4, ... below `most`, then `most` itself."""
    return [*(2**power for power in range((most - 1).bit_length())), most]


def measure_costs(
    target: Target,
    drafter: Drafter,
    reach: CostRange = CostRange(),
    name: str = "",
    on_progress: Callable[[float], None] = lambda share: None,
) -> Costs:
    """Return the costs of a drafter, which need not be trained, for its target on this device.

    `on_progress` gets the share that is done. Raises `UserError` where the target's context is too short, and for a
    drafter whose drafts have a shape of their own.
    """
    check_measurable(target, drafter, reach)
    times = time_rounds(target, drafter, reach, on_progress)
    return costs_from(target, drafter, reach, name, times)


def measure_costs_in_turns(target: Target, drafters: dict[str, Drafter], reach: CostRange) -> dict[str, Costs]:
    """Return the costs of several drafters, which need not be trained, by the names given; see `measure_costs`.

    Each is measured three times, in turns, and the median of its times counts: a machine that is slow for some seconds
    then makes no drafter look slow beside the others.
    """
    turn = replace(reach, seconds=reach.seconds / TURNS)
    times: dict[str, list[list[RoundTimes]]] = {name: [] for name in drafters}
    for drafter in drafters.values():
        check_measurable(target, drafter, reach)
    for _ in range(TURNS):
        for name, drafter in drafters.items():
            times[name].append(time_rounds(target, drafter, turn, least_visits=1))
    return {
        name: costs_from(target, drafter, reach, name, median_times(times[name])) for name, drafter in drafters.items()
    }


def check_measurable(target: Target, drafter: Drafter, reach: CostRange) -> None:
    """Raise `UserError` where the costs of a drafter cannot be measured in a range."""
    if not isinstance(drafter.own_shape(1), Chain):
        raise UserError(
            f"{drafter.kind} drafts in a shape of its own, which the cost model does not know: measure it with "
            "`draftsmith evaluate`"
        )
    longest = longest_context(target, reach.draft_length, reach.tree_nodes)
    if longest < 1:
        raise UserError(
            f"measuring costs needs {target.context - longest} tokens beyond a request's own, and the target's context "
            f"is {target.context}: give shorter drafts, smaller trees or a target with a longer context"
        )
    if reach.context > longest:
        raise UserError(
            f"context {reach.context}: measuring needs {target.context - longest} tokens beyond it, and the target's "
            f"context is {target.context}: give at most {longest}"
        )


def costs_from(target: Target, drafter: Drafter, reach: CostRange, name: str, times: list[RoundTimes]) -> Costs:
    """Return the costs that fit the times of `time_rounds`, with the errors at the settings that were left out."""
    num_fitted = len(reach.settings(drafter)[0])
    costs = fit_costs(times[:num_fitted])
    return replace(
        costs,
        device=device_name(target),
        target=target.name,
        drafter=name or drafter.kind,
        drafter_kind=drafter.kind,
        drops_columns=target.device.type == "cpu",
        held_out=speedup_errors(costs, times[num_fitted:]),
    )


def median_times(measured: list[list[RoundTimes]]) -> list[RoundTimes]:
    """Return the median times of each setting, of several measurements of the same settings in the same order."""
    return [
        replace(
            rows[0],
            draft_ms=statistics.median(row.draft_ms for row in rows),
            verify_ms=statistics.median(row.verify_ms for row in rows),
            round_ms=statistics.median(row.round_ms for row in rows),
        )
        for rows in zip(*measured, strict=True)
    ]


def longest_context(target: Target, draft_length: int, tree_nodes: int = 0) -> int:
    """Return the most tokens of a request that costs can be measured at; 0 or less where the target's context is short.

    Rounds go on beyond it.
    """
    return target.context - MOST_ROUNDS - draft_length - tree_nodes


def time_rounds(
    target: Target,
    drafter: Drafter,
    reach: CostRange,
    on_progress: Callable[[float], None] = lambda share: None,
    least_visits: int = LEAST_VISITS,
) -> list[RoundTimes]:
    """Time rounds of all settings of a range, those to fit on first; the settings take turns, some rounds a visit.

    A machine that gets slower or faster meanwhile then does so for all. Each setting is visited `least_visits` times,
    though that takes longer than `reach.seconds`.
    """
    settings = [setting for part in reach.settings(drafter) for setting in part]
    groups: dict[tuple[int, int], list[int]] = {}  # settings, by their place, of each batch size and context
    for place, setting in enumerate(settings):
        groups.setdefault((setting.batch, setting.context), []).append(place)
    timed: dict[int, TimedGeneration] = {}
    for places in groups.values():
        generations = start_generations(target, drafter, [settings[place] for place in places])
        timed |= {place: TimedGeneration(one, settings[place]) for place, one in zip(places, generations, strict=True)}
    begin = time.perf_counter()
    for visit in range(1, MOST_VISITS + 1):
        for places in groups.values():
            for place in places:
                for _ in range(settings[place].visit.rounds):
                    timed[place].step()
        done = max(visit / MOST_VISITS, (time.perf_counter() - begin) / reach.seconds)
        on_progress(min(1.0, done))
        if done >= 1 and visit >= least_visits:
            break
    return [timed[place].times() for place in range(len(settings))]


def start_generations(target: Target, drafter: Drafter, settings: list[RoundSetting]) -> list[Generation]:
    """Start decoding at settings of one batch size and context; texts have `context` tokens in the middle of it."""
    batch, context = settings[0].batch, settings[0].context
    most_nodes = max(setting.nodes for setting in settings)
    length = max(1, context - MOST_ROUNDS // 2) + MOST_ROUNDS + most_nodes + 2
    # all read the same text: one cache serves them, as warm as it would be alone
    cache = SlotCache(batch, length + 2, most_nodes + 1)
    # texts repeat themselves, so that a lookup finds a draft, unless the trained drafter would then never be asked
    period = length if drafter.looks_up_first else most_nodes + 1
    pieces = torch.randint(target.vocab_size, (batch, period), generator=torch.Generator().manual_seed(0))
    texts = pieces.repeat(1, -(-length // period))[:, :length].tolist()
    plain = load_drafter("none", target)
    generations = []
    for setting in settings:
        drafts_with = drafter if setting.draft_length else plain
        num_rounds = setting.visit.rounds * MOST_VISITS
        engine = ForcedBatchEngine(target, drafts_with, setting.shape, texts, num_rounds, cache)
        start = max(1, context - num_rounds // 2)
        generations.append(start_forced(engine, [text[:start] for text in texts]))
    return generations


class TimedGeneration:
    """A generation at one setting, and how long its rounds took."""

    def __init__(self, generation: Generation, setting: RoundSetting) -> None:
        self.generation, self.setting = generation, setting
        self._milliseconds: list[float] = []  # of whole rounds

    def step(self) -> None:
        """Decode one round."""
        begin = time.perf_counter()
        self.generation.step()
        self._milliseconds.append((time.perf_counter() - begin) * 1000)

    def times(self) -> RoundTimes:
        """Return the medians of the rounds so far."""
        setting, visit = self.setting, self.setting.visit
        intervals = self.generation.clock.intervals()
        draft, verify = ([time for phase, time in intervals if phase == wanted] for wanted in ("draft", "verify"))
        return RoundTimes(
            setting.draft_length,
            setting.batch,
            setting.context,
            setting.nodes,
            setting.tree is not None,
            counted_median(draft, visit),
            counted_median(verify, visit),
            counted_median(self._milliseconds, visit),
        )


def counted_median(milliseconds: list[float], visit: Visit) -> float:
    """Return the median over a setting's rounds, without the first ones of each visit."""
    counted = (value for number, value in enumerate(milliseconds) if number % visit.rounds >= visit.warm_up)
    return statistics.median(counted)
