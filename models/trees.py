"""What shape a draft has: a chain or a tree; depths of its nodes, and who is whose ancestor.

Shapes: B rows, N nodes, T = N + 1 columns of the window (column 0 is the root), W words of 32 columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 32  # columns in a word of the ancestor mask


@dataclass(frozen=True)
class Chain:
    """Every token follows the one before it."""

    depth: int

    @property
    def num_nodes(self) -> int:
        return self.depth


@dataclass(frozen=True)
class StaticTree:
    """The same tree each round: a node is the path of choices to it, 0 for the likeliest token of its parent."""

    choices: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.choices)

    @property
    def depth(self) -> int:
        return max(map(len, self.choices))


@dataclass(frozen=True)
class DynamicTree:
    """The likeliest `num_nodes` of what grows when `width` nodes of each level get `width` children (EAGLE-2)."""

    num_nodes: int
    depth: int
    width: int


Shape = Chain | StaticTree | DynamicTree


def node_depths(parents: Tensor, depth: int) -> Tensor:
    """Depth of each column [B, T] from the nodes' parents [B, N]: 0 for the root, `depth` at most."""
    columns = parent_columns(parents)
    found = torch.zeros_like(columns)
    ancestor = torch.arange(columns.shape[1], device=parents.device).expand_as(columns)
    for _ in range(depth):
        found = found + (ancestor > 0)
        ancestor = columns.gather(1, ancestor)
    return found


def ancestor_words(parents: Tensor, depth: int) -> Tensor:
    """Which columns each column sees, itself among them: int32 bits [B, T, W] from the nodes' parents [B, N]."""
    columns = parent_columns(parents)
    batch, width = columns.shape
    num_words = -(-width // WORD)
    seen = torch.zeros(batch, width, num_words * WORD, dtype=torch.int64, device=parents.device)
    ancestor = torch.arange(width, device=parents.device).expand_as(columns)
    for _ in range(depth + 1):
        seen.scatter_(2, ancestor[..., None], 1)
        ancestor = columns.gather(1, ancestor)
    powers = torch.arange(WORD, device=parents.device)
    words = (seen.unflatten(2, (num_words, WORD)) << powers).sum(-1)
    return torch.where(words >= 1 << (WORD - 1), words - (1 << WORD), words).int()  # bit 31 is the sign


def parent_columns(parents: Tensor) -> Tensor:
    """The column of each column's parent [B, T]; the root is its own."""
    root = torch.zeros(len(parents), 1, dtype=parents.dtype, device=parents.device)
    return torch.cat([root, parents + 1], 1)
