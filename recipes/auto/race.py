"""The race of `draftsmith auto`: kinds of drafters are trained in rungs, and half of them dropped after each.

What counts is the speedup predicted on the user's traffic at the user's load. Lookups, which need no training, are
rivals from the start. A forecast says what a kind can still reach, alone and behind a lookup; where none can reach what
a lookup has, the race ends.

A short probe of each kind comes before the first rung. So at the end of each rung it is known what twice the steps
added to the log-odds of its acceptance. Each further doubling adds less, in searches of the embedded target about three
quarters of what the one before added (docs/auto.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.inference.planning.costs import Costs
from draftsmith.recipes.auto.budget import AutoPlan
from draftsmith.recipes.auto.score import (
    Score,
    ScoredLookup,
    ServingLoad,
    growth_per_doubling,
    potential,
    potential_behind,
)

LOOKUPS = ("ngram", "suffix")
USUAL_DECLINE = 0.75  # what a doubling of the steps adds, of what the one before it added
LEAST_DECLINE = 0.9  # the same at best
SLOW_START = 0.3  # growth per doubling that a kind may still come to, though it hardly grew so far

Training = Callable[[str, int], tuple[Score, Costs]]  # of a kind, for so many steps in all


@dataclass(frozen=True)
class Contender:
    """A kind in a rung: what it reached, and what it could reach with all the training that is left."""

    score: Score
    growth: float  # of the log-odds of acceptance, by each doubling of the steps since the score before
    potential: float  # predicted speedup at the end, if growth declines as it usually does
    best_potential: float  # the same if it declines as little as was seen
    best_cascade: float = 0.0  # the same behind the best lookup; 0 where no lookup is served before a kind


@dataclass(frozen=True)
class Conditions:
    """The conditions that all kinds in a race share."""

    plan: AutoPlan
    load: ServingLoad
    lookup: ScoredLookup | None  # the best one; None where none is served before a kind


@dataclass(frozen=True)
class Rung:
    """A part of the race, and who is left after it."""

    contenders: list[Contender]  # that were trained, the best first
    kept: list[str]
    decision: str  # in words


def run_rung(alive: list[str], before: dict[str, Score], train: Training, conditions: Conditions) -> list[Contender]:
    """Train every kind that is alive for its part of a rung; return them, the best first.

    `before` holds the score that each had before, from which its growth is told.
    """
    contenders = []
    for kind in alive:
        score, costs = train(kind, conditions.plan.steps_in_rung(kind, len(alive), before[kind].steps))
        contenders.append(with_forecast(before[kind], score, costs, conditions))
    return ranked(contenders)


def ranked(contenders: list[Contender]) -> list[Contender]:
    """Return contenders, those of the best forecast first.

    Forecasts are level where they differ from the best by no more than half of the interval of what that one has
    reached. Among these the order is that of what each has reached, which is known better than its growth.
    """
    best = max(contenders, key=lambda contender: contender.potential)
    level = best.potential - (best.score.high - best.score.low) / 2

    def rank_key(contender: Contender) -> tuple[bool, float, float]:
        is_level = contender.potential >= level
        known = contender.score.speedup if is_level else contender.potential
        return is_level, known, contender.best_potential

    return sorted(contenders, key=rank_key, reverse=True)


def with_forecast(before: Score, score: Score, costs: Costs, conditions: Conditions) -> Contender:
    """Return a kind with its forecast for the case that the rest of the training is all its own."""
    growth, load, lookup = growth_per_doubling(before, score), conditions.load, conditions.lookup
    times = conditions.plan.final_steps(score.name, score.steps) / score.steps
    usual, best = growth_to_come(growth, times)
    return Contender(
        score,
        growth,
        potential(score, usual, costs, load),
        potential(score, best, costs, load),
        potential_behind(lookup, score, best, costs, load) if lookup else 0.0,
    )


def growth_to_come(growth: float, times: float) -> tuple[float, float]:
    """Return what so many times the steps usually add to log-odds that last grew so per doubling, and add at best."""
    doublings = math.log2(times)
    usual, best = (ratio * (1 - ratio**doublings) / (1 - ratio) for ratio in (USUAL_DECLINE, LEAST_DECLINE))
    return max(0.0, growth) * usual, max(SLOW_START, growth) * best


def decided(number: int, contenders: list[Contender], lookups: list[Score]) -> Rung:
    """Return a rung in which the better half of the contenders goes on, with the reason in words."""
    kept = [contender.score.name for contender in contenders[: max(1, len(contenders) // 2)]]
    best, dropped = contenders[0], contenders[len(kept) :]
    line = f"rung {number}: {', '.join(kept)} go on" if len(kept) > 1 else f"rung {number}: {kept[0]} goes on"
    for loser in dropped:
        reason = (
            f"forecast {loser.potential:.2f}× after {loser.score.speedup:.2f}×, {best.score.name} "
            f"{best.potential:.2f}× after {best.score.speedup:.2f}×"
            if loser.potential
            else "no request is forecast to keep the SLA"
        )
        line += f"; {loser.score.name} is dropped: {reason}"
    if lookups:
        rival = max(lookups, key=lambda score: score.speedup)
        line += f"; {rival.name} has {rival.speedup:.2f}× without training"
    return Rung(contenders, kept, line)


NONE_CAN_PAY = (
    "no kind can pay at this load, whatever it learnt: a round takes as long as the plain steps for all tokens that it "
    "could bring. Nothing is trained"
)


def why_over(contenders: list[Contender], lookups: list[Score], plain: float = 1.0) -> str | None:
    """Return why no further training can win, if so: a lookup, or plain decoding, is out of reach for every kind.

    `plain` is what plain decoding is predicted to have: 0 where it breaks the SLA. Then the SLA may be out of reach.
    """
    best = max(contenders, key=lambda contender: contender.best_potential)
    cascade = max(contender.best_cascade for contender in contenders)
    rival = max(lookups, key=lambda score: score.low, default=None)
    name, reached = ("plain decoding", plain) if rival is None or rival.low <= plain else (rival.name, rival.low)
    if max(best.best_potential, cascade) > reached:
        return None
    if best.best_potential == 0:
        return "no kind is forecast to keep the SLA for any request, however much it grew: training ends here"
    behind = f", or {cascade:.2f}× behind {rival.name}" if rival and cascade else ""
    return (
        f"{name} has at least {reached:.2f}×, and the best forecast of what training can still bring is "
        f"{best.best_potential:.2f}× ({best.score.name}){behind}: training ends here"
    )
