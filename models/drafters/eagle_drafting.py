"""The layer of EAGLE-1 and EAGLE-3 as drafting runs it: on plain tensors, in few operations.

It computes what the layer's modules do. A small drafter is bound by the number of its operations and module calls, not
by their size.

Shapes: B rows, T tokens of a row, H hidden width, W width of what the attention reads, Nq query heads, Nkv key-value
heads, D head width, M slots, Vd draft vocabulary.
"""

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.drafting import tree_drafting
from draftsmith.models.drafting.base import DecodingState
from draftsmith.models.drafting.decoder_layer import DecoderLayer
from draftsmith.models.drafting.tree_drafting import LevelWindows, take
from draftsmith.models.layers import DecodingNorm, rotary_table, store_by_columns
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.target.slots import Window, slot_attention

if TYPE_CHECKING:
    from draftsmith.models.drafters.eagle import Eagle
    from draftsmith.models.drafters.eagle3 import Eagle3


class DrafterCache(tree_drafting.DrafterCache):
    """What is made or looked up once: the cache, the rotary table, and the weights."""

    ids: Tensor | None = None  # [Vd] target ids of a draft vocabulary

    def __init__(
        self, layer: DecoderLayer, embedding: nn.Module, rotary: nn.Module, num_rows: int, num_slots: int, shape: Shape
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        super().__init__(num_rows, num_slots, shape, attention.o_proj.weight.device)
        self.layer, self.attention, self.embedding = layer, attention, embedding
        self.rotary = rotary_table(rotary, self.kv.num_slots, attention.o_proj.weight)
        store_for_decoding(attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        self.output = attention.o_proj.weight
        self.mlp_norm = decoding_norm(layer.post_attention_layernorm)
        self.gate_up, self.down = mlp.gate_up_proj.weight, mlp.down_proj.weight

    @abstractmethod
    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features [B, T, H] -> what the attention reads [B, T, W], and the residual [B, T, H]"""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[B, T, H] -> [B, T, Vd]"""

    def write(self, token_ids: Tensor, hidden: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Store keys and values of tokens [B, T] with their features [B, T, H].

        Returns the query [B, Nq, T, D] and the residual [B, T, H].
        """
        x, residual = self.enter(self.embedding(token_ids), hidden)
        query, key, value = self.attention.project(x, self.rotary, window.positions)
        self.kv.write_to(window.slots)
        self.keys, self.values = self.kv.update(key, value, 0)
        return query, residual

    def finish(self, query: Tensor, residual: Tensor, window: Window) -> Tensor:
        """The rest of the layer, from query [B, Nq, T, D] and residual [B, T, H] to its output [B, T, H]."""
        mask = window.mask(self.kv.num_slots)
        attended, _ = slot_attention(self.layer, query, self.keys, self.values, mask)
        hidden = residual + F.linear(attended.flatten(2), self.output)
        gate, up = F.linear(self.mlp_norm(hidden), self.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate, inplace=True).mul_(up), self.down)


class Eagle3Cache(DrafterCache):
    def __init__(self, drafter: "Eagle3", num_rows: int, num_slots: int, shape: Shape) -> None:
        layer = drafter.layer
        super().__init__(layer, drafter.embedding, drafter.rotary, num_rows, num_slots, shape)
        self.norm_before_residual = drafter.config.norm_before_residual
        self.ids = drafter.draft_to_target()
        self.input_norm = decoding_norm(layer.input_layernorm, layer.hidden_norm)
        store_for_decoding(drafter.lm_head)
        self.final_norm, self.head = decoding_norm(drafter.norm), drafter.lm_head.weight

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([embedded, hidden], 2)  # [B, T, 2, H]
        normed = self.input_norm(both)
        return normed.flatten(2), normed[:, :, 1] if self.norm_before_residual else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.final_norm(hidden), self.head)


class EagleCache(DrafterCache):
    def __init__(self, drafter: "Eagle", num_rows: int, num_slots: int, shape: Shape) -> None:
        super().__init__(drafter.layer, drafter.target.embedding, drafter.rotary, num_rows, num_slots, shape)
        store_for_decoding(drafter.fc)
        self.fc, self.bias, self.logits_of_target = drafter.fc.weight, drafter.fc.bias, drafter.target.logits

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = F.linear(torch.cat([embedded, hidden], -1), self.fc, self.bias)
        return x, x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.logits_of_target(hidden)


def store_for_decoding(*linears: nn.Linear) -> None:
    for linear in linears:
        if linear.weight.device.type == "cpu":
            store_by_columns(linear)


def decoding_norm(*norms: nn.RMSNorm) -> DecodingNorm:
    """One norm, or several side by side [B, T, norms, H]."""
    eps = norms[0].eps
    assert eps is not None
    weights: list[Tensor] = [norm.weight for norm in norms]
    return DecodingNorm(torch.stack(weights) if weights[1:] else weights[0], eps)


class Drafting:
    """One draft. Call it with drafted tokens for the logits of what follows them, as `tree_drafting.grow` does."""

    def __init__(self, state: DecodingState, features: Tensor, shape: Shape) -> None:
        """Reads the features [B, T, H] of the last target pass.

        All become keys and values, only the newest committed one goes on through the layer.
        """
        self.cache: DrafterCache = state.cache
        next_ids = state.token_ids.gather(1, (state.positions + 1).clamp(max=state.token_ids.shape[1] - 1))
        window = Window(state.positions, state.positions, state.positions[:, 0])
        query, residual = self.cache.write(next_ids, features, window)
        rows, newest = torch.arange(len(query), device=query.device), state.num_new - 1
        slots = state.lengths[:, None] - 2
        window = Window(slots, slots, slots[:, 0])
        self.hidden = self.cache.finish(query[rows, :, newest][:, :, None], residual[rows, newest][:, None], window)
        self.root = self.cache.logits(self.hidden)  # [B, 1, Vd]
        self.windows = LevelWindows(state.lengths - 1, shape.num_read)

    def __call__(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        window = self.windows.next(tokens.shape[1], parents)
        token_ids = tokens if self.cache.ids is None else self.cache.ids[tokens]
        hidden = self.hidden if parents is None else take(self.hidden, parents)
        self.hidden = self.cache.finish(*self.cache.write(token_ids, hidden, window), window)
        return self.cache.logits(self.hidden)
