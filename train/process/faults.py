"""Faults during training, each of which ends in one line that names the cause and the mend."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch.distributed import DistError

from draftsmith.data.progress import warn
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.files import DISK_FAULTS, write_json
from draftsmith.train.process.stages import Stages

NONFINITE = "nonfinite.json"
RESUMES = "the same command goes on from the newest checkpoint"
# Texts by which errors of torch tell of a lost process.
PROCESS_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class NonFiniteSteps:
    """Counts steps in a row whose loss or gradient is not finite; each of them changes nothing."""

    def __init__(self, run: Path, max_steps: int, is_main: bool) -> None:
        self._run, self._max_steps, self._is_main = run, max_steps, is_main
        self._steps: list[dict] = []

    def note(self, finite: bool, step: int, samples: list[int]) -> None:
        """Note whether a step was finite. Raises `UserError`, alike on all ranks, at the last of too many in a row."""
        if finite:
            self._steps = []
            return
        self._steps.append({"step": step, "samples": samples})
        if len(self._steps) < self._max_steps:
            if self._is_main:
                warn(f"step {step} is skipped: its loss or gradient is not finite")
            return
        if self._is_main:
            write_json(self._run / NONFINITE, self._steps, indent=1)
        where = f"{self._max_steps} steps in a row, up to step {step}" if self._max_steps > 1 else f"step {step}"
        raise UserError(
            f"loss or gradient were not finite in {where}; the samples are listed in {self._run / NONFINITE}: lower "
            "optimizer.learning_rate, or take out samples that are broken; with other settings give another run.dir"
        )


@contextlib.contextmanager
def failing_together(error_class: type[Exception] = UserError) -> Iterator[None]:
    """Raise a `UserError` on all processes where one of them raises an `error_class` inside the block.

    All processes enter the block together.
    """
    failures = []
    try:
        yield
    except error_class as error:
        failures.append(first_line(error))
    if failures := gather_object(failures):
        raise UserError(failures[0])


@contextlib.contextmanager
def in_one_line(stages: Stages, rank: int, num_ranks: int) -> Iterator[None]:
    """Turn errors inside the block that come from the disk or from another process into a `UserError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not (faults := [text for text in DISK_FAULTS if text in str(error)]):
            raise
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        raise UserError(
            f"the disk takes no more{where}: {faults[0]}: make room, and give the same command again; {RESUMES}"
        ) from error
    except RuntimeError as error:
        if num_ranks == 1 or not (isinstance(error, DistError) or any(text in str(error) for text in PROCESS_LOST)):
            raise
        waited = "imed out" in str(error)
        raise UserError(
            f"process {rank} of {num_ranks} {'waited run.timeout for' if waited else 'lost'} another at step "
            f"{stages.step}, {stages.now[0]} ({first_line(error)}): see what that one said; {RESUMES}"
        ) from error
