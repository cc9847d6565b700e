"""How much of an evaluation a share of training's time allows, and when more training brings nothing."""

import math
from dataclasses import dataclass
from typing import Any

from draftsmith.train.config import EvaluationConfig

LEAST_PROMPTS, LEAST_REPEATS = 8, 2  # never fewer, unless fewer are asked for


@dataclass(frozen=True)
class Amount:
    """Of one evaluation."""

    num_prompts: int
    repeats: int


@dataclass(frozen=True)
class Cost:
    """What an evaluation took, in evaluation.json as "cost"."""

    seconds: float
    training_seconds: float  # of the run, up to that checkpoint
    num_prompts: int
    repeats: int
    time_share: float | None


def affordable(config: EvaluationConfig, num_prompts: int, earlier: list[Cost], training_seconds: float) -> Amount:
    """The next evaluation: all evaluations together take `time_share` of the time trained so far, or the least amount.

    Sized by what the last one took; the first is done in full. Repeats go first: with the same prompts checkpoints stay
    comparable.
    """
    full = Amount(num_prompts, config.repeats)
    if config.time_share is None or not earlier:
        return full
    last = earlier[-1]
    size = left(config, earlier, training_seconds) / last.seconds * last.num_prompts * last.repeats
    if size >= num_prompts * config.repeats:
        return full
    repeats = max(min(full.repeats, LEAST_REPEATS), int(size / num_prompts))
    return Amount(max(min(num_prompts, LEAST_PROMPTS), min(num_prompts, int(size / repeats))), repeats)


def left(config: EvaluationConfig, earlier: list[Cost], training_seconds: float) -> float:
    """Seconds that evaluations may still take by now; below 0 where they took more."""
    if config.time_share is None:
        return math.inf
    return config.time_share * training_seconds - sum(cost.seconds for cost in earlier)


def checkpoints_without_gain(rows: list[dict[str, Any]]) -> int:
    """How many of the newest checkpoints bring no better speedup, given each one's first row, oldest first.

    A better one is lossless, and its whole interval lies above the speedup of the last better one; its speedup, where
    too little was timed for an interval.
    """
    best, count = 0.0, -1  # the first is measured against nothing
    for row in rows:
        if row["lossless"]["divergences"] == 0 and (row["speedup_ci95"] or [row["speedup"]])[0] > best:
            best, count = row["speedup"], 0
        else:
            count += 1
    return max(count, 0)
