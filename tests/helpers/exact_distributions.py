"""Exact distributions of what a round of speculative decoding emits, on vocabularies of a few tokens.

The drafts can be listed. Over the coins, `measure` integrates the rule itself, as a black box, with no grid and no
chance:

* A coin is only ever compared with thresholds that are fixed once the comparisons before it are. So the coins that lead
  to one outcome (accepted nodes and next token) are a box, a product of intervals.
* One point of a box gives all of it: each coin is moved alone until the outcome changes, by bisection to 2^-36. The
  neighbours of the box are met by stepping over its faces.
* Boxes of different outcomes cannot overlap, so nothing is missing when their volumes add up to 1, which is asserted.

Rules compute in the dtype that they are given, here fp64: what is left is bisection and rounding, below 1e-9.

Shapes as in inference/verification/acceptance_rules.py; K coins of a round, R rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from draftsmith.inference.verification import acceptance_rules
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.sampling.sampling import Sampling, cut, sample

EXACT = 1e-9
Label = tuple[int, ...]
Drafts = list[tuple[float, list[int]]]  # every draft with its probability


# The target and the drafter ------------------------------------------------------------------------------------------


@dataclass
class World:
    """The distribution of the next token after every text: entry d of p and of q is [V ** d, V] fp64."""

    p: list[Tensor]
    q: list[Tensor]

    @property
    def vocab_size(self) -> int:
        return self.p[0].shape[1]

    def context(self, tokens: list[int]) -> tuple[int, int]:
        """Where the distribution after these tokens stands: (depth, row)."""
        row = 0
        for token in tokens:
            row = row * self.vocab_size + max(token, 0)
        return len(tokens), row

    def continuations(self, start: list[int], length: int) -> Tensor:
        """The target's distribution of the next `length` tokens after `start`, flat [V ** length]."""
        depth, row = self.context(start)
        distribution = torch.ones(1, dtype=torch.float64)
        for step in range(length):
            width = self.vocab_size**step
            distribution = (distribution[:, None] * self.p[depth + step][row * width : (row + 1) * width]).flatten()
        return distribution


KINDS = ["any", "equal", "disjoint", "one_hot", "reduced", "cut"]


def random_world(kind: str, depth: int, vocab_size: int, seed: int) -> World:
    """Laws in sixths: zeros, ties and one-hot rows come up all the time."""
    generator = torch.Generator().manual_seed(seed)

    def distributions(length: int) -> Tensor:
        picks = torch.randint(vocab_size, (vocab_size**length, 6), generator=generator)
        return one_hot(picks, vocab_size).double().mean(1)

    def cut_distributions(length: int) -> Tensor:
        logits = torch.randn(vocab_size**length, vocab_size, generator=generator)
        return cut(logits, Sampling(temperature=0.7, top_k=vocab_size - 1, top_p=0.9)).double().softmax(-1)

    p, q = (
        [(cut_distributions if kind == "cut" else distributions)(length) for length in range(depth + 1)] for _ in "pq"
    )
    if kind == "equal":
        q = p
    elif kind == "disjoint":  # two tokens are the drafter's, the others the target's
        p = [normalised(distribution + 0.1, torch.arange(vocab_size) >= 2) for distribution in p]
    elif kind == "one_hot":
        q = [one_hot(distribution.argmax(1), vocab_size).double() for distribution in q]
    if kind in ("disjoint", "reduced"):  # the drafter knows two tokens only
        q = [normalised(distribution + 0.1, torch.arange(vocab_size) < 2) for distribution in q]
    return World(p, q)


def normalised(weights: Tensor, keep: Tensor) -> Tensor:
    return weights * keep / (weights * keep).sum(-1, keepdim=True)


# Drafts ---------------------------------------------------------------------------------------------------------------


def path_of(tokens: list[int], parents: list[int], node: int) -> list[int]:
    """Tokens from the root's first child to `node`; none for the root, -1."""
    return [*path_of(tokens, parents, parents[node]), tokens[node]] if node >= 0 else []


def one_by_one(q: list[float], siblings: list[int]) -> Drafts:
    """Drawn from q without replacement."""
    left = [0 if token in siblings else chance for token, chance in enumerate(q)]
    return [(chance / sum(left), [token]) for token, chance in enumerate(left) if chance] or [(1, [NO_TOKEN])]


def independent(q: list[float], siblings: list[int]) -> Drafts:
    return [(chance, [token]) for token, chance in enumerate(q) if chance]


def likeliest(q: list[float], siblings: list[int]) -> Drafts:
    """The next of the drafter's top tokens, by no chance at all."""
    return [(1, [max(set(range(len(q))) - set(siblings), key=lambda token: q[token])])]


