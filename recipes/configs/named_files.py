"""Checks that the files and folders which settings name are there, before anything slow is imported.

What they hold is checked where they are read.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError
from draftsmith.models.files import require_writable

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a model or a data set; whether the Hub has it shows later


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise `UserError` where a setting, by its name or the last part of it, names what cannot be there."""
    for key, value in settings.items():
        check = CHECKS.get(key.rpartition(".")[2])
        for name in value if isinstance(value, tuple) else (value,):
            if check and name:
                check(str(name))


def _target(name: str) -> None:
    if not Path(name).is_dir() and not HUB_NAME.fullmatch(name):
        raise UserError(f"no target at {name!r}: give a Hub name or a model directory")


def _drafter(name: str) -> None:
    path = Path(name.partition("+")[2] or name)
    if not path.parent.is_dir() and not HUB_NAME.fullmatch(str(path)):  # below a run's folder, the nearest is named
        raise UserError(f"no drafter at {name!r}: give a checkpoint's directory, a Hub name, or ngram")


def _prompts(source: str) -> None:
    name, colon, _ = source.partition(":")
    if not Path(name).exists() and (Path(name).suffix or not colon):
        raise UserError(f"no prompts file {name}: give a file, a folder, or a Hub data set as NAME:COLUMN")


def _samples(folder: str) -> None:
    if not Path(folder).exists():
        raise UserError(f"{folder} holds no prepared samples: run `draftsmith prepare --out {folder}` first")


def _file(path: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file")


def _out(folder: str) -> None:
    require_writable(Path(folder))


CHECKS: dict[str, Callable[[str], None]] = {
    "target": _target,
    "drafter": _drafter,
    "checkpoint": _drafter,
    "init_from": _drafter,
    "prompts": _prompts,
    "fit_prompts": _prompts,
    "samples": _samples,
    "schedule": _file,
    "config": _file,
    "out": _out,
    "dir": _out,
}
