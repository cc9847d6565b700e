"""Checkpoints of a run, written whole, and what a resumed run goes on from.

A checkpoint is a drafter as the engines load it; its `trainer/` holds what resuming needs: weights in fp32 and the
optimiser's state (training_state.py), the step, and a manifest with the checksum of every file. All else follows from
these: the step gives the learning rate, the order of the data and the random numbers (`seed_step`), the evaluations in
the checkpoints give `evaluation.patience`. So a run goes on as it would have. In another layout or on another number of
processes it does so up to rounding, but for what a drafter draws by chance (each team has random numbers of its own)
and for batches counted in tokens (of which each process takes as many samples).
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.progress import size_text, warn
from draftsmith.models import CHANGED_TARGET, Drafter
from draftsmith.models.checkpoints import DrafterFiles, files_of
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.files import file_hash, whole_folder
from draftsmith.models.storage.reading import read_typed
from draftsmith.train.hardware.layouts import whole_weights
from draftsmith.train.process.faults import failing_together
from draftsmith.train.run_folder.training_state import MOMENTUM, PARTS, WEIGHT, load_parts, part_file, whole_part

TRAINER, MANIFEST, PROGRESS = "trainer", "manifest.json", "progress.json"
WEIGHTS = "model.safetensors"
RESUMABLE = 2  # checkpoints that keep their training state: the newest, and one in case that it is damaged


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint's folder after so many steps."""
    return f"step-{step:06d}"


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of steps after which a checkpoint was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(run: Path) -> list[Path]:
    """Return all complete checkpoints of a run, oldest first; old ones may hold only what was measured on them."""
    return sorted((run / "checkpoints").glob("step-[0-9]*[0-9]"), key=checkpoint_step)


# --- writing


@dataclass(frozen=True)
class StatePart:
    """A file of the training state of a checkpoint, in the CPU's memory."""

    part: str  # one of PARTS
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        save_file(self.tensors, part_file(folder / TRAINER, self.part))


@dataclass(frozen=True)
class Progress:
    """Steps and seconds of training that have led to a checkpoint."""

    step: int
    training_seconds: float

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder, with the folder of the training state."""
        (folder / TRAINER).mkdir()
        (folder / TRAINER / PROGRESS).write_text(json.dumps(asdict(self)) + "\n")


Piece = DrafterFiles | Progress | StatePart


def pieces_of(accelerator: Accelerator, drafter: Drafter, optimizer: Any, progress: Progress) -> Iterator[Piece]:
    """Yield the pieces of a checkpoint on the main process, each when its copy lies in the CPU's memory.

    All processes go through them together, and the others get nothing. The training state comes one part at a time, so
    that whoever keeps none has no more than one of them in memory.
    """
    files: list[DrafterFiles] = []
    with whole_weights(accelerator, drafter), failing_together(Exception):
        if accelerator.is_main_process:
            files = [files_of(drafter)]
    yield from files
    del files
    if accelerator.is_main_process:
        yield progress
    for part in PARTS:
        tensors = whole_part(accelerator, drafter, optimizer, part)
        if accelerator.is_main_process and (tensors or part != MOMENTUM):
            yield StatePart(part, tensors)


def save_checkpoint(accelerator: Accelerator, drafter: Drafter, optimizer: Any, run: Path, progress: Progress) -> None:
    """Write a checkpoint while training waits for it. All processes call this together.

    Raises `UserError` on every rank where the main one cannot write.
    """
    pieces = pieces_of(accelerator, drafter, optimizer, progress)
    with failing_together():
        try:
            if accelerator.is_main_process:
                write_checkpoint(run, progress.step, pieces)
        finally:
            for _ in pieces:  # which the others put together with the main process, also where that cannot write
                pass


def write_checkpoint(run: Path, step: int, pieces: Iterable[Piece]) -> None:
    """Write the pieces of a checkpoint, which appears when all of it is on disk.

    Raises `UserError` where that fails: nothing is left of the new checkpoint, and earlier ones are as they were.
    """
    final = run / "checkpoints" / checkpoint_name(step)
    try:
        with whole_folder(final) as partial:
            fill(partial, pieces)
    except UserError as error:
        # torch, safetensors and the system each have their own error for a full disk: the free room tells it
        free, existing = size_text(shutil.disk_usage(run).free), resumable(run)
        raise UserError(
            f"{final} cannot be written ({error}; {free} free): make room or mend the disk, and give the same command "
            f"again; it goes on from {existing[-1].name if existing else 'the start'}"
        ) from error


def fill(folder: Path, pieces: Iterable[Piece]) -> None:
    """Write the pieces of a checkpoint and their manifest into a folder. Raises `UserError` for whatever fails."""
    try:
        for piece in pieces:
            piece.write(folder)
        (folder / TRAINER / MANIFEST).write_text(json.dumps(manifest(folder), indent=1) + "\n")
    except Exception as error:
        raise UserError(first_line(error)) from error


def manifest(checkpoint: Path) -> dict[str, str]:
    """Return the checksum of each file of a checkpoint by its path."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(checkpoint)): file_hash(path) for path in files}


