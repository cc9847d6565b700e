"""`run.compile`: what torch.compile was found to speed up in a training step (docs/training.md)."""

import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from draftsmith.models.errors import UserError
from draftsmith.models.losses.losses import Teacher

P = ParamSpec("P")
T = TypeVar("T")


def check_compiles(device: torch.device) -> None:
    """Refuse where it would change nothing, and where there is nothing to compile with."""
    if device.type != "cpu":
        raise UserError("run.compile is for CPUs: on a GPU the loss is one kernel already; leave it out")
    if not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError("run.compile needs a C++ compiler: install g++, or leave it out")


def with_compiled_loss(compute: Callable[P, T]) -> Callable[P, T]:
    """The same function, in which drafter and target are compared in fewer passes over their logits.

    Compiled once for chunks of any number of rows, when it is first called.
    """
    plain, compiled = Teacher.compare, torch.compile(Teacher.compare, dynamic=True)

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        Teacher.compare = compiled  # type: ignore[method-assign]
        try:
            return compute(*args, **kwargs)
        finally:
            Teacher.compare = plain  # type: ignore[method-assign]

    return run