def all_drafts(world: World, parents: list[int], draw: Callable = one_by_one, stop: bool = False) -> Drafts:
    """Every draft on the tree. With `stop` nothing is drafted after a token 0: decided by what is drafted already."""
    drafts: Drafts = [(1.0, [])]
    for node, parent in enumerate(parents):
        longer: Drafts = []
        for weight, tokens in drafts:
            before = path_of(tokens, parents, parent)
            siblings = [tokens[i] for i in range(node) if parents[i] == parent]
            depth, row = world.context(before)
            nothing = NO_TOKEN in before or (stop and before[-1:] == [0])
            options = [(1, [NO_TOKEN])] if nothing else draw(world.q[depth][row].tolist(), siblings)
            longer += [(weight * chance, tokens + token) for chance, token in options]
        drafts = longer
    return drafts


# Rounds ---------------------------------------------------------------------------------------------------------------


@dataclass
class RuleInputs:
    """What a rule is given: one round for each of R rows."""

    logits: Tensor  # [R, T, V]
    draft_logits: Tensor  # [R, P, V]
    tokens: Tensor  # [R, N]
    parents: Tensor  # [R, N]
    depth: int
    accept: Tensor  # [R, N]
    draw: Tensor  # [R, D + 1]


Rule = Callable[[RuleInputs], Verified]


def on_chain(rule: Callable[..., Verified]) -> Rule:
    return lambda r: rule(r.logits, r.draft_logits[:, : r.depth], r.tokens, r.accept, r.draw)


RULES: dict[str, Rule] = {
    "greedy": lambda r: acceptance_rules.greedy(r.logits, r.tokens, r.parents, r.depth),
    "one_hot": lambda r: acceptance_rules.one_hot(r.logits, r.tokens, r.parents, r.depth, r.draw),
    "probabilistic": on_chain(acceptance_rules.probabilistic),
    "block": on_chain(acceptance_rules.block),
    "without_replacement": lambda r: acceptance_rules.without_replacement(
        r.logits, r.draft_logits, r.tokens, r.parents, r.depth, r.accept, r.draw
    ),
    "typical": lambda r: acceptance_rules.typical(r.logits, r.tokens, r.parents, r.depth),
}


def siblings(r: RuleInputs, remove: bool = False, renormalise: bool = False) -> Verified:
    """A plain rule to make wrong ones of: the nodes of a tree one level deep, one after the other. As it stands,
    recursive rejection of independent drafts (SpecInfer, arXiv 2305.09781); with both options, of drafts without
    replacement."""
    p, q = r.logits.softmax(-1), r.draft_logits.softmax(-1)
    left, rest, column = p[:, 0], q[:, 0], torch.zeros_like(r.tokens[:, 0])
    for node in range(r.tokens.shape[1]):
        token = r.tokens[:, node, None].clamp(min=0)
        tried = (r.tokens[:, node] >= 0) & (column == 0)
        passes = (r.accept[:, node, None] * rest.gather(1, token) < left.gather(1, token))[:, 0]
        column = torch.where(tried & passes, node + 1, column)
        residual = (left - rest).clamp(min=0)
        left = torch.where((tried & ~passes)[:, None], residual / residual.sum(1, keepdim=True), left)
        rest = torch.where(tried[:, None], rest.scatter(1, token, 0), rest) if remove else rest
        rest = rest / rest.sum(1, keepdim=True) if renormalise else rest
    rows = torch.arange(len(p))
    distribution = torch.where(column[:, None] > 0, p[rows, column], left)
    return Verified((column > 0).long(), column[:, None], sample(distribution, r.draw[rows, (column > 0).long()]))


@dataclass
class Outcome:
    """One way for a round to end, and how likely it is: over its draft as drawn and over all coins."""

    case: int  # which (world, drafts)
    draft: list[int]
    path: list[int]  # columns of the accepted nodes
    next_token: int
    probability: float

    @property
    def emitted(self) -> list[int]:
        return [*(self.draft[column - 1] for column in self.path), self.next_token]


def depth_of(parents: list[int]) -> int:
    return max((len(path_of(parents, parents, node)) for node in range(len(parents))), default=0)


