"""The drafters, the target, and drafter checkpoints.

`DRAFTERS` is the whole list of families: a new one adds its file and one line here.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models.base import Drafter, drafter_entry
from draftsmith.models.draft_model import DraftModel
from draftsmith.models.eagle3 import Eagle3
from draftsmith.models.errors import UserError
from draftsmith.models.identity import check_identity, identity
from draftsmith.models.medusa import Medusa
from draftsmith.models.ngram import Ngram
from draftsmith.models.none import NoDrafter
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import vocabulary_hash

__all__ = ["DRAFTERS", "Drafter", "Target", "UserError", "load_drafter", "save_drafter"]

DRAFTERS: dict[str, type[Drafter]] = {
    "eagle3": Eagle3,
    "medusa": Medusa,
    "draft_model": DraftModel,
    "ngram": Ngram,
    "none": NoDrafter,
}

CHANGED_TARGET = "target"  # folder of a checkpoint with the target that its drafter was trained along with

# How checkpoints that draftsmith did not write tell their family; any other causal language model is a draft model.
ARCHITECTURES = {"LlamaForCausalLMEagle3": "eagle3", "Eagle3LlamaForCausalLM": "eagle3", "MedusaModel": "medusa"}


def save_drafter(drafter: Drafter, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write config.json and model.safetensors, laid out as the serving engines load them."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in drafter.engine_tensors().items()
    }
    own = {**drafter_entry(drafter), "trained_for": identity(drafter.target)}
    if (token_ids := drafter.draft_to_target()) is not None:
        own["draft_vocab_hash"] = vocabulary_hash(token_ids)
    config = {
        **drafter.engine_config(),
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),  # the older name, which engines still read
        "draftsmith": own,
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if drafter.changes_target():
        drafter.write_changed_target(directory / CHANGED_TARGET)


def load_drafter(name: str | Path, target: Target) -> Drafter:
    """A drafter for the target, on its device and in its dtype.

    `name` is a checkpoint directory, a Hub name, or the kind of a drafter that needs no training (`ngram`, `none`).
    Raises `UserError` where there is no such drafter or it was made for another target.
    """
    if str(name) in DRAFTERS and not Path(name).is_dir():
        drafter_class = DRAFTERS[str(name)]
        drafter = drafter_class.from_target(drafter_class.config_class(kind=str(name)), target)
        if drafter.trainable():
            raise UserError(f"drafter {str(name)!r} needs a checkpoint: give the directory of a trained one")
    else:
        directory = _checkpoint_directory(name)
        config = _read_config(directory)
        own = config.get("draftsmith", {})
        trained_for, recorded_hash = own.pop("trained_for", {}), own.pop("draft_vocab_hash", None)
        mend = "measure and serve it with the tokenizer and template that it was trained with, or train it again"
        check_identity(f"drafter {name}", trained_for, target, ("tokenizer_fingerprint", "template_hash"), mend)
        drafter = DRAFTERS[_kind(config)].from_engine(config, _read_tensors(directory), target)
        drafter.trained_for = trained_for
        token_ids = drafter.draft_to_target()
        if recorded_hash and (token_ids is None or vocabulary_hash(token_ids) != recorded_hash):
            raise UserError(f"{directory} holds another draft vocabulary than it was trained with: take another copy")
    for parameter in drafter.parameters():  # not the buffers: rotary frequencies need fp32
        parameter.data = parameter.data.to(target.dtype)
    return drafter.to(target.device).eval()


def _checkpoint_directory(name: str | Path) -> Path:
    directory = Path(name)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors"]))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
            without = [kind for kind, drafter_class in DRAFTERS.items() if not drafter_class.can_sample]
            raise UserError(
                f"no drafter at {str(name)!r}: give a checkpoint directory, a Hub name, or one of {', '.join(without)}"
            ) from None
    return directory


def _read_config(directory: Path) -> dict:
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} holds no config.json: give a checkpoint directory, such as runs/NAME/best")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from None


def _kind(config: dict) -> str:
    if "draftsmith" in config:
        kind = config["draftsmith"]["kind"]
        if kind not in DRAFTERS:
            raise UserError(f"this checkpoint holds a drafter of kind {kind!r}, which this version does not know")
        return kind
    architectures = config.get("architectures") or ["none named"]
    return ARCHITECTURES.get(architectures[0], "draft_model")


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no .safetensors file: convert its weights first")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except SafetensorError as error:
            raise UserError(f"{file} is damaged: {error}") from None
    return tensors
