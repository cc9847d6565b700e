"""Whether acceptance has fallen for good: a test that is made at every reading, for months.

It is the self-starting CUSUM of Hawkins ("Self-Starting CUSUM Charts for Location and Scale", The Statistician 36,
1987): each reading is compared with the mean and the spread of all readings before it, which makes it a normal number
where nothing has changed, however few there were. The numbers that lie more than `SLACK` below 0 are summed, and a sum
above `LIMIT` is an alarm.
"""

import math
from dataclasses import dataclass

from scipy.special import ndtri, stdtr

SLACK = 0.5  # standard deviations of a reading; falls of twice as much are found soonest
LIMIT = 16.0  # with a look a minute, false alarms in 0 to 27 % of simulated months: benchmarks/watch_alarms.py
FEWEST = 5  # readings before the first is judged
FARTHEST = 6.0  # standard deviations that one reading counts for at most
TINY = 1e-12


@dataclass(frozen=True)
class Change:
    """A fall that was found."""

    since: float  # time of the last reading before it, in seconds
    before: float  # mean value until then
    after: float  # mean value from then on


class ChangeTest:
    """The test of one series of readings. After an alarm it starts anew, from the level that was reached."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._all, self._weighted = Moments(), Moments()  # of the readings before `_since`
        self._squared_errors = 0.0  # of these, summed
        self._fall = 0.0
        self._since: list[WeightedReading] = []  # the last reading at which nothing had fallen, and those after it

    def add(self, time: float, value: float, error: float) -> Change | None:
        """Take a reading with its standard error; return the change where this one makes it sure.

        Readings that may belong to a fall wait until it proves to be none: among those that they are compared with,
        they would hide it.
        """
        weight = 1 / max(error**2 + self._between(error), TINY)
        before = self._weighted
        if before.count >= FEWEST and before.squares > 0:
            spread = math.sqrt(before.squares / (before.count - 1) * (1 / weight + 1 / before.weight))
            normal = float(ndtri(stdtr(before.count - 1, (value - before.mean) / spread)))
            self._fall = max(0.0, self._fall - max(normal, -FARTHEST) - SLACK)
        if self._fall == 0.0:
            for reading in self._since:
                self._learn(reading)
            self._since = []
        self._since.append(WeightedReading(time, value, weight, error))
        if self._fall <= LIMIT:
            return None
        change = likeliest_change(self._since, before.mean)
        self._start()
        return change

    def _learn(self, reading: "WeightedReading") -> None:
        """Count a reading among those that later ones are compared with."""
        self._weighted.add(reading.value, reading.weight)
        self._all.add(reading.value, 1.0)
        self._squared_errors += reading.error**2

    def _between(self, error: float) -> float:
        """Return the variance of readings beyond their errors: prompts differ from one minute to the next."""
        if self._all.count < 2:
            return error**2
        return max(0.0, self._all.squares / (self._all.count - 1) - self._squared_errors / self._all.count)


@dataclass(frozen=True)
class WeightedReading:
    """A reading with its standard error, and its weight: the inverse of its variance, to which other prompts add."""

    time: float
    value: float
    weight: float
    error: float


def likeliest_change(readings: list[WeightedReading], before: float) -> Change:
    """Return the change after which the readings lie farthest below a level, by their likelihood."""
    after, best = Moments(), (-math.inf, 0.0, 0.0)
    for last, reading in zip(readings[-2::-1], readings[:0:-1], strict=True):
        after.add(reading.value, reading.weight)
        fall = max(0.0, before - after.mean)
        best = max(best, (after.weight * fall**2, last.time, after.mean))
    return Change(best[1], before, best[2])


@dataclass
class Moments:
    """Mean and spread of weighted values, kept as they come."""

    count: int = 0
    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0  # weighted squares of the distances from the mean, summed

    def add(self, value: float, weight: float) -> None:
        """Take a value."""
        self.count, self.weight = self.count + 1, self.weight + weight
        distance = value - self.mean
        self.mean += weight / self.weight * distance
        self.squares += weight * distance * (value - self.mean)
