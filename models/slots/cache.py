"""Stock Hugging Face modelling on a cache with one slot per token and one length per row.

`SlotCache` replaces transformers' caches, whose single length for the whole batch rules out ragged rows. A token's
slot says where its key and value are kept, a `Window` which slots the new tokens see. Committed text has slot =
position; the nodes of a drafted tree stand behind it, several of one position side by side.

Shapes: B rows, T new tokens a row, M slots, W words of 32 columns, Hq query heads, Hkv key-value heads, D head width of
queries and keys, Dv that of values (most often D), S = Hkv * (D + Dv) values that a slot of a layer holds.
"""

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.slots.running_states import enter_layer
from draftsmith.models.slots.state_buffers import RunningStates

if TYPE_CHECKING:
    from draftsmith.models.slots.cache_kernels import MoveTable


@dataclass
class LayerSlots:
    """The slots of a layer of a cache, of all rows. Keys and values are views of `kept`, where they stand side by side.

    One slot more a row takes what is written past the end, the padding of rows with fewer new tokens. It is never seen.
    """

    kept: Tensor  # [num_rows, M + 1, S]
    keys: Tensor  # [num_rows, Hkv, M, D]
    values: Tensor  # [num_rows, Hkv, M, Dv]


class SlotCache:
    """Keys and values of `num_slots` tokens a row, for every layer, or its running states.

    transformers calls `update` and the getters.
    """

    is_compileable = True

    def __init__(self, num_rows: int, num_slots: int, num_columns: int = 1) -> None:
        """`num_columns`: of the largest draft, with the token before it."""
        self.num_slots = num_slots
        self.states = RunningStates(num_rows, num_columns)
        self.num_seen = num_slots  # slots from the left that attention reads; the host lowers it where rows are short
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

    def chosen_rows(self, count: int) -> Tensor | slice:
        """Return the rows of a pass over `count` of them: those that a view picked, else the first ones."""
        rows = self.picked_rows
        return slice(count) if rows is None else rows

    def write_to(self, slots: Tensor) -> None:
        """Set the slots [B, T] of the next forward pass."""
        self.written = self.rows_of(slots).flatten()

    def rows_of(self, slots: Tensor) -> Tensor:
        """Return where in `flat` the slots [B, T] of the rows of a pass stand, int64 [B, T]."""
        rows, length = self.picked_rows, self.num_slots + 1
        first_rows = torch.arange(0, len(slots) * length, length, device=slots.device)
        starts = first_rows if rows is None else rows * length
        return starts[:, None] + slots.clamp(max=self.num_slots)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store key and value [B, Hkv, T, D or Dv] at the slots set before; return those seen, [B, Hkv, M, D or Dv]."""
        self.reserve(layer_idx, key.shape[1], (key.shape[3], value.shape[3]), like=key)
        if runs_kernels(key.device):
            from draftsmith.models.slots import cache_kernels

            cache_kernels.write_slots(key, value, self.written, self.flat(layer_idx))
        else:
            write_slots(key, value, self.written, self.flat(layer_idx))
        return self.keys_and_values(layer_idx)

    def update_indexer(self, key: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store the keys [B, T, D] by which a layer chooses what it attends to; return those seen, [B, M, D].

        They stand beside the layer's own keys and values, under a number below 0.
        """
        return self.update(key[:, None], key[:, None, :, :0], -1 - layer_idx)[0][:, 0]

    def reserve(self, layer_idx: int, heads: int, widths: tuple[int, int], like: Tensor) -> None:
        """Make a layer's slots, empty, unless they exist; `widths` are D and Dv."""
        if layer_idx not in self._layers:
            kept = like.new_zeros(self._num_rows, self.num_slots + 1, heads * sum(widths))
            of_slots = kept[:, : self.num_slots].split([heads * width for width in widths], 2)
            keys, values = (part.unflatten(2, (heads, -1)).transpose(1, 2) for part in of_slots)
            self._layers[layer_idx] = LayerSlots(kept, keys, values)
            self._move_tables = None

    def slot_sizes(self) -> dict[int, int]:
        """Return how many values a slot of each layer holds, S."""
        return {layer: slots.kept.shape[2] for layer, slots in self._layers.items()}

    def flat(self, layer_idx: int) -> Tensor:
        """Return a layer's slots of all rows, for writing: [num_rows * (M + 1), S], keys before values."""
        return self._layers[layer_idx].kept.flatten(0, 1)

    def keys_and_values(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return what a layer of these rows holds in the slots seen, for reading: each [B, Hkv, M, D or Dv]."""
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
        self.states.keep_path(self.chosen_rows(len(path)), path)
        stored = [layer.kept for layer in self._layers.values()]
        if not stored:  # short convolutions alone
            return
        if not runs_kernels(path.device):
            move_slots(stored, prefix, path)
            return
        from draftsmith.models.slots import cache_kernels

        if self._move_tables is None:
            self._move_tables = cache_kernels.move_tables(stored)
        for table in self._move_tables:
            cache_kernels.move_slots(table, prefix, path)

    def update_conv_state(self, inputs: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Note the layer of the inputs [B, C, T] of a convolution, which itself will look for those before them."""
        enter_layer(layer_idx)
        return inputs

    def update_recurrent_state(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the state, which the layer's rule has kept."""
        return state

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Return that there is no state: a module then calls functions that are replaced (until transformers 5.20)."""
        return False

    def get_conv_state(self, *args: Any, **kwargs: Any) -> None:
        """Return no state, for the same reason (from transformers 5.21 on)."""

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> None:
        """Return no state, for the same reason."""

    def is_recording_past(self, *args: Any, **kwargs: Any) -> bool:
        return True

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
    """Store key [B, Hkv, T, D] and value [B, Hkv, T, Dv] of new tokens in rows `written` [B * T] of flat [R, S]."""
    new = torch.cat([part.transpose(1, 2).flatten(2) for part in (key, value)], 2)  # [B, T, S]
    flat.index_copy_(0, written, new.flatten(0, 1))


def move_slots(stored: list[Tensor], prefix: Tensor, path: Tensor) -> None:
    """Do what `SlotCache.keep_path` does in each of the stored tensors [B, M + 1, ...]."""
    rows = torch.arange(len(path), device=path.device)[:, None]
    last = stored[0].shape[1] - 1
    source = (prefix[:, None] + path).clamp(max=last)
    kept = (prefix[:, None] + torch.arange(1, path.shape[1] + 1, device=path.device)).clamp(max=last)
    for tensor in stored:
        tensor[rows, kept] = tensor[rows, source]
