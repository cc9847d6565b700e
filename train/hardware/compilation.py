"""`run.compile`: what torch.compile was found to speed up in a training step (docs/training.md)."""

import shutil

import torch

from draftsmith.models.errors import UserError


def check_compiles(device: torch.device) -> None:
    """Refuse where it would change nothing, and where there is nothing to compile with."""
    if device.type != "cpu":
        raise UserError("run.compile is for CPUs: on a GPU the loss is one kernel already; leave it out")
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError("run.compile needs a C++ compiler: install g++, or leave it out")
