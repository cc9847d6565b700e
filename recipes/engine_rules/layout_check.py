"""A check of a drafter's files against the names and values that an engine loads (engine_key_names.py).

It looks both ways: for what the engine needs and is not there, and for what is there and the engine does not know.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftsmith.models import Checkpoint, Target
from draftsmith.models.errors import UserError
from draftsmith.models.storage.reading import JsonObject
from draftsmith.recipes.engine_rules.engine_key_names import DROPPED, DTYPES, FEATURE_NORMS, LoaderRules
from draftsmith.recipes.engine_rules.loader_rules import (
    LOADER_RULES,
    ONE_LAYOUT,
    SGLANG,
    SHIFTED_ONLY_FROM_1,
    rules_for,
)

READ_AS_THEY_ARE = ("eagle", "dflash", "dflash2", "dspark", "domino")  # kinds that do not norm embeddings first
SCALED_IN_SGLANG = ("gemma3_text", "gemma4_text")  # targets whose module scales there, too; block drafters call it


def check_files(engine: str, files: Checkpoint, target: Target) -> None:
    """Raise `UserError` where the engine would not load the files, or would load another drafter than was trained."""
    rules = rules_for(engine, files.kind)
    problems = list(loading_problems(rules, files, target))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{rules.engine} would not serve what was trained: {problems[0]}{more}")


def engines_that_serve(files: Checkpoint, target: Target, among: Sequence[str] = ONE_LAYOUT) -> tuple[str, ...]:
    """Return which of some engines load the files as the drafter that was trained."""
    return tuple(
        engine
        for (engine, kind), rules in LOADER_RULES.items()
        if kind == files.kind and engine in among and not any(loading_problems(rules, files, target))
    )


def loading_problems(rules: LoaderRules, files: Checkpoint, target: Target) -> Iterator[str]:
    """Yield what an engine would load otherwise than it was trained, each in a clause."""
    yield from config_problems(rules, files, target)
    yield from tensor_problems(rules, files, target)
    yield from value_problems(files)
    yield from embedding_problems(rules, files, target)
    if files.kind in ("eagle3", "p_eagle"):
        yield from capture_problems(files, target)
    if "dflash_config" in files.config:
        yield from causality_problems(files.config)


# --- config.json


def config_problems(rules: LoaderRules, files: Checkpoint, target: Target) -> Iterator[str]:
    """Yield the keys of config.json that are not there, or hold another value than the engine must read."""
    config = files.config
    for key, kind in rules.required.items():
        if not isinstance(config.get(key), (int, float) if kind is float else kind):
            yield f"config.json has {key} {config.get(key)!r}, which must be of type {kind.__name__}"
    for key, expected in rules.fixed.items():
        if config.get(key) != expected:
            yield f"config.json has {key} {config.get(key)!r}, not {expected!r}"
    for part in (config, config.get("eagle_config") or {}):  # SGLang looks for flags in either
        for key in rules.off:
            if part.get(key):
                yield f"config.json has {key} {part[key]!r}, which was not trained"
    if config.get("target_hidden_size", target.hidden_size) != target.hidden_size:
        yield f"target_hidden_size {config['target_hidden_size']} is not the target's {target.hidden_size}"
    if rules.architecture and config.get("architectures") != [rules.architecture]:
        yield f"config.json has architectures {config.get('architectures')}, not {rules.architecture}"
    if config.get("quantization_config"):
        yield "config.json has a quantization_config, but the drafter's weights are plain"
    if config.get("vocab_size") != target.vocab_size:
        yield f"vocab_size {config.get('vocab_size')} is not the target's {target.vocab_size}"
    if rules.tensors:
        yield from (f"config.json has {key} null" for key, value in config.items() if value is None)
        yield from rope_problems(files, target)
    if rules.method == "medusa":
        yield from medusa_problems(files)


def causality_problems(config: JsonObject) -> Iterator[str]:
    """Yield what engines would take for a block's attention; without `is_causal` each layer goes by its own type."""
    causal, mixed = config.get("is_causal"), len(set(config.get("layer_types") or ())) > 1
    if mixed and causal is not None:
        yield f"config.json has is_causal {causal}, which engines read for all layers, but their types differ"
    elif not mixed and not isinstance(causal, bool):
        yield f"config.json has is_causal {causal!r}, which must be of type bool"


def rope_problems(files: Checkpoint, target: Target) -> Iterator[str]:
    """Yield where the two schemas of RoPE differ: an engine, or a version of transformers, reads one."""
    config = files.config
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if new.get("rope_theta") != config.get("rope_theta"):
        yield f"rope_theta {config.get('rope_theta')} is not that of rope_parameters {new.get('rope_theta')}"
    if not old and new.get("rope_type", "default") != "default":
        yield f"rope_scaling is missing beside rope_parameters of type {new['rope_type']}"
    elif old and scaling_of(old) != scaling_of(new):
        yield f"rope_scaling {scaling_of(old)} is not that of rope_parameters {scaling_of(new)}"
    if config.get("max_position_embeddings", 0) < target.context:
        yield f"max_position_embeddings is below the target's {target.context}: acceptance would end there"


