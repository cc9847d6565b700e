"""The speedup that a drafter is predicted to bring on some prompts, from acceptance in few rounds and from costs.

Under an SLA only requests that are predicted to keep it count: what is predicted is then goodput, over the throughput
of plain decoding at the same load.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.planning.best_draft import Rates, acceptance_length, equal_rates, rates_of_rounds
from draftsmith.inference.planning.costs import Costs, DraftChances
from draftsmith.inference.planning.tuning import decode
from draftsmith.inference.traffic.stages import Sla
from draftsmith.models import Drafter, Target

LONGEST = 8  # tokens in a row, where a drafter drafts so many
RESAMPLES = 200  # of the prompts, for an interval
NEVER, ALWAYS = 0.002, 0.998  # between which rates are moved
MOST_GROWTH = 20.0  # of log-odds: more than from never to always


@dataclass(frozen=True)
class Score:
    """The speedup that is predicted for a drafter at its best draft length, with the 90 % interval over prompts.

    Under an SLA it is the goodput, over the throughput of plain decoding.
    """

    name: str  # a kind that was trained, a lookup, or a lookup before a kind: `ngram+hydra`
    steps: int  # trained for; 0 of a lookup
    rates: list[float | None]  # conditional acceptance rates of rounds, by depth
    chances: DraftChances  # of the lengths of drafts
    draft_length: int  # the best; 0 where no speedup is predicted
    acceptance_length: float
    speedup: float
    low: float
    high: float
    rates_by_prompt: list[list[float | None]] = field(default_factory=list)  # empty where nobody asked for an SLA
    within_sla: float | None = None  # share of the prompts that is predicted to keep it

    @property
    def text(self) -> str:
        after = f" after {self.steps} steps" if self.steps else ""
        within = "" if self.within_sla is None else f" within the SLA, which {self.within_sla:.0%} of the requests keep"
        return (
            f"{self.name}{after}: {self.speedup:.2f}× [{self.low:.2f}, {self.high:.2f}] predicted{within}, "
            f"{self.acceptance_length:.2f} tokens a round at draft length {self.draft_length}"
        )


@dataclass(frozen=True)
class ServingLoad:
    """The load that speedups are predicted for, and the latencies that its requests must keep."""

    batch_size: int
    context: int  # tokens of each request
    sla: Sla = Sla()  # of which the time to the first token is not predicted


def measure_score(
    target: Target,
    drafter: Drafter,
    name: str,
    steps: int,
    prompts: PromptSet,
    settings: MeasureSettings,
    costs: Costs,
    load: ServingLoad,
) -> Score:
    """Decode the prompts once, untimed, and return what the drafter is predicted to bring at its best draft length."""
    settings = replace(settings, draft=longest_draft(drafter))
    requests = decode(target, drafter, prompts, settings).stats.requests
    total = reduce(add, requests)
    best = best_draft_of(requests, costs, load)
    generator = np.random.default_rng(0)
    speedups = []
    for _ in range(RESAMPLES):
        drawn = [requests[i] for i in generator.integers(len(requests), size=len(requests))]
        speedups.append(speedup_of(drawn, best, costs, load))
    low, high = np.quantile(speedups, [0.05, 0.95]).tolist()
    rates, chances, by_prompt = rates_of(total), DraftChances.of(total), list(map(rates_of, requests))
    asks = load.sla.tpot_ms is not None
    return Score(
        name,
        steps,
        rates,
        chances,
        best,
        acceptance_length(rates, best),
        speedup_of(requests, best, costs, load),
        low,
        high,
        by_prompt if asks else [],
        share_within_sla(by_prompt, chances, best, costs, load) if asks else None,
    )


def longest_draft(drafter: Drafter) -> int:
    """Return the most tokens in a row that a drafter is considered with."""
    return min(LONGEST, drafter.max_draft_length or LONGEST)


def rates_of(stats: Stats) -> list[float | None]:
    """Return the conditional acceptance rates of all rounds."""
    return rates_of_rounds(stats.conditional_acceptance_rates, stats.num_drafts, max(1, stats.num_rounds))


def best_draft_of(requests: Sequence[Stats], costs: Costs, load: ServingLoad) -> int:
    """Return the draft length of the highest predicted speedup, 0 where none exceeds that of plain decoding."""
    longest = requests[0].draft_length
    return max(range(longest + 1), key=lambda length: speedup_of(requests, length, costs, load))


def speedup_of(requests: Sequence[Stats], draft_length: int, costs: Costs, load: ServingLoad) -> float:
    """Return the predicted speedup of rounds of a draft length, 1 for none; times the share within the SLA."""
    total = reduce(add, requests)
    chances = DraftChances.of(total)
    within = share_within_sla(map(rates_of, requests), chances, draft_length, costs, load)
    return within * predicted(rates_of(total), chances, draft_length, costs, load)


def predicted(rates: Rates, chances: DraftChances, draft_length: int, costs: Costs, load: ServingLoad) -> float:
    """Return the predicted speedup of rounds with these rates."""
    if draft_length == 0:
        return 1.0
    emitted = acceptance_length(rates, draft_length)
    return costs.drafting_with(chances).speedup(emitted, draft_length, load.batch_size, load.context)


def share_within_sla(
    rates_by_prompt: Iterable[Rates], chances: DraftChances, draft_length: int, costs: Costs, load: ServingLoad
) -> float:
    """Return the share of requests whose time per token is predicted to keep the SLA; 1 where it asks for none.

    It is the time of a round at this load over the tokens that a round brings this request. At draft length 0 all of
    them take a plain step, and keep it or do not.
    """
    limit = load.sla.tpot_ms
    if limit is None:
        return 1.0
    round_ms = costs.drafting_with(chances).round(draft_length, load.batch_size, load.context)
    kept = [round_ms <= limit * acceptance_length(rates, draft_length) for rates in rates_by_prompt]
    return sum(kept) / len(kept)


def plain_speedup(costs: Costs, load: ServingLoad) -> float:
    """Return what plain decoding is predicted to have: 1, or 0 where it breaks the SLA."""
    return share_within_sla([[]], DraftChances(), 0, costs, load)


def needed_rate(costs: Costs, longest: int, load: ServingLoad) -> float | None:
    """Return the acceptance rate, the same at each depth, from which on a drafter pays; None where none is enough."""
    needed = {length: costs.break_even(length, load.batch_size, load.context) for length in range(1, longest + 1)}
    rates = [equal_rates(max(1.0, tokens), length)[0] for length, tokens in needed.items() if tokens < length + 1]
    return min(rates, default=None)


def best_length(score: Score, costs: Costs, load: ServingLoad) -> int:
    """Return the draft length of the highest predicted speedup at a load, 0 where none exceeds 1."""
    return max(range(len(score.rates) + 1), key=lambda length: speedup_at(score, length, costs, load))


def potential(score: Score, growth: float, costs: Costs, load: ServingLoad) -> float:
    """Return the speedup at the best draft length if the log-odds of every acceptance rate grew by so much."""
    by_prompt = [grown(rates, growth) for rates in score.rates_by_prompt]
    later = replace(score, rates=grown(score.rates, growth), rates_by_prompt=by_prompt)
    return speedup_at(later, best_length(later, costs, load), costs, load)


def speedup_at(score: Score, draft_length: int, costs: Costs, load: ServingLoad) -> float:
    """Return the speedup that a score foretells at a draft length, times the share within the SLA."""
    within = share_within_sla(score.rates_by_prompt, score.chances, draft_length, costs, load)
    return within * predicted(score.rates, score.chances, draft_length, costs, load)


@dataclass(frozen=True)
class ScoredLookup:
    """A lookup that may draft before a kind, with what its rounds cost."""

    score: Score
    costs: Costs

    def speedup_before(self, tokens: float, round_ms: float, load: ServingLoad) -> float:
        """Return the speedup of the lookup before a kind whose rounds bring so many tokens and take so long.

        Rounds in which the lookup finds nothing become the kind's. That is the most to be expected: text is harder to
        foretell there than elsewhere.
        """
        score, batch, context = self.score, load.batch_size, load.context
        missed = 1 - score.chances.drafted
        found_nothing = self.costs.drafting_with(DraftChances(0.0)).round(score.draft_length, batch, context)
        whole = self.costs.drafting_with(score.chances).round(score.draft_length, batch, context)
        whole += missed * (round_ms - found_nothing)
        return self.costs.plain(batch, context) * (score.acceptance_length + missed * (tokens - 1)) / whole


def potential_behind(lookup: ScoredLookup, score: Score, growth: float, costs: Costs, load: ServingLoad) -> float:
    """Return what a kind brings at most behind a lookup if the log-odds of every acceptance rate grew by so much."""
    rates, own = grown(score.rates, growth), costs.drafting_with(score.chances)
    return max(
        lookup.speedup_before(acceptance_length(rates, length), own.round(length, load.batch_size, load.context), load)
        for length in range(1, len(rates) + 1)
    )


def grown(rates: Rates, growth: float) -> list[float | None]:
    """Return acceptance rates whose log-odds grew by so much; depths that no draft came to had hardly any."""
    return [float(expit(logit(np.clip(rate or 0.0, NEVER, ALWAYS)) + growth)) for rate in rates]


def growth_per_doubling(before: Score, after: Score) -> float:
    """Return what each doubling of the steps between two scores added to the log-odds of acceptance.

    It is taken to be the same at all depths, so that acceptance lengths at the longest draft length tell it.
    """
    length = grown_length(after, 0.0)
    added = brentq(lambda growth: grown_length(before, growth) - length, -MOST_GROWTH, MOST_GROWTH)
    return float(added) / math.log2(after.steps / before.steps)


def grown_length(score: Score, growth: float) -> float:
    """Return the acceptance length at the longest draft length if the log-odds of every rate grew by so much."""
    return acceptance_length(grown(score.rates, growth), len(score.rates))
