"""The verification rules row by row: against plain Python on the same coins, and at the edges.

Shapes as in inference/verification/acceptance_rules.py.
"""

import math
from collections.abc import Callable

import pytest
import torch
from exact_distributions import RULES, RuleInputs
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import one_hot

from draftsmith.inference.verification import acceptance_rules
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.sampling.trees import node_depths, parents_or_chain

V = 5
SAMPLED = ["probabilistic", "block", "without_replacement"]
LOSSLESS = ["one_hot", *SAMPLED]
Distribution = list[float]
Path = tuple[list[int], int]  # columns of the accepted nodes, next token


# The rules for one row, in plain Python -------------------------------------------------------------------------------


def draw_from(distribution: Distribution, uniform: float) -> int:
    """The token in whose share of the line from 0 to the sum of the distribution the uniform falls."""
    end = 0.0
    for token, weight in enumerate(distribution):
        end += weight
        if weight > 0 and uniform * sum(distribution) <= end:
            return token
    raise AssertionError("a distribution without mass")


def residual(p: Distribution, q: Distribution) -> Distribution:
    return [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]


def scaled(distribution: Distribution) -> Distribution:
    return [x / sum(distribution) for x in distribution] if sum(distribution) else distribution


def plain_walk(targets: list[int], tokens: list[int], parents: list[int]) -> Path:
    path: list[int] = []
    column = 0
    while True:
        matching = [i + 1 for i, above in enumerate(parents) if above + 1 == column and tokens[i] == targets[column]]
        if not matching:
            return path, targets[column]
        column = matching[0]
        path.append(column)


def plain_rejection(
    p: list[Distribution],
    q: list[Distribution],
    tokens: list[int],
    parents: list[int],
    accept: list[float],
    draw: list[float],
) -> Path:
    """Siblings in order, each tested against what p and q have left; on a chain, token by token."""
    path: list[int] = []
    while True:
        column = path[-1] if path else 0
        left, rest = p[column], q[column] if column < len(q) else []
        for node, token in enumerate(tokens):
            if parents[node] + 1 != column or token == NO_TOKEN or rest[token] == 0:
                continue
            if accept[node] * rest[token] < left[token]:
                path.append(node + 1)
                break
            left = scaled(residual(left, rest)) if sum(residual(left, rest)) else left
            rest = scaled([0.0 if other == token else x for other, x in enumerate(rest)])
        else:
            return path, draw_from(left, draw[len(path)])


def plain_block(
    p: list[Distribution],
    q: list[Distribution],
    drafts: list[int],
    parents: list[int],
    accept: list[float],
    draw: list[float],
) -> Path:
    """Algorithm of arXiv 2403.10444: from the longest beginning down, the first that its coin lets pass."""
    weights = [1.0]
    for i, x in enumerate(drafts):
        if x == NO_TOKEN or q[i][x] == 0:
            break
        weights.append(min(1.0, weights[-1] * p[i][x] / q[i][x]))
    last = len(weights) - 1
    for n in range(last, -1, -1):
        rest = residual([weights[n] * x for x in p[n]], q[n]) if n < last else p[n]
        room = sum(rest) + 1 - weights[n]
        passes = n == 0 or accept[n - 1] < (weights[n] if n == last or room == 0 else sum(rest) / room)
        if passes:
            return list(range(1, n + 1)), draw_from(rest if sum(rest) else p[n], draw[n])
    raise AssertionError("nothing always passes")


def plain_typical(p: list[Distribution], tokens: list[int], parents: list[int]) -> Path:
    best: tuple[int, float, list[int]] = (0, 0.0, [])
    for node in range(len(tokens)):
        path, likelihood = [], 0.0
        while node >= 0:
            distribution, token = p[parents[node] + 1], tokens[node]
            entropy = -sum(x * math.log(x) for x in distribution if x)
            if token == NO_TOKEN or not distribution[token] > min(0.09, 0.3 * math.exp(-entropy)):
                break
            path, likelihood, node = [node + 1, *path], likelihood + math.log(distribution[token]), parents[node]
        if node < 0 and (len(path), likelihood) > best[:2]:
            best = len(path), likelihood, path
    path = best[2]
    distribution = p[path[-1] if path else 0]
    return path, distribution.index(max(distribution))


# On the same coins ----------------------------------------------------------------------------------------------------


