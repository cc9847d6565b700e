"""Weights of the target's decoder layers, with which new layers of a drafter can start.

Shapes: H hidden width, N heads, D head width.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from draftsmith.models.fused.fused_layers import DENSE_FAMILIES
from draftsmith.models.target.loading import whole_of
from draftsmith.models.target.target import Target
from draftsmith.models.target.target_files import read_tensors

LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
)


def why_not_copied(target: Target, intermediate_size: int | None, num_layers: int) -> str | None:
    """Return why a drafter's layers cannot start as the target's last ones, in a clause; None where they can.

    `intermediate_size` is the drafter's, None for the target's.
    """
    text = target.text_config
    rope = getattr(text, "rope_parameters", None) or {}
    if text.model_type not in DENSE_FAMILIES or text.hidden_act != "silu":
        return f"layers of {text.model_type} compute otherwise than Llama's, which the drafter's are"
    if rope.get("partial_rotary_factor", 1) != 1:
        return f"{target.name} rotates a part of each head, and the drafter all of it"
    if intermediate_size not in (None, text.intermediate_size):
        return f"the target's intermediate_size is {text.intermediate_size}, and the drafter's {intermediate_size}"
    if num_layers > target.num_layers:
        return f"the target has {target.num_layers} layers, and the drafter {num_layers}"
    return None


def layer_tensors(target: Target, index: int) -> dict[str, Tensor]:
    """Return the tensors of a layer, counted from 0, by their names in it.

    They are read from the target's files where it has no layers, and have the names that they have there.
    """
    if target.has_layers:
        return {name: _whole(tensor) for name, tensor in target.decoder_layers[index].state_dict().items()}
    place, towers = f"layers.{index}.", {*getattr(whole_of(target.model), "towers", ())}
    read = read_tensors(target.name, lambda name: place in name and not towers & {*name.split(".")}, torch.float32)
    return {name.partition(place)[2]: tensor for name, tensor in read.items()}


def layer_weights(target: Target, index: int) -> dict[str, Tensor]:
    """Return the tensors of a layer, counted from 0, by their names in it, as a layer of Llama would have them.

    Biases of projections are left out. Norms of query and key heads (Qwen3), which depend on the input, become factors
    of the matrices.
    """
    tensors = layer_tensors(target, index)
    weights = {name: tensors[name].float() for name in LAYER_TENSORS}
    for part in ("q", "k"):
        if (norm := tensors.get(f"self_attn.{part}_norm.weight")) is not None:
            name = f"self_attn.{part}_proj.weight"
            weights[name] = with_head_norm(weights[name], norm.float(), weights["input_layernorm.weight"])
    return weights


def with_head_norm(matrix: Tensor, norm: Tensor, input_norm: Tensor) -> Tensor:
    """Return the matrix [N * D, H] whose heads are as large as behind the norm, on average over inputs.

    That is exact for inputs of the size that `input_norm` [H] gives them, if their values are independent. `norm` [D].
    """
    heads = matrix.unflatten(0, (-1, len(norm)))  # [N, D, H]
    sizes = (heads * input_norm).square().sum(-1).mean(-1).sqrt()  # [N]
    return (heads / sizes[:, None, None] * norm[:, None]).flatten(0, 1)


def final_norm_weight(target: Target) -> Tensor:
    """Return the weight [H] of the norm behind the last layer, of a target whose layers can be copied."""
    return cast(Any, target.model.base_model).norm.weight.detach()


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may lie in pieces on all processes, which call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
