"""A drafter on recorded texts, and what a cause of low acceptance costs it: the ground of every diagnosis.

Shapes: N places of an answer where a round can start, K depths.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftsmith.inference.decoding.counters import Stats, paired_difference
from draftsmith.inference.replay.replay import AcceptanceTrace, Recording, expected_stats, starts, survival
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import Drafter, Target
from draftsmith.models.sampling.trees import Chain

WORTH = 0.2  # tokens a round that a cause must cost
LEAST_PROMPTS = 4  # of fewer, an interval over prompts says nothing


@dataclass(frozen=True)
class Reference:
    """What the drafter accepted before: of the first drafted tokens, and where that was measured."""

    first_accepted: float
    source: str  # a file
    in_training: bool  # on the training text, else on an evaluation's prompts


@dataclass
class ReplayedDrafter:
    """A drafter on recorded texts."""

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

    def stats(self, traces: list[AcceptanceTrace]) -> list[Stats]:
        return [expected_stats(one, Chain(self.draft_length), self.mode) for one in traces]

    def accept(self, index: int) -> np.ndarray:
        """[N, K]"""
        return self.traces[index].accept[self.mode]

    def with_accept(self, change: Callable[[AcceptanceTrace, np.ndarray], np.ndarray]) -> list[AcceptanceTrace]:
        """The traces with other chances."""
        return [replace(one, accept={self.mode: change(one, one.accept[self.mode])}) for one in self.traces]

    def gain(self, traces: list[AcceptanceTrace]) -> dict[str, Any] | None:
        """The acceptance length that other traces add, where that is worth a word."""
        return worthy_gain(self.stats(traces), self.stats(self.traces))

    def weights(self, index: int) -> np.ndarray:
        """Chance that a draft of each place and depth is offered with all before it accepted, [N, K]."""
        one = self.traces[index]
        alive = survival(one, Chain(self.draft_length), self.mode)
        before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], 1)
        return starts(alive, one.limit)[:, None] * before

    def first_accepted(self, traces: list[AcceptanceTrace]) -> float:
        """Share of first drafted tokens."""
        stats = self.stats(traces)
        return sum(stats[1:], stats[0]).conditional_acceptance_rates[0] or 0.0

    def target_ids(self) -> np.ndarray:
        """Target ids of the draft vocabulary [Vd]."""
        ids = self.drafter.draft_to_target()
        return np.arange(self.target.vocab_size) if ids is None else ids.cpu().numpy()


def worthy_gain(better: list[Stats], found: list[Stats]) -> dict[str, Any] | None:
    """What is won in acceptance length, by prompt; None where that is not worth a word, or may be chance."""
    if len(found) < LEAST_PROMPTS:
        return None
    gain = paired_difference(better, found)
    worthy = gain["ci95"][0] > 0 and gain["difference"] >= WORTH
    return gain if worthy else None


def plus(gain: dict[str, Any]) -> str:
    """A gain in words."""
    low, high = gain["ci95"]
    return f"acceptance length {gain['difference']:+.2f} [{low:+.2f}, {high:+.2f}]"
