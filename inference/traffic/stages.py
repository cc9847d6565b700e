"""The counters of a load test: a stage is one load, served by one contender. docs/load.md defines the fields."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from draftsmith.inference.decoding.counters import total_of
from draftsmith.inference.measuring.results import Interval, Percentiles
from draftsmith.inference.measuring.speed import percentiles
from draftsmith.inference.traffic.requests import Load
from draftsmith.inference.traffic.serving import Answer, ServedRun, Step
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural, NonNegative, Positive

OFF, ON, SCHEDULED = "off", "on", "scheduled"  # contenders; those that read prompts in chunks have a name behind it
IN_CHUNKS = ", in chunks"
WARM_UP_SHARE = 0.2  # of a run's requests, from the first on, that only bring it to a steady state
LEAST_FOR_P95, LEAST_FOR_P99 = 20, 100  # requests: of fewer ones the percentile is only the slowest


@dataclass(frozen=True)
class Sla:
    """Milliseconds that 95 of 100 requests must keep; None asks for nothing."""

    ttft_ms: NonNegative | None = None
    tpot_ms: NonNegative | None = None

    def kept_by(self, answer: Answer) -> bool:
        slow_start = self.ttft_ms is not None and answer.ttft * 1000 > self.ttft_ms
        slow_tokens = self.tpot_ms is not None and answer.tpot is not None and answer.tpot * 1000 > self.tpot_ms
        return not (slow_start or slow_tokens)

    def kept_at(self, ttft_ms: Percentiles, tpot_ms: Percentiles, num_counted: int) -> bool | None:
        """Return whether the 95th percentiles of so many requests keep the limits; None where too few were counted."""
        limits = ((self.ttft_ms, ttft_ms), (self.tpot_ms, tpot_ms))
        asked = [(limit, latency) for limit, latency in limits if limit is not None]
        if asked and num_counted < LEAST_FOR_P95:
            return None
        return all(latency.p95 <= limit for limit, latency in asked)


@dataclass(frozen=True)
class RepeatResult:
    """A repeat of a stage."""

    throughput_tokens_per_second: Positive
    tpot_ms: Positive | None  # median; None where every answer is a single token
    goodput_requests_per_second: NonNegative | None = None  # None in older files


@dataclass(frozen=True)
class StageResult:
    """An entry of `stages` in load.json, pooled over the repeats."""

    mode: Literal["rate", "concurrency"]
    load: NonNegative  # requests a second, or at once
    contender: str  # off, on or scheduled; or off or on, in chunks
    num_counted: Natural
    seconds: NonNegative
    throughput_tokens_per_second: Positive
    requests_per_second: NonNegative
    mean_running: NonNegative
    prompt_tokens: Percentiles
    output_tokens: Percentiles
    ttft_ms: Percentiles
    queue_ms: Percentiles
    prefill_ms: Percentiles
    tpot_ms: Percentiles
    sla_share: NonNegative
    goodput_requests_per_second: NonNegative
    mean_acceptance_length: NonNegative
    mean_draft_length: NonNegative
    repeats: list[RepeatResult]
    within_sla: bool | None  # None: too few requests to tell
    pause_ms: Percentiles | None = None  # longest time of a request between two of its tokens; None in older files


@dataclass(frozen=True)
class CountedPart:
    """The part of a run that counts: the requests after the warm-up, and the time until the load falls.

    Times are in seconds since the start of the run.
    """

    run: ServedRun
    answers: list[Answer]
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def num_tokens(self) -> int:
        """Tokens that were emitted by the steps that began in this time."""
        return sum(step.num_tokens for step in self.run.steps if self.begin <= step.began < self.end)

    @property
    def num_arrivals(self) -> int:
        return sum(answer.arrived < self.end for answer in self.answers)

    def result(self, sla: Sla) -> RepeatResult:
        """Return the figures of this part alone. Goodput is the number of requests a second that kept the limits."""
        tpots = tpots_ms(self.answers)
        median = float(np.median(tpots)) if tpots else None
        goodput = sla_share(self.answers, sla) * self.num_arrivals / self.seconds
        return RepeatResult(self.num_tokens / self.seconds, median, goodput)


def counted_part(run: ServedRun, load: Load) -> CountedPart:
    """Return a run without the first fifth of its requests, and in a closed test without the first of each client.

    The time that counts begins with the arrival of the next request. It ends where the load falls: at the last arrival,
    or in a closed test when the first client is answered that has no request left.
    """
    num_clients = int(load.value) if load.mode == "concurrency" else 0
    answers = run.answers[max(num_clients, int(len(run.answers) * WARM_UP_SHARE)) :]
    end = answers[-1].arrived
    if load.mode == "concurrency":
        end = min(answer.finished for answer in run.answers if answer.finished > end)
    return CountedPart(run, answers, answers[0].arrived, end)


def stage_result(load: Load, contender: str, runs: list[ServedRun], sla: Sla) -> StageResult:
    """Pool the repeats of a stage.

    The rate of requests is that of arrivals in the time that counts. In an open test the last request arrives at the
    end of that time, so that n requests have n - 1 gaps. Raises `UserError` where no answer is longer than a token.
    """
    parts = [counted_part(run, load) for run in runs]
    answers = [answer for part in parts for answer in part.answers]
    tpots = tpots_ms(answers)
    if not tpots:
        raise UserError("every answer ended with its first token, which leaves nothing to measure: give other prompts")
    seconds = sum(part.seconds for part in parts)
    requests_per_second = sum(part.num_arrivals for part in parts) / seconds
    share = sla_share(answers, sla)
    stats = total_of([run.stats for run in runs])
    ttft_ms = percentiles([answer.ttft * 1000 for answer in answers])
    tpot_ms = percentiles(tpots)
    return StageResult(
        mode=load.mode,
        load=load.value,
        contender=contender,
        num_counted=len(answers),
        seconds=seconds,
        throughput_tokens_per_second=sum(part.num_tokens for part in parts) / seconds,
        requests_per_second=requests_per_second,
        mean_running=sum(time_running(part.run.steps, part.begin, part.end) for part in parts) / seconds,
        prompt_tokens=percentiles([answer.num_prompt_tokens for answer in answers]),
        output_tokens=percentiles([len(answer.token_ids) for answer in answers]),
        ttft_ms=ttft_ms,
        queue_ms=percentiles([(answer.admitted - answer.arrived) * 1000 for answer in answers]),
        prefill_ms=percentiles([(answer.first_token - answer.admitted) * 1000 for answer in answers]),
        tpot_ms=tpot_ms,
        sla_share=share,
        goodput_requests_per_second=share * requests_per_second,
        mean_acceptance_length=stats.mean_acceptance_length,
        mean_draft_length=stats.num_draft_tokens / max(1, stats.num_rounds),
        repeats=[part.result(sla) for part in parts],
        within_sla=sla.kept_at(ttft_ms, tpot_ms, len(answers)),
        pause_ms=percentiles([answer.longest_pause * 1000 for answer in answers]),
    )


def sla_share(answers: Sequence[Answer], sla: Sla) -> float:
    """Return the share of answers that kept the limits."""
    return sum(map(sla.kept_by, answers)) / len(answers)


def tpots_ms(answers: Sequence[Answer]) -> list[float]:
    """Return the milliseconds per token after the first of each answer that has more than one."""
    return [answer.tpot * 1000 for answer in answers if answer.tpot is not None]


def time_running(steps: Sequence[Step], begin: float, end: float) -> float:
    """Integrate the number of requests in rows from `begin` to `end`; idle waits count as none."""
    return sum(step.num_running * max(0.0, min(step.ended, end) - max(step.began, begin)) for step in steps)


def latency_text(latency: Percentiles, num_counted: int) -> str:
    """Return p50/p95/p99 in ms; a dash for a percentile with no request beyond it."""
    shown = ((latency.p50, 0), (latency.p95, LEAST_FOR_P95), (latency.p99, LEAST_FOR_P99))
    return "/".join(f"{ms:.{ms < 10:d}f}" if num_counted >= least else "–" for ms, least in shown)


def operating_points(stages: Sequence[StageResult]) -> dict[str, StageResult | None]:
    """Return each contender's stage of the largest throughput within the SLA; None where no stage kept it."""
    points: dict[str, StageResult | None] = dict.fromkeys(stage.contender for stage in stages)
    for name in points:
        kept = [stage for stage in stages if stage.contender == name and stage.within_sla]
        points[name] = max(kept, key=lambda stage: stage.throughput_tokens_per_second, default=None)
    return points


