"""The progress that a user sees: the one progress bar, notices, and sizes in words."""

import contextlib
from collections.abc import Iterator

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


def progress_bar(visible: bool = True) -> Progress:
    """Return a rich progress bar with the time left; tasks may show a `detail`."""
    return Progress(
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
def waiting(text: str) -> Iterator[None]:
    """Say during the block what takes its time. Only a terminal shows it, and nothing stays of it."""
    with SafeConsole(stderr=True).status(Text(text)):
        yield


def notice(text: str) -> None:
    """Print a line that a user should know of, and that stops nothing, to the error output."""
    SafeConsole(stderr=True).print(text, style="yellow")


def size_text(num_bytes: float) -> str:
    """Return a size as disks are sold: 1 kB is 1000 bytes."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
