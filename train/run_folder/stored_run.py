"""The files of a run as a report reads them back, each by its type and each on its own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural, NonNegative
from draftsmith.models.reading import read_yaml
from draftsmith.models.typed_json import from_json
from draftsmith.train.run_folder.tracking import METRICS, read_metrics

T = TypeVar("T")


@dataclass(frozen=True)
class StoredDrafter:
    """The part of a run's drafter settings that the report reads."""

    kind: str


@dataclass(frozen=True)
class StoredRun:
    """The part of config.yaml that the report reads."""

    target: str
    drafter: StoredDrafter


@dataclass(frozen=True)
class LoggedStep:
    """The part of a line of metrics.jsonl that the report draws."""

    step: Natural
    loss: NonNegative | None = None
    simulated_acceptance_length: NonNegative | None = None
    acceptance_length: NonNegative | None = None


class Reader:
    """Reads the files of a report one by one. What cannot be read is left out, and `unreadable` says why."""

    def __init__(self) -> None:
        self.unreadable: list[str] = []

    def read(self, read: Callable[[Path], T], path: Path) -> T | None:
        """Return what `read` makes of a file; None where there is none, or where it raises `UserError`."""
        try:
            return read(path) if path.exists() else None
        except UserError as error:
            self.unreadable.append(str(error))
            return None

    def read_all(self, read: Callable[[Path], T], paths: Iterable[Path]) -> list[T]:
        """Return what `read` makes of those of the files that it can read."""
        values = [self.read(read, path) for path in paths]
        return [value for value in values if value is not None]


def read_config(path: Path) -> StoredRun:
    """Read a run's config.yaml. Raises `UserError` naming the file where it is none."""
    return _typed(StoredRun, read_yaml(path), path)


def read_logged_steps(run: Path) -> list[LoggedStep]:
    """Read the metrics.jsonl of a run. Raises `UserError` naming the file where it is none."""
    return _typed(list[LoggedStep], read_metrics(run), run / METRICS)


def _typed(kind: type[T], content: Any, path: Path) -> T:
    try:
        return from_json(kind, content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
