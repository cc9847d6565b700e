"""Synthetic checkpoints of exactly the layouts that other projects publish drafters in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drafters import noisy
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models import Drafter, Target


def write(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory


def llama_config(target: Target, **more: Any) -> dict[str, Any]:
    """config.json as SafeAILab's training code leaves it: the older RoPE key, no layer ids, no target width."""
    text = target.text_config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "intermediate_size": text.intermediate_size,
        "max_position_embeddings": 2048,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": text.rms_norm_eps,
        "rope_theta": text.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": target.vocab_size,
        **more,
    }


def safeailab_eagle(target: Target, folder: Path, bias: bool = True) -> Drafter:
    """EAGLE-1 names the target's architecture, and brings a copy of its embedding; its `fc` mostly has a bias."""
    drafter = noisy("eagle", target, bias=bias)
    config = llama_config(target, architectures=["LlamaForCausalLM"], bias=bias)
    write(folder, config, {**drafter.engine_tensors(), **embedding(target)}, "pytorch_model.bin")
    return drafter


def safeailab_eagle3(target: Target, folder: Path, file: str = "pytorch_model.bin") -> Drafter:
    drafter = noisy("eagle3", target, draft_vocab_size=6)
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.engine_tensors().items()}
    write(folder, llama_config(target, draft_vocab_size=6), tensors, file)
    return drafter


def specforge_eagle3(target: Target, folder: Path) -> Drafter:
    """Nested layer ids name output layers; a whole vocabulary comes with tables that map it on itself."""
    drafter = noisy("eagle3", target, layer_ids=[2, 5, 7])
    size = target.vocab_size
    tables = {"d2t": torch.zeros(size, dtype=torch.int64), "t2d": torch.ones(size, dtype=torch.bool)}
    tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.engine_tensors().items()}
    eagle = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    config = llama_config(target, draft_vocab_size=size, eagle_config=eagle)
    write(folder, config, {**tensors, **tables}, "model.safetensors")
    return drafter


def speculators_eagle3(target: Target, folder: Path, **changes: Any) -> Drafter:
    """The layer's config nested; copies of the target's norm, head and embedding beside the tensors."""
    drafter = noisy("eagle3", target, draft_vocab_size=6, layer_ids=[1, 3, 6])
    layer = {**llama_config(target), "head_dim": 8, "rope_parameters": dict(target.text_config.rope_parameters)}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 6,
        "norm_before_residual": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": [], "verifier": {"name_or_path": "x"}},
        **changes,
    }
    copies = {"verifier_norm.weight": torch.ones(target.hidden_size), "verifier_lm_head.weight": torch.ones(6, 32)}
    write(folder, config, {**drafter.engine_tensors(), **copies, **embedding(target)}, "model.safetensors")
    return drafter


BLOCKS = {"num_layers": 2, "block_size": 5, "layer_ids": [1, 3, 6], "mask_token_id": 7, "key_norm": True}


def qwen3_config(target: Target, **more: Any) -> dict[str, Any]:
    """The layers of a block drafter, as transformers writes a config of Qwen3."""
    attention = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False}
    rope = {"head_dim": 8, "rope_parameters": dict(target.text_config.rope_parameters)}
    layers = {"model_type": "qwen3", "num_hidden_layers": 2, **attention, **rope}
    return {**llama_config(target), **layers, **more}


def deepspec_dspark(target: Target, folder: Path) -> Drafter:
    """All entries at the top level, none that tells of attention; the layer ids count outputs from 0."""
    drafter = noisy("dspark", target, markov_rank=6, **BLOCKS)
    heads = {"markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
    own = {"block_size": 5, "mask_token_id": 7, "target_layer_ids": [0, 2, 5], "confidence_head_with_markov": True}
    config = qwen3_config(target, architectures=["Qwen3DSparkModel"], **heads, **own)
    write(folder, config, drafter.engine_tensors(), "model.safetensors")
    return drafter


def speculators_block(kind: str, target: Target, folder: Path, **fields: Any) -> Drafter:
    """The layers' config nested, copies of the target's parts; `fields` of the drafter stand in config.json, too."""
    drafter = noisy(kind, target, draft_vocab_size=6, **BLOCKS, **fields)
    config = {
        "speculators_model_type": kind,
        "transformer_layer_config": qwen3_config(target),
        "draft_vocab_size": 6,
        "block_size": 5,
        "mask_token_id": 7,
        "aux_hidden_state_layer_ids": [1, 3, 6],
        "sample_from_anchor": kind == "dspark",
        "sliding_window_non_causal": False,  # of other attention than this
        "target_hidden_size": None,
        **fields,
    }
    copies = {"verifier_norm.weight": torch.ones(target.hidden_size), "verifier_lm_head.weight": torch.ones(6, 32)}
    write(folder, config, {**drafter.engine_tensors(), **copies, **embedding(target)}, "model.safetensors")
    return drafter


def fasterdecoding_medusa(target: Target, folder: Path, prefix: str = "") -> Drafter:
    """Its config.json tells no sizes, and often fewer heads than the file has."""
    drafter = noisy("medusa", target, num_heads=3)
    own = drafter.engine_tensors()
    tensors = {}
    for head in range(3):
        tensors[f"{prefix}{head}.0.linear.weight"] = own[f"blocks.{head}.layers.0.weight"]
        tensors[f"{prefix}{head}.0.linear.bias"] = own[f"blocks.{head}.layers.0.bias"]
        tensors[f"{prefix}{head}.1.weight"] = own[f"lm_heads.{head}.weight"]
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    write(folder, config, tensors, "medusa_lm_head.pt")
    return drafter


def embedding(target: Target) -> dict[str, Tensor]:
    return {"embed_tokens.weight": target.embedding.weight.detach().clone()}  # type: ignore[union-attr,operator]


PUBLIC: dict[str, Callable[[Target, Path], Drafter]] = {  # each writes a checkpoint and returns the drafter in it
    "SafeAILab EAGLE-1": safeailab_eagle,
    "SafeAILab EAGLE-1, no bias": lambda target, folder: safeailab_eagle(target, folder, bias=False),
    "SafeAILab EAGLE-3": safeailab_eagle3,
    "SafeAILab EAGLE-3, safetensors": lambda target, folder: safeailab_eagle3(target, folder, "model.safetensors"),
    "SpecForge EAGLE-3": specforge_eagle3,
    "speculators EAGLE-3": speculators_eagle3,
    "DeepSpec DSpark": deepspec_dspark,
    "speculators DFlash": lambda target, folder: speculators_block("dflash", target, folder),
    "speculators DSpark": lambda target, folder: speculators_block("dspark", target, folder, markov_rank=6),
    "FasterDecoding Medusa": fasterdecoding_medusa,
    "FasterDecoding Medusa, prefixed": lambda target, folder: fasterdecoding_medusa(target, folder, "medusa_head."),
}
