"""Rules for the draft length of the coming round.

The more requests run, the more a drafted token costs to verify, and from some number of requests on no draft pays.
`Schedule` is a fixed table by the number of running requests, and `Adaptive` follows the acceptance of the rounds
before. `Confident` ends the chain of each row by how sure the drafter is of what it has drafted.

None of them changes the distribution of the output. A round of any draft length emits tokens by the target's
distribution given the text so far, as long as it is settled whether a token is drafted before that token and the coins
of its test are drawn. A rule that looked at the token it is about to offer, or at a coin of the coming round, would
offer likely tokens more often, and the output would have another distribution (tests/inference/test_schedule.py proves
the first and finds the second).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.ranges import AboveZero, BelowOne, Count, Natural, Positive, checked_fields
from draftsmith.models.storage.reading import read_json
from draftsmith.models.storage.typed_json import from_json


@dataclass(frozen=True)
class Schedule:
    """Draft lengths by the number of running requests. Raises `UserError` unless these numbers rise from 1."""

    draft_lengths: tuple[tuple[Count, Natural], ...]  # (from so many requests on, draft length); 0: speculation is off

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "schedule: "))
        check_starts([start for start, _ in self.draft_lengths])

    def draft_length(self, num_running: int) -> int:
        """Return the draft length for a number of running requests, at least 1."""
        return next(length for start, length in reversed(self.draft_lengths) if start <= num_running)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple({length for _, length in self.draft_lengths})

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def to_json(self) -> dict[str, Any]:
        return {"draft_lengths": [list(entry) for entry in self.draft_lengths]}


@dataclass(frozen=True)
class Adaptive:
    """Draft the length that promises most tokens per millisecond, by the acceptance of the rounds before.

    The conditional acceptance rate of each depth is an exponential mean over finished rounds of the whole batch
    (TurboSpec, arXiv 2406.14066). It begins at 1, so that the first rounds try long drafts. Every `probe_every` rounds
    the longest one is drafted whatever the means are, since only drafts show how often they are accepted.
    Raises `UserError` for numbers that make no such rule.
    """

    candidates: tuple[Natural, ...]  # draft lengths to choose from, rising; 0: speculation is off
    costs: tuple[tuple[Count, tuple[Positive, ...]], ...] = ()
    """(from so many running requests on, milliseconds of a round at each candidate). Where it is empty, a drafted token
    costs a tenth of a plain step at any number of requests: a guess that fits one request on a large target."""
    decay: BelowOne = 0.9  # of the means, per round
    probe_every: Count = 32  # rounds

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "adaptive schedule: "))
        if list(self.candidates) != sorted(set(self.candidates)):
            raise UserError("adaptive schedule: give candidates that rise, from 0 (speculation off) or more")
        if not any(self.candidates):
            raise UserError("adaptive schedule: give at least one candidate above 0")
        if self.costs:
            check_starts([start for start, _ in self.costs])
        if any(len(row) != len(self.candidates) for _, row in self.costs):
            raise UserError("adaptive schedule: give each row of costs one time for each candidate")

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.candidates

    @property
    def longest(self) -> int:
        return self.candidates[-1]

    def best(self, num_running: int, rates: list[float]) -> int:
        """Return the candidate of most tokens per time; `rates` are conditional acceptance rates by depth."""
        row = next((row for start, row in reversed(self.costs) if start <= num_running), None)
        milliseconds = row or [1 + length / 10 for length in self.candidates]
        expected, chance = [1.0], 1.0  # tokens that a round of each length emits, the bonus token among them
        for rate in rates:
            chance *= rate
            expected.append(expected[-1] + chance)
        speeds = [expected[length] / time for length, time in zip(self.candidates, milliseconds, strict=True)]
        return self.candidates[speeds.index(max(speeds))]

    def to_json(self) -> dict[str, Any]:
        return {"adaptive": asdict(self)}


@dataclass(frozen=True)
class Confident:
    """Draft on while the drafter is sure of what it has drafted: at least one token, and up to `longest` of them.

    The confidence in a token is what the drafter's confidence head says (DSpark), or else the probability of the
    likeliest token in its place, whichever was drawn. The confidence in a chain is the product over its tokens; EAGLE-2
    (arXiv 2406.16858) multiplies what was drawn. One more token is drafted while the confidence in the chain before it,
    which is known before it is drawn, is at least `least`. Each row of a batch stops by itself, and the drafter stops
    with the last row.
    Raises `UserError` for numbers that make no such rule.
    """

    longest: Count
    least: AboveZero

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "confident schedule: "))

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.longest,)

    def to_json(self) -> dict[str, Any]:
        return {"confident": asdict(self)}


AnySchedule = Schedule | Adaptive | Confident


def check_starts(starts: list[int]) -> None:
    """Raise `UserError` unless numbers of running requests rise from 1."""
    if starts[:1] != [1] or starts != sorted(set(starts)):
        raise UserError(f"schedule: the numbers of running requests are {starts}: let them rise from 1")


FORMATS = (
    '{"draft_lengths": [[1, 4], [8, 2], [24, 0]]}, {"adaptive": {"candidates": [0, 2, 4]}}, or '
    '{"confident": {"longest": 8, "least": 0.4}}'
)


def read_schedule(path: Path) -> AnySchedule:
    """Read a file that holds a schedule, or one under "schedule" as choice.json does. Raises `UserError`."""
    try:
        content = read_json(path)
        return schedule_from_json(content.get("schedule", content))
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} holds no schedule ({first_line(error)}): give {FORMATS}") from None


def schedule_from_json(content: Any) -> AnySchedule:
    """Return the schedule whose `to_json` gave this content. Raises `UserError` for content of none."""
    if isinstance(content, dict) and "confident" in content:
        return from_json(Confident, content["confident"])
    if isinstance(content, dict) and "adaptive" in content:
        return from_json(Adaptive, content["adaptive"])
    return from_json(Schedule, content)


# --- in the decoder


class DraftLengths:
    """The draft length of each coming round of a generation."""

    def __init__(self, schedule: AnySchedule | None, draft_length: int) -> None:
        """Without a schedule each round has `draft_length`; with `Confident` it has that at most."""
        self._schedule, self._draft_length = schedule, draft_length
        self._num_rounds = 0
        self._reached = [1.0] * draft_length  # means of how often each depth was tried, all before it being accepted
        self._accepted = [1.0] * draft_length

    def next(self, num_running: int) -> int:
        """Return the draft length of the next round, in which `num_running` requests take part."""
        if self._schedule is None or isinstance(self._schedule, Confident):
            return self._draft_length
        if isinstance(self._schedule, Schedule):
            return self._schedule.draft_length(num_running)
        self._num_rounds += 1
        if self._num_rounds % self._schedule.probe_every == 0:
            return self._schedule.longest
        return self._schedule.best(num_running, self.rates)

    @property
    def rates(self) -> list[float]:
        """The conditional acceptance rate of each depth."""
        return [accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True)]

    def finish_round(self, draft_length: int, num_accepted: list[int]) -> None:
        """Take in how many drafted tokens of each running request a round of that length accepted.

        Nothing was accepted where the drafter had nothing to propose.
        """
        if not isinstance(self._schedule, Adaptive):
            return
        for depth in range(draft_length):
            reached = sum(number >= depth for number in num_accepted)
            if reached:
                decay = self._schedule.decay
                self._reached[depth] = decay * self._reached[depth] + (1 - decay) * reached
                accepted = sum(number > depth for number in num_accepted)
                self._accepted[depth] = decay * self._accepted[depth] + (1 - decay) * accepted


# --- in the engines


def for_vllm(schedule: Schedule) -> list[list[int]]:
    """Return vLLM's `num_speculative_tokens_per_batch_size`: [first batch size, last one, draft length].

    vLLM carries the last length on beyond its range. `num_speculative_tokens` beside it must be the longest length,
    since vLLM cuts the lengths of the schedule at it.
    """
    starts = [start for start, _ in schedule.draft_lengths]
    ends = [*(start - 1 for start in starts[1:]), starts[-1]]
    return [[start, end, length] for (start, length), end in zip(schedule.draft_lengths, ends, strict=True)]


def for_sglang(schedule: Schedule) -> dict[str, dict[str, list[int]]]:
    """Return the JSON of SGLang's `--speculative-adaptive-config`: one candidate from each batch size on.

    SGLang serves it for EAGLE and EAGLE3 with `--speculative-adaptive` and topk 1, and wants `--speculative-num-steps`
    among the candidates. It looks up batch sizes as it pads them for its CUDA graphs.
    """
    return {str(start): {"candidate_steps": [length]} for start, length in schedule.draft_lengths}