def random_logits(generator: torch.Generator, *shape: int) -> Tensor:
    """Some rows in sixths, full of zeros and ties, some one-hot, some of any kind."""
    sixths = one_hot(torch.randint(V, (*shape, 6), generator=generator), V).float().mean(-2).log()
    certain = one_hot(torch.randint(V, shape, generator=generator), V).float().log()
    smooth = torch.randn(*shape, V, generator=generator) * 2
    kind = torch.randint(4, (*shape, 1), generator=generator)
    return torch.where(kind == 0, certain, torch.where(kind == 1, sixths, smooth))


def random_parents(generator: torch.Generator, rows: int, num_nodes: int) -> Tensor:
    return (torch.rand(rows, num_nodes, generator=generator) * (torch.arange(num_nodes) + 1)).long() - 1


def longest_path(parents: Tensor) -> int:
    """A bound will do; one that equals the number of nodes would say that every row is a chain."""
    longest = int(node_depths(parents, parents.shape[1]).max())
    return longest + (longest == parents.shape[1])


def uniforms(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64).clamp(min=1e-12)


def assert_same(verified: Verified, expected: list[Path]) -> None:
    for row, (path, next_token) in enumerate(expected):
        num_accepted = int(verified.num_accepted[row])
        assert verified.path[row, :num_accepted].tolist() == path, row
        assert int(verified.next_token[row]) == next_token, row


def lists(logits: Tensor) -> list[list[Distribution]]:
    return logits.softmax(-1).tolist()  # [B][T][V]


@pytest.mark.parametrize("num_nodes", [1, 5, 12])
def test_walk_on_trees_with_twins_and_ties(num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    parents = random_parents(generator, 300, num_nodes)
    tokens = torch.randint(NO_TOKEN, 3, parents.shape, generator=generator)
    logits = torch.randint(3, (300, num_nodes + 1, 3), generator=generator).float()  # ties: the lowest id counts
    depth = longest_path(parents)
    targets = [[max(range(3), key=row.__getitem__) for row in rows] for rows in logits.tolist()]
    expected = list(map(plain_walk, targets, tokens.tolist(), parents.tolist()))
    assert max(len(path) for path, _ in expected) >= min(num_nodes, 3)
    assert_same(acceptance_rules.greedy(logits, tokens, parents, depth), expected)


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
@pytest.mark.parametrize("rule", SAMPLED)
def test_rules_on_chains_equal_plain_python(rule: str, num_nodes: int) -> None:
    """Drafts likely and unlikely under q, impossible ones, and rows where the draft ends early; p = q in some."""
    generator = torch.Generator().manual_seed(num_nodes)
    rows = 1000
    logits, draft_logits = (random_logits(generator, rows, n) for n in (num_nodes + 1, num_nodes))
    draft_logits[::5] = logits[::5, :-1]
    drafts = acceptance_rules.sample(draft_logits.softmax(-1), uniforms(generator, rows, num_nodes))
    anything = torch.randint(NO_TOKEN, V, drafts.shape, generator=generator)
    drafts = torch.where(torch.rand(drafts.shape, generator=generator) < 0.2, anything, drafts)
    accept, draw = uniforms(generator, rows, num_nodes), uniforms(generator, rows, num_nodes + 1)
    parents = parents_or_chain(None, torch.zeros(rows, num_nodes))
    plain: Callable = plain_block if rule == "block" else plain_rejection
    columns = lists(logits), lists(draft_logits), drafts.tolist(), parents.tolist(), accept.tolist(), draw.tolist()
    expected = list(map(plain, *columns))
    assert max(len(path) for path, _ in expected) == num_nodes
    assert_same(RULES[rule](RuleInputs(logits, draft_logits, drafts, parents, num_nodes, accept, draw)), expected)


@pytest.mark.parametrize("num_nodes", [2, 6, 12])
def test_siblings_without_replacement_equal_plain_python(num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    rows = 600
    parents = random_parents(generator, rows, num_nodes)
    tokens = torch.randint(NO_TOKEN, V, parents.shape, generator=generator)
    depth = longest_path(parents)
    logits, draft_logits = (random_logits(generator, rows, n) for n in (num_nodes + 1, num_nodes))
    draft_logits[::3] = logits[::3, :-1]
    accept, draw = uniforms(generator, rows, num_nodes), uniforms(generator, rows, depth + 1)
    columns = lists(logits), lists(draft_logits), tokens.tolist(), parents.tolist(), accept.tolist(), draw.tolist()
    found = acceptance_rules.without_replacement(logits, draft_logits, tokens, parents, depth, accept, draw)
    assert_same(found, list(map(plain_rejection, *columns)))


@pytest.mark.parametrize("num_nodes", [1, 6, 12])
def test_typical_acceptance_equals_plain_python(num_nodes: int) -> None:
    generator = torch.Generator().manual_seed(num_nodes)
    parents = random_parents(generator, 500, num_nodes)
    tokens = torch.randint(NO_TOKEN, V, parents.shape, generator=generator)
    depth = longest_path(parents)
    logits = torch.randn(500, num_nodes + 1, V, generator=generator) * 2
    expected = list(map(plain_typical, lists(logits), tokens.tolist(), parents.tolist()))
    assert max(len(path) for path, _ in expected) >= min(num_nodes, 2)
    assert_same(acceptance_rules.typical(logits, tokens, parents, depth), expected)


# At the edges ---------------------------------------------------------------------------------------------------------


def on_chains(
    rule: str, p: Tensor, q: Tensor, drafts: list[list[int]], accept: list[float], draw: list[float]
) -> Verified:
    """Distributions p [T, V] and q [N, V] and coins that every row shares."""
    tokens = torch.tensor(drafts, dtype=torch.int64)
    rows, num_nodes = tokens.shape
    parents = parents_or_chain(None, torch.zeros(rows, num_nodes))
    shared = (p.log(), q.log(), torch.tensor(accept), torch.tensor(draw))
    logits, draft_logits, coins, uniforms = (x.expand(rows, *x.shape) for x in shared)
    return RULES[rule](RuleInputs(logits, draft_logits, tokens, parents, num_nodes, coins, uniforms))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_no_drafts_is_plain_decoding(rule: str) -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]])
    verified = on_chains(rule, p, p[:0], [[], []], [], [0.6])
    assert verified.num_accepted.tolist() == [0, 0]
    assert verified.path.shape == (2, 0)
    assert verified.next_token.tolist() == [1, 1]


