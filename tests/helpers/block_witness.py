"""The outside witnesses of block drafters, as drafters of ours (witness_dflash.py and witness_dspark.py wrote them)."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models import DRAFTERS, Target
from draftsmith.models.checkpoints import build_drafter, checkpoint_of
from draftsmith.models.drafter_parts.layouts import in_engine_layout
from draftsmith.models.drafters.dflash import DFlash
from draftsmith.models.slots.attention import ATTENTION

GOLDEN = Path(__file__).parents[1] / "golden"
Tensors = dict[str, Tensor]


def witness_of(kind: str) -> Tensors:
    return load_file(GOLDEN / f"{kind}_witness.safetensors")


def part(tensors: Tensors, name: str) -> Tensors:
    return {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}


def witnessed(kind: str, golden: Tensors, **fields: Any) -> DFlash:
    """The witness's weights in a drafter and a target of ours; the target's layers are not needed."""
    of_target = part(golden, "target.")
    vocab, width = of_target["lm_head.weight"].shape
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    config._attn_implementation = ATTENTION
    model = LlamaForCausalLM(config)
    model.load_state_dict(of_target, strict=False)
    target = Target(model, None, "witness")
    settings = {"num_layers": 2, "block_size": 5, "layer_ids": [1, 3, 5], "mask_token_id": 7, "key_norm": True}
    settings |= {"draft_vocab_size": 24, "intermediate_size": 48, **fields}
    own = DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind, **settings), target)
    checkpoint = checkpoint_of(own, torch.float32)
    missing = checkpoint.tensors.keys() ^ part(golden, "drafter.").keys()
    assert all(name.startswith("candidate_selector") for name in missing)  # which is not computed
    checkpoint.tensors |= part(golden, "drafter.")
    checkpoint.config["draftsmith"].pop("draft_vocab_hash", None)
    built = build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, target), target)
    assert isinstance(built, DFlash)
    return built.eval()
