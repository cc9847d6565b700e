"""Checkpoints on disk, those of other projects too: read and brought into the engines' layout.

| layout | how it is told | what differs from the engines' layout |
|---|---|---|
| engines (vLLM, SGLang), ours | `architectures` | nothing |
| SafeAILab EAGLE-1, EAGLE-3 | `fc.weight` beside a plain Llama config | layer named `midlayer`, pytorch_model.bin |
| SpecForge, ModelOpt EAGLE-3 | nested layer ids only | count output layers: one lower than ours |
| DeepSpec DSpark | `architectures` | DFlash's entries stand at the top level |
| speculators | `speculators_model_type` | layer config nested; copies of the target's norm and head |
| FasterDecoding Medusa | `medusa_num_heads` | `HEAD.LAYER.linear.*`, medusa_lm_head.pt, no sizes in config.json |

What a layout cannot say, and engines would fill in silently, is filled in here from the target or refused.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.drafter_parts.config_fields import DFlashFields, EngineFields, LayoutFields, OwnFields
from draftsmith.models.errors import UserError, errors_of, library_errors
from draftsmith.models.ranges import checked_fields
from draftsmith.models.storage.model_files import CONFIG, drafter_config_file
from draftsmith.models.storage.reading import read_json_object
from draftsmith.models.storage.weights import check_counts, check_finite, read_weights
from draftsmith.models.target.target import Target

# How checkpoints that draftsmith did not write tell their family; any other causal language model is a draft model.
ARCHITECTURES = {
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "MedusaModel": "medusa",
    "MLPSpeculatorPreTrainedModel": "mlp_speculator",
    "PeagleLlamaForCausalLM": "p_eagle",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
}
PATTERNS = ["*.json", "*.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"]  # what a checkpoint may consist of
MEDUSA_DEFAULTS = {"num_heads": 5, "num_hidden_layers": 1}  # of vLLM's MedusaConfig
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3 variants
BLOCK_FIELDS = (
    *("aux_hidden_state_layer_ids", "block_size", "mask_token_id", "sample_from_anchor"),
    *("draft_vocab_size", "target_hidden_size"),
)
SPECULATORS = {  # types of speculators' format: our architecture, and the fields beside those of the layer
    "eagle3": (
        "LlamaForCausalLMEagle3",
        ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids", *FLAGS),
    ),
    "dflash": ("DFlashDraftModel", BLOCK_FIELDS),
    "dflash2": ("DFlash2DraftModel", (*BLOCK_FIELDS, "conv_kernel_size", "conv_group_size")),
    "dspark": (
        "Qwen3DSparkModel",
        (*BLOCK_FIELDS, "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    ),
}
RENAMED_HEAD = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")


@dataclass
class Checkpoint:
    """A drafter in the engines' layout, whatever it was read from."""

    kind: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]  # in the dtypes of the file


def read_checkpoint(name: str | Path, target: Target) -> Checkpoint:
    """Return the checkpoint in a directory or under a Hub name. Raises `UserError` where it cannot be read."""
    directory = find_directory(name)
    config = read_json_object(directory / CONFIG)
    if "hydra_num_heads" in config:
        raise UserError(f"{name} has Hydra heads in their authors' layout, which is not read: train new ones (hydra)")
    tensors = _read_tensors(directory)
    check_finite(tensors.items(), f"drafter {name}")
    with errors_of(f"drafter {name}"):
        return in_engine_layout(config, tensors, target)


def find_directory(name: str | Path) -> Path:
    """Return the directory of a checkpoint, downloaded where need be. Raises `UserError` where there is none."""
    config = drafter_config_file(name)
    if os.path.isdir(name):
        return config.parent
    with library_errors(f"drafter {str(name)!r} cannot be downloaded", "give the same command again"):
        return Path(snapshot_download(str(name), allow_patterns=PATTERNS))


