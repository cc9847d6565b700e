"""Speedup over the batch size: the best draft at each, and where speculation stops to pay."""

import math
from dataclasses import dataclass
from itertools import pairwise

from draftsmith.recipes.reports.contents import DRAFT, Contender, Result, is_sound, same_but


def settings_but(contender: Contender, like: Result, *free: str) -> list[Result]:
    """Its sound rows that share the setting of another row, but for the fields in `free`."""
    return [row for row in contender.results if is_sound(row) and same_but(row, like, *free)]


def batch_curve(contender: Contender, like: Result) -> list[Result]:
    """Its fastest sound row at each batch size, all else but the draft as in another row; smallest batch first."""
    rows = settings_but(contender, like, "batch_size", *DRAFT)
    best: dict[int, Result] = {}
    for row in sorted(rows, key=lambda row: (row["batch_size"], row["speedup"])):
        best[row["batch_size"]] = row
    return list(best.values())


@dataclass(frozen=True)
class BreakEven:
    """Where the best measured speedup falls below 1, between two measured batch sizes."""

    batch_size: float  # on the straight line between both, over the logarithm of the batch size
    last_above: int
    first_below: int
    is_clear: bool  # whether the intervals at both sizes lie on their sides of 1


def break_even(curve: list[Result]) -> BreakEven | None:
    """None where the curve does not cross 1 from above."""
    for row, following in pairwise(curve):
        above, below = row["speedup"], following["speedup"]
        if above > 1 >= below:
            low, high = math.log(row["batch_size"]), math.log(following["batch_size"])
            size = math.exp(low + (high - low) * (above - 1) / (above - below))
            intervals = row["speedup_ci95"], following["speedup_ci95"]
            is_clear = all(intervals) and intervals[0][0] > 1 > intervals[1][1]
            return BreakEven(size, row["batch_size"], following["batch_size"], is_clear)
    return None