def outcomes(rule: Rule, parents: list[int], cases: list[tuple[World, Drafts]]) -> list[Outcome]:
    """All outcomes of one round in each case, with every draft of its own."""
    drafts = [(case, weight, tokens) for case, (_, drafts) in enumerate(cases) for weight, tokens in drafts]
    columns = range(-1, len(parents))
    at = [(cases[c][0], cases[c][0].context(path_of(x, parents, node))) for c, _, x in drafts for node in columns]
    shape = len(drafts), len(parents) + 1, -1
    logits = torch.stack([world.p[depth][row] for world, (depth, row) in at]).view(shape).log()
    draft_logits = torch.stack([world.q[depth][row] for world, (depth, row) in at]).view(shape).log()
    tokens = torch.tensor([tokens for _, _, tokens in drafts], dtype=torch.int64)
    above = torch.tensor(parents, dtype=torch.int64).expand_as(tokens)
    depth, num_nodes = depth_of(parents), len(parents)

    def play(row: Tensor, coins: Tensor) -> Tensor:
        accept, draw = coins[:, :num_nodes], coins[:, num_nodes:]
        rows = RuleInputs(logits[row], draft_logits[row], tokens[row], above[row], depth, accept, draw)
        verified = rule(rows)
        path = verified.path * (torch.arange(depth) < verified.num_accepted[:, None])
        return torch.cat([rows.tokens, path, verified.next_token[:, None]], 1)

    found = []
    for (row, *label), volume in measure(play, len(drafts), num_nodes + depth + 1).items():
        path = [column for column in label[num_nodes:-1] if column]
        found.append(Outcome(drafts[row][0], label[:num_nodes], path, label[-1], drafts[row][1] * volume))
    return found


def distances(rule: Rule, parents: list[int], cases: list[tuple[World, Drafts]]) -> list[float]:
    """Return, for each case, the total variation between two joint distributions of the D + 1 tokens after the root: by
    rounds that the target continues, and by the target alone.
    """
    length = depth_of(parents) + 1
    distributions = [-world.continuations([], length) for world, _ in cases]
    for outcome in outcomes(rule, parents, cases):
        world = cases[outcome.case][0]
        missing = length - len(outcome.emitted)
        _, place = world.context(outcome.emitted)
        reached = distributions[outcome.case].view(-1, world.vocab_size**missing)[place]
        reached += outcome.probability * world.continuations(outcome.emitted, missing)
    return [float(distribution.abs().sum() / 2) for distribution in distributions]


# Integration over coins -----------------------------------------------------------------------------------------------


def measure(play: Callable[[Tensor, Tensor], Tensor], num_rows: int, num_coins: int) -> dict[Label, float]:
    """Volume of the coins [0, 1]^K that give each (row, *label); `play` maps rows [R] and coins [R, K] to labels."""
    volumes: dict[Label, float] = {}
    rows, coins = torch.arange(num_rows), torch.full((num_rows, num_coins), 0.4, dtype=torch.float64)
    while len(rows):
        labels = play(rows, coins)
        keys = [(row, *label) for row, label in zip(rows.tolist(), labels.tolist(), strict=True)]
        first = {key: i for i, key in reversed(list(enumerate(keys))) if key not in volumes}
        index = torch.tensor(list(first.values()), dtype=torch.int64)
        boxes, rows, coins = box(play, rows[index], coins[index], labels[index])
        volumes.update(zip(first, boxes.tolist(), strict=True))
    totals = torch.zeros(num_rows, dtype=torch.float64)
    for (row, *_), volume in volumes.items():
        totals[row] += volume
    torch.testing.assert_close(totals, torch.ones_like(totals), atol=EXACT, rtol=0)
    return volumes


def box(play: Callable, rows: Tensor, coins: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Volumes [R] of the boxes around coins [R, K], then rows and coins just outside of every face."""
    num_rows, num_coins = coins.shape
    row, coin, side = (x.flatten() for x in torch.meshgrid(*map(torch.arange, (num_rows, num_coins, 2)), indexing="ij"))

    def moved(face: Tensor, value: Tensor) -> Tensor:
        return coins[row[face]].scatter(1, coin[face, None], value[:, None])

    def same(face: Tensor, value: Tensor) -> Tensor:
        return (play(rows[row[face]], moved(face, value)) == labels[row[face]]).all(1)

    bound = side.double()
    face = (~same(torch.arange(len(row)), (bound - 1e-12).abs())).nonzero()[:, 0]  # the others reach to 0 or 1
    inside, outside = coins[row[face], coin[face]], bound[face]
    for _ in range(36):
        middle = (inside + outside) / 2
        stays = same(face, middle)
        inside, outside = torch.where(stays, middle, inside), torch.where(stays, outside, middle)
    bound[face] = outside
    low, high = bound.view(num_rows, num_coins, 2).unbind(2)
    beyond = outside + (2 * side[face] - 1) * 1e-10
    return (high - low).prod(1), rows[row[face]], moved(face, beyond.clamp(0, 1))
