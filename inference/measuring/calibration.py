"""Calibration of a drafter: its chance of its likeliest token beside how often that token was accepted.

A drafter that is sure of what the target refuses asks for a lower draft length than one that knows its limits, and an
adaptive draft length or a dynamic tree can only be as good as the confidence that steers it.
"""

import numpy as np

from draftsmith.inference.measuring.results import CalibrationBin
from draftsmith.inference.replay.replay import AcceptanceTrace, chance_offered
from draftsmith.inference.verification.acceptance_rules import VerificationMode

NUM_BINS = 10  # of equal width


def calibration_bins(
    traces: list[AcceptanceTrace], draft_length: int, mode: VerificationMode
) -> list[list[CalibrationBin]]:
    """Return the bins of each depth that are not empty.

    A bin counts the drafts whose every token before was accepted. So over all bins of a depth the share accepted is its
    conditional acceptance rate.
    """
    offered = np.concatenate([chance_offered(trace, draft_length, mode) for trace in traces])
    confidence = np.concatenate([trace.confidence[:, :draft_length] for trace in traces])
    accepted = np.concatenate([trace.accept[mode][:, :draft_length] for trace in traces])
    return [depth_bins(*depth) for depth in zip(offered.T, confidence.T, accepted.T, strict=True)]


def depth_bins(offered: np.ndarray, confidence: np.ndarray, accepted: np.ndarray) -> list[CalibrationBin]:
    """Return the bins of one depth from the chance of its drafts to be offered, their confidence and their acceptance.

    These are arrays [N]. An empty bin is left out.
    """
    bins = []
    numbers = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    for number in range(NUM_BINS):
        weights = np.where(numbers == number, offered, 0.0)
        if count := float(weights.sum()):
            bins.append(CalibrationBin(float(weights @ confidence) / count, float(weights @ accepted) / count, count))
    return bins


def calibration_error(bins: list[CalibrationBin]) -> float | None:
    """Return the mean distance of confidence and share accepted over the bins of a depth, weighted by their counts.

    That is the expected calibration error (Guo et al., arXiv 1706.04599); None where nothing was drafted.
    """
    total = sum(part.count for part in bins)
    return sum(part.count * abs(part.confidence - part.accepted) for part in bins) / total if total else None
