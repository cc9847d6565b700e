"""Depths and ancestors of drafted trees against walking from node to node."""

import pytest
import torch
from torch import Tensor

from draftsmith.models.sampling.trees import WORD, ancestor_words, node_depths
from draftsmith.models.slots.window import Window


def random_parents(num_nodes: int, seed: int, rows: int = 3) -> Tensor:
    """Trees in which every parent comes before its children."""
    generator = torch.Generator().manual_seed(seed)
    highest = torch.arange(num_nodes).expand(rows, -1)
    return (torch.rand(rows, num_nodes, generator=generator) * (highest + 1)).long() - 1


def path_to(parents: list[int], node: int) -> list[int]:
    """Columns from the node in column `node + 1` up to the root."""
    return [node + 1, *path_to(parents, parents[node])] if node >= 0 else [0]


@pytest.mark.parametrize("num_nodes", [1, 4, 31, 32, 70])
def test_depths_and_ancestors(num_nodes: int) -> None:
    parents = random_parents(num_nodes, seed=num_nodes)
    paths = [[path_to(row, node) for node in range(-1, num_nodes)] for row in parents.tolist()]
    depth = max(len(path) - 1 for row in paths for path in row)
    assert node_depths(parents, depth).tolist() == [[len(path) - 1 for path in row] for row in paths]
    words = ancestor_words(parents, depth)
    assert words.dtype == torch.int32
    bits = (words[..., None] >> torch.arange(WORD)) & 1
    seen = [[row.nonzero()[:, 0].tolist() for row in tree] for tree in bits.flatten(2)]
    assert seen == [[sorted(path) for path in row] for row in paths]


def test_a_window_sees_the_prefix_and_its_ancestors() -> None:
    """Rows of different length: prefix slots, then the columns of the tree, never what another row or branch wrote."""
    parents = torch.tensor([[-1, -1, 0], [-1, 0, 1]])
    prefix = torch.tensor([2, 5])
    slots = prefix[:, None] + torch.arange(4)
    mask = Window(slots, slots, prefix, ancestor_words(parents, 3)).mask(num_slots=10)[:, 0]
    seen = [[row.nonzero()[:, 0].tolist() for row in tree] for tree in mask]
    assert seen[0] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5]]
    assert seen[1] == [list(range(6)), list(range(7)), list(range(8)), list(range(9))]
