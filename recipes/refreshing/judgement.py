"""Champion against challenger: both decode the same held-out prompts in turns, beside plain decoding.

The challenger is promoted where it is expected to be better on the newest traffic, surely not much worse on the old,
and lossless on both.

By what decoding accepts, a gain is hard to tell from chance. So the gain is judged by expected counters on texts that
the target writes at temperature 1 (inference/replay): they hold no chance but that of the texts. Decoding itself tells
whether the output is the target's, and keeps back a challenger that is plainly worse in it.
"""

from dataclasses import dataclass

from scipy.special import stdtrit

from draftsmith.inference.decoding.counters import Interval, Stats, paired_difference, total_of
from draftsmith.inference.decoding.decoder import GenerationSettings
from draftsmith.inference.measuring.measure import (
    Contender,
    MeasureSettings,
    PromptSet,
    check_settings,
    decode_all,
    lossless_check,
    stats_by_prompt,
)
from draftsmith.inference.measuring.speed import ratio_interval, speedup_of
from draftsmith.inference.replay.replay import check_replayed_as, expected_stats, record, replay
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling

MARGIN = 0.1  # share of the tokens that drafting brings on old traffic which a challenger may lose, at most
NO_WORSE = 0.95  # the confidence of the bounds on losses
PLAIN, CHAMPION, CHALLENGER = "none", "champion", "challenger"


@dataclass(frozen=True)
class Lengths:
    """The acceptance lengths of champion and challenger on the same prompts."""

    num_prompts: int
    champion: float
    challenger: float
    difference: float
    ci95: Interval  # of the difference, over prompts

    @classmethod
    def of(cls, champion: list[Stats], challenger: list[Stats]) -> "Lengths":
        """Return the lengths of counters by prompt."""
        paired = paired_difference(challenger, champion)
        own, others = (total_of(stats).mean_acceptance_length for stats in (challenger, champion))
        return cls(len(champion), others, own, paired.difference, paired.ci95)

    def at_least(self, confidence: float) -> float:
        """Return what the difference is at least, with a confidence; minus infinity where there are too few prompts.

        It is asked on which side of a bound the difference lies, so the bound is one-sided. The interval leaves 2.5 %
        on either side.
        """
        if self.ci95 is None:
            return float("-inf")
        degrees = self.num_prompts - 1
        one_sided = float(stdtrit(degrees, confidence) / stdtrit(degrees, 0.975))  # of half the interval
        return self.difference - one_sided * (self.difference - self.ci95[0])

    def at_most(self, confidence: float) -> float:
        """Return what the difference is at most, with a confidence; infinity where there are too few prompts."""
        return 2 * self.difference - self.at_least(confidence)

    @property
    def text(self) -> str:
        """The lengths in words."""
        interval = f" [{self.ci95[0]:+.2f}, {self.ci95[1]:+.2f}]" if self.ci95 else ""
        return f"{self.champion:.2f} -> {self.challenger:.2f} ({self.difference:+.2f}{interval})"


@dataclass(frozen=True)
class Comparison:
    """The challenger beside the champion on one set of prompts."""

    expected: Lengths  # at temperature 1, in expectation over drafts and over the coins of their acceptance
    decoded: Lengths  # of the rounds that decoding made
    speed_ratio: float  # tokens per second over the champion's
    speed_ratio_ci95: Interval
    num_compared: int  # answers of the challenger beside those of plain decoding; 0 where both are sampled apart
    num_divergences: int  # of them, differences that are no near tie


@dataclass(frozen=True)
class Judgement:
    """The comparisons on the newest and on the old held-out prompts."""

    new: Comparison
    old: Comparison | None  # None: there is no older traffic

    @property
    def is_lossless(self) -> bool:
        """Whether the challenger's output is the target's, on all prompts."""
        return self.new.num_divergences + (self.old.num_divergences if self.old else 0) == 0

    @property
    def decodes_worse(self) -> bool:
        """Whether decoding accepts less on the newest traffic by more than noise."""
        return self.new.decoded.at_most(NO_WORSE) < 0

    @property
    def reason_against(self) -> str | None:
        """Why the challenger is not promoted, in words; None where it is."""
        if not self.is_lossless:
            return "its output is not the target's: a bug, please report it"
        if self.old and self.old.expected.at_least(NO_WORSE) < lowest_allowed(self.old.expected):
            return f"it may lose more than {MARGIN:.0%} of what drafting brings on the old traffic"
        if self.decodes_worse:
            return "decoding accepts less on the newest traffic"
        # A gain need not be shown with confidence: a challenger that is as good does no harm in the champion's place,
        # while a gain that is kept back for more prompts is lost until they are there.
        return None if self.new.expected.difference > 0 else "it is not expected to be better on the newest traffic"

    @property
    def is_undecided(self) -> bool:
        """Whether the challenger is neither promoted nor shown to be worse: training it on may make it better."""
        if self.reason_against is None or not self.is_lossless or self.decodes_worse:
            return False
        loses_old = self.old is not None and self.old.expected.at_most(NO_WORSE) < lowest_allowed(self.old.expected)
        return self.new.expected.at_most(NO_WORSE) > 0 and not loses_old

    @property
    def text(self) -> str:
        """The judgement in words."""
        old = f", on the old {self.old.expected.text}" if self.old else ""
        return f"tokens a round on the newest traffic {self.new.decoded.text}; expected {self.new.expected.text}{old}"


def lowest_allowed(old: Lengths) -> float:
    """Return the lowest difference on old traffic with which a challenger is promoted."""
    return -MARGIN * (old.champion - 1)


def compare(
    target: Target, champion: Drafter, challenger: Drafter, prompts: PromptSet, settings: MeasureSettings
) -> Comparison:
    """Decode prompts with both drafters and without one, in turns, and replay both on texts of temperature 1."""
    drafters = {PLAIN: load_drafter(PLAIN, target), CHAMPION: champion, CHALLENGER: challenger}
    check_settings(settings, drafters)
    contenders = {name: Contender(name, drafter, settings) for name, drafter in drafters.items()}
    resolved = {name: settings.resolve(drafter) for name, drafter in drafters.items()}
    outputs = decode_all(target, contenders, resolved, prompts, (), lambda: None)
    lossless = lossless_check(target, resolved[CHALLENGER], prompts, outputs[CHALLENGER], outputs[PLAIN])
    return Comparison(
        expected=expected_lengths(target, champion, challenger, prompts.token_ids, resolved[CHALLENGER]),
        decoded=Lengths.of(*(stats_by_prompt(outputs[name]) for name in (CHAMPION, CHALLENGER))),
        speed_ratio=speedup_of(outputs[CHALLENGER], outputs[CHAMPION]),
        speed_ratio_ci95=ratio_interval(outputs[CHALLENGER], outputs[CHAMPION]),
        num_compared=lossless.checked,
        num_divergences=lossless.divergences,
    )


def expected_lengths(
    target: Target, champion: Drafter, challenger: Drafter, prompts: list[list[int]], settings: GenerationSettings
) -> Lengths:
    """Return the acceptance lengths to expect on texts that the target writes at temperature 1."""
    shape = check_replayed_as(settings.shape, "probabilistic")
    recording = record(target, prompts, Sampling(1.0), settings.max_new_tokens, shape.depth)
    traces = replay(target, recording, {CHAMPION: champion, CHALLENGER: challenger}, shape.depth)
    stats = {name: [expected_stats(trace, shape, "probabilistic") for trace in found] for name, found in traces.items()}
    return Lengths.of(stats[CHAMPION], stats[CHALLENGER])
