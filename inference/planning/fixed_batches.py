"""Predicts the speedup of fixed batches, which take no new requests and last as long as their slowest request.

A server gives the row of a finished request to the next one. Its batch stays full, and its speedup follows from the
tokens that a round emits (`Costs.speedup`). `evaluate` decodes fixed batches. The slowest request decides on the number
of their rounds, finished rows are idle, and on a CPU the rows right of the last running one are no longer computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.planning.costs import Costs

NUM_BATCHES = 64  # batches that are drawn from the requests


@dataclass(frozen=True)
class RequestProfile:
    """The lengths of one request in tokens, and its number of rounds."""

    prompt_length: int
    num_tokens: int  # of the answer, without the first one, which reading the prompt gives
    num_rounds: int

    def context(self, number: int) -> float:
        """Return the number of its tokens in the middle of round `number`, counted from 0."""
        return self.prompt_length + self.num_tokens * (number + 0.5) / self.num_rounds


@dataclass(frozen=True)
class DecodedRequest:
    """A request as it was decoded once, with chains as long as the longest that `profile` is asked for."""

    prompt_length: int
    stats: Stats

    def profile(self, draft_length: int) -> RequestProfile:
        """Return its profile with chains of another length, 0 for plain decoding.

        A round of a shorter chain emits what a longer one would have, up to its own length. The number of rounds until
        n tokens are reached is then (n + the expected surplus of the last round) / the mean of a round. The surplus is
        that of a renewal process, E[e (e - 1)] / (2 E[e]) for rounds of e tokens.
        """
        num_tokens, stats = self.stats.num_emitted_tokens - 1, self.stats
        accepted = np.minimum(np.arange(len(stats.acceptance_histogram)), draft_length)
        counts = np.array(stats.acceptance_histogram, dtype=float)
        counts[0] += stats.num_rounds - stats.num_drafts  # rounds without a draft accept nothing
        if not counts.sum():
            return RequestProfile(self.prompt_length, num_tokens, num_tokens)
        mean = 1 + counts @ accepted / counts.sum()
        surplus = counts @ ((1 + accepted) * accepted) / counts.sum() / (2 * mean)
        return RequestProfile(self.prompt_length, num_tokens, round((num_tokens + surplus) / mean))


def batch_milliseconds(
    costs: Costs,
    draft: int | Schedule,
    profiles: Sequence[RequestProfile],
    drops_rows: bool,
    nodes: int | None = None,
) -> float:
    """Return the milliseconds of all rounds of a fixed batch.

    `draft` is the length of chains, or a schedule of lengths; with `nodes` it is the depth of trees. `drops_rows`: the
    rows right of the last running one are not computed, as on a CPU.
    """
    total = 0.0
    for number in range(max(profile.num_rounds for profile in profiles)):
        running = [row for row, profile in enumerate(profiles) if profile.num_rounds > number]
        context = max(profiles[row].context(number) for row in running)
        width = 1 + running[-1] if drops_rows else len(profiles)
        length = draft.draft_length(len(running)) if isinstance(draft, Schedule) else draft
        total += costs.round(length, width, round(context), nodes)
    return total


def fixed_batch_speedup(
    costs: Costs, draft_length: int, requests: Sequence[DecodedRequest], batch: int, drops_rows: bool
) -> float:
    """Return the speedup over plain decoding of the same batches, which are drawn from the requests by a fixed seed."""
    rng = np.random.default_rng(0)
    drafted, plain = ([request.profile(length) for request in requests] for length in (draft_length, 0))
    milliseconds = np.zeros(2)
    for _ in range(NUM_BATCHES):
        picks = rng.choice(len(requests), batch, replace=batch > len(requests))
        for side, (length, profiles) in enumerate(((0, plain), (draft_length, drafted))):
            milliseconds[side] += batch_milliseconds(costs, length, [profiles[i] for i in picks], drops_rows)
    return float(milliseconds[0] / milliseconds[1])
