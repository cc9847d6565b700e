"""Numbered folders: checkpoints that are kept, and removal of what is not needed any more."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from draftsmith.models.storage.files import whole_folder
from draftsmith.train.run_folder.checkpoint import remove


def numbered(folder: Path) -> list[int]:
    """Return the numbers that folders in a folder have as names, the lowest first."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if re.fullmatch("[0-9]{1,9}", path.name))


def keep_only(folder: Path, numbers: Collection[int]) -> None:
    """Remove all folders in a folder but those of these numbers, and hidden ones: what was cut short."""
    for path in folder.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
    for number in numbered(folder):
        if number not in numbers:
            remove(folder / str(number))


def copy_checkpoint(checkpoint: Path, out: Path) -> None:
    """Copy a drafter without its training state, all or nothing; what was copied before stays."""
    if out.is_dir():
        return
    with whole_folder(out) as folder:
        for file in checkpoint.iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
