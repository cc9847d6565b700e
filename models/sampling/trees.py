"""The shapes of drafts, chains and trees: the depths of their nodes, and which nodes are ancestors of which.

Shapes: B rows, N nodes, T = N + 1 columns of the window (column 0 is the root), W words of 32 columns.
"""

import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Count, Depth, Natural, TwoOrMore, checked_fields

WORD = 32  # columns in a word of the ancestor mask


@dataclass(frozen=True)
class Chain:
    """Every token follows the one before it."""

    depth: int

    @property
    def num_nodes(self) -> int:
        return self.depth

    @property
    def num_read(self) -> int:
        """Number of drafted tokens that the drafter reads, to draft what follows them."""
        return max(0, self.depth - 1)


@dataclass(frozen=True)
class StaticTree:
    """The same tree each round: a node is the path of choices to it, 0 for the likeliest token of its parent.

    Nodes are put in order: level by level, siblings by their choice. Raises `UserError` for a node whose parent or
    whose next better sibling is not in the tree: siblings are tried in order, and what was drawn second is a draw from
    what the first has left.
    """

    choices: tuple[tuple[Natural, ...], ...]

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "tree: "))
        nodes = {*self.choices} - {()}
        if not nodes:
            raise UserError("tree: give at least one node, such as [0] for the likeliest first token")
        for path in nodes:
            before = (*path[:-1], path[-1] - 1) if path[-1] else path[:-1]
            if before and before not in nodes:
                raise UserError(f"tree: node {list(path)} needs node {list(before)} in the tree")
        object.__setattr__(self, "choices", tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @property
    def num_nodes(self) -> int:
        return len(self.choices)

    @property
    def depth(self) -> int:
        return len(self.choices[-1])

    @property
    def width(self) -> int:
        """Largest number of children of a node."""
        return 1 + max(path[-1] for path in self.choices)

    @property
    def num_read(self) -> int:
        return len({path[:-1] for path in self.choices}) - 1


@dataclass(frozen=True)
class DynamicTree:
    """The likeliest `num_nodes` of what grows when `width` nodes of each level get `width` children (EAGLE-2)."""

    num_nodes: Count
    depth: Depth
    width: TwoOrMore

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "tree: "))
        most = self.width + (self.depth - 1) * self.width**2
        if not self.depth < self.num_nodes <= most:
            raise UserError(
                f"tree of {self.num_nodes} nodes: depth {self.depth} and width {self.width} "
                f"make {self.depth + 1} to {most}"
            )

    @property
    def num_read(self) -> int:
        return (self.depth - 1) * self.width


@dataclass(frozen=True)
class DDTree:
    """The likeliest `num_nodes` of all paths, for a drafter whose depths do not hang on each other (arXiv 2604.12989).

    What a path is worth is the product of its tokens' probabilities. No other tree of as many nodes has more accepted
    tokens expected, if the probabilities are right.
    """

    num_nodes: Count
    depth: Depth

    def __post_init__(self) -> None:
        vars(self).update(checked_fields(type(self), vars(self), "tree: "))
        if self.num_nodes < self.depth:
            raise UserError(f"tree of {self.num_nodes} nodes: give a depth of at most as much, not {self.depth}")

    @property
    def num_read(self) -> int:
        return 0

    @property
    def width(self) -> int:
        """Number of children that a node must have to choose from: with fewer the tree is not filled."""
        return 1


Tree = StaticTree | DynamicTree | DDTree
Shape = Chain | Tree


def likeliest_tree(accuracies: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Return the tree of `num_nodes` with most accepted nodes expected, for depths that err independently.

    `accuracies[i][r]`: how often the token that the drafter ranks r-th (from 0) at depth i is right, falling with r. A
    node is right as often as all choices on its path are; the likeliest nodes are added one by one (Medusa, arXiv
    2401.10774, section 2.3.3). Raises `UserError` for more nodes than there can be.
    """
    frontier: list[tuple[float, tuple[int, ...]]] = [
        (-accuracies[0][0], (0,))
    ]  # the next sibling of every node in the tree, and its first child
    nodes: list[tuple[int, ...]] = []
    while len(nodes) < num_nodes:
        if not frontier:
            raise UserError(f"tree of {num_nodes} nodes: these accuracies allow {len(nodes)} at most")
        _, path = heapq.heappop(frontier)
        nodes.append(path)
        for new in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(new) <= len(accuracies) and new[-1] < len(accuracies[len(new) - 1]):
                heapq.heappush(frontier, (-math.prod(map(operator.getitem, accuracies, new)), new))
    return StaticTree(tuple(nodes))


def node_depths(parents: Tensor, depth: int) -> Tensor:
    """Return the depth of each column [B, T] from the nodes' parents [B, N]: 0 for the root, `depth` at most."""
    columns = parent_columns(parents)
    depths = torch.zeros_like(columns)
    ancestor = torch.arange(columns.shape[1], device=parents.device).expand_as(columns)
    for _ in range(depth):
        depths = depths + (ancestor > 0)
        ancestor = columns.gather(1, ancestor)
    return depths


def ancestor_words(parents: Tensor, depth: int) -> Tensor:
    """Return which columns each column sees, itself among them: int32 bits [B, T, W] from the parents [B, N]."""
    columns = parent_columns(parents)
    batch, width = columns.shape
    num_words = -(-width // WORD)
    seen = torch.zeros(batch, width, num_words * WORD, dtype=torch.int64, device=parents.device)
    ancestor = torch.arange(width, device=parents.device).expand_as(columns)
    for _ in range(depth + 1):
        seen.scatter_(2, ancestor[..., None], 1)
        ancestor = columns.gather(1, ancestor)
    return pack(seen)


def pack(seen: Tensor) -> Tensor:
    """Pack numbers 0 and 1 [..., 32 W] int64 into the bits of int32 words [..., W]; bit 31 is the sign."""
    powers = torch.arange(WORD, device=seen.device)
    words = (seen.unflatten(-1, (-1, WORD)) << powers).sum(-1)
    return torch.where(words >= 1 << (WORD - 1), words - (1 << WORD), words).int()


def parents_or_chain(parents: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the parents [B, N] of drafted tokens [B, N]; None stands for those of a chain."""
    if parents is not None:
        return parents
    return torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)


def parent_columns(parents: Tensor) -> Tensor:
    """Return the column of each column's parent [B, T]; the root is its own."""
    root = torch.zeros(len(parents), 1, dtype=parents.dtype, device=parents.device)
    return torch.cat([root, parents + 1], 1)
