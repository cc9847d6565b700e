"""EAGLE-3's layer as drafting runs it: few operations on plain tensors, with what a whole decode shares made once.

A small drafter is bound by the number of its operations and module calls. Computes what `eagle3.Layer` does.

Shapes: B rows, T tokens a row, H hidden width, Nq query heads, Nkv key-value heads, D head width, M slots.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention, silu

from draftsmith.models.base import DecodingState
from draftsmith.models.layers import rotary_table
from draftsmith.models.slots import Window

if TYPE_CHECKING:
    from draftsmith.models.eagle3 import Eagle3


class Norm:
    """RMSNorm as x * (weight * r) / sqrt(|x|^2 + r^2 eps) with r^2 the width: four operations on a CPU."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        width = weight.shape[-1]
        self.weight = weight * math.sqrt(width)
        self.floor = torch.tensor(math.sqrt(width * eps), device=weight.device, dtype=weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self.weight).div_(torch.hypot(length, self.floor))


class Memory:
    """What drafting keeps from round to round: the cache, the rotary table, and the weights as plain tensors."""

    def __init__(self, drafter: "Eagle3", batch: int, num_slots: int) -> None:
        layer, attention, mlp = drafter.layer, drafter.layer.self_attn, drafter.layer.mlp
        eps = drafter.layer_config.rms_norm_eps
        self.num_kv_heads, self.head_dim = attention.num_kv_heads, attention.head_dim
        self.embedding = drafter.target.embedding.weight
        self.ids = drafter.draft_to_target()  # [Vd]
        self.input_norm = Norm(torch.stack([layer.input_layernorm.weight, layer.hidden_norm.weight]), eps)
        self.qkv = attention.qkv_proj.weight.t()
        self.output = attention.o_proj.weight.t()
        self.mlp_norm = Norm(layer.post_attention_layernorm.weight, eps)
        self.gate_up = mlp.gate_up_proj.weight.t()
        self.down = mlp.down_proj.weight.t()
        self.final_norm = Norm(drafter.norm.weight, eps)
        self.head = drafter.lm_head.weight.t()

        like = drafter.fc.weight
        self.turns = rotary_table(drafter.rotary, num_slots, like)  # [M, 2, D]
        cache = like.new_zeros(batch, num_slots, 2 * self.num_kv_heads, self.head_dim)
        self.cache = cache.view(batch * num_slots, -1)  # of each slot its keys, then its values
        self.keys, self.values = cache.transpose(1, 2).chunk(2, 1)  # each [B, Nkv, M, D]
        self.slots = torch.arange(num_slots, device=like.device)
        self.first_slots = torch.arange(batch, device=like.device)[:, None] * num_slots  # rows of the cache, [B, 1]


class Steps:
    """The passes of one draft: first over the features of the last target pass, then over drafted tokens."""

    def __init__(self, memory: Memory, state: DecodingState, fused: Tensor, depth: int) -> None:
        """`fused` [B, T, H]: the features after `fc`. All become keys and values, only the newest goes on."""
        self.memory = memory
        next_ids = state.token_ids.gather(1, (state.positions + 1).clamp(max=state.token_ids.shape[1] - 1))
        query = self.write(next_ids, fused, state.positions)
        rows, newest = torch.arange(len(fused), device=fused.device), state.num_new - 1
        self.prefix = state.lengths - 1  # [B] slots of committed tokens
        mask = self.mask(self.prefix[:, None] - 1)
        self.hidden = self.finish(query[rows, :, newest, None], fused[rows, newest][:, None], mask)  # [B, 1, H]
        self.slots = self.prefix[:, None] + torch.arange(depth, device=fused.device)
        self.masks = self.mask(self.slots)
        self.level = 0

    def logits(self) -> Tensor:
        """What follows the newest tokens: [B, W, Vd]."""
        return self.memory.final_norm(self.hidden) @ self.memory.head

    def follow(self, tokens: Tensor) -> None:
        """One more token a row [B, 1]."""
        slots = self.slots[:, self.level, None]
        query = self.write(tokens if self.memory.ids is None else self.memory.ids[tokens], self.hidden, slots)
        self.hidden = self.finish(query, self.hidden, self.masks[:, :, self.level, None])
        self.level += 1

    def mask(self, slots: Tensor) -> Tensor:
        seen = Window(slots, slots, slots[:, 0]).mask(len(self.memory.slots))
        return torch.where(seen, 0.0, -math.inf)

    def write(self, token_ids: Tensor, hidden: Tensor, slots: Tensor) -> Tensor:
        """Keys and values at slots [B, T] of tokens [B, T] and hidden [B, T, H]; returns the query [B, Nq, T, D]."""
        m = self.memory
        both = m.input_norm(torch.stack([embedding(token_ids, m.embedding), hidden], 2))
        qkv = both.flatten(2) @ m.qkv  # [B, T, (Nq + 2 Nkv) * D]
        heads = qkv.unflatten(2, (-1, m.head_dim))
        turned = heads[:, :, : -m.num_kv_heads]
        cos, sin = m.turns[slots].chunk(2, 2)
        turned.copy_(torch.addcmul(turned * cos, turned.roll(m.head_dim // 2, -1), sin))
        query, stored = heads.tensor_split([-2 * m.num_kv_heads], 2)
        m.cache.index_copy_(0, (m.first_slots + slots).flatten(), stored.flatten(2).flatten(0, 1))
        return query.transpose(1, 2)

    def finish(self, query: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        m = self.memory
        attended = scaled_dot_product_attention(query, m.keys, m.values, attn_mask=mask, enable_gqa=True)
        batch, tokens = hidden.shape[:2]
        hidden = hidden.view(batch * tokens, -1)
        hidden = torch.addmm(hidden, attended.transpose(1, 2).reshape(batch * tokens, -1), m.output)
        gate, up = (m.mlp_norm(hidden) @ m.gate_up).chunk(2, -1)
        hidden = torch.addmm(hidden, silu(gate, inplace=True).mul_(up), m.down)
        return hidden.view(batch, tokens, -1)
