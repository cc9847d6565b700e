"""The folder that a command writes: what could not be written there is told before anything is loaded."""

import contextlib
from collections.abc import Iterator
from typing import Any

from draftsmith.data.processes import locked, rank_and_num_ranks
from draftsmith.data.progress import notice
from draftsmith.models.errors import UserError
from draftsmith.models.files import require_writable

MEASURED = {  # by command: the file of its --out that an earlier one may have written
    "evaluate": "evaluation.md",
    "tune": "evaluation.md",
    "load-test": "load.json",
    "replay": "replay.json",
    "plan": "plan.json",
}


@contextlib.contextmanager
def output_folder(command: str, settings: Any) -> Iterator[None]:
    """Check the folder --out of a command, and keep it for this process while the command measures.

    Raises `UserError` for a folder that cannot be written to, that another process holds, or that has a measurement of
    its own. Commands without the flag, and those that lock what they write themselves, are only checked.
    """
    if not hasattr(settings, "out") or getattr(settings, "dry_run", False) or rank_and_num_ranks()[0]:
        yield
        return
    out = settings.out
    require_writable(out)
    if command not in MEASURED:
        yield
        return
    if (out / "config.json").is_file():
        raise UserError(
            f"--out {out} holds a model, and what was measured of it in its training or at its export must stay: give "
            f"another folder, such as --out {out.parent / 'evaluation'}"
        )
    if (out / MEASURED[command]).is_file():
        notice(f"{out / MEASURED[command]} is of an earlier evaluation and will be overwritten")
    with locked(out):
        yield
