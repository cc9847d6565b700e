"""The places of targets and drafters: a directory, or a name on the Hub of which single files are fetched.

Neither torch nor transformers is imported here, so that a wrong name is reported at once.
"""

import os
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.ranges import named

CONFIG = "config.json"


def find_file(name: str | Path, file: str) -> Path | None:
    """Return the path of a file of a model, downloaded where need be; None where the model has no such file.

    Raises `UserError` where the Hub does not give the file.
    """
    if os.path.isdir(name):
        path = Path(name) / file
        return path if os.path.isfile(path) else None  # not there, too, under a name that is too long
    with library_errors(f"{file} of {str(name)!r} cannot be had", "give a Hub name or a model directory"):
        try:
            return Path(hf_hub_download(str(name), file))
        except EntryNotFoundError:
            return None


def target_config_file(name: str | Path) -> Path:
    """Return the path of a target's config.json. Raises `UserError` where there is none."""
    name = named("target", name)
    if os.path.isfile(name):
        raise UserError(f"{name} is a file: give a Hub name or a model directory, such as {Path(name).parent}")
    path = find_file(name, CONFIG)
    if path is None and not os.path.isdir(name):
        raise UserError(
            f"no target at {name!r}, for it is no folder, and the Hub has none of this name or cannot be reached: give "
            "a Hub name or a model directory"
        )
    if path is None:
        raise UserError(f"no target at {name!r}, for there is no config.json: give a Hub name or a model directory")
    return path


def drafter_config_file(name: str | Path) -> Path:
    """Return the path of a drafter's config.json. Raises `UserError`, naming a checkpoint nearby, without one."""
    name = named("drafter", name)
    directory = Path(name)
    if os.path.isfile(name):
        raise UserError(f"{name} is a file: give the folder of a checkpoint, such as {directory.parent}")
    is_directory = os.path.isdir(name)
    if not is_directory and directory.name == "best" and (newest := checkpoint_of_run(directory.parent)):
        raise UserError(f"{directory} is not there, for it is a measured checkpoint, and none was: give {newest}")
    try:
        path = find_file(name, CONFIG)
    except UserError:
        path = None
    if path is None and is_directory:
        example = checkpoint_of_run(directory) or "runs/NAME/best"
        raise UserError(f"{directory} holds no config.json: give a checkpoint directory, such as {example}")
    if path is None:
        raise UserError(
            f"no drafter at {name!r}: give a checkpoint directory, a Hub name, or a drafter without training such as "
            "ngram, suffix or none"
        )
    return path


def checkpoint_of_run(run: Path) -> Path | None:
    """Return the best checkpoint of a run's folder, or the newest where none was measured; None without any."""
    newest = max((run / "checkpoints").glob("step-*"), default=None)
    return run / "best" if (run / "best").is_dir() else newest
