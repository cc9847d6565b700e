"""The class of every drafter. The decoder, the training loop and checkpoints each know one part of it and no more."""

from typing import Any, ClassVar

from draftsmith.models.drafter_configs import DrafterConfig
from draftsmith.models.drafter_parts.checkpoint_interface import StoredDrafter
from draftsmith.models.drafter_parts.decoding_interface import DecodingDrafter
from draftsmith.models.drafter_parts.training_interface import TrainedDrafter
from draftsmith.models.target.target import Target


class Drafter(DecodingDrafter, StoredDrafter, TrainedDrafter):
    """Proposes tokens for one target. A drafter without parameters is neither trained nor stored."""

    kind: ClassVar[str]
    config_class: ClassVar[type[DrafterConfig]]

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config: Any = config

    @classmethod
    def from_target(cls, config: Any, target: Target) -> "Drafter":
        """Return a new drafter for the target, with starting weights; by default one without weights."""
        return cls(config)

    def as_target(self) -> Target | None:
        """Return itself as a model that writes text, by its weights at each moment; None: it only drafts."""
        return None
