"""The amount of evaluation that a share of training's time allows, and the end of training that brings nothing more."""

import math
from dataclasses import dataclass

from draftsmith.inference.measuring.results import EvaluationCost, Result
from draftsmith.train.config import EvaluationConfig

LEAST_PROMPTS, LEAST_REPEATS = 8, 2  # never fewer, unless fewer are asked for


@dataclass(frozen=True)
class Amount:
    """The amount that one evaluation measures."""

    num_prompts: int
    repeats: int


def affordable(
    config: EvaluationConfig, num_prompts: int, earlier: list[EvaluationCost], training_seconds: float
) -> Amount:
    """Return the amount of the next evaluation.

    All evaluations together take `time_share` of the time trained so far, or the least amount. It is sized by what the
    last one took; the first is done in full. Repeats go first: with the same prompts checkpoints stay comparable.
    """
    full = Amount(num_prompts, config.repeats)
    if config.time_share is None or not earlier:
        return full
    last = earlier[-1]
    size = seconds_left(config, earlier, training_seconds) / last.seconds * last.num_prompts * last.repeats
    if size >= num_prompts * config.repeats:
        return full
    repeats = max(min(full.repeats, LEAST_REPEATS), int(size / num_prompts))
    return Amount(max(min(num_prompts, LEAST_PROMPTS), min(num_prompts, int(size / repeats))), repeats)


def seconds_left(config: EvaluationConfig, earlier: list[EvaluationCost], training_seconds: float) -> float:
    """Return the seconds that evaluations may still take by now; below 0 where they took more."""
    if config.time_share is None:
        return math.inf
    return config.time_share * training_seconds - sum(cost.seconds for cost in earlier)


def checkpoints_without_gain(rows: list[Result]) -> int:
    """Return how many of the newest checkpoints bring no better speedup, given the first row of each, oldest first.

    A better one is lossless, and its whole interval lies above the speedup of the last better one; its speedup, where
    too little was timed for an interval.
    """
    best, count = 0.0, -1  # the first is measured against nothing
    for row in rows:
        low, _ = row.speed.speedup_ci95 or (row.speed.speedup, None)
        if row.lossless.divergences == 0 and low > best:
            best, count = row.speed.speedup, 0
        else:
            count += 1
    return max(count, 0)
