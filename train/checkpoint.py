"""Checkpoints of a run, written whole, and what a resumed run goes on from.

A checkpoint is a drafter as the engines load it; its `trainer/` holds optimiser and random state for resuming.
"""

import shutil
from pathlib import Path

from accelerate import Accelerator

from draftsmith.models import Drafter, save_drafter


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def checkpoints(run: Path) -> list[Path]:
    """All complete checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def save_checkpoint(accelerator: Accelerator, drafter: Drafter, run: Path, step: int) -> Path:
    """Write a checkpoint under a hidden name and rename it when all of it is on disk."""
    final = run / "checkpoints" / checkpoint_name(step)
    partial = final.with_name("." + final.name)
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        save_drafter(drafter, partial)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial / "trainer"))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        partial.rename(final)
    accelerator.wait_for_everyone()
    return final


def resume(accelerator: Accelerator, run: Path) -> int:
    """Load the newest checkpoint's training state; return its step, 0 where there is none."""
    existing = [checkpoint for checkpoint in checkpoints(run) if (checkpoint / "trainer").is_dir()]
    if not existing:
        return 0
    accelerator.load_state(str(existing[-1] / "trainer"))
    return checkpoint_step(existing[-1])
