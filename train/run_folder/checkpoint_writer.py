"""Checkpoints that are written while training goes on: copied into memory, and written by a thread of their own.

The copy holds 16 bytes of each trained weight, on the main process's machine: the weights as engines load them, the
weights as they are trained, and two moments, all in fp32. Where that is more than half of the memory that is free,
training waits, and the parts are written one after the other, as they are where the run needs the checkpoint at once.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from draftsmith.data.progress import notice, size_text, warn
from draftsmith.models import Drafter
from draftsmith.models.errors import first_line
from draftsmith.train.process.faults import failing_together
from draftsmith.train.run_folder.checkpoint import Piece, Progress, pieces_of, save_checkpoint, write_checkpoint

COPIED_BYTES, COPIED_BYTES_FROZEN = 16, 8  # of a weight, trained or not
FREE_SHARE = 0.5  # of the memory that is free, which a copy may take


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, while training waits or beside it.

    It is made before the drafter is divided into pieces. All processes call `save`, `save_beside` and `wait` together.
    Each raises `UserError` on all of them where a checkpoint, or the one before, cannot be written.
    """

    def __init__(self, accelerator: Accelerator, drafter: Drafter, run: Path, tidy: Callable[[], None]) -> None:
        """`tidy` is called after a checkpoint that was written beside training, on the main process."""
        self._accelerator, self._drafter, self._run, self._tidy = accelerator, drafter, run, tidy
        self._copied_bytes = sum(
            parameter.numel() * (COPIED_BYTES if parameter.requires_grad else COPIED_BYTES_FROZEN)
            for parameter in drafter.parameters()
        )
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None  # on the main process: the newest checkpoint beside training
        self._said = False

    @property
    def failed(self) -> bool:
        """Whether a checkpoint could not be written beside training; `wait` raises the error."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def save(self, optimizer: Any, progress: Progress) -> None:
        """Write a checkpoint while training waits."""
        self.wait()
        save_checkpoint(self._accelerator, self._drafter, optimizer, self._run, progress)

    def save_beside(self, optimizer: Any, progress: Progress) -> None:
        """Write a checkpoint while training goes on, if memory holds a copy; then set `best` and thin out old ones."""
        self.wait()
        if self._has_room():
            pieces = list(pieces_of(self._accelerator, self._drafter, optimizer, progress))
            if self._accelerator.is_main_process:
                self._writing = self._thread.submit(self._write, progress.step, pieces)
            return
        self.save(optimizer, progress)
        if self._accelerator.is_main_process:
            self._tidy()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun beside training is written."""
        writing, self._writing = self._writing, None
        with failing_together(Exception):
            if writing is not None:
                writing.result()

    def close(self) -> None:
        """Wait for it on this process alone, whatever ended the run; tell where it failed."""
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()):
            warn(first_line(error))

    def _write(self, step: int, pieces: list[Piece]) -> None:
        write_checkpoint(self._run, step, pieces)
        pieces.clear()
        self._tidy()

    def _has_room(self) -> bool:
        """Return whether the memory of the main process's machine holds a copy; say once where it does not."""
        free = psutil.virtual_memory().available
        (has_room,) = broadcast_object_list([self._copied_bytes <= FREE_SHARE * free])
        if self._accelerator.is_main_process and not (has_room or self._said):
            self._said = True
            notice(
                f"training waits for its checkpoints: a copy of one, to be written beside it, takes "
                f"{size_text(self._copied_bytes)} of this machine's memory, of which {size_text(free)} are free"
            )
        return has_room
