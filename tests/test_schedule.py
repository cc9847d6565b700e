"""Schedules of draft lengths: what they say, in the engines' words too, and that following one leaves the law."""

import json
from pathlib import Path

import pytest

from draftsmith.inference.schedule import (
    Adaptive,
    DraftLengths,
    Schedule,
    for_sglang,
    for_vllm,
    read_schedule,
)
from draftsmith.models.errors import UserError

SCHEDULE = Schedule(((1, 4), (8, 2), (24, 0)))


def test_draft_length_by_running_requests() -> None:
    assert [SCHEDULE.draft_length(n) for n in (1, 7, 8, 23, 24, 1000)] == [4, 4, 2, 2, 0, 0]
    assert SCHEDULE.longest == 4


@pytest.mark.parametrize("entries", [(), ((2, 4),), ((1, 4), (1, 2)), ((1, 4), (8, 2), (4, 1)), ((1, -1),)])
def test_schedules_with_gaps_are_refused(entries: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(UserError):
        Schedule(entries)


def test_engines_read_the_same_schedule() -> None:
    """Looked up as vLLM does (inclusive ranges, the last length carried on) and as SGLang does (the tier below)."""
    ranges, tiers = for_vllm(SCHEDULE), for_sglang(SCHEDULE)
    assert ranges[0][0] == 1
    for size in range(1, 64):
        in_vllm = next((length for first, last, length in ranges if first <= size <= last), ranges[-1][2])
        in_sglang = tiers[str(max(int(tier) for tier in tiers if int(tier) <= size))]["candidate_steps"]
        assert [in_vllm] == in_sglang == [SCHEDULE.draft_length(size)]


@pytest.mark.parametrize("schedule", [SCHEDULE, Adaptive((0, 1, 4), ((1, (1.0, 1.5, 2.0)), (8, (1.0, 2.0, 3.0))), 0.5)])
def test_files(schedule: Schedule | Adaptive, tmp_path: Path) -> None:
    """As they are, or under "schedule" beside other choices."""
    for name, content in (
        ("a.json", schedule.to_json()),
        ("b.json", {"draft_length": 4, "schedule": schedule.to_json()}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert read_schedule(tmp_path / name) == schedule
    for text in ("", "[]", '{"draft_lengths": 4}', '{"adaptive": {"candidates": [2, 1]}}', '{"adaptive": {"x": 1}}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(UserError):
            read_schedule(tmp_path / "wrong.json")


def test_adaptive_takes_what_promises_most_per_millisecond() -> None:
    """Tokens of a round are 1 + sum of products of the rates; times are those of the row for so many requests."""
    adaptive = Adaptive((0, 1, 2), ((1, (1.0, 1.4, 1.8)), (8, (1.0, 1.8, 2.6))))
    assert adaptive.best(1, [0.5, 0.5]) == 1  # 1, 1.5 / 1.4, 1.75 / 1.8
    assert adaptive.best(1, [0.9, 0.9]) == 2  # 1, 1.9 / 1.4, 2.71 / 1.8
    assert adaptive.best(8, [0.5, 0.5]) == 0
    assert adaptive.best(7, [0.3, 0.9]) == 0


def test_adaptive_follows_what_was_accepted() -> None:
    """It begins with long drafts, gives up on a drafter that is always wrong, probes it, and comes back."""
    lengths = DraftLengths(Adaptive((0, 4), decay=0.5, probe_every=10), 4)
    right, chosen = False, []
    for number in range(1, 61):
        right = right or number > 30
        chosen.append(lengths.next(num_running=2))
        lengths.finish_round(chosen[-1], [4 if right else 0] * 2)
    assert chosen[0] == 4
    assert [number for number, length in enumerate(chosen[5:30], 6) if length] == [10, 20, 30]
    assert chosen[39:] == [4] * 21  # the probe of round 40 was all right, and sufficed


def test_rates_are_conditional_and_of_what_was_offered() -> None:
    lengths = DraftLengths(Adaptive((0, 2, 3), decay=0.0), 3)
    lengths.finish_round(2, [0, 1, 2, 2])  # 3 of 4 accepted the first token, 2 of these 3 the second, none was third
    assert lengths.rates == [3 / 4, 2 / 3, 1.0]