def rotate(run: Path, keep: int | None, best: Path | None, whole: str | None = None) -> None:
    """Keep the weights of the newest `keep` checkpoints and of the best, the training state of the newest two of them.

    Of the checkpoint that `whole` names both are kept, for a longer run goes on from there. What was measured stays in
    every checkpoint, for the report and for `evaluation.patience`. None keeps all.
    """
    if keep is None:
        return
    existing = [checkpoint for checkpoint in checkpoints(run) if checkpoint.name != whole]
    for checkpoint in existing[: -min(keep, RESUMABLE)]:
        remove(checkpoint / TRAINER)
    for checkpoint in existing[:-keep]:
        if checkpoint != best:
            remove(checkpoint / CHANGED_TARGET)
            (checkpoint / WEIGHTS).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove a folder so that an interruption leaves none of it under its name."""
    if folder.is_dir():
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}")))


# --- resuming


def resumable(run: Path) -> list[Path]:
    """Return the checkpoints that have their training state, oldest first."""
    return [checkpoint for checkpoint in checkpoints(run) if (checkpoint / TRAINER).is_dir()]


def damage(checkpoint: Path) -> str | None:
    """Return the first file of a checkpoint that is not as it was written; None where all are."""
    try:
        expected = read_typed(dict[str, str], checkpoint / TRAINER / MANIFEST)
        return next((name for name, digest in expected.items() if file_hash(checkpoint / name) != digest), None)
    except (OSError, ValueError) as error:
        return first_line(error)


def set_damaged_aside(run: Path) -> None:
    """Rename resumable checkpoints that are newer than the newest whole one, and say so; remove what is half written.

    Raises `UserError` where there are resumable checkpoints, but none is whole.
    """
    for path in [path for pattern in (".*", "step-*/.*") for path in (run / "checkpoints").glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    existing = resumable(run)
    while existing and (file := damage(existing[-1])):
        damaged = existing.pop()
        if not existing:
            raise UserError(
                f"{damaged} is damaged ({file}), and there is no other to go on from: give another run.dir, or remove "
                f"{run} to start anew"
            )
        aside = damaged.with_name(f"damaged-{damaged.name}")
        remove(aside)
        damaged.rename(aside)
        warn(
            f"{damaged.name} is damaged ({file}); it is now {aside.name}, and the run goes on from {existing[-1].name}"
        )


def resume(accelerator: Accelerator, drafter: Drafter, optimizer: Any, run: Path) -> tuple[int, float]:
    """Load the training state of the newest whole checkpoint; return its step and its seconds of training, or 0 and 0.

    Raises `UserError` on every rank where checkpoints are there and none can be loaded.
    """
    with failing_together():
        if accelerator.is_main_process:
            set_damaged_aside(run)
    existing = resumable(run)
    if not existing:
        return 0, 0.0
    folder = existing[-1] / TRAINER
    if not part_file(folder, WEIGHT).is_file():
        raise UserError(
            f"the training state in {existing[-1]} is that of an older draftsmith: let that one end the run, or give "
            f"another run.dir and init_from={existing[-1]}, which starts with a fresh optimiser"
        )
    load_parts(accelerator, drafter, optimizer, folder)
    progress = read_typed(Progress, folder / PROGRESS)
    return progress.step, progress.training_seconds
