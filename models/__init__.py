"""The drafters, the target, and drafter checkpoints."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.models.checkpoints import (
        CHANGED_TARGET,
        DRAFTERS,
        Checkpoint,
        Drafter,
        Target,
        UserError,
        build_drafter,
        checkpoint_of,
        load_drafter,
        read_checkpoint,
        save_drafter,
    )

__all__ = [
    "CHANGED_TARGET",
    "DRAFTERS",
    "Checkpoint",
    "Drafter",
    "Target",
    "UserError",
    "build_drafter",
    "checkpoint_of",
    "load_drafter",
    "read_checkpoint",
    "save_drafter",
]

if "DRAFTSMITH_KERNELS" in os.environ:
    import_module("draftsmith.models.kernels")  # before triton is imported, which its switch has to reach


def __getattr__(name: str) -> Any:
    """Return what `checkpoints` holds under a name. It is imported now: whoever reads settings does not need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module("draftsmith.models.checkpoints"), name)
