"""How often `draftsmith watch` raises a false alarm, and how soon it finds a drop.

    python benchmarks/watch_alarms.py [--months 200]

A look a minute for a month, on simulated traffic: the drafts of a minute follow the hour of the day, each accepts up to
four tokens, and the rate of a minute is drawn around a mean, since prompts differ. Then the tokens that drafting brings
fall by a tenth after a day, and the minutes until the alarm are counted.
"""

import argparse
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from draftsmith.data.http import Server
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.recipes.watching.readings import Latency, Reading
from draftsmith.recipes.watching.watch import WatchedServer
from draftsmith.train.engine.vllm_counters import Counters

MINUTES, DAY = 30 * 24 * 60, 24 * 60
RATES = np.array([0.7, 0.6, 0.55, 0.5])  # conditional acceptance rates by depth


@dataclass(frozen=True)
class Traffic:
    """A kind of traffic."""

    name: str
    drafts: float  # a minute, on the mean over a day
    spread: float  # standard deviation of the log-odds of acceptance from minute to minute


KINDS = [
    Traffic("quiet", 30, 0.1),
    Traffic("usual", 1000, 0.1),
    Traffic("busy", 30_000, 0.1),
    Traffic("of few, long requests", 1000, 0.5),
]


def readings_of(kind: Traffic, chances: np.random.Generator, drop: float, minutes: int) -> list[tuple[int, Counters]]:
    """Return the counters of each minute; from the second day on all rates are so much lower that `drop` is lost."""
    hours = np.arange(minutes) / 60
    drafts = chances.poisson(kind.drafts * (1 + 0.8 * np.sin(2 * math.pi * hours / 24)))
    shift = chances.normal(0.0, kind.spread, minutes)
    shift[DAY:] += shift_of(drop)
    alive, per_position = drafts.copy(), []
    for rate in RATES:
        alive = chances.binomial(alive, expit(logit(rate) + shift))
        per_position.append(alive)
    counts = np.stack(per_position, 1).tolist()
    numbers = zip(drafts.tolist(), counts, strict=True)
    return [
        (minute, Counters(number, len(RATES) * number, sum(accepted), tuple(accepted)))
        for minute, (number, accepted) in enumerate(numbers)
    ]


def shift_of(drop: float) -> float:
    """Return the change of the log-odds of all rates at which drafts bring `drop` fewer tokens."""

    def gained(shift: float) -> float:
        return float(np.cumprod(expit(logit(RATES) + shift)).sum())

    return float(brentq(lambda shift: gained(shift) - (1 - drop) * gained(0.0), -5.0, 0.0)) if drop else 0.0


def first_alarm(readings: list[tuple[int, Counters]]) -> int | None:
    """Return the minute of the first alarm, if any."""
    server = WatchedServer("", Server("http://localhost", "", ""), None)
    for minute, counters in readings:
        if server.add(Reading(60.0 * minute, counters, None, Latency(), Latency(), 0.0)):
            return minute
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--months", type=int, default=200)
    args = parser.parse_args()
    chances = np.random.default_rng(0)
    print(f"commit {git_commit()}, {args.months} simulated months of each kind")
    for kind in KINDS:
        alarms = [first_alarm(readings_of(kind, chances, 0.0, MINUTES)) for _ in range(args.months)]
        false = sum(alarm is not None for alarm in alarms) / args.months
        found = [first_alarm(readings_of(kind, chances, 0.1, 3 * DAY)) for _ in range(args.months)]
        delays = sorted(alarm - DAY for alarm in found if alarm is not None and alarm >= DAY)
        late = f"{delays[len(delays) // 2]} minutes (90 %: {delays[len(delays) * 9 // 10]})" if delays else "-"
        missed = sum(alarm is None for alarm in found)
        print(
            f"traffic that is {kind.name}: false alarms in {false:.1%} of the months; a drop of 10 % is found after "
            f"{late}, {missed} not within two days",
            flush=True,
        )


if __name__ == "__main__":
    main()
