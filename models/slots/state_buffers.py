"""Running states as a slot cache holds them, and a window that one pass reads.

Shapes: B rows, T new tokens a row, k taps of a convolution.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.slots.window import Window

if TYPE_CHECKING:
    from draftsmith.models.slots.cache_kernels import MoveTable


# --- what a cache holds


@dataclass
class Buffer:
    """The state of one part of a layer, of all rows, and the inputs of the newest draft, which wait in `columns`."""

    state: Tensor  # [num_rows, ...]
    inputs: list[Tensor]  # each [num_rows, columns, ...]


@dataclass
class RunningStates:
    """The running states of a cache, of all rows."""

    num_rows: int
    num_columns: int  # of the largest draft expected; a larger one gets more room, which a recorded round cannot make
    buffers: dict[tuple[str, int], Buffer] = field(default_factory=dict)  # by part and layer
    num_held: Tensor | None = None  # [num_rows] int64, tokens that the states have taken up
    num_waiting: Tensor | None = None  # [num_rows] int64, columns that wait behind these
    move_tables: "list[MoveTable] | None" = None  # for `keep_path` on a GPU

    def make_counts(self, device: torch.device) -> None:
        if self.num_held is None:
            self.num_held = torch.zeros(self.num_rows, dtype=torch.int64, device=device)
            self.num_waiting = torch.zeros_like(self.num_held)

    def buffer(self, name: tuple[str, int], shape: tuple[int, ...], inputs: list[Tensor], dtype: torch.dtype) -> Buffer:
        """Return a part of a layer, made where there is none, with room for inputs [B, T, ...]."""
        columns = max(self.num_columns, inputs[0].shape[1])
        buffer = self.buffers.get(name)
        if buffer is None or buffer.inputs[0].shape[1] < columns:
            device = inputs[0].device
            state = torch.zeros(self.num_rows, *shape, dtype=dtype, device=device) if buffer is None else buffer.state
            room = [part.new_zeros(self.num_rows, columns, *part.shape[2:]) for part in inputs]
            for new, old in zip(room, buffer.inputs if buffer else [], strict=bool(buffer)):
                new[:, : old.shape[1]] = old
            self.buffers[name] = buffer = Buffer(state, room)
            self.move_tables = None
        return buffer

    def keep_path(self, rows: Tensor | slice, path: Tensor) -> None:
        """Leave of the waiting columns of rows [B] the first one and those of a path [B, D], in this order."""
        if not self.buffers:
            return
        assert self.num_waiting is not None
        columns = F.pad(path, (1, 0))
        self.num_waiting[rows] = columns.shape[1]
        if runs_kernels(path.device):
            assert isinstance(rows, slice)
            self._move_columns(path)
            return
        for buffer in self.buffers.values():
            for part in buffer.inputs:
                index = columns.view(*columns.shape, *[1] * (part.ndim - 2)).expand(-1, -1, *part.shape[2:])
                part[rows, : columns.shape[1]] = part[rows].gather(1, index)

    def _move_columns(self, path: Tensor) -> None:
        """Do what `keep_path` does in the first rows, as if the columns were slots of a cache behind slot 0."""
        from draftsmith.models.slots import cache_kernels

        if self.move_tables is None:
            parts = [part for buffer in self.buffers.values() for part in buffer.inputs]
            self.move_tables = cache_kernels.move_tables(parts)
        first = torch.zeros(len(path), dtype=torch.int64, device=path.device)
        for table in self.move_tables:
            cache_kernels.move_slots(table, first, path)


# --- what one pass reads


class WindowRead:
    """A window that is being read, by its rows of a cache. Everything is computed once for all layers."""

    def __init__(self, states: RunningStates, rows: Tensor | slice, window: Window) -> None:
        self.states, self.rows, self.window = states, rows, window
        self.layer = -1  # whose convolution or rule is called next
        states.make_counts(window.slots.device)
        assert states.num_held is not None
        assert states.num_waiting is not None
        first, length = window.slots[:, 0], window.slots.shape[1]
        held, waiting = states.num_held[rows], states.num_waiting[rows]
        self.is_new = first == 0  # [B] rows in which another text begins
        self.num_kept = torch.minimum((first - held).clamp(min=0), waiting)  # [B] of the waiting columns
        if window.num_text is None:
            states.num_held[rows] = first
            states.num_waiting[rows] = length
        else:
            held = torch.where(window.num_text > 0, first + window.num_text, held)
            states.num_held[rows] = torch.where(self.is_new, window.num_text, held)
            states.num_waiting[rows] = 0
        on_cpu = first.device.type == "cpu"
        self.most_kept = int(self.num_kept.max()) if on_cpu else states.num_columns  # a GPU is not waited for
        self._ancestors: Tensor | None = None
        self._taps: Tensor | None = None

    @property
    def num_text(self) -> Tensor | None:
        return self.window.num_text

    @property
    def ancestors(self) -> Tensor:
        """Which columns each column follows, itself among them: bool [B, T, T]."""
        if self._ancestors is None:
            length, device = self.window.slots.shape[1], self.window.slots.device
            if self.window.ancestors is None:
                chain = torch.ones(length, length, dtype=torch.bool, device=device).tril()
                self._ancestors = chain.expand(len(self.window.slots), -1, -1)
            else:
                bits = (self.window.ancestors[..., None] >> torch.arange(32, device=device)) & 1
                self._ancestors = bits.flatten(2)[..., :length].bool()
        return self._ancestors

    def taps(self, num_taps: int) -> Tensor:
        """Return where the inputs of a convolution stand, oldest first: int64 [B, T, k].

        Places count from the oldest of the k - 1 inputs of the state, behind which the T new ones stand.
        """
        if self._taps is None or self._taps.shape[2] != num_taps:
            num_after = self.ancestors.flip(2).cumsum(2).flip(2)  # [B, T, T] ancestors of t from column s on
            depth = num_after[..., :1]  # [B, T, 1] of each column, 1 for the first
            back = torch.arange(num_taps, device=depth.device)  # 0: the column itself
            is_back = self.ancestors[:, :, None] & (num_after[:, :, None] == back[:, None] + 1)  # [B, T, k, T]
            new = num_taps - 1 + is_back.int().argmax(3)
            self._taps = torch.where(back < depth, new, num_taps - 1 - (back - depth + 1)).flip(2)
        return self._taps

    def begin(self, buffer: Buffer) -> Tensor:
        """Return the states of these rows [B, ...], zero where a text begins."""
        state = buffer.state[self.rows]
        return state.masked_fill(self.is_new.view(-1, *[1] * (state.ndim - 1)), 0)

    def waiting(self, buffer: Buffer) -> list[Tensor]:
        """Return what waits in these rows, as many columns as may be kept."""
        return [part[self.rows, : self.most_kept] for part in buffer.inputs]

    def let_wait(self, buffer: Buffer, inputs: list[Tensor]) -> None:
        for part, new in zip(buffer.inputs, inputs, strict=True):
            part[self.rows, : new.shape[1]] = new
