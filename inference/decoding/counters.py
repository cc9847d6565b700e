"""Counters of speculative decoding, with the names and definitions of vLLM's.

Tokens are counted before the cut at the length limit, which is no fault of the drafter, but not beyond an end-of-text
token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field
from scipy.special import stdtrit

from draftsmith.models.ranges import Natural, NonNegative

BOOTSTRAP_SAMPLES = 2000
Counted = Natural | NonNegative  # the decoder counts whole numbers; expected counters are fractions
DraftLength = Annotated[int, Field(ge=0, le=10_000)]
LEAST_SAMPLES = 3  # with two, Student's t asks for 13 standard errors


class Round(NamedTuple):
    """A round of one request."""

    start: int  # place of its first token among the generated ones
    num_drafted: int
    num_accepted: int


@dataclass
class Stats:
    """The counters of one request, or their sum over several. A round in which nothing was drafted is not a draft.

    The decoder counts whole numbers; the expected counters of a replay are fractions.
    """

    draft_length: DraftLength  # longest path of a draft
    num_drafts: Counted = 0  # rounds with at least one drafted token
    num_draft_tokens: Counted = 0
    num_accepted_tokens: Counted = 0  # bonus tokens not among them
    num_emitted_tokens: Natural = 0
    num_rounds: Counted = 0  # target passes after the prompt's
    acceptance_histogram: list[Counted] = field(default_factory=list)  # drafts by accepted tokens

    def __post_init__(self) -> None:
        self.acceptance_histogram = self.acceptance_histogram or [0] * (self.draft_length + 1)
        if len(self.acceptance_histogram) != self.draft_length + 1:
            raise ValueError(f"acceptance_histogram has {len(self.acceptance_histogram)} numbers at this draft_length")

    def count_round(self, num_drafted: int, num_accepted: int) -> None:
        """Count one round of one request."""
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
        """Tokens emitted per draft, the bonus token counted: 1 + accepted / drafts; 1 where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Share of drafts with more than i tokens accepted, by i; it is unconditional, so it never rises with i."""
        return [n / self.num_drafts if self.num_drafts else 0.0 for n in self._at_least()[1:]]

    @property
    def conditional_acceptance_rates(self) -> list[float | None]:
        """Share of drafts with at least i tokens accepted that have one more, by i; None where there was no such draft.

        Of chains of full length it is the share of tokens at depth i that were accepted where all before them were.
        """
        at_least = self._at_least()
        return [later / now if now else None for now, later in zip(at_least[:-1], at_least[1:], strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Return the fields of evaluation.json: the counters, and the figures that follow from them."""
        return {
            "num_rounds": self.num_rounds,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_emitted_tokens": self.num_emitted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "per_position_acceptance_rates": self.per_position_acceptance_rates,
            "conditional_acceptance_rates": self.conditional_acceptance_rates,
            "acceptance_histogram": list(self.acceptance_histogram),
        }

    def _at_least(self) -> list[float]:
        """Return the numbers of drafts with at least j accepted tokens, j = 0..draft_length."""
        return [sum(self.acceptance_histogram[j:]) for j in range(self.draft_length + 1)]


def total_of(stats: Sequence[Stats]) -> Stats:
    """Return the sum of the counters of one request or more."""
    return sum(stats[1:], stats[0])


# --- intervals

Interval = tuple[float, float] | None  # 95 % interval; None where too little was measured for one


def interval(statistic: Callable[[np.ndarray], np.ndarray], count: int) -> Interval:
    """Return the 95 % interval of a statistic over `count` units, such as prompts; None for fewer than three.

    `statistic` maps samples of the units, their places int64 [samples, count], to its values [samples]. The interval is
    the statistic plus and minus its bootstrap standard error times Student's t, since percentiles of a bootstrap are
    too narrow for few units (Hesterberg, What Teachers Should Know About the Bootstrap, 2015). The samples are the same
    each time.
    """
    if count < LEAST_SAMPLES:
        return None
    whole = float(statistic(np.arange(count)[None])[0])
    picks = np.random.default_rng(0).integers(count, size=(BOOTSTRAP_SAMPLES, count))
    # a bootstrap of n units gives a standard error that is too small by a factor of sqrt((n - 1) / n)
    error = float(statistic(picks).std()) * math.sqrt(count / (count - 1))
    reach = float(stdtrit(count - 1, 0.975)) * error
    return whole - reach, whole + reach


def length_interval(stats: list[Stats]) -> Interval:
    """Return the interval of the mean acceptance length over prompts."""
    return interval(lambda picks: _acceptance_lengths(stats, picks), len(stats))


def tokens_reach(stats: list[Stats]) -> float:
    """Return half the interval of the logarithm of the tokens a round, over prompts; infinite for fewer than three."""
    accepted = np.array([request.num_accepted_tokens for request in stats], dtype=float)
    rounds = np.array([request.num_rounds for request in stats], dtype=float)

    def logarithm(picks: np.ndarray) -> np.ndarray:
        return np.log1p(accepted[picks].sum(1) / np.maximum(rounds[picks].sum(1), 1e-9))

    ends = interval(logarithm, len(stats))
    return math.inf if ends is None else (ends[1] - ends[0]) / 2


@dataclass(frozen=True)
class PairedDifference:
    """The acceptance length of one drafter or setting less that of another, on the same prompts."""

    difference: float
    ci95: Interval  # over prompts drawn for both


def paired_difference(stats: list[Stats], others: list[Stats]) -> PairedDifference:
    """Return the difference in acceptance length of counters by prompt."""
    difference = total_of(stats).mean_acceptance_length - total_of(others).mean_acceptance_length
    ci95 = interval(lambda picks: _acceptance_lengths(stats, picks) - _acceptance_lengths(others, picks), len(stats))
    return PairedDifference(difference, ci95)


def _acceptance_lengths(stats: list[Stats], picks: np.ndarray) -> np.ndarray:
    """Return the mean acceptance length [samples] of samples of prompts, by their places [samples, prompts]."""
    accepted = np.array([request.num_accepted_tokens for request in stats])[picks].sum(1)
    drafts = np.array([request.num_drafts for request in stats])[picks].sum(1)
    return 1 + accepted / np.maximum(drafts, 1e-9)
