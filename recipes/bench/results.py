"""The measures of a bench, as bench.json holds them. docs/bench.md defines the fields."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy import stats

from draftsmith.inference.decoding.counters import Interval
from draftsmith.models.ranges import Natural, NonNegative
from draftsmith.recipes.bench.client import Reply
from draftsmith.train.engine.vllm_counters import Counters

CONFIDENCE = 0.95
SLA_SHARE = 0.95  # of the requests that must keep the limits

Mode = Literal["rate", "concurrency", "trace"]


@dataclass(frozen=True)
class BenchLoad:
    """A way to arrive: at a rate, from so many clients at once, or as in the trace at so many times its speed."""

    mode: Mode
    value: Annotated[float, Field(gt=0)]
    burstiness: Annotated[float, Field(gt=0)] = 1.0  # coefficient of variation between arrivals; 1: Poisson

    @property
    def text(self) -> str:
        if self.mode == "trace":
            return "as in the trace" if self.value == 1 else f"the trace at {self.value:g} times its speed"
        return f"{self.value:g} {'requests a second' if self.mode == 'rate' else 'at once'}"


@dataclass(frozen=True)
class Limits:
    """Milliseconds that 95 of 100 requests must keep; None asks for nothing."""

    ttft_ms: NonNegative | None = None
    tpot_ms: NonNegative | None = None
    e2e_ms: NonNegative | None = None

    @property
    def any(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def kept_by(self, reply: Reply) -> bool:
        """Return whether a request kept them; one that failed did not."""
        if reply.failure:
            return False
        pairs = ((self.ttft_ms, reply.ttft_ms), (self.tpot_ms, reply.tpot_ms), (self.e2e_ms, reply.e2e_ms))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True)
class Percentile:
    """A percentile of a latency in milliseconds, with its interval; None where too few requests bound it."""

    value: NonNegative
    interval: Interval = None


@dataclass(frozen=True)
class Latencies:
    """Percentiles of a latency over requests; None where no request has it, as later tokens of single ones."""

    p50: Percentile | None
    p95: Percentile | None
    p99: Percentile | None


@dataclass(frozen=True)
class Acceptance:
    """The server's own counters of speculation, of the time in which it was measured."""

    num_drafts: Natural
    num_draft_tokens: Natural
    num_accepted_tokens: Natural
    per_position_acceptance_rates: list[float]
    mean_acceptance_length: NonNegative


@dataclass(frozen=True)
class BenchRun:
    """A run: the requests of a plan, sent once to one server."""

    seconds: NonNegative  # from the first sending to the last text
    output_tokens_per_second: NonNegative
    requests_per_second: NonNegative
    mean_tpot_ms: NonNegative | None
    mean_ttft_ms: NonNegative | None
    goodput: NonNegative  # requests a second that kept the limits


@dataclass(frozen=True)
class BenchStage:
    """The measures of one load on one server, pooled over its runs."""

    server: str
    load: BenchLoad
    num_requests: Natural
    num_failed: Natural
    failures: list[str]  # the first of each kind
    num_prompt_tokens: Natural
    num_output_tokens: Natural
    largest_delay_ms: NonNegative  # by which a request left later than it should have
    ttft_ms: Latencies
    tpot_ms: Latencies
    gap_ms: Latencies  # between events that bring text: several tokens each, with speculation
    e2e_ms: Latencies
    sla_share: NonNegative  # of all requests
    sla_share_interval: Interval
    acceptance: Acceptance | None  # None: the server does not tell
    runs: list[BenchRun]

    @property
    def keeps_limits(self) -> bool:
        return self.sla_share >= SLA_SHARE

    def mean(self, value: Callable[[BenchRun], float | None]) -> float:
        """Return the mean of a value over the runs that have it; 0 where none has."""
        values = [each for each in map(value, self.runs) if each is not None]
        return float(np.mean(values)) if values else 0.0


@dataclass(frozen=True)
class BenchTest:
    """The content of bench.json."""

    models: list[str]  # of each server
    num_requests_known: Natural  # that the runs draw from
    requests_a_run: Natural
    max_new_tokens: Natural
    temperature: NonNegative
    limits: Limits
    stages: list[BenchStage]
    verdict: list[str]  # sentences


def stage_of(
    server: str, load: BenchLoad, runs: Sequence[Sequence[Reply]], limits: Limits, counted: Counters | None
) -> BenchStage:
    """Return the measures of all runs of one load on one server."""
    replies = [reply for run in runs for reply in run]
    good = [reply for reply in replies if not reply.failure]
    num_kept = sum(map(limits.kept_by, replies))
    share = stats.binomtest(num_kept, len(replies)).proportion_ci(CONFIDENCE, method="wilson")
    return BenchStage(
        server=server,
        load=load,
        num_requests=len(replies),
        num_failed=len(replies) - len(good),
        failures=list(dict.fromkeys(reply.failure for reply in replies if reply.failure))[:10],
        num_prompt_tokens=sum(reply.num_prompt_tokens for reply in good),
        num_output_tokens=sum(reply.num_output_tokens for reply in good),
        largest_delay_ms=1000 * max(max(0.0, reply.sent - reply.due) for reply in replies),
        ttft_ms=latencies([reply.ttft_ms for reply in good]),
        tpot_ms=latencies([reply.tpot_ms for reply in good if reply.tpot_ms is not None]),
        gap_ms=latencies([1000 * gap for reply in good for gap in reply.gaps]),
        e2e_ms=latencies([reply.e2e_ms for reply in good]),
        sla_share=num_kept / len(replies),
        sla_share_interval=(float(share.low), float(share.high)),
        acceptance=None if counted is None or not counted.num_drafts else acceptance_of(counted),
        runs=[run_of(run, limits) for run in runs],
    )


def run_of(replies: Sequence[Reply], limits: Limits) -> BenchRun:
    good = [reply for reply in replies if not reply.failure]
    seconds = max((reply.finished for reply in good), default=0.0) - min((reply.sent for reply in replies), default=0.0)
    tpots = [reply.tpot_ms for reply in good if reply.tpot_ms is not None]
    a_second = 1 / seconds if good and seconds > 0 else 0.0
    return BenchRun(
        seconds=max(0.0, seconds),
        output_tokens_per_second=sum(reply.num_output_tokens for reply in good) * a_second,
        requests_per_second=len(good) * a_second,
        mean_tpot_ms=float(np.mean(tpots)) if tpots else None,
        mean_ttft_ms=float(np.mean([reply.ttft_ms for reply in good])) if good else None,
        goodput=sum(map(limits.kept_by, replies)) * a_second,
    )


def acceptance_of(counted: Counters) -> Acceptance:
    return Acceptance(
        counted.num_drafts,
        counted.num_draft_tokens,
        counted.num_accepted_tokens,
        counted.per_position_acceptance_rates,
        counted.mean_acceptance_length,
    )


def latencies(milliseconds: Sequence[float]) -> Latencies:
    """Return the percentiles of some latencies."""
    return Latencies(*(percentile(milliseconds, share) for share in (0.5, 0.95, 0.99)))


def percentile(values: Sequence[float], share: float) -> Percentile | None:
    """Return a percentile with the interval that the order of the values gives, whatever their distribution."""
    if not values:
        return None
    value = float(np.quantile(values, share))
    interval = stats.quantile_test(values, q=value, p=share).confidence_interval(CONFIDENCE)
    bounded = np.isfinite(interval.low) and np.isfinite(interval.high)
    return Percentile(value, (float(interval.low), float(interval.high)) if bounded else None)
