"""Batches that take no new requests, against expected rounds by recursion and against what full batches give."""

import functools

import pytest

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.fixed_batches import (
    DecodedRequest,
    RequestProfile,
    batch_milliseconds,
    fixed_batch_speedup,
)

COSTS = Costs("", "", "", "", draft_ms={"step: pass": 0.25}, verify_ms={"pass": 2.0}, host=0.0)  # whatever the batch


def answered(num_tokens: int, histogram: list[float], without_draft: int = 0) -> DecodedRequest:
    """A request of so many tokens behind its first one."""
    drafts = sum(histogram)
    stats = Stats(len(histogram) - 1, drafts, num_emitted_tokens=1 + num_tokens, acceptance_histogram=histogram)
    stats.num_rounds = drafts + without_draft
    return DecodedRequest(10, stats)


@pytest.mark.parametrize("draft_length", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("histogram", "without_draft"), [([5, 3, 1, 0, 6], 0), ([20, 0, 0, 0, 0], 0), ([0, 2, 3, 0, 1], 9)]
)
def test_rounds_of_shorter_chains(histogram: list[float], without_draft: int, draft_length: int) -> None:
    """Expected rounds, by recursion, until so many tokens are reached, if rounds are independent."""
    rounds = sum(histogram) + without_draft
    distribution = [(min(accepted, draft_length), count / rounds) for accepted, count in enumerate(histogram)]
    distribution.append((0, without_draft / rounds))

    @functools.cache
    def expected(tokens: int) -> float:
        return 0.0 if tokens <= 0 else 1 + sum(p * expected(tokens - 1 - accepted) for accepted, p in distribution)

    profile = answered(60, histogram, without_draft).profile(draft_length)
    assert profile.num_rounds == pytest.approx(expected(60), abs=0.51)
    assert profile.num_rounds == 60 or draft_length


def test_a_request_of_one_token_takes_no_round() -> None:
    assert answered(0, [0, 0]).profile(1).num_rounds == 0


def test_a_batch_lasts_as_long_as_its_slowest_request() -> None:
    """One request has all drafts accepted, one none: together they take the rounds of the second."""
    requests = [answered(30, [0, 0, 10]), answered(30, [30, 0, 0])]
    of_a_round = COSTS.round(2, 2, 10) / COSTS.plain(2, 10)
    assert fixed_batch_speedup(COSTS, 2, requests, 2, drops_rows=True) == pytest.approx(1 / of_a_round)
    full = COSTS.speedup(60 / 40, 2, 2, 10)
    assert fixed_batch_speedup(COSTS, 2, requests, 2, drops_rows=True) == pytest.approx(full / 1.5)
    same = [requests[0]] * 2
    assert fixed_batch_speedup(COSTS, 2, same, 2, drops_rows=True) == pytest.approx(3 / of_a_round)
    assert fixed_batch_speedup(COSTS, 0, requests, 2, drops_rows=True) == 1


def test_rows_right_of_the_last_running_one_cost_nothing() -> None:
    costs = Costs("", "", "", "", draft_ms={}, verify_ms={"pass": 1.0, "token": 1.0}, host=0.0)
    left, right = RequestProfile(5, 4, 4), RequestProfile(5, 4, 1)
    assert batch_milliseconds(costs, 1, [left, right], drops_rows=True) == (1 + 4) + 3 * (1 + 2)
    assert batch_milliseconds(costs, 1, [right, left], drops_rows=True) == 4 * (1 + 4)
    assert batch_milliseconds(costs, 1, [left, right], drops_rows=False) == 4 * (1 + 4)


def test_attention_reads_up_to_the_longest_running_text() -> None:
    """Two requests: in the first round both run, at 7.5 and 22.5 tokens; then one at 12.5."""
    costs = Costs("", "", "", "", draft_ms={}, verify_ms={"row x context": 1.0}, host=0.0)
    longer, shorter = RequestProfile(20, 5, 1), RequestProfile(5, 10, 2)
    assert batch_milliseconds(costs, 1, [shorter, longer], drops_rows=True) == 2 * round(22.5) + round(12.5)
