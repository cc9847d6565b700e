"""The files of a run as a report reads them back, each by its type and each on its own."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural, NonNegative
from draftsmith.models.storage.reading import read_yaml
from draftsmith.models.storage.typed_json import from_json
from draftsmith.train.run_folder.tracking import complete_lines, parse_metrics

T = TypeVar("T")


@dataclass(frozen=True)
class StoredKind:
    """The kind of drafter that config.yaml names."""

    kind: str


@dataclass(frozen=True)
class StoredData:
    """The training text that config.yaml names."""

    samples: str


@dataclass(frozen=True)
class StoredSteps:
    """The steps of a run."""

    steps: int
    seed: int


@dataclass(frozen=True)
class StoredOptimizer:
    """The course of the learning rate."""

    decay: str | None = None  # None in a run of before there was the setting


@dataclass(frozen=True)
class StoredRun:
    """The part of config.yaml that is read again: by reports, by model cards, and by a run that goes on."""

    target: str
    drafter: StoredKind
    data: StoredData
    run: StoredSteps
    optimizer: StoredOptimizer = StoredOptimizer()


@dataclass(frozen=True)
class LoggedStep:
    """The part of a line of metrics.jsonl that the report draws."""

    step: Natural
    loss: NonNegative | None = None
    simulated_acceptance_length: NonNegative | None = None
    acceptance_length: NonNegative | None = None
    held_out_acceptance_length: NonNegative | None = None
    forecast_num_steps: Natural | None = None
    forecast_low: NonNegative | None = None
    forecast_high: NonNegative | None = None


class Reader:
    """Reads the files of a report one by one. What cannot be read is left out, and `unreadable` says why."""

    def __init__(self) -> None:
        self.unreadable: list[str] = []

    def read(self, read: Callable[[Path], T], path: Path) -> T | None:
        """Return what `read` makes of a file; None where there is none, or where it raises `UserError`."""
        try:
            return read(path) if os.path.lexists(path) else None
        except UserError as error:
            self.unreadable.append(str(error))
            return None

    def read_all(self, read: Callable[[Path], T], paths: Iterable[Path]) -> list[T]:
        """Return what `read` makes of those of the files that it can read."""
        values = [self.read(read, path) for path in paths]
        return [value for value in values if value is not None]

    def logged_steps(self, run: Path) -> list[LoggedStep]:
        """Return what the lines of a run's metrics.jsonl hold, those that can be read."""
        steps, faults = [], []
        for place, line in self.read(complete_lines, run) or []:
            try:
                steps.append(from_json(LoggedStep, parse_metrics(line, place), place))
            except UserError as error:
                faults.append(str(error))
        if faults:
            self.unreadable.append(f"{faults[0]}; {len(faults)} of {len(faults) + len(steps)} lines are left out")
        return steps


def read_config(path: Path) -> StoredRun:
    """Read a run's config.yaml. Raises `UserError` naming the file where it is none."""
    return from_json(StoredRun, read_yaml(path), str(path))
