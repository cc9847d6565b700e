"""The speedup that a drafter is predicted to bring on some prompts, from acceptance in few rounds and from costs."""

from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from scipy.special import expit, logit

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.planning.best_draft import Rates, acceptance_length, rates_of_rounds
from draftsmith.inference.planning.costs import Costs
from draftsmith.models import Drafter, Target

LONGEST = 8  # tokens in a row, where a drafter drafts so many
RESAMPLES = 200  # of the prompts, for an interval
NEVER, ALWAYS = 0.002, 0.998  # between which rates are moved


@dataclass(frozen=True)
class Score:
    """The speedup that is predicted for a drafter at its best draft length, with the 90 % interval over prompts."""

    name: str  # a kind that was trained, or a lookup
    steps: int  # trained for; 0 of a lookup
    rates: list[float | None]  # conditional acceptance rates of rounds, by depth
    drafted: float  # share of the rounds with a draft
    draft_length: int  # the best; 0 where no speedup is predicted
    acceptance_length: float
    speedup: float
    low: float
    high: float

    @property
    def text(self) -> str:
        after = f" after {self.steps} steps" if self.steps else ""
        return (
            f"{self.name}{after}: {self.speedup:.2f}× [{self.low:.2f}, {self.high:.2f}] predicted, "
            f"{self.acceptance_length:.2f} tokens a round at draft length {self.draft_length}"
        )


@dataclass(frozen=True)
class ServingLoad:
    """The load that speedups are predicted for."""

    batch_size: int
    context: int  # tokens of each request


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
    drafter.forget()
    longest = min(LONGEST, drafter.max_draft_length or LONGEST)
    settings = replace(settings, draft=longest)
    decoder = SpeculativeDecoder(target, drafter)
    requests = decoder.decode(prompts.token_ids, settings.resolve(drafter), batch_size=8).stats.requests
    total = reduce(add, requests)
    best = best_draft_of(total, costs, load)
    chances = np.random.default_rng(0)
    speedups = []
    for _ in range(RESAMPLES):
        drawn = reduce(add, (requests[i] for i in chances.integers(len(requests), size=len(requests))))
        speedups.append(speedup_of(drawn, best, costs, load))
    low, high = np.quantile(speedups, [0.05, 0.95]).tolist()
    rates = rates_of(total)
    return Score(
        name,
        steps,
        rates,
        drafted_share(total),
        best,
        acceptance_length(rates, best),
        speedup_of(total, best, costs, load),
        low,
        high,
    )


def rates_of(stats: Stats) -> list[float | None]:
    """Return the conditional acceptance rates of all rounds."""
    return rates_of_rounds(stats.conditional_acceptance_rates, stats.num_drafts, max(1, stats.num_rounds))


def drafted_share(stats: Stats) -> float:
    """Return the share of the rounds that have a draft."""
    return stats.num_drafts / max(1, stats.num_rounds)


def best_draft_of(stats: Stats, costs: Costs, load: ServingLoad) -> int:
    """Return the draft length of the highest predicted speedup, 0 where none exceeds 1."""
    return max(range(stats.draft_length + 1), key=lambda length: speedup_of(stats, length, costs, load))


def speedup_of(stats: Stats, draft_length: int, costs: Costs, load: ServingLoad) -> float:
    """Return the predicted speedup of rounds of a draft length, 1 for none."""
    return predicted(rates_of(stats), drafted_share(stats), draft_length, costs, load)


def predicted(rates: Rates, drafted: float, draft_length: int, costs: Costs, load: ServingLoad) -> float:
    """Return the predicted speedup of rounds with these rates."""
    if draft_length == 0:
        return 1.0
    emitted = acceptance_length(rates, draft_length)
    return costs.drafting_in(drafted).speedup(emitted, draft_length, load.batch_size, load.context)


def potential(score: Score, growth: float, costs: Costs, load: ServingLoad) -> float:
    """Return the speedup at the best draft length if the log-odds of every acceptance rate grew by so much."""
    rates = [
        None if rate is None else float(expit(logit(np.clip(rate, NEVER, ALWAYS)) + growth)) for rate in score.rates
    ]
    return max(predicted(rates, score.drafted, length, costs, load) for length in range(len(rates) + 1))