def scaling_of(rope: JsonObject) -> dict[str, object]:
    """Return what either schema says beside theta; the older one calls its type "type", too."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_type": kind, **{k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type")}}


def medusa_problems(files: Checkpoint) -> Iterator[str]:
    """Yield what misleads vLLM, which takes every key with "num" and "heads" in it for the number of heads.

    It takes keys with "num" and "layers" in them likewise.
    """
    for word, meant in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        for key in files.config:
            if "num" in key and word in key and key != meant:
                yield f"config.json has {key}, which vLLM would take for {meant}"
    if files.config.get("truncated_vocab_size") != files.config.get("vocab_size"):
        yield (
            "the heads have a reduced vocabulary, whose token_map vLLM 0.32.0 fails to load "
            '("weights were not initialized from checkpoint"): train with the whole one'
        )


# --- tensors


def tensor_problems(rules: LoaderRules, files: Checkpoint, target: Target) -> Iterator[str]:
    """Yield tensors that the engine has room for and are not there, or are there and it has no room for."""
    tensors, expected = files.tensors, expected_shapes(rules, files, target)
    for name in sorted(expected.keys() - tensors.keys()):
        yield f"{name} is missing and {rules.missing}"
    for name in sorted(tensors.keys() - expected.keys()):
        is_dropped = any(fnmatch(name, pattern) for pattern in rules.dropped)
        yield f"{name} is unknown and {DROPPED if is_dropped else rules.unexpected}"
    for name in sorted(tensors.keys() & expected.keys()):
        shape = list(tensors[name].shape)
        if shape != expected[name]:
            yield f"{name} has the shape {shape}, not {expected[name]}"
    for name in rules.ignored:
        if name in tensors and tensors[name].any():
            yield f"{name} is not zero and {DROPPED}"
    for name, dtype in DTYPES.items():
        if name in tensors and tensors[name].dtype != dtype:
            yield f"{name} is of type {tensors[name].dtype}, not {dtype}"
    weights = {tensor.dtype for name, tensor in tensors.items() if name not in DTYPES}
    if len(weights) != 1 or not all(dtype.is_floating_point for dtype in weights):
        yield f"the weights are of types {', '.join(sorted(map(str, weights)))}: one floating-point type was due"


def expected_shapes(rules: LoaderRules, files: Checkpoint, target: Target) -> dict[str, list[int]]:
    """Return name -> shape of every tensor that must be there, and of those that may be and are."""
    if rules.architecture is None:
        return shapes_of_model(files)
    config, sizes = files.config, sizes_of(files, target)
    shapes = {**rules.tensors, **{name: text for name, text in rules.optional_tensors.items() if name in files.tensors}}
    if rules.method == "medusa":
        heads, layers = range(config.get("num_heads") or 0), range(config.get("num_hidden_layers") or 0)
        for block in (f"blocks.{head}.layers.{layer}" for head in heads for layer in layers):
            shapes |= {f"{block}.weight": "H H", f"{block}.bias": "H"}
        shapes |= {
            f"lm_heads.{head}.weight": "V H" for head in (heads[:1] if config.get("original_lm_head") else heads)
        }
    elif shapes and sizes["R"] < sizes["V"]:
        shapes |= rules.reduced
    for key, norms in FEATURE_NORMS.items() if files.kind in ("eagle3", "p_eagle") else ():
        for i in range(sizes["A"] if config.get(key) else 0):
            shapes |= {name.format(i=i): text for name, text in norms.items()}
    for layer in range(1, config.get("num_hidden_layers") or 1):
        shapes |= {name.replace(".0.", f".{layer}."): text for name, text in rules.later_layers.items()}
    return {name: shape_of(text, sizes) for name, text in shapes.items()}


def shapes_of_model(files: Checkpoint) -> dict[str, list[int]]:
    """Return the shapes of transformers' own model of a config.json; a tied head is there as the embedding only."""
    with torch.device("meta"):
        config = CONFIG_MAPPING[files.config["model_type"]].from_dict(dict(files.config))
        model = AutoModelForCausalLM.from_config(config)
    tied = set(model.all_tied_weights_keys)
    return {name: list(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


def sizes_of(files: Checkpoint, target: Target) -> dict[str, int]:
    """Return the sizes that stand for the letters in shapes."""
    config = files.config
    heads = config.get("num_attention_heads") or 0
    block = config.get("dflash_config") or {}
    return {
        "H": config.get("hidden_size") or 0,
        "T": target.hidden_size,
        "A": config.get("num_aux_hidden_states") or len(block.get("target_layer_ids") or ()),
        "N": heads,
        "K": config.get("num_key_value_heads") or heads,
        "D": config.get("head_dim") or 0,
        "I": config.get("intermediate_size") or 0,
        "M": config.get("markov_rank") or 0,
        "P": block.get("conv_kernel_size") or 0,
        "G": (config.get("hidden_size") or 0) // (block.get("conv_group_size") or 1),
        "U": block.get("gru_hidden_dim") or 0,
        "E": block.get("emb_dim") or 0,
        "W": (config.get("hidden_size") or 0) + (block.get("gru_hidden_dim") or 0),
        "S": block.get("selector_rank") or 0,
        "C": (config.get("hidden_size") or 0) + (config.get("markov_rank") or 0),
        "V": target.vocab_size,
        "R": config.get("draft_vocab_size") or target.vocab_size,
    }


def shape_of(text: str, sizes: dict[str, int]) -> list[int]:
    """Return the shape that a text such as 'N*D 2*H' describes: [N * D, 2 * H]."""
    return [math.prod(sizes[f] if f in sizes else int(f) for f in part.split("*")) for part in text.split()]


# --- what no name, shape or type tells


def value_problems(files: Checkpoint) -> Iterator[str]:
    """Yield values that are broken, or that two parts of the files tell differently."""
    tensors = files.tensors
    yield from (f"{name} holds NaN or infinity" for name, tensor in tensors.items() if not tensor.isfinite().all())
    written = {str(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    told = {f"torch.{files.config[key]}" for key in ("dtype", "torch_dtype") if key in files.config}
    if told - written:
        yield f"config.json calls the weights {', '.join(sorted(told))}, but they are {', '.join(written)}"
    if "d2t" in tensors and "t2d" in tensors and not same_tokens(tensors["d2t"], tensors["t2d"]):
        yield "d2t and t2d tell of different tokens: d2t holds the target's id less the draft's own"


def same_tokens(d2t: Tensor, t2d: Tensor) -> bool:
    """Return whether the offsets [R] and the mask [V] of a draft vocabulary hold the same tokens."""
    return torch.equal((d2t.long() + torch.arange(len(d2t))).sort().values, t2d.nonzero()[:, 0])


def embedding_problems(rules: LoaderRules, files: Checkpoint, target: Target) -> Iterator[str]:
    """Yield where the drafter reads embeddings that its target's module scales: engines look up the table alone."""
    model_type = target.text_config.model_type
    scaled = type(target.embedding).forward is not nn.Embedding.forward
    if rules.engine == SGLANG and files.kind != "eagle" and model_type in SCALED_IN_SGLANG:
        return
    if scaled and files.kind in READ_AS_THEY_ARE:
        yield (
            f"it was trained on the embeddings of {model_type}, which are scaled, and the engine would feed it the "
            "plain ones: train one that norms them first, such as eagle3"
        )


def vllm_layers(files: Checkpoint, num_layers: int) -> list[int]:
    """Return the number of layers after which vLLM captures each of the states that it feeds to an EAGLE-3 drafter."""
    return sorted(files.config.get("eagle_aux_hidden_state_layer_ids") or default_layers(num_layers))


def sglang_layers(files: Checkpoint, num_layers: int, model_type: str) -> list[int]:
    """Return the same for SGLang, which captures before a layer, and only before one that there is."""
    ids = (files.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        ids = default_layers(num_layers)
    elif model_type not in SHIFTED_ONLY_FROM_1 or ids[0] == 1:
        ids = [layer_id + 1 for layer_id in ids]
    return sorted(layer_id for layer_id in ids if layer_id < num_layers)


def default_layers(num_layers: int) -> list[int]:
    """Return the layers of EAGLE-3's authors, which both engines take where config.json names none."""
    return [2, num_layers // 2, num_layers - 3]


def capture_problems(files: Checkpoint, target: Target) -> Iterable[str]:
    """Yield where engines that serve the kind would capture other states than each other, or than `fc` reads."""
    vllm = vllm_layers(files, target.num_layers)
    sglang = sglang_layers(files, target.num_layers, target.text_config.model_type)
    if ("sglang", files.kind) in LOADER_RULES and vllm != sglang:
        yield f"vLLM would capture the states after layers {vllm}, SGLang after {sglang}"
    nested, flag = files.config.get("eagle_config") or {}, files.config.get("norm_before_fc")
    if nested.get("norm_before_fc", flag) != flag:
        yield f"eagle_config has norm_before_fc {nested['norm_before_fc']}, which engines take, beside {flag}"
    if nested.get("use_aux_hidden_state") is not True:
        yield "eagle_config has no use_aux_hidden_state true: the engine would feed one layer's states"
    num_states = files.config.get("num_aux_hidden_states")
    if len(set(vllm)) != num_states or len(vllm) < 2:
        yield f"layers {vllm} are not {num_states} distinct ones, two or more"
