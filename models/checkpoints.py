"""The families of drafters, and their checkpoints.

`DRAFTERS` is the whole list of families: a new one adds its file and one line here.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models.drafter_configs import CascadeConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.drafter_parts.layouts import Checkpoint, read_checkpoint
from draftsmith.models.drafter_parts.vocabulary import vocabulary_hash
from draftsmith.models.drafters.dflash import DFlash
from draftsmith.models.drafters.dflash2 import DFlash2
from draftsmith.models.drafters.domino import Domino
from draftsmith.models.drafters.draft_model import DraftModel
from draftsmith.models.drafters.dspark import DSpark
from draftsmith.models.drafters.eagle import Eagle
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.drafters.hydra import Hydra
from draftsmith.models.drafters.medusa import Medusa
from draftsmith.models.drafters.mlp_speculator import MLPSpeculator
from draftsmith.models.drafters.mtp import Mtp
from draftsmith.models.drafters.p_eagle import PEagle
from draftsmith.models.errors import UserError, errors_of, library_errors
from draftsmith.models.storage.files import whole_folder, write_json
from draftsmith.models.target.identity import check_identity, identity
from draftsmith.models.target.target import Target
from draftsmith.models.training_free.cascade import Cascade
from draftsmith.models.training_free.draft_model_cascade import DraftModelCascade
from draftsmith.models.training_free.lookahead import Lookahead
from draftsmith.models.training_free.ngram import Ngram
from draftsmith.models.training_free.no_drafter import NoDrafter
from draftsmith.models.training_free.suffix import Suffix

DRAFTERS: dict[str, type[Drafter]] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "p_eagle": PEagle,
    "dflash": DFlash,
    "dflash2": DFlash2,
    "dspark": DSpark,
    "domino": Domino,
    "mtp": Mtp,
    "medusa": Medusa,
    "hydra": Hydra,
    "mlp_speculator": MLPSpeculator,
    "draft_model": DraftModel,
    "ngram": Ngram,
    "suffix": Suffix,
    "lookahead": Lookahead,
    "none": NoDrafter,
}

CHANGED_TARGET = "target"  # folder of a checkpoint with the target that its drafter was trained along with


@dataclass(frozen=True)
class DrafterFiles:
    """The files of a drafter as it was at a moment, in the CPU's memory."""

    checkpoint: Checkpoint
    target: Target
    changed_weights: dict[str, Tensor] | None  # of the target that was trained along; None: it is as it was

    def write(self, folder: Path) -> None:
        """Write config.json and model.safetensors, laid out as the serving engines load them, into a folder."""
        save_file(self.checkpoint.tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_json(folder / "config.json", self.checkpoint.config)
        if self.changed_weights is not None:
            self.target.model.save_pretrained(folder / CHANGED_TARGET, state_dict=self.changed_weights)
            if self.target.tokenizer is not None:
                self.target.tokenizer.save_pretrained(folder / CHANGED_TARGET)


def files_of(drafter: Drafter, dtype: torch.dtype = torch.float32) -> DrafterFiles:
    """Return the files of a drafter as it is now; training that goes on does not change them."""
    changed = drafter.changed_target() if drafter.config.changes_target else None
    return DrafterFiles(checkpoint_of(drafter, dtype), drafter.target, changed)


def save_drafter(drafter: Drafter, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the files of a drafter, all or nothing."""
    with whole_folder(directory) as folder:
        files_of(drafter, dtype).write(folder)


def checkpoint_of(drafter: Drafter, dtype: torch.dtype) -> Checkpoint:
    """Return a drafter in the engines' layout, with a copy of its weights in the CPU's memory."""
    tensors = {}
    for name, tensor in drafter.engine_tensors().items():
        own_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        tensors[name] = tensor.detach().to("cpu", own_dtype, copy=True, memory_format=torch.contiguous_format)
    own = {**asdict(drafter.config), "trained_for": identity(drafter.target)}
    if drafter.trained_length is not None:
        own["trained_length"] = drafter.trained_length
    if (token_ids := drafter.draft_to_target()) is not None:
        own["draft_vocab_hash"] = vocabulary_hash(token_ids)
    config = {
        **drafter.engine_config(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),  # the older name, which engines still read
        "draftsmith": own,
    }
    return Checkpoint(drafter.kind, config, tensors)


def check_reads_same(drafter: Drafter, name: str | Path, target: Target) -> None:
    """Raise `UserError` where a drafter was trained with another tokenizer or chat template than the target's."""
    mend = "measure and serve it with the tokenizer and template that it was trained with, or train it again"
    parts = ("tokenizer_fingerprint", "template_hash")
    check_identity(f"drafter {name}", drafter.trained_for or {}, target, parts, mend)


def load_drafter(name: str | Path, target: Target) -> Drafter:
    """Return a drafter for the target, on its device and in its dtype.

    `name` is a checkpoint directory, a Hub name, the kind of a drafter that needs no training (`ngram`, `suffix`,
    `lookahead`, `none`), or `mtp` for the target's own head. `ngram+CHECKPOINT` and `suffix+CHECKPOINT` are cascades,
    and so is `SMALL+LARGE` of two draft models. Raises `UserError` where there is no such drafter or it was
    made for another target.
    """
    first, plus, second = str(name).partition("+")
    if plus and not os.path.isdir(str(name)):  # which may be anything, and too long for a path
        return load_cascade(first, second, target)
    if str(name) in DRAFTERS and not Path(name).is_dir():
        drafter_class = DRAFTERS[str(name)]
        drafter = drafter_class.from_target(drafter_class.config_class(kind=str(name)), target)
        if drafter.trainable() and not drafter.comes_with_target:
            raise UserError(f"drafter {str(name)!r} needs a checkpoint: give the directory of a trained one")
    else:
        checkpoint = read_checkpoint(name, target)
        with errors_of(f"drafter {name}"):
            drafter = build_drafter(checkpoint, target)
        check_reads_same(drafter, name, target)
    for parameter in drafter.parameters():  # not the buffers: rotary frequencies need fp32
        parameter.data = parameter.data.to(target.dtype)
    return drafter.to(target.device).eval()


def load_cascade(first: str, second: str, target: Target) -> Cascade | DraftModelCascade:
    """Return the cascade of a lookup and a trained drafter, or of two draft models.

    Raises `UserError` where the two make none.
    """
    if second in DRAFTERS and not os.path.isdir(second):
        raise UserError(f"drafter '{first}+{second}': behind the + give the directory of a trained drafter")
    before, behind = load_drafter(first, target), load_drafter(second, target)
    if isinstance(before, Ngram | Suffix):
        return Cascade(CascadeConfig(), before, behind)
    if isinstance(before, DraftModel) and isinstance(behind, DraftModel):
        return DraftModelCascade(before, behind)
    raise UserError(
        f"drafter '{first}+{second}': {before.kind} before {behind.kind} is no cascade: give ngram or suffix before "
        "the +, or two draft models, the smaller one first"
    )


def build_drafter(checkpoint: Checkpoint, target: Target) -> Drafter:
    """Return the drafter of a checkpoint in fp32.

    Raises `UserError` where its kind is unknown, its files are damaged, or it was made for another target.
    """
    if checkpoint.kind not in DRAFTERS:
        raise UserError(
            f"this checkpoint holds a drafter of kind {checkpoint.kind!r}, which this version does not know: give one "
            f"of {', '.join(DRAFTERS)}"
        )
    if OWN_EMBEDDING in checkpoint.tensors and not DRAFTERS[checkpoint.kind].can_embed:
        raise UserError(
            f"this drafter's {OWN_EMBEDDING} is not the target's embedding: give the target that it was trained on "
            f"(a drafter of kind {checkpoint.kind} cannot have an embedding of its own)"
        )
    own = dict(checkpoint.config.get("draftsmith", {}))
    trained_for, recorded_hash = own.pop("trained_for", {}), own.pop("draft_vocab_hash", None)
    trained_length = own.pop("trained_length", None)
    config = {**checkpoint.config, **({"draftsmith": own} if own else {})}
    with library_errors(f"this drafter of kind {checkpoint.kind} does not load", "take another copy of it"):
        drafter = DRAFTERS[checkpoint.kind].from_engine(config, checkpoint.tensors, target)
    drafter.trained_for, drafter.trained_length = trained_for, trained_length
    token_ids = drafter.draft_to_target()
    if token_ids is not None and len(set(token_ids.tolist()) & set(range(target.vocab_size))) != len(token_ids):
        raise UserError(
            "this drafter's draft vocabulary is not of distinct token ids of the target: its d2t or token_map is "
            "damaged, take another copy"
        )
    if recorded_hash and (token_ids is None or vocabulary_hash(token_ids) != recorded_hash):
        raise UserError(
            f"this checkpoint holds another draft vocabulary than the one it was trained with ({recorded_hash}): its "
            "files are not of one checkpoint, take another copy"
        )
    return drafter
