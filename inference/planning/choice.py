"""Which draft length, tree and schedule are fastest, from acceptance by depth and rank and from what rounds cost."""

import itertools
import math
import operator
from collections.abc import Sequence

import torch

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.replay.forced_decoding import force_answers
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree, likeliest_tree

Rates = Sequence[float | None]  # by depth: chance to be accepted when all before it were; None: that never happened


def acceptance_length(conditional_rates: Rates, draft_length: int) -> float:
    """Tokens that a round of a chain emits, the bonus token counted: 1 + sum over j of the first j rates' product.

    Raises `UserError` for a chain that is longer than the rates tell of.
    """
    if draft_length > len(conditional_rates):
        raise UserError(f"draft_length {draft_length}: acceptance is known of {len(conditional_rates)} tokens in a row")
    rates = [rate or 0.0 for rate in conditional_rates[:draft_length]]
    return 1 + sum(itertools.accumulate(rates, operator.mul))


def rates_of_rounds(conditional_rates: Rates, num_drafts: float, num_rounds: float) -> list[float | None]:
    """The first rate made that of all rounds: in those without a draft nothing is accepted.

    `acceptance_length` of these is the tokens of any round, 1 + accepted / rounds, and not of those with a draft only.
    """
    first, *later = conditional_rates
    return [None if first is None else first * num_drafts / num_rounds, *later]


def equal_rates(length: float, draft_length: int) -> list[float]:
    """The rates, all equal, at which chains of `draft_length` have this acceptance length, from 1 to draft_length + 1.

    Real rates fall with depth for drafters that run once a draft and rise for those that read their own tokens: a
    guess where nothing but a length is known.
    """
    if not 1 <= length <= draft_length + 1:
        raise UserError(f"acceptance length {length:g}: chains of {draft_length} emit 1 to {draft_length + 1} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = acceptance_length([middle] * draft_length, draft_length) < length
        low, high = (middle, high) if below else (low, middle)
    return [high] * draft_length


def best_draft_length(rates: Rates, costs: Costs, batch: int, context: int) -> int:
    """The draft length of the highest predicted speedup, of equal ones the shortest; 0 where none exceeds 1."""

    def speedup(draft_length: int) -> float:
        return costs.speedup(acceptance_length(rates, draft_length), draft_length, batch, context)

    return max(range(len(rates) + 1), key=speedup)


def fit_schedule(rates: Rates, costs: Costs, batches: Sequence[int], context: int) -> Schedule:
    """The best draft length at each of the batch sizes, and from there to the next one."""
    lengths: list[tuple[int, int]] = []
    for batch in sorted(set(batches)):
        length = best_draft_length(rates, costs, batch, context)
        if not lengths or lengths[-1][1] != length:
            lengths.append((batch if lengths else 1, length))
    return Schedule(tuple(lengths))


def tree_acceptance_length(tree: StaticTree, accuracies: Sequence[Sequence[float]]) -> float:
    """Tokens that a round emits with the tree: a node is accepted as often as all choices on its path are right."""
    return 1 + sum(math.prod(map(operator.getitem, accuracies, path)) for path in tree.choices)


def fit_tree(
    accuracies: Sequence[Sequence[float]], costs: Costs, batch: int, context: int, most_nodes: int = 64
) -> StaticTree:
    """The tree of at most so many nodes with the highest predicted speedup.

    `accuracies[i][r]` as `rank_accuracies` finds them, which must not rise with r. Of a number of nodes and a depth the
    likeliest tree is best, since the costs know no more of a tree.
    """
    best, best_speedup = likeliest_tree(accuracies, 1), 0.0
    for depth in range(1, len(accuracies) + 1):
        possible = sum(math.prod(len(row) for row in accuracies[:d]) for d in range(1, depth + 1))
        for num_nodes in range(depth, min(most_nodes, possible) + 1):
            tree = likeliest_tree(accuracies[:depth], num_nodes)
            length = tree_acceptance_length(tree, accuracies)
            speedup = costs.speedup(length, tree.depth, batch, context, num_nodes)
            if speedup > best_speedup:
                best, best_speedup = tree, speedup
    return best


def rank_accuracies(
    drafter: Drafter,
    target: Target,
    texts: list[tuple[list[int], list[int]]],
    depth: int,
    most: int,
    batch_size: int = 8,
) -> list[list[float]]:
    """How often the token that the drafter ranks r-th at each depth is the text's, all before it having been right.

    texts: prompts and what the target answered. At every token of an answer the decoder drafts a tree of the likeliest
    path with `most` choices at each depth, so that a drafter reads what it reads in decoding. Returns [depth][most],
    each row not rising: what rises with the rank does so by chance, and its mean counts.
    """
    comb = StaticTree(tuple((0,) * level + (rank,) for level in range(depth) for rank in range(most)))
    ranks = torch.zeros(depth, most, dtype=torch.float64)
    counts = torch.zeros(depth, dtype=torch.float64)
    for followed in force_answers(target, drafter, comb, texts, batch_size):
        for round_number in range(followed.num_rounds):
            followed.generation.step()
            drafted = followed.engine.drafted.view(len(followed.texts), depth, most).tolist()
            for (_, answer), row in zip(followed.texts, drafted, strict=True):
                _count_ranks(row, answer[1 + round_number :], ranks, counts)
    return [falling(row) for row in (ranks / counts.clamp(min=1)[:, None]).tolist()]


def _count_ranks(drafted: list[list[int]], following: list[int], ranks: torch.Tensor, counts: torch.Tensor) -> None:
    """Add what one draft, [depth][most] choices, had right of the text that follows."""
    for level, (choices, token) in enumerate(zip(drafted, following, strict=False)):
        counts[level] += 1
        if token in choices:
            ranks[level, choices.index(token)] += 1
        if token != choices[0]:
            return


def falling(values: Sequence[float]) -> list[float]:
    """The nearest values, by least squares, that do not rise (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean and size
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (b, m), (a, n) = pools.pop(), pools.pop()
            pools.append(((a * n + b * m) / (n + m), n + m))
    return [mean for mean, size in pools for _ in range(size)]
