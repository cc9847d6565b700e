"""The amount of evaluation that a share of training's time allows, and the end of training that brings nothing more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from draftsmith.inference.measuring.judged import JudgedResult
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
    last one took; without one it is the least. Repeats go first: with the same prompts checkpoints stay comparable.
    """
    full = Amount(num_prompts, config.repeats)
    if config.time_share is None:
        return full
    if not earlier:
        return Amount(min(num_prompts, LEAST_PROMPTS), min(full.repeats, LEAST_REPEATS))
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


def lengths_without_gain(lengths: list[float]) -> int:
    """Return how many of the newest acceptance lengths, oldest first, are no longer than the longest before them."""
    return len(lengths) - 1 - lengths.index(max(lengths)) if lengths else 0


def checkpoints_without_gain(rows: Sequence[Result | JudgedResult]) -> int:
    """Return how many of the newest checkpoints bring no longer acceptance, given the first row of each, oldest first.

    A better one is lossless, and the whole interval of its acceptance length lies above that of the last better one;
    the length itself, where several processes counted or there are too few prompts for an interval.
    """
    best, count = 0.0, -1  # the first is measured against nothing
    for row in rows:
        length = row.acceptance.mean_acceptance_length
        low, _ = row.mean_acceptance_length_ci95 or (length, None)
        if row.is_sound and low > best:
            best, count = length, 0
        else:
            count += 1
    return max(count, 0)
