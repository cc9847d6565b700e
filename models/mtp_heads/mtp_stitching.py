"""A copy of a target's files with a head for further tokens among its tensors, as engines load it.

Engines read every tensor of every weight file, so a trained tensor has to take the place of the one that it was trained
from. The files that hold parts of the head are written anew; all others are linked or copied.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.mtp_heads.mtp_layouts import HeadLayout, together
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.model_files import CONFIG
from draftsmith.models.storage.reading import open_tensors, read_json_object
from draftsmith.models.storage.weights import files_of_index, read_weights
from draftsmith.models.target.quantised import CODES
from draftsmith.models.target.target_files import read_quantisation, stored_tensors

NEW_FILE = "model-mtp.safetensors"  # of a head that the target's own files did not have
AS_QWEN2 = ("llama", "mistral")  # targets that vLLM serves with a head as the Qwen2 models that they equal


def write_with_head(
    name: str, config: PretrainedConfig, head: dict[str, Tensor], layout: HeadLayout, folder: Path
) -> None:
    """Write a copy of a target, which is a directory or a Hub name, into an empty folder, with a head in its files.

    `config` is the target's, and `head` has the names of the target's files. Tensors that the target has already are
    replaced in their own dtypes; no other one changes. Raises `UserError` where no engine would serve the copy.
    """
    content, head = as_in_files(name, config, head, layout)
    source = directory_of(name)
    places = weight_places(source)
    is_new = head.keys().isdisjoint(places)
    one_file = SAFE_WEIGHTS_NAME in places.values()
    dtype = dtype_of_norms(source, places)
    changed: dict[str, dict[str, Tensor]] = {}
    for key, tensor in head.items():
        file = places.setdefault(key, SAFE_WEIGHTS_NAME if one_file else NEW_FILE)
        changed.setdefault(file, {})[key] = tensor.to(dtype).contiguous().cpu()
    for file, tensors in changed.items():
        kept = read_weights(source / file) if (source / file).is_file() else {}
        tensors = {key: tensor.to(kept[key].dtype) if key in kept else tensor for key, tensor in tensors.items()}
        save_file(kept | tensors, folder / file, metadata={"format": "pt"})
    copy_others(source, folder, {*changed, *((CONFIG, SAFE_WEIGHTS_INDEX_NAME) if is_new else ())})
    if is_new and not one_file:
        index = read_json_object(source / SAFE_WEIGHTS_INDEX_NAME)
        write_json(folder / SAFE_WEIGHTS_INDEX_NAME, {**index, "weight_map": dict(sorted(places.items()))})
    if is_new:
        write_json(folder / CONFIG, content)


def as_in_files(
    name: str, config: PretrainedConfig, head: dict[str, Tensor], layout: HeadLayout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the head's tensors as `write_with_head` puts them into a target's files.

    Raises `UserError` where no engine would serve the target with them.
    """
    source = directory_of(name)
    places, content = weight_places(source), read_json_object(source / CONFIG)
    if not head.keys() <= places.keys() and together(head).keys() <= places.keys():
        head = together(head)  # as these files hold the experts of their own head
    own = stored_tensors(name, head.keys().__contains__, "meta")
    is_plain = len(own) == len(head) and not any(tensor.dtype in CODES for tensor in own.values())
    if read_quantisation(name) is not None and not is_plain:
        raise UserError(
            f"the weights of {name} are quantised, and engines take no plain head among such: export the head for the "
            "BF16 model that they were made from"
        )
    if head.keys().isdisjoint(places):
        content, biases = with_new_head(config, content, layout)
        return content, head | biases
    if missing := sorted(head.keys() - places.keys()):
        raise UserError(f"the files of {name} hold a part of a head, without {missing[0]}: get them whole")
    return content, head


def with_new_head(
    config: PretrainedConfig, content: dict[str, Any], layout: HeadLayout
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json by which vLLM finds a head that the target did not have, and tensors that it then asks for.

    vLLM has no class for a Llama with a head, but one for a Qwen2 with MiMo's: that is a Llama whose attention has
    biases, which are zero here. Raises `UserError` where it has no class for such a target at all.
    """
    if config.model_type == "qwen3":
        raise UserError(
            "no engine serves a Qwen3 target with a head for further tokens: train eagle3 or dflash to serve"
        )
    content = {**content, layout.count: 1}
    if layout.architecture is not None:
        content["architectures"] = [layout.architecture]
    if config.model_type not in AS_QWEN2:
        return content, {}
    width, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    flags = [name for name in ("attention_bias", "mlp_bias", "sliding_window") if getattr(config, name, None)]
    if flags or width * heads != config.hidden_size:
        reason = f"{flags[0]} {getattr(config, flags[0])}" if flags else f"head_dim {width}"
        raise UserError(
            f"no engine serves this target with a head for further tokens: it has {reason}, and Qwen2, as which vLLM "
            "would serve it, has not; train eagle3 or dflash to serve"
        )
    layers = [f"model.layers.{layer}." for layer in range(config.num_hidden_layers)]
    places = [f"{layer}self_attn." for layer in (*layers, layout.prefix)]
    sizes = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    biases = {f"{place}{part}_proj.bias": torch.zeros(size) for place in places for part, size in sizes.items()}
    return {**config.to_dict(), **content, "model_type": "qwen2"}, biases


def directory_of(name: str) -> Path:
    """Return the directory of a target, downloaded whole where need be."""
    if os.path.isdir(name):
        return Path(name)
    with library_errors(f"target {name!r} cannot be downloaded", "give the same command again"):
        return Path(snapshot_download(name))


def weight_places(source: Path) -> dict[str, str]:
    """Return the file of each tensor of a target. Raises `UserError` where it is not kept as safetensors."""
    if (source / SAFE_WEIGHTS_NAME).is_file():
        with open_tensors(source / SAFE_WEIGHTS_NAME) as file:
            return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    index = source / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise UserError(f"{source} holds no safetensors: convert the target first, for a head is put among its tensors")
    return files_of_index(index)


def dtype_of_norms(source: Path, places: dict[str, str]) -> torch.dtype:
    """Return the floating-point type of the target's norms, which is its own even where other weights are quantised."""
    key = next(key for key in places if key.endswith("norm.weight"))
    return read_weights(source / places[key], wanted=lambda name: name == key)[key].dtype


def copy_others(source: Path, folder: Path, written: set[str]) -> None:
    """Copy all files of a directory but those that are written anew; safetensors are hard links where that works."""
    for path in source.iterdir():
        if path.is_file() and path.name not in written:
            linked = path.suffix == ".safetensors" and link(path, folder / path.name)
            if not linked:
                shutil.copyfile(path, folder / path.name)


def link(path: Path, place: Path) -> bool:
    """Make a hard link to a file; return whether that could be done, as on one disk."""
    try:
        os.link(os.path.realpath(path), place)
    except OSError:
        return False
    return True
