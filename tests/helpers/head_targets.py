"""Tiny random targets of the families whose heads for further tokens are known, and such heads in their files."""

import json
from pathlib import Path
from typing import Any

import torch
from drafters import noisy, trained
from safetensors.torch import load_file, save_file
from tiny_target import tiny_tokenizer
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftsmith.models import Target, save_drafter
from draftsmith.recipes.serving.export import export_checkpoint

WIDE = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}  # as vLLM's CPU has heads
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FULL = {"layer_types": ["full_attention"] * 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_text": FULL,
    "qwen3_5_moe_text": {**FULL, **EXPERTS, "shared_expert_intermediate_size": 32},
    "glm4_moe": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
}


def save_head_target(directory: Path, family: str, max_shard_size: str = "50GB", **changes: Any) -> Path:
    """Write a random target without a head, whose norms are away from one, so that none goes unnoticed."""
    tokenizer = tiny_tokenizer()
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**fields, **FAMILIES[family], **changes}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.4)
    model.lm_head.weight.data *= 3
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
    return directory


def add_head(directory: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Put a random head into the last file of a target, and fields into its config.json; return the head's tensors."""
    target = Target.from_pretrained(directory, "cpu", torch.float32)
    head = noisy("mtp", target, starting_layers="random").engine_tensors()
    weights = max(directory.glob("*.safetensors"))
    save_file(load_file(weights) | {name: tensor.contiguous() for name, tensor in head.items()}, weights)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(head, weights.name)
        index.write_text(json.dumps(content))
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return head


def export_trained_head(folder: Path, family: str, texts: list[str]) -> Target:
    """Train a head on such prompts for a target that vLLM's CPU build serves; return the exported copy that has it.

    Rough norms and noise in the weights, so that a wrong state, order or norm changes what is accepted.
    """
    weights = save_head_target(folder / "target", family, **WIDE, initializer_range=0.12) / "model.safetensors"
    tensors = load_file(weights)
    torch.manual_seed(3)
    tensors["model.norm.weight"] = 1 + 0.8 * torch.randn(64)
    save_file(tensors, weights, metadata={"format": "pt"})
    target = Target.from_pretrained(folder / "target", "cpu", torch.float32)
    prompts = [target.encode(text) for text in texts]
    twice = [prompt for prompt in prompts for _ in range(2)]
    drafter = trained("mtp", target, twice, num_steps=150, starting_layers="target")
    torch.manual_seed(0)  # other noise may leave too little that is accepted
    for parameter in drafter.parameters():
        parameter.data += 0.6 * torch.randn_like(parameter) * parameter.abs().mean()
    save_drafter(drafter, folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", "vllm", target, folder / "out")
    return Target.from_pretrained(folder / "out", "cpu", torch.float32)
