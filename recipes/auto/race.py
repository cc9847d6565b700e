"""The race of `draftsmith auto`: kinds of drafters are trained in rungs, and half of them dropped after each.

What counts is the speedup predicted on the user's traffic at the user's load. Lookups, which need no training, are
rivals from the start. A forecast says what a kind can still reach; where none can reach a lookup, the race ends.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from draftsmith.inference.planning.costs import Costs
from draftsmith.recipes.auto.budget import AutoPlan
from draftsmith.recipes.auto.score import Score, ServingLoad, potential

LOOKUPS = ("ngram", "suffix")
# How much twice the steps added to the log-odds of acceptance of a kind, from the first rung of a search to a training
# with all of its time: on code, on dialogues and on tables, as benchmarks/auto.py prints it (docs/auto.md).
GROWTH = {
    "eagle3": (0.247, 0.353, 0.328),
    "medusa": (0.071, 0.129, 0.079),
    "hydra": (0.108, 0.142, 0.144),
    "dflash": (0.441, 1.003, 0.558),
    "draft_model": (0.227, 0.225, 0.231),
}

Training = Callable[[str, int], tuple[Score, Costs]]  # of a kind, for so many steps in all


@dataclass(frozen=True)
class Contender:
    """A kind in a rung: what it reached, and what it could reach with all the training that is left."""

    score: Score
    potential: float  # predicted speedup at the end, at the growth that is usual
    best_potential: float  # the same at the growth of the run that grew most


@dataclass(frozen=True)
class Rung:
    """A part of the race, and who is left after it."""

    contenders: list[Contender]  # that were trained, the best potential first
    kept: list[str]
    decision: str  # in words


def run_rung(
    alive: list[str], plan: AutoPlan, steps: dict[str, int], train: Training, load: ServingLoad
) -> list[Contender]:
    """Train every kind that is alive for its part of a rung; return them, the best potential first."""
    contenders = []
    for kind in alive:
        score, costs = train(kind, plan.steps_in_rung(kind, len(alive), steps.get(kind, 0)))
        contenders.append(with_forecast(score, costs, plan, load))
    return sorted(contenders, key=lambda contender: (contender.potential, contender.best_potential), reverse=True)


def with_forecast(score: Score, costs: Costs, plan: AutoPlan, load: ServingLoad) -> Contender:
    """Return a kind with its forecast for the case that the rest of the training is all its own."""
    doublings = math.log2(plan.final_steps(score.name, score.steps) / score.steps)
    usual, most = growth_per_doubling(score.name)
    reached, best = (potential(score, growth * doublings, costs, load) for growth in (usual, most))
    return Contender(score, reached, max(reached, best))


def growth_per_doubling(kind: str) -> tuple[float, float]:
    """Return how much twice the steps add to the log-odds of acceptance of a kind: the usual, and the most seen.

    Sizes of a kind are taken to grow as it does, and a kind that was never seen as all of them.
    """
    everything = [growth for of_kind in GROWTH.values() for growth in of_kind]
    seen = GROWTH.get(kind.partition("@")[0], everything)
    return float(np.median(seen)), max(seen)


def decided(number: int, contenders: list[Contender], lookups: list[Score]) -> Rung:
    """Return a rung in which the better half of the contenders goes on, with the reason in words."""
    kept = [contender.score.name for contender in contenders[: max(1, len(contenders) // 2)]]
    best, dropped = contenders[0], contenders[len(kept) :]
    line = f"rung {number}: {', '.join(kept)} go on" if len(kept) > 1 else f"rung {number}: {kept[0]} goes on"
    for loser in dropped:
        reason = (
            f"forecast {loser.potential:.2f}×, {best.score.name} {best.potential:.2f}×"
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
    rival = max(lookups, key=lambda score: score.low, default=None)
    name, reached = ("plain decoding", plain) if rival is None or rival.low <= plain else (rival.name, rival.low)
    if best.best_potential > reached:
        return None
    if best.best_potential == 0:
        return "no kind is forecast to keep the SLA for any request, however much it grew: training ends here"
    return (
        f"{name} has at least {reached:.2f}×, and the best forecast of what training can still bring is "
        f"{best.best_potential:.2f}× ({best.score.name}): training ends here"
    )
