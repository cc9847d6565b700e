"""The slots of new tokens, and what these see.

Shapes: B rows, T new tokens a row, M slots, W words of 32 columns, D head width.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.models.kernels import runs_kernels


class Places(NamedTuple):
    """Places in the cache of a window's tokens, the masks of what they see, and the angles that their heads turn by."""

    written: Tensor  # [B, T] int64 rows of a layer in the cache
    masks: dict[int | None, Tensor]  # of each sliding window fp32 [B, 1, T, M], to add to the scores
    cos: Tensor  # [B, T, 1, 1, D / 2] fp32
    sin: Tensor  # [B, T, 1, 2, D / 2] fp32, negative for first halves

    def part(self, columns: slice) -> "Places":
        """Return those of some columns of the window."""
        masks = {reach: mask[:, :, columns] for reach, mask in self.masks.items()}
        return Places(self.written[:, columns], masks, self.cos[:, columns], self.sin[:, columns])


@dataclass
class Window:
    """The slots of the new tokens of one forward pass, and what they see.

    All see the slots before `prefix`. Of the columns from there on (column c is slot prefix + c) each sees those whose
    bits are set in its `ancestors`; without them, the new tokens form chains and each sees every slot up to its own.
    `num_text` columns from the left are text, and what stands behind them is padding; None: a draft behind a token of
    text, of which the slot of the next window's first token will tell how many tokens were kept.
    """

    slots: Tensor  # [B, T] int64
    positions: Tensor  # [B, T] int64
    prefix: Tensor  # [B] int64
    ancestors: Tensor | None = None  # [B, T, W] int32, bit c % 32 of word c // 32
    num_text: Tensor | None = None  # [B] int64
    part_of: "tuple[Window, slice] | None" = None  # a longer window, and the columns of it that this one has
    places: Places | None = None  # of a longer window: what `layer_steps.places_of` returned for it

    def part(self, columns: slice) -> "Window":
        """Return the window of some columns of chains. On a CPU all parts share what is made of the whole."""
        return Window(self.slots[:, columns], self.positions[:, columns], self.prefix, part_of=(self, columns))

    def mask(self, num_slots: int) -> Tensor:
        """Return what each new token sees, as the attention of its device reads it: packed on a GPU, else bool."""
        return self.packed_mask() if runs_kernels(self.slots.device) else self.bool_mask(num_slots)

    def bool_mask(self, num_slots: int) -> Tensor:
        """Return which slots each new token sees: bool [B, 1, T, M]."""
        if self.ancestors is None:
            return chain_mask(self.slots, num_slots)
        return unpacked_mask(self.packed_mask(), num_slots)

    def packed_mask(self) -> Tensor:
        """Return slot, position, prefix and ancestor words of each new token: int32 [B, 1, T, 3 + W], for chains W = 0.

        With four dimensions like any ready mask, transformers hands it on to the attention as it is.
        """
        seen = torch.stack([self.slots, self.positions, self.prefix[:, None].expand_as(self.slots)], -1).int()
        return (seen if self.ancestors is None else torch.cat([seen, self.ancestors], -1))[:, None]


def unpacked_mask(packed: Tensor, num_slots: int) -> Tensor:
    """Return which slots each new token sees, bool [B, 1, T, M], from what `Window.packed_mask` returns."""
    slot, _, prefix, *words = packed[:, 0].unbind(-1)  # each [B, T]
    if not words:
        return chain_mask(slot, num_slots)
    all_slots = torch.arange(num_slots, device=packed.device)
    bits = (torch.stack(words, -1)[..., None] >> torch.arange(32, device=packed.device)) & 1
    bits = bits.flatten(2).bool()  # [B, T, 32 W]
    columns = all_slots - prefix[..., None]  # [B, T, M]
    inside = bits.gather(2, columns.clamp(0, bits.shape[2] - 1)) & (columns < bits.shape[2])
    return torch.where(columns < 0, True, inside)[:, None]


def chain_mask(slots: Tensor, num_slots: int) -> Tensor:
    """Return which slots new tokens in `slots` [B, T] see that form chains: all up to their own, bool [B, 1, T, M]."""
    return (torch.arange(num_slots, device=slots.device) <= slots[..., None])[:, None]


def chain_window(first: Tensor, length: int, num_text: Tensor | None = None) -> Window:
    """Return a window of `length` new tokens a row from slot `first` [B] on, each seeing all before it."""
    slots = first[:, None] + torch.arange(length, device=first.device)
    return Window(slots, slots, first, num_text=num_text)
