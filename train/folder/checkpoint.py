"""Checkpoints of a run, written whole, and what a resumed run goes on from.

A checkpoint is a drafter as the engines load it; its `trainer/` holds what resuming needs: weights in fp32 and the
optimiser's state (training_state.py), the step, and a manifest with the checksum of every file. All else is a function
of these: the learning rate, the order of the data and the random numbers (`seed_step`) of the step, patience of the
evaluations that lie in the checkpoints. So a run goes on as it would have, also in another layout or on another number
of processes.
"""

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.torch import save_file

from draftsmith.data.progress import notice, size_text
from draftsmith.models import CHANGED_TARGET, Drafter, save_drafter
from draftsmith.models.errors import UserError, first_line
from draftsmith.train.folder.training_state import PARTS, WEIGHT, load_parts, part_file, whole_part
from draftsmith.train.hardware.placement import whole_weights

TRAINER, MANIFEST, PROGRESS = "trainer", "manifest.json", "progress.json"
WEIGHTS = "model.safetensors"
RESUMABLE = 2  # of the checkpoints that are kept: the newest, and one for the case that it is damaged


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(run: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first; of some only what was measured on them is left."""
    return sorted((run / "checkpoints").glob("step-*"), key=checkpoint_step)


# --- writing


def save_checkpoint(
    accelerator: Accelerator, drafter: Drafter, optimizer: Any, run: Path, step: int, seconds: float
) -> Path:
    """Write a checkpoint under a hidden name and rename it when all of it is on disk.

    `seconds`: of training so far. Raises `UserError` on every rank where one of them cannot write; what is there of the
    new checkpoint is removed, and earlier ones are as they were.
    """
    final = run / "checkpoints" / checkpoint_name(step)
    partial = final.with_name("." + final.name)

    def write_drafter() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        save_drafter(drafter, partial)
        (partial / TRAINER).mkdir()
        (partial / TRAINER / PROGRESS).write_text(json.dumps({"step": step, "training_seconds": seconds}) + "\n")

    def save_part(part: str) -> list[str]:
        tensors, file = whole_part(accelerator, drafter, optimizer, part), part_file(partial / TRAINER, part)
        return failures(accelerator, run, (lambda: save_file(tensors, file)) if on_main else None)

    def finish() -> None:
        (partial / TRAINER / MANIFEST).write_text(json.dumps(manifest(partial), indent=1) + "\n")
        sync(partial)
        partial.rename(final)

    on_main = accelerator.is_main_process
    with whole_weights(accelerator, drafter):
        failed = failures(accelerator, run, write_drafter if on_main else None)
    for part in PARTS:  # one at a time, so that the main process's memory holds no more than one of them
        failed = failed or save_part(part)
    failed = failed or failures(accelerator, run, finish if on_main else None)
    if failed:
        if on_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"{final} cannot be written ({failed[0]}): make room or mend the disk, and give the same command again; it "
            f"goes on from {existing[-1].name if (existing := resumable(run)) else 'the start'}"
        )
    return final


def failures(accelerator: Accelerator, run: Path, act: Callable[[], None] | None) -> list[str]:
    """Act on this rank, if there is something to do; what went wrong on any rank, known to all.

    torch, safetensors and the system each have their own error for a full disk, so the room that is left is told, too.
    """
    failed = []
    if act is not None:
        try:
            act()
        except Exception as error:
            failed.append(f"{first_line(error)}; {size_text(shutil.disk_usage(run).free)} free")
    return gather_object(failed)


def manifest(checkpoint: Path) -> dict[str, str]:
    """Checksum of each file of a checkpoint by its path."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(checkpoint)): checksum(path) for path in files}


def checksum(path: Path) -> str:
    digest = sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


def sync(checkpoint: Path) -> None:
    """Wait until the files are on the disk: a renamed folder with empty files would pass for a checkpoint."""
    for path in checkpoint.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def rotate(run: Path, keep: int | None) -> None:
    """Leave the weights of the newest `keep` checkpoints and of the best, the training state of the newest two of them.

    What was measured stays in every checkpoint, for the report and for `evaluation.patience`.
    """
    if keep is None:
        return
    existing = checkpoints(run)
    best = (run / "best").resolve()
    for checkpoint in existing[: -min(keep, RESUMABLE)]:
        remove(checkpoint / TRAINER)
    for checkpoint in existing[:-keep]:
        if checkpoint.resolve() != best:
            remove(checkpoint / CHANGED_TARGET)
            (checkpoint / WEIGHTS).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a folder so that an interruption leaves none of it under its name."""
    if folder.is_dir():
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}")))


# --- resuming


def resumable(run: Path) -> list[Path]:
    return [checkpoint for checkpoint in checkpoints(run) if (checkpoint / TRAINER).is_dir()]


def damage(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that is not as it was written; None where it is whole."""
    try:
        expected: dict[str, str] = json.loads((checkpoint / TRAINER / MANIFEST).read_text())
        return next((name for name, digest in expected.items() if checksum(checkpoint / name) != digest), None)
    except (OSError, ValueError) as error:
        return first_line(error)


def set_damaged_aside(run: Path) -> None:
    """Rename resumable checkpoints that are newer than the newest whole one, and say so; clear up what was half done.

    Raises `UserError` where there are some, but none is whole.
    """
    for left in [path for pattern in (".*", "step-*/.*") for path in (run / "checkpoints").glob(pattern)]:
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    found = resumable(run)
    while found and (file := damage(found[-1])):
        damaged = found.pop()
        if not found:
            raise UserError(
                f"{damaged} is damaged ({file}), and there is no other to go on from: give another run.dir, or remove "
                f"{run} to start anew"
            )
        aside = damaged.with_name(f"damaged-{damaged.name}")
        remove(aside)
        damaged.rename(aside)
        notice(f"{damaged.name} is damaged ({file}); it is now {aside.name}, and the run goes on from {found[-1].name}")


def resume(accelerator: Accelerator, drafter: Drafter, optimizer: Any, run: Path) -> tuple[int, float]:
    """Load the training state of the newest whole checkpoint; its step and seconds of training, 0 where there is none.

    Raises `UserError` on every rank where checkpoints are there and none can be loaded.
    """
    problem: list[str] = []
    if accelerator.is_main_process:
        try:
            set_damaged_aside(run)
        except UserError as error:
            problem = [str(error)]
    if problem := gather_object(problem):
        raise UserError(problem[0])
    found = resumable(run)
    if not found:
        return 0, 0.0
    folder = found[-1] / TRAINER
    if not part_file(folder, WEIGHT).is_file():
        raise UserError(
            f"the training state in {found[-1]} is that of an older draftsmith: let that one end the run, or give "
            f"another run.dir and init_from={found[-1]}, which starts with a fresh optimiser"
        )
    load_parts(accelerator, drafter, optimizer, folder)
    progress = json.loads((folder / PROGRESS).read_text())
    return progress["step"], progress["training_seconds"]
