"""The parts of an evaluation, each of which has all its contenders decode in turns, and the time for each part."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.progress import Progress

from draftsmith.inference.measuring.baselines import Baseline
from draftsmith.inference.measuring.measure import Contender, PromptSet, measure_in_turns
from draftsmith.inference.measuring.results import Result
from draftsmith.models import Target
from draftsmith.train.evaluation.pooling import pool, share_of, subset


class Measurement:
    """Contenders that take turns on a set of prompts, which is shared out over the processes.

    Rows of results are by the keys of `contenders`.
    """

    def __init__(self, prompts: PromptSet, contenders: list[Contender], num_ranks: int) -> None:
        self.contenders = {f"{number} {each.name}": each for number, each in enumerate(contenders)}
        self.repeats, size = contenders[0].settings.repeats, contenders[0].settings.batch_size
        self._prompts = prompts
        self._shares = [share_of(len(prompts.token_ids), rank, num_ranks, size) for rank in range(num_ranks)]
        self.num_batches = -(-len(self._shares[0]) // size)  # of the first process

    def measure(
        self, target: Target, seconds: float | None, on_progress: Callable[[], None], baselines: Sequence[Baseline]
    ) -> dict[str, Result]:
        """Return the rows of the first process, with as many repeats as fit into the seconds."""
        timed = self.contenders_with(self.repeats, seconds)
        return measure_in_turns(target, timed, subset(self._prompts, self._shares[0]), on_progress, baselines)

    def count(self, target: Target, rank: int) -> dict[str, Result]:
        """Return rows of which only the counters are wanted; none without prompts for a process."""
        share = self._shares[rank]
        once = self.contenders_with(1, None)
        return measure_in_turns(target, once, subset(self._prompts, share)) if share else {}

    def contenders_with(self, repeats: int, seconds: float | None) -> dict[str, Contender]:
        """Return the contenders, with other limits of their time."""
        return {
            key: replace(each, settings=replace(each.settings, repeats=repeats, seconds=seconds))
            for key, each in self.contenders.items()
        }

    def pool(self, rows: list[Result]) -> Result:
        """Return one contender's row from those of the processes with a share."""
        return pool(rows, [share for share in self._shares if share])


class Timer:
    """Gives each measurement its share of the time, and moves the progress bar.

    A limit of time says how many repeats there are, never the figures that were found: that keeps them honest.
    """

    def __init__(self, measurements: list[Measurement], minutes: float | None, progress: Progress) -> None:
        self._limit, self._progress = minutes and minutes * 60, progress
        self._batches = [measurement.num_batches for measurement in measurements]
        total = self._limit or sum(each.num_batches * each.repeats for each in measurements)
        self._task = progress.add_task("evaluating", total=total, detail="seconds" if self._limit else "batches")
        self._start = time.perf_counter()

    def shares(self) -> Iterator[float | None]:
        """Yield the seconds of each measurement when its turn comes: its share, by its batches, of the time left."""
        for number, num_batches in enumerate(self._batches):
            share = num_batches / sum(self._batches[number:])
            yield (self._limit - self.seconds) * share if self._limit else None

    @property
    def seconds(self) -> float:
        """Seconds since the first part began."""
        return time.perf_counter() - self._start

    def advance(self) -> None:
        """Show that another batch is decoded."""
        if self._limit:
            self._progress.update(self._task, completed=self.seconds)
        else:
            self._progress.advance(self._task)
