"""The progress that a user sees: the one progress bar, notices, and sizes in words."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from draftsmith.data.console import SafeConsole, shared_console


class Bar(Progress):
    """A progress bar that ends at its end: a task that took fewer rounds than were planned is done all the same."""

    def __exit__(self, kind: Any, *error: Any) -> None:
        for task in self.tasks if kind is None else ():
            self.update(task.id, completed=task.total)
        super().__exit__(kind, *error)


def progress_bar(visible: bool = True) -> Bar:
    """Return a rich progress bar with the time left; tasks may show a `detail`."""
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", markup=False),
        console=shared_console(),
        disable=not visible,
    )


@contextlib.contextmanager
def waiting(text: str, visible: bool = True) -> Iterator[None]:
    """Say during the block what takes its time. Only a terminal shows it, and nothing stays of it."""
    console = SafeConsole(stderr=True)
    with console.status(Text(text)) if visible and console.is_terminal else contextlib.nullcontext():
        yield


def notice(text: str) -> None:
    """Print a line that a user may want to know, and that asks for nothing, to the error output."""
    SafeConsole(stderr=True).print(text)


@functools.cache
def notice_once(text: str) -> None:
    """Print a line as `notice` does, unless this process printed it before."""
    notice(text)


def warn(text: str) -> None:
    """Print a line on what puts a result or the rest of the work in doubt, and stops nothing, to the error output."""
    SafeConsole(stderr=True).print(f"warning: {text}", style="yellow")


def size_text(num_bytes: float) -> str:
    """Return a size as disks are sold: 1 kB is 1000 bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
