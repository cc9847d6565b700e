"""Stock Hugging Face modelling on a cache with one slot per token and one length per row.

`SlotCache` replaces transformers' caches, whose single length for the whole batch rules out ragged rows. A token's
slot says where its key and value are kept, a `Window` which slots the new tokens see. Committed text has slot =
position; the nodes of a drafted tree stand behind it, several of one position side by side.

Shapes: B rows, T new tokens a row, M slots, W words of 32 columns, Hq query heads, Hkv key-value heads, D head width.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "draftsmith"  # the name under which transformers finds `slot_attention`


@dataclass
class Window:
    """Where the new tokens of one forward pass stand, and what they see.

    All see the slots before `prefix`. Of the columns from there on (column c is slot prefix + c) each sees those whose
    bits are set in its `ancestors`; without them, the new tokens form chains and each sees every slot up to its own.
    """

    slots: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64
    prefix: Tensor  # [B] int64
    ancestors: Tensor | None = None  # [B, T, W] int32, bit c % 32 of word c // 32

    def mask(self, num_slots: int) -> Tensor:
        """Which slots each new token sees: bool [B, 1, T, M]."""
        all_slots = torch.arange(num_slots, device=self.slots.device)
        if self.ancestors is None:
            return (all_slots <= self.slots[:, :, None])[:, None]
        bits = (self.ancestors[..., None] >> torch.arange(32, device=self.slots.device)) & 1
        bits = bits.flatten(2).bool()  # [B, T, 32 W]
        columns = (all_slots - self.prefix[:, None])[:, None].expand(-1, bits.shape[1], -1)  # [B, T, M]
        inside = bits.gather(2, columns.clamp(0, bits.shape[2] - 1)) & (columns < bits.shape[2])
        return torch.where(columns < 0, True, inside)[:, None]


def chain_window(first: Tensor, length: int) -> Window:
    """`length` new tokens a row from slot `first` [B] on, each seeing all before it."""
    slots = first[:, None] + torch.arange(length, device=first.device)
    return Window(slots, slots, first)


class SlotCache:
    """Keys and values of `num_slots` tokens a row, for every layer; transformers calls `update` and the getters."""

    is_compileable = True

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: Tensor | None = None  # [B, T] where the tokens of the running forward pass go
        self._num_rows = num_rows
        self._index: Tensor | None = None  # [b] the rows of a view; None: all
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # K and V of all rows, each [num_rows, M, Hkv, D]

    def rows(self, index: Tensor) -> "SlotCache":
        """For passes over some rows [b] only."""
        view = copy.copy(self)
        view._index = index
        return view

    def write_to(self, slots: Tensor) -> None:
        """Set the slots [B, T] of the next forward pass."""
        self.slots = slots
        index = self._index
        self._row = (torch.arange(len(slots), device=slots.device) if index is None else index)[:, None]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store key and value [B, Hkv, T, D] at `slots`; return all slots [B, Hkv, M, D]."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._empty(key), self._empty(value))
        keys, values = self._layers[layer_idx]
        keys[self._row, self.slots] = key.transpose(1, 2)
        values[self._row, self.slots] = value.transpose(1, 2)
        if self._index is not None:
            keys, values = keys[self._index], values[self._index]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._num_rows, self.num_slots, like.shape[1], like.shape[3])

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, of all rows, each [B, M, Hkv, D]."""
        return self._layers[layer_idx]

    def keep_path(self, prefix: Tensor, path: Tensor) -> None:
        """Move what stands in columns `path` [B, D] of the window at `prefix` [B] to its columns 1..D, in every layer.

        Path columns ascend, so that what is kept moves left or not at all.
        """
        rows = torch.arange(len(path), device=path.device)[:, None]
        source = prefix[:, None] + path
        kept = prefix[:, None] + torch.arange(1, path.shape[1] + 1, device=path.device)
        for keys, values in self._layers.values():
            keys[rows, kept] = keys[rows, source]
            values[rows, kept] = values[rows, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.num_slots, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * max(1, len(self._layers))


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, Hq, T, D] over key and value [B, Hkv, M, D] where the mask [B, 1, T, M] is True.

    Without a mask it is causal over the T tokens themselves. `softcap` (Gemma-2) and `s_aux`, the attention sinks of
    gpt-oss, need the scores in the open; everything else goes to torch's fused attention. Returns [B, T, Hq, D].
    """
    assert attention_mask is not None or query.shape[2] == key.shape[2], "a cache needs a mask"
    if sliding_window is not None:
        attention_mask = _within_window(attention_mask, query, sliding_window)
    if softcap is None and s_aux is None:
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scaling,
            enable_gqa=True,
        )
        return output.transpose(1, 2), None

    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = query.float() @ key.float().transpose(2, 3) * scale  # [B, Hq, T, M]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = causal_mask(query)
    scores = scores.masked_fill(~attention_mask, float("-inf"))
    if s_aux is None:
        weights = scores.softmax(-1)
    else:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype).transpose(1, 2), None


def causal_mask(query: Tensor) -> Tensor:
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]


def _within_window(mask: Tensor | None, query: Tensor, window: int) -> Tensor:
    """Drop what lies more than `window` positions back. On a chain, slot = position = number of visible keys - 1."""
    mask = causal_mask(query) if mask is None else mask
    query_positions = mask.sum(-1, keepdim=True) - 1  # [B, 1, T, 1]
    key_positions = torch.arange(mask.shape[-1], device=mask.device)  # [M]
    return mask & (query_positions - key_positions < window)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


def run_on_slots(model: PreTrainedModel, token_ids: Tensor, window: Window, cache: SlotCache) -> Tensor:
    """Run the base model on the new tokens [B, T] of a window; return its last hidden state [B, T, H].

    Positions are clamped to the model's context, so that drafts reaching past it (never kept) stay harmless.
    """
    cache.write_to(window.slots)
    context = getattr(model.config, "max_position_embeddings", None) or cache.num_slots
    output = model.base_model(
        input_ids=token_ids,
        position_ids=window.positions.clamp(max=context - 1),
        attention_mask=window.mask(cache.num_slots),
        past_key_values=cache,
        use_cache=True,
    )
    return output.last_hidden_state


def run_causal(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Run the base model on whole right-padded rows [B, T], without a cache; return its last hidden state [B, T, H].

    Padding at the end needs no mask: no real token looks to its right.
    """
    return model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
