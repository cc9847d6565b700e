"""How far a drafter's confidence can be believed: its chance of its likeliest token beside how often that was kept.

A drafter that is sure of what the target refuses asks for a lower draft length than one that knows its limits, and an
adaptive draft length or a dynamic tree can only be as good as the confidence that steers it.
"""

from typing import Any

import numpy as np

from draftsmith.inference.replay.replay import AcceptanceTrace, starts, survival
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models.sampling.trees import Chain

NUM_BINS = 10  # of equal width


def calibration_fields(traces: list[AcceptanceTrace], draft_length: int, mode: VerificationMode) -> dict[str, Any]:
    """What a row of evaluation.json says: of each depth its bins that are not empty, and the calibration error.

    A bin has the mean confidence, the share accepted of the drafts whose every token before was, and their (expected)
    number; over all bins of a depth that share is its conditional acceptance rate. `calibration_error` is the mean
    distance of the two, weighted by number (Guo et al., arXiv 1706.04599); None where nothing was drafted.
    """
    offered, confidence, accepted = (
        np.concatenate(arrays) for arrays in zip(*(offers(trace, draft_length, mode) for trace in traces), strict=True)
    )
    bins = [depth_bins(*depth) for depth in zip(offered.T, confidence.T, accepted.T, strict=True)]
    return {"calibration": bins, "calibration_error": [error_of(of_depth) for of_depth in bins]}


def offers(
    trace: AcceptanceTrace, draft_length: int, mode: VerificationMode
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each place and depth [N, K]: chance that its token was offered, its confidence, chance that it was kept."""
    alive = survival(trace, Chain(draft_length), mode)
    before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], 1)
    columns = slice(draft_length)
    return starts(alive, trace.limit)[:, None] * before, trace.confidence[:, columns], trace.accept[mode][:, columns]


def depth_bins(offered: np.ndarray, confidence: np.ndarray, accepted: np.ndarray) -> list[dict[str, float]]:
    found = []
    numbers = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    for number in range(NUM_BINS):
        weights = np.where(numbers == number, offered, 0.0)
        if count := float(weights.sum()):
            shares = {"confidence": float(weights @ confidence) / count, "accepted": float(weights @ accepted) / count}
            found.append({**shares, "count": count})
    return found


def error_of(bins: list[dict[str, float]]) -> float | None:
    total = sum(one["count"] for one in bins)
    return sum(one["count"] * abs(one["confidence"] - one["accepted"]) for one in bins) / total if total else None
