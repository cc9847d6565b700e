"""Training of drafters: the config, the loop, the folder of a run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftsmith.train.config import TrainConfig

if TYPE_CHECKING:
    from draftsmith.train.loop import train

__all__ = ["TrainConfig", "train"]


def __getattr__(name: str) -> Any:
    """Return `train`. It is imported now: whoever reads a config does not need torch."""
    if name != "train":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return import_module("draftsmith.train.loop").train
