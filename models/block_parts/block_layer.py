"""The decoder layer of block drafters: Qwen3's, whose keys and values come from a context, too.

Shapes: B rows, T tokens, H hidden width, N heads, D head width.
"""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from draftsmith.models.drafter_parts.decoder_layer import Attention, DecoderLayer
from draftsmith.models.errors import UserError
from draftsmith.models.layers import RMSNorm, as_computed, rotate

KEY_NORM = "self_attn.k_norm.weight"  # name of a tensor in a layer
KeysValues = tuple[Tensor, Tensor]  # of one layer, each [B, N, T, D]


class BlockAttention(Attention):
    """Attention of Qwen3, with a norm on each head of queries and keys; keys and values are those of the context, too.

    Without `key_norm` the norm of keys has no weights. Those of the norm of queries can say the same, but for the two
    halves of a head that turn together.
    """

    def __init__(self, config: LlamaConfig, key_norm: bool) -> None:
        super().__init__(config, config.hidden_size)
        self.eps = config.rms_norm_eps
        self.q_norm = RMSNorm(self.head_dim, self.eps)
        self.k_norm = RMSNorm(self.head_dim, self.eps) if key_norm else None

    def project(self, x: Tensor, rotary: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated query, rotated key and value [B, N, T, D] of x [B, T, H] at positions [B or 1, T]."""
        normed, value = self._heads(self.qkv_proj(x))
        query, key = normed.split([self.num_heads, self.num_kv_heads], 1)
        query, key = query * self.q_norm.weight.to(query), self._scaled(key)
        return rotate(query, rotary, positions), rotate(key, rotary, positions), value

    def keys_values(self, x: Tensor, rotary: Tensor, positions: Tensor) -> KeysValues:
        """Return rotated key and value [B, N, T, D] of x [B, T, H] at positions [B or 1, T]."""
        weight = as_computed(self.qkv_proj.weight)[self.num_heads * self.head_dim :]
        key, value = self._heads(F.linear(x, weight))
        return rotate(self._scaled(key), rotary, positions), value

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed heads in front of the values, and the values, [B, N, T, D] of projected [B, T, N * D]."""
        heads = projected.unflatten(2, (-1, self.head_dim))
        normed = F.rms_norm(heads, (self.head_dim,), None, self.eps)  # of values, too, which is cheaper than a copy
        values = heads[:, :, -self.num_kv_heads :]
        return normed[:, :, : -self.num_kv_heads].transpose(1, 2), values.transpose(1, 2)

    def _scaled(self, key: Tensor) -> Tensor:
        return key if self.k_norm is None else key * self.k_norm.weight.to(key)


class BlockLayer(DecoderLayer):
    """A layer of Qwen3. Its first norm is for the block alone: the context has been normed once for all layers."""

    self_attn: BlockAttention

    def __init__(self, config: LlamaConfig, key_norm: bool, sliding_window: int | None) -> None:
        super().__init__(config, config.hidden_size)
        self.self_attn = BlockAttention(config, key_norm)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.sliding_window = sliding_window  # None: the block sees all before it, and itself in both directions

    def project(self, hidden: Tensor, rotary: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(hidden), rotary, positions)


def attention_of(config: dict[str, Any]) -> tuple[int | None, list[int]]:
    """Return the window of a checkpoint's layers, None without one, and the numbers of layers that see all the same.

    Raises `UserError` for attention that draftsmith does not compute.
    """
    num_layers, causal = config["num_hidden_layers"], config.get("is_causal")
    types = config.get("layer_types") or ["full_attention"] * num_layers
    if len(types) != num_layers:
        raise UserError(f"this drafter has {num_layers} layers and layer_types for {len(types)}: take another copy")
    sliding, window = "sliding_attention" in types, config.get("sliding_window")
    nested = config.get("dflash_config") or {}
    if nested.get("use_swa") and not sliding:
        raise UserError(
            "this drafter has use_swa (in dflash_config), a window that sees both ways: draftsmith's see what is before"
        )
    if sliding and nested.get("swa_window_size") not in (None, window):
        raise UserError(
            f"this drafter has swa_window_size {nested['swa_window_size']} (in dflash_config) beside sliding_window "
            f"{window}, and engines differ in which they take: leave the right one in config.json"
        )
    mixed = sliding and "full_attention" in types
    if causal is not None and (mixed or causal != sliding):
        what = "sliding and full attention" if mixed else types[0]
        raise UserError(
            f"this drafter has {what} with is_causal {causal}: draftsmith's blocks see both ways with full attention, "
            "and what is before with sliding attention"
        )
    full_layers = [number for number, kind in enumerate(types) if kind == "full_attention"]
    return config["sliding_window"] if sliding else None, full_layers if mixed else []
