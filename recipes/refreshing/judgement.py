"""Champion against challenger: both decode the same held-out prompts in turns, beside plain decoding.

The challenger is promoted where it is better on the newest traffic, not worse on the old, and lossless on both.
"""

from dataclasses import dataclass

from scipy.special import stdtrit

from draftsmith.inference.decoding.counters import Interval, paired_difference, total_of
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
from draftsmith.models import Drafter, Target, load_drafter

MARGIN = 0.1  # share of the tokens that drafting brings on old traffic which a challenger may lose, at most
# How sure it has to be that the challenger is better on the newest traffic. One that is as good does no harm in the
# champion's place, and a gain that takes more prompts to be shown is lost until they are there: so less is asked than
# on the old traffic, where a loss would do harm.
BETTER = 0.8
NO_WORSE = 0.95
PLAIN, CHAMPION, CHALLENGER = "none", "champion", "challenger"


@dataclass(frozen=True)
class Comparison:
    """The challenger beside the champion on one set of prompts."""

    num_prompts: int
    champion: float  # acceptance length
    challenger: float
    difference: float
    ci95: Interval  # of the difference, over prompts
    speed_ratio: float  # tokens per second over the champion's
    speed_ratio_ci95: Interval
    num_compared: int  # answers of the challenger beside those of plain decoding; 0 where both are sampled apart
    num_divergences: int  # of them, differences that are no near tie

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
        """The comparison in words."""
        interval = f" [{self.ci95[0]:+.2f}, {self.ci95[1]:+.2f}]" if self.ci95 else ""
        return f"{self.champion:.2f} -> {self.challenger:.2f} ({self.difference:+.2f}{interval})"


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
    def reason_against(self) -> str | None:
        """Why the challenger is not promoted, in words; None where it is."""
        if not self.is_lossless:
            return "its output is not the target's: a bug, please report it"
        if self.old and self.old.at_least(NO_WORSE) < lowest_allowed(self.old):
            return f"it may lose more than {MARGIN:.0%} of what drafting brings on the old traffic"
        return "it is not shown to be better on the newest traffic" if self.new.at_least(BETTER) <= 0 else None

    @property
    def is_undecided(self) -> bool:
        """Whether the challenger is neither promoted nor shown to be worse: training it on may make it better."""
        if self.reason_against is None or not self.is_lossless:
            return False
        loses_old = self.old is not None and self.old.at_most(NO_WORSE) < lowest_allowed(self.old)
        return self.new.at_most(BETTER) > 0 and not loses_old

    @property
    def text(self) -> str:
        """The judgement in words."""
        old = f", on the old {self.old.text}" if self.old else ""
        return f"tokens a round on the newest traffic {self.new.text}{old}"


def lowest_allowed(old: Comparison) -> float:
    """Return the lowest difference on old traffic with which a challenger is promoted."""
    return -MARGIN * (old.champion - 1)


def compare(
    target: Target, champion: Drafter, challenger: Drafter, prompts: PromptSet, settings: MeasureSettings
) -> Comparison:
    """Decode prompts with both drafters and without one, in turns."""
    drafters = {PLAIN: load_drafter(PLAIN, target), CHAMPION: champion, CHALLENGER: challenger}
    check_settings(settings, drafters)
    contenders = {name: Contender(name, drafter, settings) for name, drafter in drafters.items()}
    resolved = {name: settings.resolve(drafter) for name, drafter in drafters.items()}
    outputs = decode_all(target, contenders, resolved, prompts, (), lambda: None)
    stats = {name: stats_by_prompt(outputs[name]) for name in (CHAMPION, CHALLENGER)}
    paired = paired_difference(stats[CHALLENGER], stats[CHAMPION])
    lossless = lossless_check(target, resolved[CHALLENGER], prompts, outputs[CHALLENGER], outputs[PLAIN])
    return Comparison(
        num_prompts=len(prompts.token_ids),
        champion=total_of(stats[CHAMPION]).mean_acceptance_length,
        challenger=total_of(stats[CHALLENGER]).mean_acceptance_length,
        difference=paired.difference,
        ci95=paired.ci95,
        speed_ratio=speedup_of(outputs[CHALLENGER], outputs[CHAMPION]),
        speed_ratio_ci95=ratio_interval(outputs[CHALLENGER], outputs[CHAMPION]),
        num_compared=lossless.checked,
        num_divergences=lossless.divergences,
    )
