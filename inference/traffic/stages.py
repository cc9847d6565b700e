"""The counters of a load test: a stage is one load, served by one contender. docs/load.md defines the fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from draftsmith.inference.measuring.results import Percentiles
from draftsmith.inference.measuring.speed import percentiles
from draftsmith.inference.traffic.requests import Load
from draftsmith.inference.traffic.serving import Answer, ServedRun, Step
from draftsmith.models.ranges import Natural, NonNegative, Positive

WARM_UP_SHARE = 0.2  # of a run's requests, from the first on, that only bring it to a steady state


@dataclass(frozen=True)
class Sla:
    """Milliseconds that 95 of 100 requests must keep; None asks for nothing."""

    ttft_ms: NonNegative | None = None
    tpot_ms: NonNegative | None = None

    def kept_by(self, answer: Answer) -> bool:
        slow_start = self.ttft_ms is not None and answer.ttft * 1000 > self.ttft_ms
        slow_tokens = self.tpot_ms is not None and answer.tpot is not None and answer.tpot * 1000 > self.tpot_ms
        return not (slow_start or slow_tokens)

    def kept_at(self, ttft_ms: Percentiles, tpot_ms: Percentiles) -> bool:
        """Return whether the 95th percentiles of a stage keep the limits."""
        limits = ((self.ttft_ms, ttft_ms), (self.tpot_ms, tpot_ms))
        return all(limit is None or latency.p95 <= limit for limit, latency in limits)


@dataclass(frozen=True)
class RepeatResult:
    """A repeat of a stage."""

    throughput_tokens_per_second: Positive
    tpot_ms: Positive | None  # median; None where every answer is a single token


@dataclass(frozen=True)
class StageResult:
    """An entry of `stages` in load.json, pooled over the repeats."""

    mode: Literal["rate", "concurrency"]
    load: NonNegative  # requests a second, or at once
    contender: str  # off, on or scheduled
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
    within_sla: bool


@dataclass(frozen=True)
class CountedPart:
    """The part of a run that counts: requests behind the warm-up, and the time until the load falls."""

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

    @property
    def result(self) -> RepeatResult:
        tpots = tpots_ms(self.answers)
        return RepeatResult(self.num_tokens / self.seconds, float(np.median(tpots)) if tpots else None)


def counted_part(run: ServedRun, load: Load) -> CountedPart:
    """Leave out the first fifth of a run's requests, among closed clients at least the first of each.

    Times are counted from the arrival of the first request behind them until the load falls: at the last arrival, or
    when a client is answered that has no request left.
    """
    num_clients = int(load.value) if load.mode == "concurrency" else 0
    answers = run.answers[max(num_clients, int(len(run.answers) * WARM_UP_SHARE)) :]
    end = answers[-1].arrived
    if load.mode == "concurrency":
        end = min(answer.finished for answer in answers if answer.finished > end)
    return CountedPart(run, answers, answers[0].arrived, end)


def stage_result(load: Load, contender: str, runs: list[ServedRun], sla: Sla) -> StageResult:
    """Pool the repeats of a stage.

    The rate is of arrivals in the time that counts: of n requests of an open test, which lie n - 1 gaps apart, the last
    arrives at its end.
    """
    parts = [counted_part(run, load) for run in runs]
    answers = [answer for part in parts for answer in part.answers]
    seconds = sum(part.seconds for part in parts)
    requests_per_second = sum(part.num_arrivals for part in parts) / seconds
    sla_share = sum(map(sla.kept_by, answers)) / len(answers)
    stats = sum((run.stats for run in runs[1:]), runs[0].stats)
    ttft_ms = percentiles([answer.ttft * 1000 for answer in answers])
    tpot_ms = percentiles(tpots_ms(answers))
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
        sla_share=sla_share,
        goodput_requests_per_second=sla_share * requests_per_second,
        mean_acceptance_length=stats.mean_acceptance_length,
        mean_draft_length=stats.num_draft_tokens / max(1, stats.num_rounds),
        repeats=[part.result for part in parts],
        within_sla=sla.kept_at(ttft_ms, tpot_ms),
    )


def tpots_ms(answers: Sequence[Answer]) -> list[float]:
    return [answer.tpot * 1000 for answer in answers if answer.tpot is not None]


def time_running(steps: Sequence[Step], begin: float, end: float) -> float:
    """Integrate the number of requests in rows from `begin` to `end`; idle waits count as none."""
    return sum(step.num_running * max(0.0, min(step.ended, end) - max(step.began, begin)) for step in steps)


def latency_text(latency: Percentiles, num_counted: int) -> str:
    """Return p50/p95/p99 in ms; a dash for a percentile with no request beyond it, so below 20 and 100 requests."""
    shown = ((latency.p50, 50), (latency.p95, 95), (latency.p99, 99))
    return "/".join(f"{ms:.{ms < 10:d}f}" if num_counted * (100 - p) >= 100 else "–" for ms, p in shown)


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
    """Speed over that with speculation off: over all repeats, and in the worst and the best of them."""

    ratio: float
    lowest: float
    highest: float

    @property
    def text(self) -> str:
        spread = f", {self.lowest:.2f}x to {self.highest:.2f}x over repeats" if self.lowest < self.highest else ""
        return f"{self.ratio:.2f}x{spread}"


def gains(stages: Sequence[StageResult], contender: str) -> dict[float, Gain]:
    """Return what a contender gains at each load, rising."""
    by_place = {(stage.load, stage.contender): stage for stage in stages}
    loads = sorted({stage.load for stage in stages})
    return {load: gain(by_place[load, contender], by_place[load, "off"]) for load in loads}


def gain(stage: StageResult, off: StageResult) -> Gain:
    """Compare two stages of one load. A repeat of both has the same requests.

    Closed clients take what they get: throughput over throughput. At a given rate of arrivals everybody is answered in
    the end, only later: the median time per token of off over that of the contender.
    """
    pairs = list(zip(stage.repeats, off.repeats, strict=True))
    if stage.mode == "concurrency":
        ratio = stage.throughput_tokens_per_second / off.throughput_tokens_per_second
        speeds = [(own.throughput_tokens_per_second, other.throughput_tokens_per_second) for own, other in pairs]
    else:
        ratio = off.tpot_ms.p50 / stage.tpot_ms.p50
        speeds = [(other.tpot_ms or 0.0, own.tpot_ms or 0.0) for own, other in pairs]
    ratios = [own / other for own, other in speeds if own and other] or [ratio]
    return Gain(ratio, min(ratios), max(ratios))


def verdict(stages: Sequence[StageResult]) -> str:
    """Return up to which load speculation pays, in one line: it does where every repeat was faster with it."""
    unit = "requests at once" if stages[0].mode == "concurrency" else "requests a second"
    by_load = list(gains(stages, "on").items())
    num_paying = next((i for i, (_, gain) in enumerate(by_load) if gain.lowest <= 1), len(by_load))
    parts = []
    if num_paying:
        load, gain = by_load[num_paying - 1]
        parts.append(f"speculation pays up to {load:g} {unit} ({gain.text})")
    if num_paying == len(by_load):
        return f"{parts[0]}, the highest load tried"
    load, gain = by_load[num_paying]
    judgement = "no clear gain" if gain.highest >= 1 else "it does not pay" if parts else "speculation does not pay"
    return "; ".join([*parts, f"{judgement} at {load:g}{'' if parts else f' {unit}'} ({gain.text})"])
