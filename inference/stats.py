"""Counters of speculative decoding, with the names and definitions of vLLM's.

Counted before the cut at the length limit, which is no fault of the drafter's, but not beyond an end-of-text token.
"""

from dataclasses import dataclass, field

import numpy as np

BOOTSTRAP_SAMPLES = 2000


def resamples(count: int) -> np.ndarray:
    """Samples, with replacement, of `count` things by their index: [samples, count], the same each time."""
    return np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))


@dataclass
class Stats:
    """Of one request, or summed over several. Rounds in which nothing was drafted are not drafts.

    Counted in the decoder these are whole numbers; expected ones (replay.py) are fractions.
    """

    draft_length: int  # longest path of a draft
    num_drafts: float = 0  # rounds with at least one drafted token
    num_draft_tokens: float = 0
    num_accepted_tokens: float = 0  # bonus tokens not among them
    num_emitted_tokens: int = 0
    num_rounds: float = 0  # target passes after the prompt's
    acceptance_histogram: list[float] = field(default_factory=list)  # drafts by accepted tokens, draft_length + 1 bins

    def __post_init__(self) -> None:
        self.acceptance_histogram = self.acceptance_histogram or [0] * (self.draft_length + 1)

    def count_round(self, num_drafted: int, num_accepted: int) -> None:
        """One round of one request."""
        self.num_rounds += 1
        if num_drafted:
            self.num_drafts += 1
            self.num_draft_tokens += num_drafted
            self.num_accepted_tokens += num_accepted
            self.acceptance_histogram[num_accepted] += 1

    def __add__(self, other: "Stats") -> "Stats":
        assert self.draft_length == other.draft_length
        histogram = [a + b for a, b in zip(self.acceptance_histogram, other.acceptance_histogram, strict=True)]
        return Stats(
            self.draft_length,
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            self.num_emitted_tokens + other.num_emitted_tokens,
            self.num_rounds + other.num_rounds,
            histogram,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the bonus token counted: 1 + accepted / drafts. 1 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Share of drafts with more than i tokens accepted; unconditional, so it never rises."""
        return [n / self.num_drafts if self.num_drafts else 0.0 for n in self._at_least()[1:]]

    @property
    def conditional_acceptance_rates(self) -> list[float | None]:
        """Chance that draft i is accepted when all before it were; None where that never happened."""
        at_least = self._at_least()
        return [later / now if now else None for now, later in zip(at_least[:-1], at_least[1:], strict=True)]

    def _at_least(self) -> list[float]:
        """Drafts with at least j accepted tokens, j = 0..draft_length."""
        return [sum(self.acceptance_histogram[j:]) for j in range(self.draft_length + 1)]


def lengths_of(stats: list[Stats], picks: np.ndarray) -> np.ndarray:
    """Mean acceptance length of each sample of prompts [samples, prompts]."""
    accepted = np.array([one.num_accepted_tokens for one in stats])[picks].sum(1)
    drafts = np.array([one.num_drafts for one in stats])[picks].sum(1)
    return 1 + accepted / np.maximum(drafts, 1e-9)