def in_engine_layout(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Checkpoint:
    """Return the same drafter in the engines' layout, with its kind."""
    config = checked(LayoutFields, config)
    if "speculators_model_type" in config:
        config, tensors = from_speculators(config, tensors)
    if "medusa_num_heads" in config:
        config = medusa_config(config, tensors, target)
    kind = _kind(config, tensors)
    if kind != "draft_model":
        config = checked(EngineFields, config)
    read = {*EngineFields.__annotations__, "draftsmith"} if kind != "draft_model" else config.keys()
    # One tensor may hold all experts of a layer.
    experts = [len(tensor) for tensor in tensors.values() if tensor.ndim > 2 and tensor.numel()]
    counts = {key: config[key] for key in read & config.keys()}
    check_counts(counts, max([len(tensors), *experts]), "this drafter's config.json")
    if kind in ("eagle3", "p_eagle"):
        config, tensors = complete_eagle3(config, tensors, target)
    elif kind in ("dflash", "dflash2", "dspark", "domino"):
        config, tensors = complete_dflash(config, tensors)
    elif kind == "medusa":
        config = {**MEDUSA_DEFAULTS, **config}
        tensors = complete_medusa(config, tensors, target)
    tensors = without_shared_embedding(tensors, target)
    return Checkpoint(kind, config, tensors)


def checked(fields: type, config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without those of the fields that are null: they are left out. Raises `UserError` by types."""
    config = {key: value for key, value in config.items() if value is not None or key not in fields.__annotations__}
    checked_fields(fields, config, "this drafter's config.json has ", strict=True)
    return config


def _kind(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    if "draftsmith" in config:
        own = checked(OwnFields, config["draftsmith"])
        if "kind" not in own:
            raise UserError("this drafter's config.json has an entry draftsmith without a kind: take another copy")
        return own["kind"]
    if "mask_hidden" in tensors:  # the rest of P-EAGLE looks like EAGLE-3
        return "p_eagle"
    architecture = (config.get("architectures") or ["none named"])[0]
    if config.get("dflash_config", {}).get("projector_type") == "domino":  # the rest of it looks like DFlash
        return "domino"
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture]
    if "fc.weight" in tensors:  # EAGLE heads of SafeAILab name the target's architecture
        return "eagle3" if any("hidden_norm" in name for name in tensors) else "eagle"
    return "draft_model"


# --- EAGLE and DFlash


def complete_eagle3(
    config: dict[str, Any], tensors: dict[str, Tensor], target: Target
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Give EAGLE-3 one name for the layer, layer ids after N layers, a head, no tables for a whole vocabulary."""
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    config = {**config, "vocab_size": config.get("vocab_size", target.vocab_size)}
    nested = checked(EngineFields, config.get("eagle_config", {}))
    if not config.get("eagle_aux_hidden_state_layer_ids") and (ids := nested.get("eagle_aux_hidden_state_layer_ids")):
        config["eagle_aux_hidden_state_layer_ids"] = [layer_id + 1 for layer_id in ids]
    if "norm_before_fc" in nested:  # as engines read it
        config["norm_before_fc"] = nested["norm_before_fc"]
    draft_vocab_size = config.get("draft_vocab_size") or target.vocab_size
    config["draft_vocab_size"] = draft_vocab_size
    if draft_vocab_size == target.vocab_size:
        if "d2t" in tensors and tensors["d2t"].any():
            raise UserError("this EAGLE-3 drafter has the whole vocabulary in another order, which engines refuse")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        tensors.setdefault("lm_head.weight", target.head_weight().cpu())  # as engines share it
    return config, tensors


def complete_dflash(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config with the entry `dflash_config` taken apart, and layer ids after N layers, as in EAGLE-3.

    DSpark's authors have these entries at the top level. Raises `UserError` where it lacks something.
    """
    nested = checked(DFlashFields, config.get("dflash_config", {}))
    outputs = nested.get("target_layer_ids") or config.get("target_layer_ids", [])
    ids = config.get("eagle_aux_hidden_state_layer_ids") or [i + 1 for i in outputs]
    needed = {key: nested.get(key, config.get(key)) for key in ("block_size", "mask_token_id", "num_hidden_layers")}
    if missing := [key for key, value in {"target_layer_ids": ids or None, **needed}.items() if value is None]:
        raise UserError(f"this DFlash drafter's config.json lacks {missing[0]} (in dflash_config): take another copy")
    config = {**config, **needed, "eagle_aux_hidden_state_layer_ids": ids}
    if "causal" in nested:
        config.setdefault("is_causal", nested["causal"])
    return config, {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def without_shared_embedding(tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Leave out an embedding of an EAGLE that only repeats the target's; another one stays."""
    own = tensors.get(OWN_EMBEDDING)
    if own is None:
        return tensors
    shared = cast(Tensor, target.embedding.weight).detach().to(own)
    if own.shape != shared.shape or not torch.allclose(own, shared, rtol=0.01, atol=1e-6):  # one of them in bf16
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != OWN_EMBEDDING}


def from_speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Flatten the nested config; leave out the copies of the verifier's (the target's) norm and head."""
    kind = config["speculators_model_type"]
    if kind not in SPECULATORS:
        raise UserError(f"speculators checkpoint of type {kind!r}: those that are read are {', '.join(SPECULATORS)}")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError("this speculators checkpoint has no transformer_layer_config, which the format requires")
    if kind == "eagle3" and config.get("norm_before_residual") is None:
        raise UserError(
            "this speculators checkpoint lacks norm_before_residual, which vLLM takes for true: give it in config.json "
            "as it was trained"
        )
    architecture, kept = SPECULATORS[kind]
    top = {key: config[key] for key in kept if config.get(key) is not None}
    if "aux_hidden_state_layer_ids" in top:
        top["eagle_aux_hidden_state_layer_ids"] = top.pop("aux_hidden_state_layer_ids")
        types, causal = layer.get("layer_types"), not config.get("sliding_window_non_causal", False)
        types = types if isinstance(types, list) else []
        sliding = "sliding_attention" in types
        if not (sliding and causal and "full_attention" in types):  # else each layer goes by its own type
            top["is_causal"] = sliding and causal
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("verifier_")}
    return {**layer, **top, "architectures": [architecture]}, tensors


# --- Medusa


def medusa_config(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> dict[str, Any]:
    """Return a config with sizes that FasterDecoding's leaves to the target; tensors tell the number of heads."""
    heads = {int(match[1]) for name in tensors if (match := RENAMED_HEAD.fullmatch(name))}
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_heads": max(heads, default=-1) + 1,
        "num_hidden_layers": config.get("medusa_num_layers", 1),
        "original_lm_head": False,
        "medusa_fc_bias": True,
    }


