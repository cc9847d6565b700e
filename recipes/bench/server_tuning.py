"""`draftsmith tune-server` chooses the settings that a server is fastest with, from what was measured of a few."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.models.ranges import Natural, NonNegative
from draftsmith.recipes.bench.results import BenchStage
from draftsmith.recipes.bench.verdict import Difference, difference
from draftsmith.recipes.serving.vllm_run import SpeculativeConfig

Lookup = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


@dataclass(frozen=True)
class Candidate:
    """A setting that a server was started with."""

    draft_length: Natural  # 0: without a drafter
    lookup: Lookup | None = None  # shortest and longest end of the text that n-grams are looked up by
    schedule: Schedule | None = None  # draft lengths by running requests, in place of the one above

    @property
    def text(self) -> str:
        if not self.draft_length:
            return "plain decoding"
        lengths = f"{self.draft_length} drafted tokens"
        if self.schedule:
            steps = ", ".join(f"{length} from {start}" for start, length in self.schedule.draft_lengths)
            lengths = f"drafted tokens by running requests: {steps}"
        return f"{lengths}, ends of {self.lookup[0]} to {self.lookup[1]} tokens" if self.lookup else lengths


@dataclass(frozen=True)
class Measured:
    """The stages of a candidate, one for each load."""

    candidate: Candidate
    start_seconds: NonNegative  # until the server answered
    stages: list[BenchStage]


@dataclass(frozen=True)
class ServerTuning:
    """The content of server_tuning.json."""

    target: str
    drafter: str
    tried: list[Measured]  # the first is plain decoding
    chosen: Candidate
    confirmed: list[Measured]  # plain decoding and the chosen one, measured anew with other requests
    differences: list[Difference]  # between these two, one for each load
    speculative_config: SpeculativeConfig | None  # of the chosen one; None: without a drafter
    command: str  # that serves the chosen one
    verdict: str


def expected_tpot_ms(short: Measured, long: Measured, load: int) -> dict[int, float]:
    """Return the milliseconds of a token that each draft length promises at a load, by draft length.

    A round of the two measured lengths took the time of a token times the tokens of a round. In between it is taken to
    grow evenly with the draft length. The tokens of a round of any length follow from how often the longest drafts
    were accepted at each position. Empty where the server did not tell acceptance, or no answer had two tokens.
    """
    first, last = short.stages[load], long.stages[load]
    tpots = [stage.mean(lambda run: run.mean_tpot_ms) for stage in (first, last)]
    if first.acceptance is None or last.acceptance is None or not all(tpots):
        return {}
    rates = last.acceptance.per_position_acceptance_rates
    least, most = short.candidate.draft_length, long.candidate.draft_length
    rounds = [
        tpot * stage.acceptance.mean_acceptance_length
        for tpot, stage in zip(tpots, (first, last), strict=True)
        if stage.acceptance
    ]
    slope = (rounds[1] - rounds[0]) / max(1, most - least)
    return {
        length: (rounds[0] + slope * (length - least)) / (1 + sum(rates[:length])) for length in range(least, most + 1)
    }


def most_promising(short: Measured, long: Measured) -> list[int]:
    """Return the draft lengths that promise the fastest token at some load, but for the two that were measured."""
    expected = [expected_tpot_ms(short, long, load) for load in range(len(short.stages))]
    best = {min(times, key=times.__getitem__) for times in expected if times}
    return sorted(best - {short.candidate.draft_length, long.candidate.draft_length})


def differences(plain: Measured, other: Measured) -> list[Difference]:
    """Return what a candidate gains over plain decoding at each load."""
    return [difference(*pair) for pair in zip(plain.stages, other.stages, strict=True)]


def fastest_over_all(plain: Measured, others: Sequence[Measured]) -> Measured:
    """Return the candidate with the largest gain over plain decoding, multiplied over all loads."""

    def gain(measured: Measured) -> float:
        return math.prod(each.ratio for each in differences(plain, measured))

    return max(others, key=gain)


def choose(plain: Measured, others: Sequence[Measured], loads: Sequence[int], can_change: bool) -> Candidate:
    """Return the candidate to serve: by number of running requests, where the engine can change the draft length.

    A draft length is chosen for a load where the interval of its gain lies above 1. Where none does, nothing is drafted
    at that load. One that cannot change is the fastest over all loads, if it is shown to gain at any.
    """
    if not can_change:
        best = fastest_over_all(plain, others)
        return best.candidate if any(map(is_shown, differences(plain, best))) else Candidate(0)
    gains = {measured.candidate.draft_length: differences(plain, measured) for measured in others}
    lengths = []
    for number in range(len(loads)):
        shown = {length: by_load[number].ratio for length, by_load in gains.items() if is_shown(by_load[number])}
        lengths.append(max(shown, key=shown.__getitem__) if shown else 0)
    if len(set(lengths)) == 1:
        return Candidate(lengths[0])
    starts = [1, *loads[1:]]
    changes = [at for at in range(len(lengths)) if not at or lengths[at] != lengths[at - 1]]
    schedule = Schedule(tuple((starts[at], lengths[at]) for at in changes))
    return Candidate(schedule.longest, schedule=schedule)


def is_shown(gain: Difference) -> bool:
    """Return whether a gain is shown: its interval lies above 1."""
    return gain.interval is not None and gain.interval[0] > 1
