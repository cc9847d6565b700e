"""Checks of the files and folders that settings name, before anything slow is imported: whether they are there, and
whether the small ones among them, and the beginnings of the others, can be read.

All that they hold is checked where it is used. What is imported inside functions is not needed for `--help`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural, checked
from draftsmith.models.storage.files import require_writable
from draftsmith.models.storage.reading import read_json, read_json_object

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a model or a data set; whether the Hub has it shows later


def check_names(settings: Mapping[str, Any]) -> None:
    """Raise `UserError` where a setting, by its name or the last part of it, names what cannot be there."""
    for key, value in settings.items():
        check = CHECKS.get(key.rpartition(".")[2])
        for name in value if isinstance(value, tuple) else (value,):
            if check and name:
                try:
                    check(str(name))
                except OSError as error:  # of a folder above, which may not be looked into
                    raise UserError(f"{name} cannot be read: {error.strerror}") from None


def _target(name: str) -> None:
    if not Path(name).exists() and not HUB_NAME.fullmatch(name):
        raise UserError(f"no target at {name!r}: give a Hub name or a model directory")
    from draftsmith.models.storage.model_files import target_config_file

    read_config_file(name, target_config_file)


def _drafter(name: str) -> None:
    from draftsmith.models.drafter_configs import DRAFTER_CONFIGS
    from draftsmith.models.storage.model_files import drafter_config_file
    from draftsmith.recipes.configs.recipes import RECIPES

    for part in [name] if Path(name).exists() else name.split("+", 1):  # of a cascade
        if Path(part).exists() or part not in {*DRAFTER_CONFIGS, *RECIPES}:
            read_config_file(part, drafter_config_file)


def read_config_file(name: str, find: Callable[[str], Path]) -> None:
    """Read the config.json of a model, and say so while the Hub is asked for it, which may not answer for a while."""
    from draftsmith.data.progress import waiting

    with waiting(f"asking the Hub for {name} ...", visible=not Path(name).exists()):
        read_json_object(find(name))


def _growing_prompts(source: str) -> None:
    name, colon, _ = source.partition(":")
    path = Path(name)
    if not path.exists() and (path.suffix or not colon):
        raise UserError(f"no prompts file {name}: give a file, a folder, or a Hub data set as NAME:COLUMN")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{name} is a pipe or a device, which is read only once: write it into a file, and give that")


def _prompts(source: str) -> None:
    _growing_prompts(source)
    name, _, _ = source.partition(":")
    from draftsmith.data.prompts.mixtures import load_mixture
    from draftsmith.data.prompts.sources import check_beginning

    if Path(name).suffix in (".yaml", ".yml"):
        for part in load_mixture(Path(name)).sources:
            _prompts(part.source)
    else:
        check_beginning(source)


def _samples(folder: str) -> None:
    if not Path(folder).exists():
        raise UserError(f"{folder} holds no prepared samples: run `draftsmith prepare --out {folder}` first")


def _file(path: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"{path}: there is no such file")


def _trace(path: str) -> None:
    if not Path(path).exists():
        raise UserError(f"{path}: there is no such file")


def _schedule(path: str) -> None:
    _file(path)
    from draftsmith.inference.decoding.schedule import read_schedule

    read_schedule(Path(path))


def _tree(text: str) -> None:
    if text.endswith(".json"):
        checked(list[list[Natural]], read_json(Path(text)), f"--tree {text}")


def _report(folder: str) -> None:
    if not Path(folder).is_dir():
        raise UserError(f"no folder {folder}: give the folder of a run, such as runs/NAME")


def _out(folder: str) -> None:
    require_writable(Path(folder))


CHECKS: dict[str, Callable[[str], None]] = {
    "target": _target,
    "drafter": _drafter,
    "checkpoint": _drafter,
    "init_from": _drafter,
    "prompts": _prompts,
    "traffic": _prompts,
    "growing_traffic": _growing_prompts,  # whose last row may be half written
    "fit_prompts": _prompts,
    "samples": _samples,
    "schedule": _schedule,
    "trace": _trace,
    "tree": _tree,
    "run": _report,
    "config": _file,
    "out": _out,
    "dir": _out,
}
