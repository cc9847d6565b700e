"""Acceptance of a running vLLM, read from its Prometheus page, beside what was measured when the drafter was exported.

Counters only ever rise, so that two readings give what happened between them.
"""

import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from operator import mul
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from draftsmith.data.http import Server
from draftsmith.models.errors import UserError, first_line

PREFIX = "vllm:spec_decode_num_"  # of vLLM's counters, whose names end in _total
TIMEOUT = 10.0  # seconds
MEND = "give the address of a running vLLM"
TOLERANCE = 0.1  # share of the extra tokens of a round that traffic may cost before retraining is worth a thought
LEAST_DRAFTS = 200  # below which nothing is said about drift


@dataclass
class Counters:
    """vLLM's counters of speculative decoding, summed over its engines."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    def __sub__(self, earlier: "Counters") -> "Counters":
        """What happened since; all of it where the server was started anew."""
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
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def mean_draft_length(self) -> float:
        return self.num_draft_tokens / self.num_drafts if self.num_drafts else math.nan

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        return [accepted / self.num_drafts for accepted in self.accepted_per_position] if self.num_drafts else []

    @property
    def standard_error(self) -> float:
        """Of the mean acceptance length, from the spread of accepted tokens among drafts."""
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


def vllm_at(url: str, timeout: float = TIMEOUT) -> Server:
    """Return the vLLM that runs at `url` (http://HOST:PORT, with or without /metrics or /v1)."""
    return Server(url, url, MEND, timeout)


def read_counters(server: Server) -> Counters:
    """Return the counters of a server as they stand now. Raises `UserError` where it is silent or drafts nothing."""
    return parse_metrics(server.text("/metrics"))


@dataclass
class Reference:
    """Acceptance that was measured from the exported directory."""

    per_position_acceptance_rates: list[float]
    temperature: float

    def range_at(self, mean_draft_length: float) -> tuple[float, float]:
        """Lowest and highest acceptance length that is as measured where drafts had so many tokens on average.

        A server with a schedule drafts now more, now fewer, and counts only the sum. Each further token adds less than
        the one before it, so that the mean gains most where all drafts are of about its length, and least where they
        are of one token and of all. The two meet where all drafts are of all tokens, or all of one.
        """
        rates = self.per_position_acceptance_rates
        beyond = max(0.0, mean_draft_length - 1)  # the first token is always drafted
        alike = [min(1.0, max(0.0, beyond - i)) for i in range(len(rates) - 1)]
        apart = [min(1.0, beyond / (len(rates) - 1))] * (len(rates) - 1) if len(rates) > 1 else []
        low, high = (1 + rates[0] + sum(map(mul, shares, rates[1:])) for shares in (apart, alike))
        return low, high


def read_reference(directory: Path, draft_length: int) -> Reference:
    """The coldest row of DIRECTORY/evaluation.json for that draft length, at the smallest batch size.

    A longer draft answers for a shorter one, because rates of a position do not hang on what comes behind it.
    """
    path = directory / "evaluation.json"
    if not path.is_file():
        raise UserError(f"--against {directory}: it holds no evaluation.json: export it with --prompts")
    rows = [row for row in json.loads(path.read_text())["results"] if row["tree_nodes"] is None]
    rows = [row for row in rows if row["draft_length"] >= draft_length]
    if not rows:
        raise UserError(f"--against {directory}: nothing was measured there with {draft_length} or more draft tokens")
    row = min(rows, key=lambda row: (row["temperature"], row["draft_length"], row["batch_size"]))
    return Reference(row["per_position_acceptance_rates"][:draft_length], row["temperature"])


def drift_of(found: Counters, reference: Reference) -> float:
    """How far the acceptance length lies outside of what was measured, for as many tokens as were drafted."""
    low, high = reference.range_at(found.mean_draft_length)
    return found.mean_acceptance_length - min(max(found.mean_acceptance_length, low), high)


def verdict(found: Counters, reference: Reference) -> str:
    """What the drift means: within chance, better, or worse by so much that retraining should be thought of."""
    if found.num_drafts < LEAST_DRAFTS:
        return f"{found.num_drafts} drafts: too few to judge"
    drift = drift_of(found, reference)
    gain = reference.range_at(found.mean_draft_length)[0] - 1
    if drift + 2 * found.standard_error < -TOLERANCE * gain:
        return "retrain: this traffic is accepted clearly less than the drafter was measured at (train on its prompts)"
    if abs(drift) <= 2 * found.standard_error:
        return "as measured"
    return "better than measured" if drift > 0 else "slightly below what was measured"


def describe(found: Counters, reference: Reference | None) -> str:
    """One reading, in a line or two."""
    if not found.num_drafts:
        return "no drafts"
    rates = " ".join(f"{rate:.2f}" for rate in found.per_position_acceptance_rates)
    text = (
        f"acceptance length {found.mean_acceptance_length:.2f} +- {2 * found.standard_error:.2f}  "
        f"by position {rates}  ({found.num_drafts} drafts of {found.mean_draft_length:.1f} tokens)"
    )
    if reference is None:
        return text
    low, high = (f"{length:.2f}" for length in reference.range_at(found.mean_draft_length))
    measured = f"measured {low if low == high else f'{low} to {high}'} at temperature {reference.temperature:g}"
    drift = round(drift_of(found, reference), 2) + 0.0  # which is never -0.0
    return f"{text}\n  {measured}, drift {drift:+.2f}: {verdict(found, reference)}"


def watch(url: str, against: Path | None, interval: float, readings: int | None, console: Console) -> None:
    """Print a line for all of the server's life, then one for each interval, `readings` of them or for ever."""
    server = vllm_at(url)
    earlier = read_counters(server)
    positions = len(earlier.accepted_per_position)
    reference = read_reference(against, positions) if against is not None and positions else None
    console.print(f"since its start: {describe(earlier, reference)}", highlight=False, soft_wrap=True)
    done = 0
    while readings is None or done < readings:
        time.sleep(interval)
        now = read_counters(server)
        stamp = time.strftime("%H:%M:%S")
        console.print(f"{stamp}  {describe(now - earlier, reference)}", highlight=False, soft_wrap=True)
        earlier, done = now, done + 1