def test_no_drafts_without_chance() -> None:
    p, none = torch.tensor([[[0.25, 0.25, 0.5]]]), torch.zeros(1, 0, dtype=torch.int64)
    assert acceptance_rules.greedy(p, none, none, 0).next_token.tolist() == [2]
    assert acceptance_rules.typical(p.log(), none, none, 0).next_token.tolist() == [2]


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_rejection_without_residual_falls_back_to_the_target(rule: str) -> None:
    """p = q up to rounding can reject and leave nothing to draw from; 0 / 0 must not happen."""
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    verified = on_chains(rule, p, p[:2], [[0, 0]], [0.5, 1.0], [0.25, 0.75, 0.5])
    assert verified.num_accepted.tolist() == [1]
    assert verified.next_token.tolist() == [1]


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_zero_coin_does_not_accept_the_impossible(rule: str) -> None:
    p, q = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    verified = on_chains(rule, p, q, [[0]], [0.0], [0.5, 0.5])
    assert verified.num_accepted.tolist() == [0]
    assert verified.next_token.tolist() == [1]


@pytest.mark.parametrize("rule", SAMPLED)
def test_what_cannot_have_been_drawn_is_not_there(rule: str) -> None:
    """Neither accepted, although p likes it, nor taken out of p by a residual."""
    p = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]])
    verified = on_chains(rule, p, torch.tensor([[0.5, 0.0, 0.5]]), [[1], [NO_TOKEN]], [1e-9], [0.1, 0.5])
    assert verified.num_accepted.tolist() == [0, 0]
    assert verified.next_token.tolist() == [0, 0]  # (p - q)+ would be token 1 alone


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_certain_target_takes_its_own_token_and_no_other(rule: str) -> None:
    """Rows of -inf but for one token, on both sides."""
    p, q = torch.eye(3)[[2, 0, 1]], torch.eye(3)[[2, 1]]
    verified = on_chains(rule, p, q, [[2, 1]], [0.999, 1e-9], [1e-9, 0.999, 0.5])
    assert verified.num_accepted.tolist() == [1]
    assert verified.next_token.tolist() == [0]


def test_twins_and_undrawn_siblings_change_nothing() -> None:
    """The second and third node of the root are as good as missing: a twin that was tried, and a token of q = 0."""
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.6, 0.3, 0.1, 0.0])
    rows = 500
    accept, draw = uniforms(generator, rows, 4), uniforms(generator, rows, 2)
    tokens, parents = torch.tensor([[0, 0, 3, 1]]).expand(rows, -1), torch.full((rows, 4), -1)

    def verified(nodes: list[int]) -> Verified:
        logits, draft_logits = p.log().expand(rows, len(nodes) + 1, 4), q.log().expand(rows, 1, 4)
        chosen = tokens[:, nodes], parents[:, nodes], 1, accept[:, nodes]
        return acceptance_rules.without_replacement(logits, draft_logits, *chosen, draw)

    with_them, without = verified([0, 1, 2, 3]), verified([0, 3])
    assert with_them.num_accepted.tolist() == without.num_accepted.tolist()
    assert with_them.next_token.tolist() == without.next_token.tolist()
    column_of = torch.tensor([0, 1, 4])
    assert with_them.path.tolist() == column_of[without.path].tolist()