# --- speculation on against off


@dataclass(frozen=True)
class Gain:
    """Speed, or goodput, over that with speculation off, and its 95 % interval over repeats."""

    ratio: float  # infinite where off answers nothing within the SLA
    interval: Interval  # None where repeats are too few

    @property
    def text(self) -> str:
        if math.isinf(self.ratio):
            return "plain decoding keeps none"
        spread = f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]" if self.interval else ""
        return f"{self.ratio:.2f}x{spread}"


def gains(stages: Sequence[StageResult], contender: str) -> dict[float, Gain]:
    """Return a contender's gain over speculation off at each load, rising. Both read prompts in the same way."""
    by_setting = {(stage.load, stage.contender): stage for stage in stages}
    loads = sorted({stage.load for stage in stages})
    return {load: gain(by_setting[load, contender], by_setting[load, off_beside(contender)]) for load in loads}


def off_beside(contender: str) -> str:
    """Return the contender without speculation that reads prompts as this one does."""
    return OFF + IN_CHUNKS if contender.endswith(IN_CHUNKS) else OFF


def gain(stage: StageResult, off: StageResult) -> Gain:
    """Compare two stages of one load. A repeat of both has the same requests.

    Where one of them misses the SLA, goodput is compared; else, in a closed test, throughput. In an open test all
    requests are answered sooner or later, so that the inverse of the median time per token is compared.
    """
    pairs = list(zip(stage.repeats, off.repeats, strict=True))
    if False in (stage.within_sla, off.within_sla):
        goodputs = [(own.goodput_requests_per_second, other.goodput_requests_per_second) for own, other in pairs]
        speeds = [(own, other) for own, other in goodputs if own is not None and other is not None]
        pooled = stage.goodput_requests_per_second, off.goodput_requests_per_second
    elif stage.mode == "concurrency":
        speeds = [(own.throughput_tokens_per_second, other.throughput_tokens_per_second) for own, other in pairs]
        pooled = stage.throughput_tokens_per_second, off.throughput_tokens_per_second
    else:
        speeds = [(1 / own.tpot_ms, 1 / other.tpot_ms) for own, other in pairs if own.tpot_ms and other.tpot_ms]
        pooled = off.tpot_ms.p50, stage.tpot_ms.p50
    return gain_over_repeats(speeds or [pooled])


