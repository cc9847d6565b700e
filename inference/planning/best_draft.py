"""Chooses the fastest draft length, tree and schedule, from acceptance by depth and rank and from what rounds cost."""

import itertools
import math
import operator
from collections.abc import Sequence

import torch
from scipy.optimize import brentq, isotonic_regression

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.planning.costs import CostModel, Costs
from draftsmith.inference.replay.forced_decoding import force_answers
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree, likeliest_tree

Rates = Sequence[float | None]  # conditional acceptance rates by depth; None where a depth was never reached


def acceptance_length(conditional_rates: Rates, draft_length: int) -> float:
    """Return the tokens that a round with a chain emits: 1 + the sum over j of the product of the first j rates.

    Raises `UserError` for a chain that is longer than the rates.
    """
    if draft_length > len(conditional_rates):
        raise UserError(f"draft_length {draft_length}: acceptance is known of {len(conditional_rates)} tokens in a row")
    rates = [rate or 0.0 for rate in conditional_rates[:draft_length]]
    return 1 + sum(itertools.accumulate(rates, operator.mul))


def rates_of_rounds(conditional_rates: Rates, num_drafts: float, num_rounds: float) -> list[float | None]:
    """Return the rates over all rounds, also those without a draft, in which nothing is accepted.

    Their `acceptance_length` is then the tokens of any round, 1 + accepted / rounds, not only of rounds with a draft.
    """
    first, *later = conditional_rates
    return [None if first is None else first * num_drafts / num_rounds, *later]


def equal_rates(length: float, draft_length: int) -> list[float]:
    """Return equal rates at which chains of `draft_length` have this acceptance length, from 1 to draft_length + 1.

    They are a guess for where only a length is known: real rates fall with depth for drafters that run once a draft,
    and rise for those that read their own tokens.
    """
    if not 1 <= length <= draft_length + 1:
        raise UserError(f"acceptance length {length:g}: chains of {draft_length} emit 1 to {draft_length + 1} tokens")
    rate = brentq(lambda rate: acceptance_length([rate] * draft_length, draft_length) - length, 0.0, 1.0)
    return [float(rate)] * draft_length


def best_draft_length(rates: Rates, costs: CostModel, batch: int, context: int) -> int:
    """Return the draft length of the highest predicted speedup, of equal ones the shortest; 0 where none exceeds 1."""

    def speedup(draft_length: int) -> float:
        return costs.speedup(acceptance_length(rates, draft_length), draft_length, batch, context)

    return max(range(len(rates) + 1), key=speedup)


def fit_schedule(rates: Rates, costs: Costs, batches: Sequence[int], context: int, length_reach: float) -> Schedule:
    """Return the schedule with the best draft length at each of the batch sizes, and from there to the next one.

    It drafts nothing where no gain is shown: where the interval of the predicted speedup does not lie above 1
    (`Costs.interval`, which takes `length_reach`).
    """
    lengths: list[tuple[int, int]] = []
    for batch in sorted(set(batches)):
        length = best_draft_length(rates, costs, batch, context)
        ends = costs.interval(costs.speedup(acceptance_length(rates, length), length, batch, context), length_reach)
        if ends is None or ends[0] <= 1:
            length = 0
        if not lengths or lengths[-1][1] != length:
            lengths.append((batch if lengths else 1, length))
    return Schedule(tuple(lengths))


def tree_acceptance_length(tree: StaticTree, accuracies: Sequence[Sequence[float]]) -> float:
    """Return the tokens that a round with a tree emits, where a path is right as often as the product of its ranks."""
    return 1 + sum(math.prod(map(operator.getitem, accuracies, path)) for path in tree.choices)


def fit_tree(
    accuracies: Sequence[Sequence[float]], costs: Costs, batch: int, context: int, most_nodes: int = 64
) -> StaticTree:
    """Return the tree of the highest predicted speedup that has at most `most_nodes` nodes.

    `accuracies[i][r]` are those of `rank_accuracies`, which do not rise with r. Among trees with a number of nodes and
    a depth the likeliest one is best, since their costs are equal.
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
    """Return how often the token of each rank is the text's at each depth, if all before it are right: [depth][most].

    `texts` are prompts and what the target answered. At every token of an answer the decoder drafts a tree of the
    likeliest path with `most` choices at each depth, so that a drafter reads what it reads in decoding. A row does not
    rise: where accuracy rises with the rank it does so by chance, and the mean counts.
    """
    comb = StaticTree(tuple((0,) * level + (rank,) for level in range(depth) for rank in range(most)))
    ranks = torch.zeros(depth, most, dtype=torch.float64)
    counts = torch.zeros(depth, dtype=torch.float64)
    for batch in force_answers(target, drafter, comb, texts, batch_size):
        for round_number in range(batch.num_rounds):
            batch.generation.step()
            drafted = batch.engine.drafted.view(len(batch.texts), depth, most).tolist()
            for (_, answer), row in zip(batch.texts, drafted, strict=True):
                _count_ranks(row, answer[1 + round_number :], ranks, counts)
    accuracies = (ranks / counts.clamp(min=1)[:, None]).numpy()
    return [isotonic_regression(row, increasing=False).x.tolist() for row in accuracies]


def _count_ranks(drafted: list[list[int]], following: list[int], ranks: torch.Tensor, counts: torch.Tensor) -> None:
    """Count the choices of one draft, [depth][most], that equal the text that follows."""
    for level, (choices, token) in enumerate(zip(drafted, following, strict=False)):
        counts[level] += 1
        if token in choices:
            ranks[level, choices.index(token)] += 1
        if token != choices[0]:
            return