def test_typical_acceptance_prefers_depth_then_likelihood() -> None:
    """Column 3 is likelier than 4 with the same parent; 2 is likelier than 1, but nothing stands below it."""
    p = torch.tensor([[0.3, 0.5, 0.2], [0.25, 0.25, 0.5], [1.0, 0, 0], [0.1, 0.6, 0.3], [1.0, 0, 0], [1.0, 0, 0]])
    tokens, parents = torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([[-1, -1, 0, 0, 1]])
    verified = acceptance_rules.typical(p.log()[None], tokens, parents, 2)
    assert verified.num_accepted.tolist() == [2]
    assert verified.path.tolist() == [[1, 3]]
    assert verified.next_token.tolist() == [1]
    strict = acceptance_rules.typical(p.log()[None], tokens, parents, 2, epsilon=0.4, delta=9.0)  # p(x) > 0.4
    assert strict.path[0, : strict.num_accepted].tolist() == [2]


def test_synthetic_acceptance_takes_no_node_without_a_token() -> None:
    """A draft that a lookup found one token for, and a tree whose first child is empty, at rates of 1."""
    logits, coins = torch.randn(1, 4, V), torch.full((1, 3), 0.5)
    for tokens, parents, path in (([5, NO_TOKEN, NO_TOKEN], [-1, 0, 1], [1]), ([NO_TOKEN, 5, 6], [-1, -1, 1], [2, 3])):
        columns = torch.tensor([tokens]), torch.tensor([parents])
        verified = acceptance_rules.synthetic(logits, *columns, 3, torch.ones(3), coins)
        assert verified.num_accepted.tolist() == [len(path)]
        assert verified.path[0, : len(path)].tolist() == path


@pytest.mark.parametrize("mode", RULES)
def test_finished_rows_may_hold_anything_finite(mode: str) -> None:
    """They give ids in range, and their neighbours the same as without them."""
    generator = torch.Generator().manual_seed(0)
    rows, num_nodes = 64, 3
    garbage = torch.arange(rows) % 2 == 0
    sizes = torch.tensor([0.0, 1.0, 1e30, -3e38])
    wild = sizes[torch.randint(4, (rows, num_nodes + 1, V), generator=generator)]
    logits = torch.where(garbage[:, None, None], wild, random_logits(generator, rows, num_nodes + 1))
    draft_logits = torch.where(garbage[:, None, None], wild.flip(2), random_logits(generator, rows, num_nodes + 1))
    tokens = torch.randint(NO_TOKEN, V, (rows, num_nodes), generator=generator)
    parents = parents_or_chain(None, torch.zeros(rows, num_nodes))
    accept, draw = uniforms(generator, rows, num_nodes), uniforms(generator, rows, num_nodes + 1)

    def verified(chosen: Tensor) -> Verified:
        inputs = (x[chosen] for x in (logits, draft_logits, tokens, parents))
        return RULES[mode](RuleInputs(*inputs, num_nodes, accept[chosen], draw[chosen]))

    among, alone = verified(torch.ones_like(garbage)), verified(~garbage)
    for field in ("num_accepted", "path", "next_token"):
        assert getattr(among, field)[~garbage].tolist() == getattr(alone, field).tolist()
    for ids, highest in ((among.num_accepted, num_nodes), (among.path, num_nodes), (among.next_token, V - 1)):
        assert torch.equal(ids, ids.clamp(0, highest))


@pytest.mark.parametrize("mode", RULES)
def test_rules_never_look_at_a_value(mode: str) -> None:
    """On fake tensors, which have none: nothing waits for the device, and a round can be captured."""
    with FakeTensorMode():
        logits, tokens = torch.empty(2, 4, V), torch.zeros(2, 3, dtype=torch.int64)
        for depth in (2, 3) if mode not in ("probabilistic", "block") else (3,):
            shape = tokens, tokens - 1, depth
            verified = RULES[mode](
                RuleInputs(logits, logits[:, :3], *shape, torch.empty(2, 3), torch.empty(2, depth + 1))
            )
            assert verified.path.shape == (2, depth)
