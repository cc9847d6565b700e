"""vLLM's own counters of speculative decoding, and how a running server's are read from its Prometheus page."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import lt
from typing import Annotated

from prometheus_client.parser import text_string_to_metric_families
from pydantic import Field

from draftsmith.data.http import Server
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.typed_json import from_json

PREFIX = "vllm:spec_decode_num_"  # of vLLM's counters, whose names end in _total
MEND = "give the address of a running vLLM"
LONGEST_LINE, LARGEST_PART = 1000, 1 << 20  # characters of a line and of all lines of these counters on a page
MOST_POSITIONS = 1000
LARGEST_COUNT = 1 << 53  # beyond it the numbers of a page have gaps


@dataclass
class Counters:
    """vLLM's counters of speculative decoding, summed over its engines."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    started: float = field(default=0.0, compare=False)  # the time at which the server made its counters; 0: it hides it

    def started_since(self, earlier: "Counters") -> bool:
        """Return whether the server was started anew: counters only rise, and positions stay as many as they are."""
        fell = any(map(lt, self._all(), earlier._all()))
        resized = earlier.accepted_per_position and len(self._all()) != len(earlier._all())
        return bool(fell or resized or self.started != earlier.started)

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Return what was counted since; all of it where the server was started anew."""
        if self.started_since(earlier):
            return self
        drafts, draft_tokens, accepted, *per_position = (
            now - then for now, then in zip_longest(self._all(), earlier._all(), fillvalue=0)
        )
        return Counters(drafts, draft_tokens, accepted, tuple(per_position), self.started)

    def __add__(self, other: "Counters") -> "Counters":
        """Return what was counted in two stretches of time."""
        drafts, draft_tokens, accepted, *per_position = (
            mine + others for mine, others in zip_longest(self._all(), other._all(), fillvalue=0)
        )
        return Counters(drafts, draft_tokens, accepted, tuple(per_position), other.started)

    def _all(self) -> tuple[int, ...]:
        return self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, *self.accepted_per_position

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
    """Return the counters of a Prometheus page.

    Raises `UserError` where it has none, because the server does not speculate, and where they cannot be counts.
    """
    totals: dict[str, int] = defaultdict(int)
    positions: dict[int, int] = defaultdict(int)
    started = 0.0
    try:
        for name, labels, value in counter_samples(page):
            name, _, kind = name.removeprefix(PREFIX).rpartition("_")
            if kind == "created" and name == "drafts":
                started = max(started, value)
            elif kind == "total":
                totals[name] += as_count(value)
                if "position" in labels:
                    positions[position_of(labels["position"])] += as_count(value)
    except ValueError as error:
        raise UserError(f"/metrics is no page of vLLM's counters ({first_line(error)}): {MEND}") from None
    if not totals:
        raise UserError(
            "the server counts no drafts: start it with --speculative-config, and without --disable-log-stats"
        )
    per_position = tuple(positions[i] for i in range(max(positions, default=-1) + 1))
    counters = Counters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], per_position, started)
    if counters.num_accepted_tokens > counters.num_draft_tokens or max(per_position, default=0) > counters.num_drafts:
        raise UserError(f"/metrics counts more accepted tokens than drafted ones: {MEND}")
    return counters


def counter_samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each of vLLM's counters. Raises `ValueError` where a line is none."""
    lines = [line for line in page.splitlines() if line.startswith(PREFIX)]
    lengths = [len(line) for line in lines]
    if sum(lengths) > LARGEST_PART or max(lengths, default=0) > LONGEST_LINE:  # which the parser would take long for
        raise ValueError(f"{len(lines)} lines of {sum(lengths)} characters")
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def as_count(value: float) -> int:
    """Return the number that a counter has reached. Raises `ValueError` where it is no such number."""
    if not (0 <= value <= LARGEST_COUNT and value == int(value)):
        raise ValueError(f"{value} is no count")
    return int(value)


def position_of(label: str) -> int:
    """Return the position that a label names. Raises `ValueError` where a draft has none such."""
    if not (label.isdecimal() and len(label) < 9 and int(label) < MOST_POSITIONS):
        raise ValueError(f"there is no position {label[:20]}")
    return int(label)


@dataclass
class Version:
    """The answer at /version."""

    version: Annotated[str, Field(max_length=100)]


def read_version(server: Server) -> str:
    """Return the version of a vLLM. Raises `UserError` where the server is silent or tells none."""
    try:
        return from_json(Version, server.json("/version")).version
    except UserError as error:
        raise UserError(f"{server.name} does not say which vLLM it is ({error}): {MEND}") from None


def read_counters(server: Server) -> Counters:
    """Return the counters of a server as they stand now. Raises `UserError` where it is silent or drafts nothing."""
    return parse_metrics(server.text("/metrics"))


def has_drafter(server: Server) -> bool:
    """Return whether a server counts drafts. Raises `UserError` where it is silent."""
    return any(line.startswith(PREFIX) for line in server.text("/metrics").splitlines())
