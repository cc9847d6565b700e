"""Reading a target from a directory or from the Hub: config, tokenizer, and all of its weights or its first layers'.

Transformers maps every file of a target privately, so that a limit on memory counts all of them, and downloads all.
Where layers are left out, a file is fetched only for a wanted tensor in it, and no more of it gets into memory.
"""

import contextlib
import copy
import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.ranges import named
from draftsmith.models.target.slots import ATTENTION

OF_LAYERS = "per_layer"  # in names of Gemma 4's second embedding, for its layers alone and larger than the first

DeviceMap = dict[str, torch.device]  # of modules by their names


def read_config(name: str | Path) -> PretrainedConfig:
    name = named("target", name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(f"no target at {str(name)!r}: give a Hub name or a model directory ({reason})") from None
    if config.is_encoder_decoder:
        raise UserError(f"target {str(name)!r} is an encoder-decoder; draftsmith drafts for decoder-only models")
    return config


def load_model(
    name: str | Path,
    config: PretrainedConfig,
    device: torch.device | DeviceMap,
    dtype: torch.dtype,
    tensors: dict[str, Tensor] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load all weights of a model of this config (transformers would make up missing ones), and the tokenizer.

    `device`: one, or by a map several, between which accelerate then moves what modules are called with. `tensors`: the
    weights by their names on disk, where they have been read already.
    """
    options: Any = {"dtype": dtype, "attn_implementation": ATTENTION, "output_loading_info": True}
    if isinstance(device, dict):
        options["device_map"] = device
    loaded: Any
    try:
        if tensors is None:
            loaded = AutoModelForCausalLM.from_pretrained(name, config=config, **options)
        else:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            loaded = model_class.from_pretrained(None, config=config, state_dict=tensors, **options)
            read_generation_config(loaded[0], name)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"target {str(name)!r} does not load: {first_line(error)}") from None
    model, report = loaded
    if missing := sorted(key for key in report["missing_keys"] if tensors is None or OF_LAYERS not in key):
        raise UserError(
            f"target {str(name)!r} lacks {len(missing)} of its weights, {missing[0]} among them: "
            "give a whole causal language model"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"target {str(name)!r} does not load: {first_line(error)}") from None
    if isinstance(device, torch.device):
        model.to(device)  # type: ignore[arg-type]  # wrapped by transformers without its types
    return model.eval().requires_grad_(False), tokenizer


def load_first_layers(
    name: str | Path,
    config: PretrainedConfig,
    num_layers: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a model of a target's first layers alone, its embedding, final norm and head, and the tokenizer."""
    shortened = copy.deepcopy(config)
    drop_layers(shortened.get_text_config(), kept=list(range(num_layers)))
    tensors = read_tensors(name, lambda key: _layer_of(key) < num_layers and OF_LAYERS not in key)
    return load_model(name, shortened, device, dtype, tensors)


def device_map(
    model: PreTrainedModel, decoder_layers: nn.ModuleList, of_layers: list[torch.device], of_ends: torch.device
) -> DeviceMap:
    """Return a map of each layer to its device, and of all else to that of the ends; `model` needs no weights."""
    path = next(name for name, module in model.named_modules() if module is decoder_layers)
    holders = ["", *accumulate(path.split("."), "{}.{}".format)]  # from the model to the layers' list
    beside = [name for name, _ in model.named_modules() if name.rpartition(".")[0] in holders[:-1]]
    places = {name: of_ends for name in beside if name not in holders}
    return places | {f"{path}.{layer}": device for layer, device in enumerate(of_layers)}


def read_generation_config(model: PreTrainedModel, name: str | Path) -> None:
    with contextlib.suppress(OSError):  # a model may have none
        model.generation_config = GenerationConfig.from_pretrained(name)


def _layer_of(tensor: str) -> int:
    """Return the layer of a tensor by its name, counted from 0; -1 outside of all layers."""
    return next((int(part) for part in tensor.split(".") if part.isdigit()), -1)


def drop_layers(text_config: PretrainedConfig, kept: list[int]) -> None:
    """Make it the config of a model of only the kept layers."""
    if shared := getattr(text_config, "num_kv_shared_layers", 0):  # at the end, and so they stay
        first_shared = text_config.num_hidden_layers - shared
        text_config.num_kv_shared_layers = sum(layer >= first_shared for layer in kept)
    text_config.num_hidden_layers = len(kept)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if of_each := getattr(text_config, name, None):
            setattr(text_config, name, [of_each[layer] for layer in kept])


# --- tensors by name


def read_tensors(name: str | Path, wanted: Callable[[str], bool]) -> dict[str, Tensor] | None:
    """Return the tensors whose names are wanted, as the files have them; None for a target without safetensors.

    `name`: a directory or a Hub name. Raises `UserError` naming a file that is not there or damaged.
    """
    files = _files(name, wanted)
    if files is None:
        return None
    tensors: dict[str, Tensor] = {}
    for file in files:
        path = _find(name, file)
        if path is None:
            raise UserError(f"target {str(name)!r} lacks {file}, which its index names: get it whole")
        try:
            with safe_open(path, "pt", backend="pread") as shard:
                tensors |= {key: shard.get_tensor(key) for key in shard.keys() if wanted(key)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"target {str(name)!r}: {path} is damaged ({first_line(error)}): get it anew") from None
    return tensors


def _files(name: str | Path, wanted: Callable[[str], bool]) -> list[str] | None:
    """Return the files that hold wanted tensors, by the index where there is one."""
    if _find(name, SAFE_WEIGHTS_NAME):
        return [SAFE_WEIGHTS_NAME]
    index = _find(name, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return None
    try:
        places = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise UserError(f"target {str(name)!r}: {index} is damaged ({first_line(error)}): get it anew") from None
    return sorted({file for key, file in places.items() if wanted(key)})


def _find(name: str | Path, file: str) -> Path | None:
    """Return a file of the target, downloaded where need be; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(name), file))
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{file} of target {str(name)!r} cannot be had: {first_line(error)}") from None
