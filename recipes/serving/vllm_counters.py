"""vLLM's own counters of speculative decoding, and how a running server's are read from its Prometheus page."""

import math
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from draftsmith.data.http import Server
from draftsmith.models.errors import UserError, first_line

PREFIX = "vllm:spec_decode_num_"  # of vLLM's counters, whose names end in _total
MEND = "give the address of a running vLLM"


@dataclass
class Counters:
    """vLLM's counters of speculative decoding, summed over its engines."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Return what was counted since; all of it where the server was started anew."""
        if self.num_drafts < earlier.num_drafts:
            return self
        before = earlier.accepted_per_position or (0,) * len(self.accepted_per_position)
        return Counters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, before, strict=True)),
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per draft, the bonus token counted; NaN where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def mean_draft_length(self) -> float:
        """Tokens drafted per draft; NaN where nothing was drafted."""
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Share of drafts whose token at each position was accepted."""
        return [accepted / self.num_drafts for accepted in self.accepted_per_position] if self.num_drafts else []

    @property
    def standard_error(self) -> float:
        """Standard error of the mean acceptance length, from the spread of accepted tokens among drafts."""
        if not self.num_drafts:
            return math.nan
        # E[a^2] = sum over positions i (from 0) of (2 i + 1) P(a > i)
        square = sum((2 * i + 1) * rate for i, rate in enumerate(self.per_position_acceptance_rates))
        return math.sqrt(max(0.0, square - (self.mean_acceptance_length - 1) ** 2) / self.num_drafts)


def parse_metrics(page: str) -> Counters:
    """Return the counters of a Prometheus page. Raises `UserError` where it has none: the server does not speculate."""
    totals: dict[str, int] = defaultdict(int)
    positions: dict[int, int] = defaultdict(int)
    try:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    except ValueError as error:
        raise UserError(f"/metrics is no Prometheus page ({first_line(error)}): {MEND}") from None
    for sample in samples:
        if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
            totals[sample.name.removeprefix(PREFIX).removesuffix("_total")] += int(sample.value)
            if "position" in sample.labels:
                positions[int(sample.labels["position"])] += int(sample.value)
    if not totals:
        raise UserError(
            "the server counts no drafts: start it with --speculative-config, and without --disable-log-stats"
        )
    per_position = tuple(positions[i] for i in range(max(positions, default=-1) + 1))
    return Counters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], per_position)


def vllm_at(url: str) -> Server:
    """Return the vLLM that runs at `url` (http://HOST:PORT, with or without /metrics or /v1)."""
    return Server(url, "", MEND)


def read_counters(server: Server) -> Counters:
    """Return the counters of a server as they stand now. Raises `UserError` where it is silent or drafts nothing."""
    return parse_metrics(server.text("/metrics"))
