"""A drafter on recorded texts, and what a cause of low acceptance costs it: what every diagnosis is based on.

Shapes: N places of an answer where a round can start, K depths, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from draftsmith.inference.decoding.counters import PairedDifference, Stats, paired_difference, total_of
from draftsmith.inference.replay.replay import AcceptanceTrace, Recording, chance_offered, expected_stats
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target
from draftsmith.models.sampling.trees import Chain

LEAST_COST = 0.2  # tokens a round that a cause must cost to be named
LEAST_PROMPTS = 4  # with fewer, an interval over prompts says nothing


@dataclass(frozen=True)
class Reference:
    """The share of first drafted tokens that was accepted before, and where that was measured."""

    first_accepted: float
    source: str  # a file
    in_training: bool  # on the training text; else on the prompts of an evaluation


@dataclass
class ReplayedDrafter:
    """A drafter on recorded texts, with a trace of each."""

    target: Target
    drafter: Drafter
    recording: Recording
    draft_length: int
    traces: list[AcceptanceTrace]
    domains: list[str]
    reference: Reference | None

    @property
    def mode(self) -> VerificationMode:
        return "greedy" if self.recording.sampling.greedy else "one_hot"

    @property
    def target_ids(self) -> np.ndarray:
        """Target ids of the draft vocabulary, [Vd]."""
        ids = self.drafter.draft_to_target()
        return np.arange(self.target.vocab_size) if ids is None else ids.cpu().numpy()

    def stats(self, traces: list[AcceptanceTrace]) -> list[Stats]:
        """Return the counters of each text that the traces lead to."""
        return [expected_stats(trace, Chain(self.draft_length), self.mode) for trace in traces]

    def first_accepted(self, traces: list[AcceptanceTrace]) -> float:
        """Return the share of first drafted tokens that is accepted."""
        return total_of(self.stats(traces)).conditional_acceptance_rates[0] or 0.0

    def with_accept(self, change: Callable[[AcceptanceTrace, np.ndarray], np.ndarray]) -> list[AcceptanceTrace]:
        """Return the traces with chances of acceptance [N, K] that `change` makes of a trace and its chances."""
        mode = self.mode
        return [replace(trace, accept={mode: change(trace, trace.accept[mode])}) for trace in self.traces]

    def gain(self, traces: list[AcceptanceTrace]) -> PairedDifference | None:
        """Return the acceptance length that other traces add, if it is significant."""
        return significant_gain(self.stats(traces), self.stats(self.traces))

    def accepted_share(
        self, traces: list[AcceptanceTrace] | None = None, marks: list[np.ndarray] | None = None
    ) -> np.ndarray:
        """Return the share of drafted tokens that is accepted at each depth, [K], where all before them were.

        `traces` have the chances of acceptance, by default the drafter's own. `marks`, bool [N, K] of each text, say
        which drafted tokens count, by default all.
        """
        weights = [chance_offered(trace, self.draft_length, self.mode) for trace in self.traces]
        if marks is not None:
            weights = [weight * mark for weight, mark in zip(weights, marks, strict=True)]
        chances = [trace.accept[self.mode] for trace in traces or self.traces]
        accepted = sum((weight * chance).sum(0) for weight, chance in zip(weights, chances, strict=True))
        return np.asarray(accepted / np.maximum(sum(weight.sum(0) for weight in weights), 1e-9))


def significant_gain(better: list[Stats], now: list[Stats]) -> PairedDifference | None:
    """Return the gain in acceptance length, from counters by prompt; None where it is small or may be chance."""
    if len(now) < LEAST_PROMPTS:
        return None
    gain = paired_difference(better, now)
    assert gain.ci95
    return gain if gain.ci95[0] > 0 and gain.difference >= LEAST_COST else None


def gain_text(gain: PairedDifference) -> str:
    """Return a gain in words."""
    assert gain.ci95
    low, high = gain.ci95
    return f"acceptance length {gain.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
