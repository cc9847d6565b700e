"""Stock Hugging Face modelling on a cache with one slot per token and one length per row.

`SlotCache` replaces transformers' caches, whose single length for the whole batch rules out ragged rows. A token's
slot says where its key and value are kept, a `Window` which slots the new tokens see. Committed text has slot =
position; the nodes of a drafted tree stand behind it, several of one position side by side.

Shapes: B rows, T new tokens a row, M slots, W words of 32 columns, Hq query heads, Hkv key-value heads, D head width.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from draftsmith.models.cache_kernels import MoveTable

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
        """What each new token sees, as the attention of its device reads it: packed on a GPU, else bool."""
        return self.packed_mask() if self.slots.is_cuda else self.bool_mask(num_slots)

    def bool_mask(self, num_slots: int) -> Tensor:
        """Which slots each new token sees: bool [B, 1, T, M]."""
        all_slots = torch.arange(num_slots, device=self.slots.device)
        if self.ancestors is None:
            return (all_slots <= self.slots[:, :, None])[:, None]
        bits = (self.ancestors[..., None] >> torch.arange(32, device=self.slots.device)) & 1
        bits = bits.flatten(2).bool()  # [B, T, 32 W]
        columns = (all_slots - self.prefix[:, None])[:, None].expand(-1, bits.shape[1], -1)  # [B, T, M]
        inside = bits.gather(2, columns.clamp(0, bits.shape[2] - 1)) & (columns < bits.shape[2])
        return torch.where(columns < 0, True, inside)[:, None]

    def packed_mask(self) -> Tensor:
        """Slot, position, prefix and ancestor words of each new token: int32 [B, 1, T, 3 + W], for chains W = 0.

        With four dimensions like any ready mask, transformers hands it on to the attention as it is.
        """
        seen = torch.stack([self.slots, self.positions, self.prefix[:, None].expand_as(self.slots)], -1).int()
        return (seen if self.ancestors is None else torch.cat([seen, self.ancestors], -1))[:, None]


def chain_window(first: Tensor, length: int) -> Window:
    """`length` new tokens a row from slot `first` [B] on, each seeing all before it."""
    slots = first[:, None] + torch.arange(length, device=first.device)
    return Window(slots, slots, first)


class SlotCache:
    """Keys and values of `num_slots` tokens a row, for every layer; transformers calls `update` and the getters.

    One slot more takes what is written past the end, the padding of rows with fewer new tokens. It is never seen.
    """

    is_compileable = True

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: Tensor | None = None  # [B, T] where the tokens of the running forward pass go
        self._num_rows = num_rows
        self._index: Tensor | None = None  # [b] the rows of a view; None: all
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # K and V of all rows, each [num_rows, M + 1, Hkv, D]
        self._move_tables: list[MoveTable] | None = None  # for `keep_path` on a GPU

    def rows(self, index: Tensor) -> "SlotCache":
        """For passes over some rows [b] only."""
        view = copy.copy(self)
        view._index = index
        return view

    def write_to(self, slots: Tensor) -> None:
        """Set the slots [B, T] of the next forward pass."""
        self.slots = slots.clamp(max=self.num_slots)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store key and value [B, Hkv, T, D] at `slots`; return all slots [B, Hkv, M, D]."""
        assert self.slots is not None
        if layer_idx not in self._layers:
            self._layers[layer_idx] = self._allocate(key), self._allocate(value)
            self._move_tables = None
        keys, values = self._layers[layer_idx]
        if self._index is not None:  # prompts, now and then
            keys[self._index[:, None], self.slots] = key.transpose(1, 2)
            values[self._index[:, None], self.slots] = value.transpose(1, 2)
            keys, values = keys[self._index], values[self._index]
        elif key.is_cuda:
            from draftsmith.models import cache_kernels

            cache_kernels.write_slots(key, value, self.slots, keys, values)
        else:
            write_slots(key, value, self.slots, keys, values)
        return keys[:, : self.num_slots].transpose(1, 2), values[:, : self.num_slots].transpose(1, 2)

    def _allocate(self, new: Tensor) -> Tensor:
        _, heads, _, width = new.shape
        return new.new_zeros(self._num_rows, self.num_slots + 1, heads, width)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, of all rows, each [B, M, Hkv, D]."""
        keys, values = self._layers[layer_idx]
        return keys[:, : self.num_slots], values[:, : self.num_slots]

    def keep_path(self, prefix: Tensor, path: Tensor) -> None:
        """Move what stands in columns `path` [B, D] of the window at `prefix` [B] to its columns 1..D, in every layer.

        All is read before anything is written, so that a path may end in any columns where fewer than D nodes are
        kept: what they bring lands behind the kept ones.
        """
        stored = [tensor for layer in self._layers.values() for tensor in layer]
        if not path.is_cuda:
            move_slots(stored, prefix, path)
            return
        from draftsmith.models import cache_kernels

        if self._move_tables is None:
            self._move_tables = cache_kernels.move_tables(stored)
        for table in self._move_tables:
            cache_kernels.move_slots(table, prefix, path)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.num_slots, 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * max(1, len(self._layers))


def write_slots(key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store key and value [B, Hkv, T, D] of new tokens in keys and values [B, M + 1, Hkv, D] at `slots` [B, T]."""
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    keys[rows, slots] = key.transpose(1, 2)
    values[rows, slots] = value.transpose(1, 2)


