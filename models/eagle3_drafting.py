"""EAGLE-3's layer as drafting runs it: on plain tensors, in few operations. It computes what `eagle3.Layer` does.

A small drafter is bound by the number of its operations and module calls, not by their size.

Shapes: B rows, T tokens of a row, H hidden width, Nq query heads, Nkv key-value heads, D head width, M slots,
Vd draft vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models import tree_drafting
from draftsmith.models.base import DecodingState
from draftsmith.models.layers import DecodingNorm, rotary_table, store_by_columns
from draftsmith.models.slots import Window, slot_attention
from draftsmith.models.tree_drafting import LevelWindows, take
from draftsmith.models.trees import Shape

if TYPE_CHECKING:
    from draftsmith.models.eagle3 import Eagle3


class Memory(tree_drafting.Memory):
    """What is made or looked up once: the cache, the rotary table, and the weights."""

    def __init__(self, drafter: "Eagle3", num_rows: int, num_slots: int, shape: Shape) -> None:
        super().__init__(num_rows, num_slots, shape, drafter.fc.weight.device)
        layer, attention, mlp = drafter.layer, drafter.layer.self_attn, drafter.layer.mlp
        self.rotary = rotary_table(drafter.rotary, self.cache.num_slots, drafter.fc.weight)
        self.ids = drafter.draft_to_target()  # [Vd] or None
        self.embedding, self.layer, self.attention = drafter.target.embedding, layer, attention
        if drafter.fc.weight.device.type == "cpu":
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj, drafter.lm_head):
                store_by_columns(linear)
        eps = drafter.layer_config.rms_norm_eps
        self.input_norm = DecodingNorm(torch.stack([layer.input_layernorm.weight, layer.hidden_norm.weight]), eps)
        self.output = attention.o_proj.weight
        self.mlp_norm = DecodingNorm(layer.post_attention_layernorm.weight, eps)
        self.gate_up, self.down = mlp.gate_up_proj.weight, mlp.down_proj.weight
        self.final_norm, self.head = DecodingNorm(drafter.norm.weight, eps), drafter.lm_head.weight

    def write(self, token_ids: Tensor, hidden: Tensor, window: Window) -> Tensor:
        """Store keys and values of tokens [B, T] with their features [B, T, H]; return the query [B, Nq, T, D]."""
        both = torch.stack([self.embedding(token_ids), hidden], 2)  # [B, T, 2, H]
        x = self.input_norm(both).flatten(2)
        query, key, value = self.attention.project(x, self.rotary, window.positions)
        self.cache.write_to(window.slots)
        self.keys, self.values = self.cache.update(key, value, 0)
        return query

    def finish(self, query: Tensor, hidden: Tensor, window: Window) -> Tensor:
        """The rest of the layer, from query [B, Nq, T, D] and the features [B, T, H] to its output [B, T, H]."""
        mask = window.mask(self.cache.num_slots)
        attended, _ = slot_attention(self.layer, query, self.keys, self.values, mask)
        hidden = hidden + F.linear(attended.flatten(2), self.output)
        gate, up = F.linear(self.mlp_norm(hidden), self.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate, inplace=True).mul_(up), self.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, Vd]"""
        return F.linear(self.final_norm(hidden), self.head)


class Drafting:
    """One draft. Call it with drafted tokens for the logits of what follows them, as `tree_drafting.grow` does."""

    def __init__(self, state: DecodingState, features: Tensor, shape: Shape) -> None:
        """Reads the features of the last target pass, fused by `fc`: [B, T, H].

        All become keys and values, only the newest committed one goes on through the layer.
        """
        self.memory: Memory = state.memory
        next_ids = state.token_ids.gather(1, (state.positions + 1).clamp(max=state.token_ids.shape[1] - 1))
        window = Window(state.positions, state.positions, state.positions[:, 0])
        query = self.memory.write(next_ids, features, window)
        rows, newest = torch.arange(len(query), device=query.device), state.num_new - 1
        slots = state.lengths[:, None] - 2
        window = Window(slots, slots, slots[:, 0])
        self.hidden = self.memory.finish(query[rows, :, newest][:, :, None], features[rows, newest][:, None], window)
        self.root = self.memory.logits(self.hidden)  # [B, 1, Vd]
        self.windows = LevelWindows(state.lengths - 1, shape.num_read)

    def __call__(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        window = self.windows.next(tokens.shape[1], parents)
        token_ids = tokens if self.memory.ids is None else self.memory.ids[tokens]
        hidden = self.hidden if parents is None else take(self.hidden, parents)
        self.hidden = self.memory.finish(self.memory.write(token_ids, hidden, window), hidden, window)
        return self.memory.logits(self.hidden)
