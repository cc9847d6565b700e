"""Stock Hugging Face modelling on a cache with one slot per token and one length per row.

`SlotCache` replaces transformers' caches, whose single length for the whole batch rules out ragged rows. A token's
slot says where its key and value are kept, a `Window` which slots the new tokens see. Committed text has slot =
position; the nodes of a drafted tree stand behind it, several of one position side by side.

Shapes: B rows, T new tokens a row, M slots, W words of 32 columns, Hq query heads, Hkv key-value heads, D head width.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.models.batch import pairs_mask
from draftsmith.models.kernels import has_flash_attention, runs_kernels
from draftsmith.models.layers import as_computed

if TYPE_CHECKING:
    from draftsmith.models.target.cache_kernels import MoveTable

ATTENTION = "draftsmith"  # the name under which transformers finds `slot_attention`


@dataclass
class Window:
    """The slots of the new tokens of one forward pass, and what they see.

    All see the slots before `prefix`. Of the columns from there on (column c is slot prefix + c) each sees those whose
    bits are set in its `ancestors`; without them, the new tokens form chains and each sees every slot up to its own.
    """

    slots: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64
    prefix: Tensor  # [B] int64
    ancestors: Tensor | None = None  # [B, T, W] int32, bit c % 32 of word c // 32

    def mask(self, num_slots: int) -> Tensor:
        """Return what each new token sees, as the attention of its device reads it: packed on a GPU, else bool."""
        return self.packed_mask() if runs_kernels(self.slots.device) else self.bool_mask(num_slots)

    def bool_mask(self, num_slots: int) -> Tensor:
        """Return which slots each new token sees: bool [B, 1, T, M]."""
        all_slots = torch.arange(num_slots, device=self.slots.device)
        if self.ancestors is None:
            return (all_slots <= self.slots[:, :, None])[:, None]
        bits = (self.ancestors[..., None] >> torch.arange(32, device=self.slots.device)) & 1
        bits = bits.flatten(2).bool()  # [B, T, 32 W]
        columns = (all_slots - self.prefix[:, None])[:, None].expand(-1, bits.shape[1], -1)  # [B, T, M]
        inside = bits.gather(2, columns.clamp(0, bits.shape[2] - 1)) & (columns < bits.shape[2])
        return torch.where(columns < 0, True, inside)[:, None]

    def packed_mask(self) -> Tensor:
        """Return slot, position, prefix and ancestor words of each new token: int32 [B, 1, T, 3 + W], for chains W = 0.

        With four dimensions like any ready mask, transformers hands it on to the attention as it is.
        """
        seen = torch.stack([self.slots, self.positions, self.prefix[:, None].expand_as(self.slots)], -1).int()
        return (seen if self.ancestors is None else torch.cat([seen, self.ancestors], -1))[:, None]


def chain_window(first: Tensor, length: int) -> Window:
    """Return a window of `length` new tokens a row from slot `first` [B] on, each seeing all before it."""
    slots = first[:, None] + torch.arange(length, device=first.device)
    return Window(slots, slots, first)


@dataclass
class LayerSlots:
    """A layer of a cache, of all rows. All are views of one tensor, in which a slot's keys stand before its values.

    One slot more a row takes what is written past the end, the padding of rows with fewer new tokens. It is never seen.
    """

    kept: Tensor  # [num_rows, M + 1, 2, Hkv, D]
    flat: Tensor  # [num_rows * (M + 1), 2 * Hkv * D]
    keys: Tensor  # [num_rows, Hkv, M, D]
    values: Tensor  # [num_rows, Hkv, M, D]


class SlotCache:
    """Keys and values of `num_slots` tokens a row, for every layer; transformers calls `update` and the getters."""

    is_compileable = True

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_seen = num_slots  # that attention reads, from the left; the host lowers it where rows are short
        self.written: Tensor  # [B * T] int64, where in `flat` the running forward pass stores its tokens
        self.angles: Tensor | None = None  # of the rotary embedding, kept here by a fused decoder
        self._num_rows = num_rows
        self._index: Tensor | slice | None = None  # the rows [b] of a view, or a slice from the first; None: all
        self._layers: dict[int, LayerSlots] = {}
        self._move_tables: list[MoveTable] | None = None  # for `keep_path` on a GPU

    def rows(self, index: Tensor | slice) -> "SlotCache":
        """Return a view for passes over some rows: their indices [b], or a slice from the first row on."""
        view = copy.copy(self)
        view._index = index
        return view

    @property
    def picked_rows(self) -> Tensor | None:
        """Rows [b] of a view that was made by indices; None where they are the first ones in order."""
        return self._index if isinstance(self._index, Tensor) else None

    def write_to(self, slots: Tensor) -> None:
        """Set the slots [B, T] of the next forward pass."""
        rows = self.picked_rows
        if rows is None:
            rows = torch.arange(len(slots), device=slots.device)
        self.written = (rows[:, None] * (self.num_slots + 1) + slots.clamp(max=self.num_slots)).flatten()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store key and value [B, Hkv, T, D] at the slots set before; return those seen, each [B, Hkv, M, D]."""
        self.reserve(layer_idx, key.shape[1], key.shape[3], like=key)
        if runs_kernels(key.device):
            from draftsmith.models.target import cache_kernels

            cache_kernels.write_slots(key, value, self.written, self.flat(layer_idx))
        else:
            write_slots(key, value, self.written, self.flat(layer_idx))
        return self.keys_and_values(layer_idx)

    def reserve(self, layer_idx: int, heads: int, width: int, like: Tensor) -> None:
        """Make a layer's slots, empty, unless they exist."""
        if layer_idx not in self._layers:
            kept = like.new_zeros(self._num_rows, self.num_slots + 1, 2, heads, width)
            keys, values = (kept[:, : self.num_slots, part].transpose(1, 2) for part in (0, 1))
            self._layers[layer_idx] = LayerSlots(kept, kept.view(-1, 2 * heads * width), keys, values)
            self._move_tables = None

    def flat(self, layer_idx: int) -> Tensor:
        """Return a layer's slots of all rows, for writing: [num_rows * (M + 1), 2 * Hkv * D], keys before values."""
        return self._layers[layer_idx].flat

    def keys_and_values(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return what a layer of these rows holds in the slots seen, for reading: each [B, Hkv, M, D]."""
        layer = self._layers[layer_idx]
        keys, values = layer.keys, layer.values
        if self.num_seen < self.num_slots:
            keys, values = keys[:, :, : self.num_seen], values[:, :, : self.num_seen]
        if self._index is None:
            return keys, values
        return keys[self._index], values[self._index]  # by indices copied, for prompts now and then

    def keep_path(self, prefix: Tensor, path: Tensor) -> None:
        """Move what stands in columns `path` [B, D] of the window at `prefix` [B] to its columns 1..D, in every layer.

        All is read before anything is written, so that a path may end in any columns where fewer than D nodes are
        kept: what they bring lands behind the kept ones.
        """
        stored = [layer.kept for layer in self._layers.values()]
        if not runs_kernels(path.device):
            move_slots(stored, prefix, path)
            return
        from draftsmith.models.target import cache_kernels

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


def write_slots(key: Tensor, value: Tensor, written: Tensor, flat: Tensor) -> None:
    """Store key and value [B, Hkv, T, D] of new tokens in rows `written` [B * T] of flat [R, 2 * Hkv * D]."""
    new = torch.cat([key.transpose(1, 2), value.transpose(1, 2)], 2)  # [B, T, 2 * Hkv, D]
    flat.index_copy_(0, written, new.flatten(0, 1).flatten(1))


def move_slots(stored: list[Tensor], prefix: Tensor, path: Tensor) -> None:
    """Do what `SlotCache.keep_path` does in each of the stored tensors [B, M + 1, ...]."""
    rows = torch.arange(len(path), device=path.device)[:, None]
    last = stored[0].shape[1] - 1
    source = (prefix[:, None] + path).clamp(max=last)
    kept = (prefix[:, None] + torch.arange(1, path.shape[1] + 1, device=path.device)).clamp(max=last)
    for tensor in stored:
        tensor[rows, kept] = tensor[rows, source]


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
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, T, Hq, D] of query [B, Hq, T, D] over key and value [B, Hkv, M, D].

    The mask is a window's, packed for the kernel or bool [B, 1, T, M]; without one it is causal over the T tokens
    themselves. For packed rows on a GPU it says where their documents begin, int64 [1, 1, 1, documents + 1]. A token
    sees the last `sliding_window` positions of its path. `softcap` (Gemma-2) and `s_aux`, the attention sinks of
    gpt-oss, need the scores in the open; everything else goes to torch's fused attention. `attend`, which whoever calls
    a layer gives it, computes the attention instead, from query, key, value and scale. Raises `TypeError` for a mask
    that a model made itself.
    """
    if attend is not None:
        return attend(query, key, value, scaling if scaling is not None else query.shape[-1] ** -0.5), None
    assert attention_mask is not None or query.shape[2] == key.shape[2], "a cache needs a mask"
    if attention_mask is not None and attention_mask.is_floating_point():
        raise TypeError("the model makes attention masks of its own")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        from draftsmith.models.target import attention_kernel

        return attention_kernel.attend(query, key, value, attention_mask, scale, sliding_window, softcap, s_aux), None
    in_the_open = softcap is not None or s_aux is not None
    if attention_mask is not None and attention_mask.dtype == torch.int64:
        if not in_the_open and has_flash_attention(as_computed(query)):
            return documents_attention(query, key, value, attention_mask.flatten(), scale, sliding_window), None
        attention_mask = mask_of_documents(attention_mask.flatten(), query)
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
    return attention_in_the_open(query, key, value, attention_mask, scale, softcap, s_aux), None


def attention_in_the_open(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Return attention [B, T, Hq, D] with all scores in memory, which a soft cap and attention sinks [Hq] change.

    `mask` is bool [B, 1, T, M].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query.float() @ key.float().transpose(2, 3) * scale  # [B, Hq, T, M]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if s_aux is None:
        weights = scores.softmax(-1)
    else:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype).transpose(1, 2)


def documents_attention(
    query: Tensor, key: Tensor, value: Tensor, edges: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """Return causal attention within each document [B, T, Hq, D] by flash attention, which reads no other pairs.

    `edges` [documents + 1]: where the documents begin among all B * T tokens, and the end.
    """
    rows, length = query.shape[0], query.shape[2]
    in_a_row = [as_computed(x).transpose(1, 2).flatten(0, 1) for x in (query, key, value)]  # [B * T, H, D]
    starts, window = edges.int(), None if sliding_window is None else sliding_window - 1
    output = torch.ops.aten._flash_attention_forward(
        *in_a_row, starts, starts, length, length, 0.0, True, False, scale=scale, window_size_left=window
    )[0]
    return output.unflatten(0, (rows, length))


def mask_of_documents(edges: Tensor, query: Tensor) -> Tensor:
    """Return bool [B, 1, T, T] from where the documents begin: each token sees those up to it in its document."""
    rows, length = query.shape[0], query.shape[2]
    places = torch.arange(rows * length, device=edges.device)
    return pairs_mask(torch.searchsorted(edges, places, right=True).view(rows, length))


def causal_mask(query: Tensor, sliding_window: int | None) -> Tensor:
    """Return bool [1, 1, T, T]: each token sees the last `sliding_window` up to itself."""
    length = query.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return (seen if sliding_window is None else seen.triu(1 - sliding_window))[None, None]


def last_seen(mask: Tensor, count: int) -> Tensor:
    """Return the last `count` slots of those that each token sees, bool [B, 1, T, M].

    These hold the last `count` positions: whatever tree it is a part of, a token sees one path, ancestors first.
    """
    return mask & (mask.sum(-1, keepdim=True) - mask.cumsum(-1) < count)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, lambda *args, **kwargs: None)


def context_of(config: PretrainedConfig) -> int:
    """Return the largest number of tokens that a model of the config can hold on slots.

    LongRoPE turns all keys by other angles as soon as a text is longer than its first context, which ends it here: what
    is in the cache cannot be turned again.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    if rotary.get("rope_type") == "longrope":
        return rotary["original_max_position_embeddings"]
    return config.max_position_embeddings


def run_on_slots(model: PreTrainedModel, token_ids: Tensor, window: Window, cache: SlotCache) -> Tensor:
    """Run the base model on the new tokens [B, T] of a window; return its last hidden state [B, T, H].

    Positions are clamped to the model's context, so that drafts reaching past it (never kept) stay harmless.
    """
    cache.write_to(window.slots)
    output = model.base_model(
        input_ids=token_ids,
        position_ids=window.positions.clamp(max=context_of(model.config) - 1),
        attention_mask=window.mask(cache.num_seen),
        past_key_values=cache,
        use_cache=True,
    )
    return output.last_hidden_state


def run_causal(
    model: PreTrainedModel, token_ids: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Run the base model on whole right-padded rows [B, T], without a cache; return its last hidden state [B, T, H].

    Padding at the end needs no mask: no real token looks to its right. Packed rows need their positions [B, T] and a
    mask of what each token sees, bool [B, 1, T, T].
    """
    output = model.base_model(input_ids=token_ids, position_ids=positions, attention_mask=mask, use_cache=False)
    return output.last_hidden_state
