"""Readings of a server: drafts, accepted tokens and latencies between two looks at its metrics.

vLLM counts drafts and accepted tokens. SGLang tells the mean acceptance length of its newest batches alone.
"""

import time
from dataclasses import dataclass, replace
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.data.http import Server
from draftsmith.models.errors import UserError, first_line
from draftsmith.train.engine.vllm_counters import LARGEST_PART, PREFIX, Counters, parse_metrics

MEND = "give the address of a running vLLM or SGLang (the latter with --enable-metrics)"
TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
# vLLM's inter-token latency is that of a step, however many tokens it brings; this one is a mean of finished requests.
TPOT = (
    "vllm:request_time_per_output_token_seconds",
    *("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
)
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
ACCEPTED = "sglang:spec_accept_length"
NAMES = (*TTFT, *TPOT, *RUNNING, ACCEPTED)


@dataclass(frozen=True)
class Latency:
    """Seconds that were waited, in all, and how often."""

    seconds: float = 0.0
    count: int = 0

    def __sub__(self, earlier: "Latency") -> "Latency":
        """Return what was waited since; all of it where the server was started anew."""
        if self.count < earlier.count or self.seconds < earlier.seconds:
            return self
        return Latency(self.seconds - earlier.seconds, self.count - earlier.count)

    @property
    def milliseconds(self) -> float | None:
        """The mean; None where nothing was waited for."""
        return 1000 * self.seconds / self.count if self.count else None


@dataclass(frozen=True)
class Reading:
    """The metrics of a server at a time, or what happened between two times."""

    time: float  # Unix time
    counters: Counters
    accepted: float | None  # mean acceptance length that an SGLang tells
    ttft: Latency
    tpot: Latency
    running: float  # requests at that time

    def since(self, earlier: "Reading") -> "Reading":
        """Return what happened since an earlier reading."""
        return replace(
            self,
            counters=self.counters - earlier.counters,
            ttft=self.ttft - earlier.ttft,
            tpot=self.tpot - earlier.tpot,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a draft brought; None where nothing was drafted."""
        return self.counters.mean_acceptance_length if self.counters.num_drafts else self.accepted


def read(server: Server) -> Reading:
    """Return the metrics of a server as they stand now. Raises `UserError` where it is silent or drafts nothing."""
    return parse_page(server.text("/metrics"), time.time())


def parse_page(page: str, now: float) -> Reading:
    """Return the reading of a page of metrics. Raises `UserError` where it is none, or tells of no drafts."""
    sums: dict[str, float] = {}
    lengths: list[float] = []  # of data-parallel ranks; SGLang gives 0 until it has counted
    try:
        for name, value in samples(page):
            sums[name] = sums.get(name, 0.0) + value
            if name == ACCEPTED and value >= 1:
                lengths.append(value)
    except ValueError as error:
        raise UserError(f"/metrics is no page of a server's metrics ({first_line(error)}): {MEND}") from None
    drafts = any(line.startswith(PREFIX) for line in page.splitlines())
    counters = parse_metrics(page) if drafts or ACCEPTED not in sums else Counters()
    accepted = fmean(lengths) if lengths else None
    running = sum(sums.get(name, 0.0) for name in RUNNING)
    return Reading(now, counters, accepted, latency(sums, TTFT), latency(sums, TPOT), running)


def latency(sums: dict[str, float], names: tuple[str, ...]) -> Latency:
    """Return the latency that the first of these names which is there tells."""
    for name in names:
        if f"{name}_count" in sums:
            return Latency(sums.get(f"{name}_sum", 0.0), int(sums[f"{name}_count"]))
    return Latency()


def samples(page: str) -> list[tuple[str, float]]:
    """Return the values that readings are made of, by name. Raises `ValueError` where a line is none."""
    lines = [line for line in page.splitlines() if line.startswith(NAMES) and "_bucket" not in line]
    if sum(map(len, lines)) > LARGEST_PART:  # which the parser would take long for
        raise ValueError(f"{len(lines)} lines of {sum(map(len, lines))} characters")
    values = []
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if not 0 <= sample.value < float("inf"):
                raise ValueError(f"{sample.name} is {sample.value}")
            values.append((sample.name, sample.value))
    return values
