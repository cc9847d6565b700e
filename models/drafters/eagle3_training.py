"""EAGLE-3's layer as training unrolls it ("training-time test", arXiv 2503.01840 section 3.2).

Only slots that draft go through the layer; the others are keys and values at step 0. Rows of a batch lie one after
another, so that documents, padding and prompts cost what they hold and no more.

Shapes: B rows, T tokens of a row, S = B * T slots, R of them draft, H hidden width, A layers read, Nq query heads,
Nkv key-value heads, D head width.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from draftsmith.models.batch import Batch
from draftsmith.models.drafting.unrolled_attention import DraftingSlots, KeyValue, unrolled_attention
from draftsmith.models.layers import rotary_table

if TYPE_CHECKING:
    from draftsmith.models.drafters.eagle3 import Eagle3


def unroll(drafter: "Eagle3", batch: Batch, layers: Tensor, slots: DraftingSlots, num_steps: int) -> Iterator[Tensor]:
    """The layer's output [R, H] at each unrolled step of the drafting slots, from features [B, T, A * H].

    Step k feeds x_{t+1+k} into slot t, at position t + k, with the output of step k - 1 in place of the feature. Where
    that reaches beyond the document nothing is counted, and no other slot sees it.
    """
    config, unrolling = drafter.config, Unrolling(drafter, batch, slots, num_steps)
    features = drafter.fc(layers).flatten(0, 1)  # [S, H]
    query, *text = unrolling.project(features, unrolling.fed.roll(-1, 0), unrolling.positions)
    hidden = unrolling.finish(features[slots.index], query[slots.index], (text[0], text[1]), [])
    yield hidden
    own: list[KeyValue] = []
    for k in range(1, num_steps):
        if config.detach:
            hidden = hidden.detach()
        step = (hidden, k, (text[0], text[1]), own)
        if config.recompute:
            hidden, newest = checkpoint(unrolling.step, *step, use_reentrant=False)
        else:
            hidden, newest = unrolling.step(*step)
        own = [*own, newest]
        yield hidden


class Unrolling:
    """What all steps share."""

    def __init__(self, drafter: "Eagle3", batch: Batch, slots: DraftingSlots, num_steps: int) -> None:
        self.layer, self.slots = drafter.layer, slots
        self.positions = batch.positions.expand_as(batch.token_ids).flatten()  # [S]
        self.norm_before_residual = drafter.config.norm_before_residual
        embedded = drafter.embedding(batch.token_ids.flatten())
        width = embedded.shape[1]
        of_tokens, self.of_features = self.layer.self_attn.qkv_proj.weight.split(width, 1)
        # what a token adds to queries, keys and values is the same at every step: [S, (Nq + 2 Nkv) D]
        self.fed = F.linear(self.layer.input_layernorm(embedded), of_tokens)
        self.rotary = rotary_table(drafter.rotary, batch.token_ids.shape[1] + num_steps, self.fed)

    def step(self, hidden: Tensor, k: int, text: KeyValue, own: list[KeyValue]) -> tuple[Tensor, KeyValue]:
        """Step k >= 1 from the output [R, H] of the one before; its own keys and values come too."""
        fed = self.fed[(self.slots.index + 1 + k).clamp(max=len(self.fed) - 1)]
        query, key, value = self.project(hidden, fed, self.positions[self.slots.index] + k)
        return self.finish(hidden, query, text, [*own, (key, value)]), (key, value)

    def project(self, hidden: Tensor, fed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated query [R, Nq, D], rotated key [R, Nkv, D] and value of slots [R, H] that are fed tokens."""
        attention = self.layer.self_attn
        x = fed + F.linear(self.layer.hidden_norm(hidden), self.of_features)
        num_turning = attention.num_heads + attention.num_kv_heads
        turning, value = x.unflatten(1, (-1, attention.head_dim)).split([num_turning, attention.num_kv_heads], 1)
        cos, sin = self.rotary[positions][:, :, None].unbind(1)
        turned = torch.addcmul(turning * cos, turning.roll(attention.head_dim // 2, -1), sin)
        query, key = turned.split([attention.num_heads, attention.num_kv_heads], 1)
        return query, key, value

    def finish(self, hidden: Tensor, query: Tensor, text: KeyValue, own: list[KeyValue]) -> Tensor:
        attended = unrolled_attention(query, text, own, self.slots.spans)
        if self.norm_before_residual:
            hidden = self.layer.hidden_norm(hidden)
        return self.layer.finish(hidden[None], attended[None])[0]
