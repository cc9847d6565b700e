"""The part of a drafter that checkpoints use: config.json and tensors, laid out as serving engines load them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.models.errors import UserError
from draftsmith.models.layers import checkpoint_tensors
from draftsmith.models.target.target import Target

M = TypeVar("M", bound=nn.Module)
OWN_EMBEDDING = "embed_tokens.weight"  # of a checkpoint; without it the embedding is the target's


class StoredDrafter:
    """The part of a drafter that is written to a checkpoint; one without parameters has none."""

    kind: ClassVar[str]
    served_in_target: ClassVar[bool] = False  # engines look for it among the target's own tensors
    can_embed: ClassVar[bool] = False  # a checkpoint may bring an embedding in place of the target's
    trained_for: dict[str, Any] | None = None  # the target's identity (identity.py), as the checkpoint has it
    trained_length: int | None = None  # tokens of the longest text that it was trained on; None: nobody noted it

    @property
    def comes_with_target(self) -> bool:
        """Whether a new one is no random one: the target's own files hold it."""
        return False

    def engine_config(self) -> dict[str, Any]:
        """Return config.json as the serving engines read it."""
        raise TypeError(f"{self.kind} has no checkpoint")

    def engine_tensors(self) -> dict[str, Tensor]:
        """Return model.safetensors as the serving engines read it."""
        assert isinstance(self, nn.Module)
        return checkpoint_tensors(self)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Any:
        """Return the drafter of a checkpoint: the inverse of the two above.

        Raises `UserError` where the checkpoint does not fit the target or lacks something.
        """
        raise UserError(f"this checkpoint is of kind {cls.kind}, which is never stored: give {cls.kind} itself")

    def changed_target(self) -> dict[str, Tensor]:
        """Return a copy of the weights of the target that was trained along, by their names in its own files."""
        raise TypeError(f"{self.kind} does not change the target")

    def check_in_target(self) -> None:
        """Raise `UserError` where no engine would serve a copy of the target with the drafter in it."""
        raise TypeError(f"{self.kind} is not served in the target")

    def write_in_target(self, directory: Path) -> None:
        """Write a copy of the target, with the drafter among its tensors, into an empty directory.

        Raises `UserError` where no engine would serve it.
        """
        raise TypeError(f"{self.kind} is not served in the target")


def check_same_shape(what: str, config: dict[str, Any], target: Target) -> None:
    """Refuse a drafter that was made for a target of another width or vocabulary."""
    for key, expected in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        recorded = config.get(key)
        if key == "hidden_size":
            recorded = config.get("target_hidden_size", recorded)
        if recorded != expected:
            raise UserError(
                f"{what}: made for a target with {key} {recorded}, but {target.name} has {expected}: use the target "
                "that it was trained on, or another drafter"
            )


def loaded(build: Callable[[], M], tensors: dict[str, Tensor], what: str) -> M:
    """Return the module that `build` makes, with all of the tensors in it.

    It is first made without memory, so that nothing is allocated for sizes that config.json claims and no tensor has.
    Raises `UserError` naming what is missing, unknown, of another shape, or no floating-point numbers where these are
    due.
    """
    with torch.device("meta"):
        own = checkpoint_tensors(build())
    wrong = sorted(own.keys() ^ tensors.keys()) + sorted(
        f"{name} {list(tensors[name].shape)} instead of {list(own[name].shape)}"
        for name in own.keys() & tensors.keys()
        if own[name].shape != tensors[name].shape
    )
    if wrong:
        raise UserError(
            f"{what}: tensors missing, unknown or of another shape: {', '.join(wrong[:6])}; take another copy"
        )
    for name, tensor in own.items():
        if tensor.is_floating_point() != tensors[name].is_floating_point():
            raise UserError(f"{what}: {name} is of type {tensors[name].dtype}, which is not that of such a weight")
    module = build()
    for name, tensor in checkpoint_tensors(module).items():
        tensor.copy_(tensors[name])
    return module
