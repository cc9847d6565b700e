"""The best of a run's checkpoints, by what was measured of each."""

from collections.abc import Sequence
from statistics import fmean

from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.results import Result


def place_of_best(rows: Sequence[Result | JudgedResult]) -> int:
    """Return the place of the best of a run's checkpoints, given the first row of each, oldest first.

    A round of each costs the same, as all have one architecture. They rank by tokens a round over that cost, pooled
    over the rows of one setting, since single times are too noisy. Rows that an engine judged are of one setting, so
    their cost plays no part. Those with divergences come last, and of equal ones the later is the better.
    """

    def cost(row: Result) -> float:
        alike = [other for other in rows if isinstance(other, Result)]
        return fmean(
            other.steps_a_round for other in alike if other.setting.differs_only_in(row.setting, "num_prompts")
        )

    def key(place: int) -> tuple[bool, float, int]:
        row = rows[place]
        value = row.tokens_a_round / cost(row) if isinstance(row, Result) else row.acceptance.mean_acceptance_length
        return row.is_sound, value, place

    return max(range(len(rows)), key=key)