def gain_over_repeats(speeds: Sequence[tuple[float, float]]) -> Gain:
    """Return the ratio of the two means over repeats, with Student's interval of their paired differences."""
    reference = fmean(other for _, other in speeds)
    differences = [own - other for own, other in speeds]
    if not reference:
        return Gain(math.inf if any(differences) else 1.0, None)
    ratio, count = 1 + fmean(differences) / reference, len(speeds)
    if count < 2:
        return Gain(ratio, None)
    half = float(stdtrit(count - 1, 0.975)) * stdev(differences) / math.sqrt(count) / reference
    return Gain(ratio, (ratio - half, ratio + half))


def reason_against(on: StageResult, off: StageResult, gain: Gain) -> str:
    """Return why speculation does not pay at a load, or is not known to; an empty text where it pays."""
    if on.within_sla is None:
        return f"has too few requests to judge the SLA ({on.num_counted} counted, {LEAST_FOR_P95} needed)"
    if not on.within_sla:
        return "misses the SLA, as plain decoding does," if off.within_sla is False else "misses the SLA"
    if math.isinf(gain.ratio):
        return ""
    if gain.interval is None:
        return "has too few repeats to tell"
    low, high = gain.interval
    return "" if low > 1 else "does not pay" if high < 1 else "shows no clear gain"


def verdict(stages: Sequence[StageResult]) -> str:
    """Return up to which load speculation pays, in one line.

    It pays where it keeps the SLA and the interval of its gain lies above 1.
    """
    unit = "at once" if stages[0].mode == "concurrency" else "a second"
    by_setting = {(stage.load, stage.contender): stage for stage in stages}
    paying = ""
    for load, gain in gains(stages, ON).items():
        reason = reason_against(by_setting[load, ON], by_setting[load, OFF], gain)
        if reason:
            if paying:
                return f"{paying}; it {reason} at {load:g} ({gain.text})"
            return f"speculation {reason} at {requests_text(load, unit)} ({gain.text})"
        paying = f"speculation pays up to {requests_text(load, unit)} ({gain.text})"
    return f"{paying}, the highest load tried"


def requests_text(load: float, unit: str) -> str:
    return f"{load:g} request{'' if load == 1 else 's'} {unit}"
