"""The folder of a command that measures: kept for one process, from before anything is loaded."""

import contextlib
from collections.abc import Iterator
from typing import Any

from draftsmith.data.processes import locked, rank_and_num_ranks
from draftsmith.data.progress import notice
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import finish_moving

MEASURED = {  # by command: the file of its --out that an earlier one may have written
    "evaluate": "evaluation.md",
    "tune": "evaluation.md",
    "load-test": "load.json",
    "replay": "replay.json",
    "plan": "plan.json",
    "tune-server": "server_tuning.json",
}


@contextlib.contextmanager
def output_folder(command: str, settings: Any) -> Iterator[None]:
    """Keep the folder --out of a command that measures for this process; other commands keep their folders themselves.

    Raises `UserError` for a folder that another process holds, and for that of a model or a run, which may have a
    measurement of its own.
    """
    if command not in MEASURED or rank_and_num_ranks()[0]:
        yield
        return
    out = settings.out
    if (out / "config.json").is_file():
        raise UserError(
            f"--out {out} holds a model, and what was measured of it in its training or at its export must stay: give "
            f"another folder, such as --out {out.parent / 'evaluation'}"
        )
    if command in ("evaluate", "tune") and (out / "config.yaml").is_file():
        raise UserError(
            f"--out {out} is a run with evaluations of its own: give a folder in it, as {out / 'evaluation'}"
        )
    if (out / MEASURED[command]).is_file():
        notice(f"{out / MEASURED[command]} is of an earlier evaluation and will be overwritten")
    with locked(out):
        finish_moving(out)
        yield
