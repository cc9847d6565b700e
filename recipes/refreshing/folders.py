"""Removal of folders that are not needed any more, and of what a kill left of earlier removals."""

import shutil
from collections.abc import Collection
from pathlib import Path

from draftsmith.train.run_folder.checkpoint import remove


def numbered(folder: Path) -> list[int]:
    """Return the numbers that folders in a folder have as names, the lowest first."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*"))


def keep_only(folder: Path, numbers: Collection[int]) -> None:
    """Remove all folders in a folder but those of these numbers, and hidden ones: what was cut short."""
    for path in folder.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
    for number in numbered(folder):
        if number not in numbers:
            remove(folder / str(number))