def move_slots(stored: list[Tensor], prefix: Tensor, path: Tensor) -> None:
    """`SlotCache.keep_path` in each of the stored tensors [B, M + 1, Hkv, D]."""
    rows = torch.arange(len(path), device=path.device)[:, None]
    source = prefix[:, None] + path
    kept = prefix[:, None] + torch.arange(1, path.shape[1] + 1, device=path.device)
    for tensor in stored:
        last = tensor.shape[1] - 1
        tensor[rows, kept.clamp(max=last)] = tensor[rows, source.clamp(max=last)]


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
    """Attention of query [B, Hq, T, D] over key and value [B, Hkv, M, D]. Returns [B, T, Hq, D].

    The mask is a window's, packed for the kernel or bool [B, 1, T, M]; without one it is causal over the T tokens
    themselves. A token sees the last `sliding_window` positions of its path. `softcap` (Gemma-2) and `s_aux`, the
    attention sinks of gpt-oss, need the scores in the open; everything else goes to torch's fused attention.
    """
    assert attention_mask is not None or query.shape[2] == key.shape[2], "a cache needs a mask"
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        from draftsmith.models import attention_kernel

        return attention_kernel.attend(query, key, value, attention_mask, scale, sliding_window, softcap, s_aux), None
    in_the_open = softcap is not None or s_aux is not None
    if attention_mask is not None and sliding_window is not None:
        attention_mask = last_seen(attention_mask, sliding_window)
    if attention_mask is None and (in_the_open or sliding_window is not None):
        attention_mask = causal_mask(query, sliding_window)
    if not in_the_open:
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return output.transpose(1, 2), None

    assert attention_mask is not None
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query.float() @ key.float().transpose(2, 3) * scale  # [B, Hq, T, M]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attention_mask, float("-inf"))
    if s_aux is None:
        weights = scores.softmax(-1)
    else:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype).transpose(1, 2), None


def causal_mask(query: Tensor, sliding_window: int | None) -> Tensor:
    """Bool [1, 1, T, T]: each token sees the last `sliding_window` up to itself."""
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return (seen if sliding_window is None else seen.triu(1 - sliding_window))[None, None]


def last_seen(mask: Tensor, count: int) -> Tensor:
    """The last `count` slots of those that each token sees, bool [B, 1, T, M].

    These hold the last `count` positions: whatever tree it is a part of, a token sees one path, ancestors first.
    """
    return mask & (mask.sum(-1, keepdim=True) - mask.cumsum(-1) < count)


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