def complete_medusa(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Give tensors vLLM's names, and every block a bias and a head where the layout leaves them out."""
    renamed = {medusa_name(name): tensor for name, tensor in tensors.items()}
    shared = renamed.pop("lm_head.weight", target.head_weight().cpu())
    for head in range(1 if config.get("original_lm_head") else config["num_heads"]):
        renamed.setdefault(f"lm_heads.{head}.weight", shared)
    for head in range(config["num_heads"]):
        for layer in range(config["num_hidden_layers"]):
            weight = renamed.get(f"blocks.{head}.layers.{layer}.weight")
            if weight is not None and not config.get("medusa_fc_bias", False):
                renamed.setdefault(f"blocks.{head}.layers.{layer}.bias", torch.zeros_like(weight[0]))
    return renamed


def medusa_name(name: str) -> str:
    """Return vLLM's name of FasterDecoding's tensor: linear layers are blocks, the weight behind them the head."""
    match = RENAMED_HEAD.fullmatch(name)
    if match is None:
        return name
    head, layer, linear, part = match.groups()
    return f"blocks.{head}.layers.{layer}.{part}" if linear else f"lm_heads.{head}.{part}"


# --- files


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the .safetensors files, or else of PyTorch's pickled ones."""
    tensors: dict[str, Tensor] = {}
    for file in _tensor_files(directory):
        more = read_weights(file)
        if repeated := sorted(tensors.keys() & more.keys()):
            raise UserError(
                f"{repeated[0]} is in {file} and in another file beside it: remove the one that is not meant"
            )
        tensors |= more
    return tensors


def _tensor_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    files = files or [directory / name for name in PATTERNS[2:] if (directory / name).is_file()]
    if not files:
        raise UserError(f"{directory} holds no .safetensors file: get it whole, or convert its weights first")
    return files


def checkpoint_hash(name: str | Path) -> str:
    """Return 16 hex digits of a checkpoint's config.json and tensors, as they lie on disk."""
    directory = find_directory(name)
    digest = hashlib.sha256()
    for path in (directory / "config.json", *_tensor_files(directory)):
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:16]
