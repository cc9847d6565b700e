"""The class of every drafter. The decoder, the training loop and checkpoints each know one part of it and no more."""

from dataclasses import dataclass
from typing import Any, ClassVar

from draftsmith.models.drafter_parts.checkpoint_interface import StoredDrafter
from draftsmith.models.drafter_parts.decoding_interface import DecodingDrafter
from draftsmith.models.drafter_parts.training_interface import TrainedDrafter
from draftsmith.models.target.target import Target


@dataclass
class DrafterConfig:
    """Settings that all families have; a family adds its own fields in a subclass beside its drafter."""

    kind: str
    fixed_fields: ClassVar[tuple[str, ...]] = ()  # decided by a checkpoint's tensors; the others by training

    @property
    def changes_target(self) -> bool:
        """Whether the target is trained along, so that a checkpoint holds a target of its own in `target/`."""
        return False

    @property
    def starts_from_files(self) -> bool:
        """Whether a new drafter is read from files, which decide on its size."""
        return False

    def for_overfitting(self) -> "DrafterConfig":
        """Return the config without what only helps on text that the drafter has not seen."""
        return self


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
