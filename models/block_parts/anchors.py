"""The blocks that are trained in a text: their anchors, their tokens, and what they see.

Shapes: B rows, T tokens, M anchors of a row, R rows of a block, K depths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.layers import shift_left


@dataclass
class Anchors:
    """Slots whose blocks are trained, ascending in each row and padded to as many in each; in the host's memory."""

    slots: Tensor  # [B, M] int64, of the newest features; the anchor's token stands one further
    real: Tensor  # [B, M] bool, False for padding


def padded_anchors(kept: Tensor) -> Anchors:
    """Return the slots that are marked, padded to as many in each row, at least one.

    `kept` is bool [B, T] in the host's memory.
    """
    count = max(1, int(kept.sum(1).max()))
    real, slots = kept.sort(dim=1, descending=True, stable=True)
    return Anchors(slots[:, :count], real[:, :count])


def block_tokens(batch: Batch, slots: Tensor, depth: int) -> Tensor:
    """Return the text's tokens from the anchor of each block on, [B, M, depth + 1], by their slots [B, M]."""
    return torch.stack([shift_left(batch.token_ids, 1 + i).gather(1, slots) for i in range(depth + 1)], -1)


def seen_by_blocks(batch: Batch, positions: Tensor, slots: Tensor, num_rows: int, window: int | None) -> Tensor:
    """Return what blocks see of the text and of each other: bool [B, 1, M * R, T + M * R].

    A block at slot t [B, M] sees the features up to t of its document, and itself; with a window each of its rows sees
    the last `window` positions up to its own.
    """
    columns = torch.arange(positions.shape[1], device=slots.device)
    text = columns <= slots[..., None]  # [B, M, T]
    if batch.documents is not None:
        text = text & (batch.documents[:, None, :] == batch.documents.gather(1, slots)[..., None])
    rows = torch.arange(num_rows, device=slots.device)
    text = text[:, :, None].expand(-1, -1, num_rows, -1)
    block = torch.ones(num_rows, num_rows, dtype=torch.bool, device=slots.device)
    if window is not None:
        places = positions.gather(1, slots)[..., None] + 1 + rows  # [B, M, R]
        text = text & (positions[:, None, None, :] > places[..., None] - window)
        block = block.tril().triu(1 - window)
    same = torch.eye(slots.shape[1], dtype=torch.bool, device=slots.device)
    blocks = (same[:, None, :, None] & block[:, None]).flatten(2).flatten(0, 1)  # [M * R, M * R]
    return torch.cat([text.flatten(1, 2), blocks.expand(len(slots), -1, -1)], 2)[:, None]
