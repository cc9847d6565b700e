"""Training of drafters: the config, the loop, the folder of a run."""

from draftsmith.train.config import TrainConfig
from draftsmith.train.loop import train

__all__ = ["TrainConfig", "train"]
