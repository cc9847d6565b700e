"""The decoder layer of EAGLE's drafters: Llama's, except for what enters its attention.

Shapes: B rows, T tokens, H hidden width, W width of what the attention reads, N heads, D head width.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.models.drafter_parts.config_fields import LAYER_FIELDS
from draftsmith.models.drafter_parts.target_layers import final_norm_weight, layer_weights, why_not_copied
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import GatedMLP, MergedLinear, RMSNorm, checkpoint_tensors, rotate
from draftsmith.models.target.target import Target
from draftsmith.models.target.target_files import common_field

USUAL_HEAD, USUAL_KEY_HEADS = 128, 8  # width of a head and number of key-value heads, of Llama and of Qwen3


class Attention(nn.Module):
    """Projections of the layer's attention, which reads W values a token and writes H."""

    def __init__(self, config: LlamaConfig, input_width: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        assert config.num_key_value_heads is not None
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = MergedLinear(input_width, {"q_proj": query, "k_proj": key, "v_proj": key})
        self.o_proj = DraftingLinear(query, config.hidden_size, bias=False)

    def project(self, x: Tensor, rotary: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated query, rotated key and value [B, N, T, D] of x [B, T, W] at positions [B or 1, T]."""
        heads = self.qkv_proj(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # [B, N + 2 Nkv, T, D]
        turning, value = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], 1)
        query, key = rotate(turning, rotary, positions).split([self.num_heads, self.num_kv_heads], 1)
        return query, key, value


class DecoderLayer(nn.Module):
    """The part that all of these layers share: attention, and the rest of the layer behind it."""

    def __init__(self, config: LlamaConfig, input_width: int) -> None:
        super().__init__()
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, input_width)
        self.mlp = GatedMLP(config)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output [B, T, H] from residual [B, T, H] and attended [B, T, N, D]; no final norm."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DeeperLayer(DecoderLayer):
    """An ordinary layer of Llama, behind EAGLE-3's first one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(self, hidden: Tensor, rotary: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value [B, N, T, D] of what the layer reads, [B, T, H]."""
        return self.self_attn.project(self.input_layernorm(hidden), rotary, positions)


def randomize(module: nn.Module) -> None:
    """Give all matrices inside a module, in place, random values of Llama's initial size."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)


def pass_on_last(fc: nn.Linear, width: int) -> None:
    """Set the weights of a layer in place, so that it returns the last `width` values of what it reads."""
    nn.init.zeros_(fc.weight)
    fc.weight.data[:, -width:] = torch.eye(width)


def start_as_target(layers: list[DecoderLayer], norm: RMSNorm | None, target: Target) -> None:
    """Copy the target's last layers, as many as there are, and its final norm, if any, in place.

    Nothing is copied from a target on the meta device, which has shapes alone. Raises `UserError` where the target's
    layers have another shape.
    """
    inner = layers[0].mlp.down_proj.in_features
    if reason := why_not_copied(target, inner, len(layers)):
        raise UserError(f"drafter.starting_layers=target: {reason}; give drafter.starting_layers=random")
    if target.device.type == "meta":
        return
    for number, layer in enumerate(layers, target.num_layers - len(layers)):
        copy_layer(layer, layer_weights(target, number))
    if norm is not None:
        norm.weight.data.copy_(final_norm_weight(target))


def copy_layer(layer: DecoderLayer, weights: dict[str, Tensor]) -> None:
    """Set a drafter's layer to the weights of a target's, by their names in it.

    What the target's attention reads, the drafter's reads last: before it stand embeddings, whose part of the matrices
    stays as it is. A layer without a norm of what it reads (EAGLE-1) gets the norm's weight as a factor.
    """
    tensors = checkpoint_tensors(layer)
    input_norm = weights["input_layernorm.weight"]
    name = next((f"{norm}.weight" for norm in ("hidden_norm", "input_layernorm") if hasattr(layer, norm)), None)
    copied = {key: weight for key, weight in weights.items() if key != "input_layernorm.weight"}
    if name is not None:
        copied[name] = input_norm
    else:
        copied |= {key: weights[key] * input_norm for key in (f"self_attn.{part}_proj.weight" for part in "qkv")}
    for key, weight in copied.items():
        tensors[key][..., -weight.shape[-1] :].copy_(weight)


def layer_config_for(intermediate_size: int | None, target: Target) -> LlamaConfig:
    """Return a one-layer Llama with the target's width, heads, rotary embedding and, if None, `intermediate_size`.

    Its angles do not depend on the length of the text, as those of some targets do: it has their plain form.
    A Llama's heads divide its width. Where the target's do not, it has heads of the usual width, as public drafters do.
    """
    text = target.text_config
    rope = dict(getattr(text, "rope_parameters", None) or {})
    # Learned positions, or one rotary embedding for each type of layer; or angles that depend on a text's length.
    if "rope_theta" not in rope or rope.get("rope_type") in ("dynamic", "longrope"):
        rope = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):  # axes of images: in text all are one
        rope.pop(name, None)
    heads, head_dim = text.num_attention_heads, common_field(text, "head_dim")
    key_heads = common_field(text, "num_key_value_heads") or heads
    if target.hidden_size % heads:
        head_dim = min(USUAL_HEAD, target.hidden_size)
        heads = target.hidden_size // head_dim
        key_heads = math.gcd(heads, USUAL_KEY_HEADS)
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or int(getattr(text, "intermediate_size", 4 * target.hidden_size)),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim or target.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=target.context,
        rope_parameters=rope,
    )


def layer_config_of(engine_config: dict[str, Any]) -> LlamaConfig:
    """Return the inverse of `engine_layer_config`, from a whole config.json. Raises `UserError` for other layers."""
    config = LlamaConfig(**{name: engine_config[name] for name in LAYER_FIELDS if name in engine_config})
    rope, heads, key_heads = config.rope_parameters or {}, config.num_attention_heads, config.num_key_value_heads
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UserError("this drafter rotates a part of each head, by partial_rotary_factor: draftsmith's rotate all")
    if heads % (key_heads or heads) or (config.head_dim or 0) % 2:
        raise UserError(
            f"num_attention_heads {heads}, num_key_value_heads {key_heads}, head_dim {config.head_dim}: give key-value "
            "heads that divide the others, and an even head_dim"
        )
    return config


def engine_layer_config(config: LlamaConfig, target: Target) -> dict[str, Any]:
    """Return the part of config.json that tells engines of the layer."""
    rope = dict(config.rope_parameters or {})
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.context,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if rope.get("rope_type") == "default" else rope,
        "rope_parameters": rope,
        "use_cache": True,
    }
