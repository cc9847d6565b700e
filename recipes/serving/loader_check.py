"""A drafter's directory, held against the rules by which an engine loads it (engine_rules.py).

Both ways: what the engine needs and is not there, and what is there and the engine does not know.
"""

import math
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.recipes.serving.engine_rules import (
    DEEPER,
    DROPPED,
    DTYPES,
    RULES,
    SHIFTED_ONLY_FROM_1,
    TABLES,
    Rules,
    rules_for,
)


def check_directory(engine: str, kind: str, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> None:
    """Refuse what the engine would not load, or would load as something else than what was trained."""
    rules = rules_for(engine, kind)
    found = directory_problems(rules, kind, config, tensors, target)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{rules.engine} would not serve what was trained: {found[0]}{more}")


def engines_that_serve(kind: str, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> list[str]:
    """Those that load these files as what was trained."""
    rules = {engine: RULES[engine, kind] for engine in ("vllm", "sglang") if (engine, kind) in RULES}
    return [engine for engine in rules if not directory_problems(rules[engine], kind, config, tensors, target)]


def directory_problems(
    rules: Rules, kind: str, config: dict[str, Any], tensors: dict[str, Tensor], target: Target
) -> list[str]:
    present = {name: text for name, text in rules.optional.items() if name in tensors}
    expected = expected_shapes(replace(rules, tensors={**rules.tensors, **present}), config, target)
    return [
        *config_problems(rules, config, target),
        *tensor_problems(rules, expected, tensors),
        *value_problems(config, tensors),
        *(capture_problems(kind, config, target) if kind in ("eagle3", "p_eagle") else []),
    ]


# --- config.json


def config_problems(rules: Rules, config: dict[str, Any], target: Target) -> list[str]:
    found = []
    for key, kind in rules.required.items():
        value = config.get(key)
        if not isinstance(value, int if kind is int else (kind, int) if kind is float else kind):
            found.append(f"config.json has {key} {value!r}, which must be of type {kind.__name__}")
    for key, expected in rules.fixed.items():
        if config.get(key) != expected:
            found.append(f"config.json has {key} {config.get(key)!r}, not {expected!r}")
    for part in (config, config.get("eagle_config") or {}):  # SGLang looks for flags in either
        found += [f"config.json has {key} {part[key]!r}, which was not trained" for key in rules.off if part.get(key)]
    if config.get("target_hidden_size", target.hidden_size) != target.hidden_size:
        found.append(f"target_hidden_size {config['target_hidden_size']} is not the target's {target.hidden_size}")
    if rules.architecture and config.get("architectures") != [rules.architecture]:
        found.append(f"config.json has architectures {config.get('architectures')}, not {rules.architecture}")
    if config.get("quantization_config"):
        found.append("config.json has a quantization_config, but the drafter's weights are plain")
    if config.get("vocab_size") != target.vocab_size:
        found.append(f"vocab_size {config.get('vocab_size')} is not the target's {target.vocab_size}")
    if rules.tensors:
        found += [f"config.json has {key} null" for key, value in config.items() if value is None]
        found += rope_problems(config, target)
    if rules.method == "medusa":
        found += medusa_problems(config)
    return found


def rope_problems(config: dict[str, Any], target: Target) -> list[str]:
    """Both schemas must say the same: one engine, or version of transformers, reads one, another the other."""
    new = config.get("rope_parameters") or {}
    found = []
    if new.get("rope_theta") != config.get("rope_theta"):
        found.append(f"rope_theta {config.get('rope_theta')} is not that of rope_parameters {new.get('rope_theta')}")
    scaled, old = new.get("rope_type", "default") != "default", config.get("rope_scaling") or {}
    if scaled and not old:
        found.append(f"rope_scaling is missing beside rope_parameters of type {new['rope_type']}")
    elif old and scaling_of(old) != scaling_of(new):
        found.append(f"rope_scaling {scaling_of(old)} is not that of rope_parameters {scaling_of(new)}")
    if config.get("max_position_embeddings", 0) < target.context:
        found.append(f"max_position_embeddings is below the target's {target.context}: acceptance would end there")
    return found


def scaling_of(rope: dict[str, Any]) -> dict[str, Any]:
    """What either schema says beside theta; the older one calls its type "type", too."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind, **{k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type")}}


def medusa_problems(config: dict[str, Any]) -> list[str]:
    """vLLM takes every key with "num" and "heads" in it for the number of heads, and likewise with layers."""
    found = []
    for word, meant in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        taken = [key for key in config if "num" in key and word in key and key != meant]
        found += [f"config.json has {key}, which vLLM would take for {meant}" for key in taken]
    if config.get("truncated_vocab_size") != config.get("vocab_size"):
        found.append(
            "the heads have a reduced vocabulary, whose token_map vLLM 0.32.0 fails to load "
            '("weights were not initialized from checkpoint"): train with the whole one'
        )
    return found


# --- tensors


def expected_shapes(rules: Rules, config: dict[str, Any], target: Target) -> dict[str, list[int]]:
    """Name -> shape of every tensor that must be there."""
    if rules.architecture is None:
        return shapes_of_model(config)
    sizes = sizes_of(config, target)
    shapes = dict(rules.tensors)
    if rules.method == "medusa":
        heads, layers = range(config.get("num_heads") or 0), range(config.get("num_hidden_layers") or 0)
        blocks = {"weight": "H H", "bias": "H"}
        shapes = {f"blocks.{h}.layers.{i}.{part}": text for h in heads for i in layers for part, text in blocks.items()}
        shapes.update({f"lm_heads.{h}.weight": "V H" for h in (heads[:1] if config.get("original_lm_head") else heads)})
    elif shapes and sizes["R"] < sizes["V"]:
        shapes.update(TABLES)
    if rules.parallel_drafting:
        for layer in range(1, config.get("num_hidden_layers") or 1):
            shapes.update({name.replace(".0.", f".{layer}."): text for name, text in DEEPER.items()})
    return {name: shape_of(text, sizes) for name, text in shapes.items()}


def shapes_of_model(config: dict[str, Any]) -> dict[str, list[int]]:
    """Those that transformers' own model of a config.json has; a tied head is the embedding, under its name only."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)))
    tied = set(model.all_tied_weights_keys)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def sizes_of(config: dict[str, Any], target: Target) -> dict[str, int]:
    heads = config.get("num_attention_heads") or 0
    return {
        "H": config.get("hidden_size") or 0,
        "T": target.hidden_size,
        "A": config.get("num_aux_hidden_states") or 0,
        "N": heads,
        "K": config.get("num_key_value_heads") or heads,
        "D": config.get("head_dim") or 0,
        "I": config.get("intermediate_size") or 0,
        "V": target.vocab_size,
        "R": config.get("draft_vocab_size") or target.vocab_size,
    }


def shape_of(text: str, sizes: dict[str, int]) -> list[int]:
    """'N*D 2*H' -> [N * D, 2 * H]"""
    return [math.prod(sizes[f] if f in sizes else int(f) for f in part.split("*")) for part in text.split()]


def tensor_problems(rules: Rules, expected: dict[str, list[int]], tensors: dict[str, Tensor]) -> list[str]:
    """Closure both ways: all that the engine has room for is there, and all that is there has room."""
    found = [f"{name} is missing and {rules.missing}" for name in sorted(expected.keys() - tensors.keys())]
    for name in sorted(tensors.keys() - expected.keys()):
        silent = any(fnmatch(name, pattern) for pattern in rules.dropped)
        found.append(f"{name} is unknown and {DROPPED if silent else rules.unexpected}")
    for name in sorted(tensors.keys() & expected.keys()):
        shape = list(tensors[name].shape)
        if shape != expected[name]:
            found.append(f"{name} has the shape {shape}, not {expected[name]}")
    found += [f"{name} is not zero and {DROPPED}" for name in rules.ignored if name in tensors and tensors[name].any()]
    return found + dtype_problems(tensors)


def dtype_problems(tensors: dict[str, Tensor]) -> list[str]:
    """d2t are offsets in int64 and t2d is a mask; everything else has one floating-point type."""
    found = []
    for name, dtype in DTYPES.items():
        if name in tensors and tensors[name].dtype != dtype:
            found.append(f"{name} is of type {tensors[name].dtype}, not {dtype}")
    rest = {tensor.dtype for name, tensor in tensors.items() if name not in DTYPES}
    if len(rest) != 1 or not all(dtype.is_floating_point for dtype in rest):
        found.append(f"the weights are of types {', '.join(sorted(map(str, rest)))}: one floating-point type was due")
    return found


def value_problems(config: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """What no name, shape or type tells."""
    found = [f"{name} holds NaN or infinity" for name, tensor in tensors.items() if not tensor.isfinite().all()]
    written = {str(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    told = {f"torch.{config[key]}" for key in ("dtype", "torch_dtype") if key in config}
    if told - written:
        found.append(f"config.json calls the weights {', '.join(sorted(told))}, but they are {', '.join(written)}")
    if "d2t" in tensors and "t2d" in tensors:
        ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        drafted = tensors["t2d"].nonzero()[:, 0]
        if not torch.equal(ids.sort().values, drafted):
            found.append("d2t and t2d tell of different tokens: d2t holds the target's id less the draft's own")
    return found


# --- what is captured of the target


def vllm_layers(config: dict[str, Any], num_layers: int) -> list[int]:
    """After-N-layers ids whose states vLLM feeds to an EAGLE-3 drafter."""
    return sorted(config.get("eagle_aux_hidden_state_layer_ids") or [2, num_layers // 2, num_layers - 3])


def sglang_layers(config: dict[str, Any], num_layers: int, model_type: str) -> list[int]:
    """The same for SGLang, which captures before a layer, and only before one that there is."""
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    elif model_type not in SHIFTED_ONLY_FROM_1 or ids[0] == 1:
        ids = [layer_id + 1 for layer_id in ids]
    return sorted(layer_id for layer_id in ids if layer_id < num_layers)


def capture_problems(kind: str, config: dict[str, Any], target: Target) -> list[str]:
    """Engines that serve the kind must capture the same states, as many as `fc` reads."""
    vllm = vllm_layers(config, target.num_layers)
    sglang = sglang_layers(config, target.num_layers, target.text_config.model_type)
    found = []
    if ("sglang", kind) in RULES and vllm != sglang:
        found.append(f"vLLM would capture the states after layers {vllm}, SGLang after {sglang}")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is not True:
        found.append("eagle_config has no use_aux_hidden_state true: the engine would feed one layer's states")
    if len(set(vllm)) != config.get("num_aux_hidden_states") or len(vllm) < 2:
        found.append(f"layers {vllm} are not {config.get('num_aux_hidden_states')} distinct ones, two or more")
    return found
