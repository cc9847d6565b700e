"""The difference between two servers, and the load up to which one keeps its limits."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from draftsmith.inference.decoding.counters import LEAST_SAMPLES, Interval
from draftsmith.models.errors import UserError
from draftsmith.recipes.bench.results import CONFIDENCE, SLA_SHARE, BenchLoad, BenchRun, BenchStage

CLOSE = 1.1  # the search ends when the lowest rate that fails is within this factor of the highest that holds
MOST_STAGES = 16  # of a search
ALONE = 0.05  # requests at a time, on the mean, below which one hardly ever meets another
SUSTAINED = 0.8  # share of the rate of arrivals below which answers lag behind


@dataclass(frozen=True)
class Difference:
    """The speed of the second server over that of the first, at one load."""

    load: BenchLoad
    measure: str  # what is compared
    ratio: float
    interval: Interval  # over runs; None for fewer than three

    @property
    def text(self) -> str:
        spread = f", 95 %: {self.interval[0]:.2f}x to {self.interval[1]:.2f}x" if self.interval else ""
        return f"{self.ratio:.2f}x ({self.measure}{spread})"


def difference(first: BenchStage, second: BenchStage) -> Difference:
    """Return what the second server gains over the first at the same load, by runs that had the same requests.

    Closed clients take what they get, so that output tokens a second are compared. Where requests arrive at their own
    times all are answered in the end, and the mean time for each token is. The interval is Student's over the
    logarithms of the runs' ratios.
    """

    def speed(run: BenchRun) -> float | None:
        return run.output_tokens_per_second

    def slowness(run: BenchRun) -> float | None:
        return run.mean_tpot_ms

    is_closed = first.load.mode == "concurrency"
    value: Callable[[BenchRun], float | None] = speed if is_closed else slowness
    pairs = [(value(one), value(other)) for one, other in zip(first.runs, second.runs, strict=True)]
    logs = [math.log(other / one) * (1 if is_closed else -1) for one, other in pairs if one and other]
    if not logs:
        raise UserError("no answer had two tokens, so that nothing tells how fast they come: raise --max-new-tokens")
    interval = None
    if len(logs) >= LEAST_SAMPLES:
        reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1) * np.std(logs, ddof=1) / math.sqrt(len(logs)))
        interval = (math.exp(np.mean(logs) - reach), math.exp(np.mean(logs) + reach))
    measure = "output tokens a second" if is_closed else "time of a token"
    return Difference(first.load, measure, math.exp(float(np.mean(logs))), interval)


def verdict(differences: list[Difference], first: str, second: str) -> str:
    """Return in a sentence where the second server is faster than the first, and where it cannot be told."""
    parts = []
    for each in differences:
        if each.interval is None:
            judgement = "too few runs to tell"
        elif each.interval[0] > 1:
            judgement = "faster"
        elif each.interval[1] < 1:
            judgement = "slower"
        else:
            judgement = "no difference can be told"
        parts.append(f"{judgement} at {each.load.text}: {each.text}")
    return f"{second} beside {first}: {'; '.join(parts)}"


def is_sustained(stage: BenchStage) -> bool:
    """Return whether answers keep up with the arrivals: they come at nearly the rate of the requests."""
    return stage.mean(lambda run: run.requests_per_second) >= SUSTAINED * stage.load.value


def is_alone(stage: BenchStage) -> bool:
    """Return whether requests hardly ever meet another one, so that a lower rate would change nothing."""
    usual = stage.e2e_ms.p50
    return usual is not None and stage.load.value * usual.value / 1000 < ALONE


def search_rate(measure: Callable[[float], BenchStage], start: float) -> tuple[BenchStage | None, list[BenchStage]]:
    """Return the stage of the highest rate of requests at which the limits are kept, and all stages that were tried.

    Rates double from `start`, or halve, until one is kept and the next is not; then the gap is halved until it is
    narrow. None where no rate was found that keeps them, as where requests that meet no other one break them.
    """
    tried: list[BenchStage] = []

    def holds(rate: float) -> bool:
        tried.append(measure(rate))
        return tried[-1].keeps_limits

    kept, failed, rate = 0.0, math.inf, start
    while len(tried) < MOST_STAGES and failed / max(kept, 1e-9) > CLOSE:
        if holds(rate):
            kept = rate
        else:
            failed = rate
        if not kept:
            if is_alone(tried[-1]):
                break
            rate /= 2
        elif math.isinf(failed):
            if not is_sustained(tried[-1]):  # a server that lags behind ends with the requests, however late
                break
            rate *= 2
        else:
            rate = math.sqrt(kept * failed)
    best = max((stage for stage in tried if stage.keeps_limits), key=lambda stage: stage.load.value, default=None)
    return best, tried


def search_text(best: BenchStage | None, tried: list[BenchStage]) -> str:
    """Return in a sentence up to which rate a server keeps the limits."""
    rates = sorted(stage.load.value for stage in tried)
    if best is None:
        return f"{tried[0].server} does not keep the limits at {rates[0]:.3g} requests a second, the lowest rate tried"
    goodput = best.mean(lambda run: run.goodput)
    text = (
        f"{best.server} keeps the limits for {100 * SLA_SHARE:.0f} % of the requests up to {best.load.value:.3g} "
        f"requests a second (goodput {goodput:.3g})"
    )
    return f"{text}, the highest rate tried" if best.load.value == rates[-1] else text
