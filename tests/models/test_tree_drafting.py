"""Drafted trees: what grows is what the papers say, each node is drafted as its path alone would be, siblings drawn by
chance have the distribution of drawing without replacement, and the output stays the target's.

Drafters are imitated by a made-up language model, `Paths`, whose logits hang on the drafted path; what grows on it is
compared with a plain loop over paths.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from drafters import admit, untrained
from torch import Tensor

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.measuring.certify import ALPHA, chi_square
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_parts import tree_drafting
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft
from draftsmith.models.drafter_parts.tree_drafting import candidates_of, grow, grow_ddtree, tree_indices
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Noise, Sampling, cut
from draftsmith.models.sampling.trees import (
    WORD,
    Chain,
    DDTree,
    DynamicTree,
    Shape,
    StaticTree,
    Tree,
    ancestor_words,
    likeliest_tree,
)
from draftsmith.models.target.target import Features

PROMPTS = ["The smith heats the iron", "def strike(iron):", "A draft is cheap, a draft is cheap, a", "x"]
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
DYNAMIC = DynamicTree(num_nodes=9, depth=3, width=3)
BUSHY = StaticTree(tuple(path for depth in range(1, 5) for path in itertools.product((0, 1), repeat=depth)))
BRANCHING = [kind for kind in DRAFTERS if DRAFTERS[kind].can_branch]
GREEDY = Sampling()
Path = tuple[int, ...]  # drafted tokens from the root on


# What grows, on a made-up language model ------------------------------------------------------------------------------


class Paths:
    """A language model of V tokens for B rows: the logits that follow a path are random, but always the same.

    `by_depth`: they hang on the length of the path alone, and only few values come up, so that many paths tie.
    """

    def __init__(self, rows: int, vocab_size: int, seed: int, by_depth: bool = False) -> None:
        self.rows, self.vocab_size, self.seed, self.by_depth = rows, vocab_size, seed, by_depth
        self.read_paths: list[list[Path]] = [[()] for _ in range(rows)]  # of each row, those of the last read
        self.all_read: list[list[Path]] = [[] for _ in range(rows)]

    def logits(self, row: int, path: Path) -> Tensor:
        key = hash((self.seed, row, len(path) if self.by_depth else path)) % 2**31
        generator = torch.Generator().manual_seed(key)
        if self.by_depth:
            return torch.randint(3, (self.vocab_size,), generator=generator).float()
        return 2 * torch.randn(self.vocab_size, generator=generator)

    def root(self) -> Tensor:
        return torch.stack([self.logits(row, ()) for row in range(self.rows)])[:, None]

    def read(self, tokens: Tensor, parents: Tensor | None) -> Tensor:
        """As a drafter reads: tokens [B, W] that follow tokens `parents` of the read before."""
        assert parents is not None
        for row, (followers, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            before = self.read_paths[row]
            self.read_paths[row] = [(*before[p], token) for token, p in zip(followers, above, strict=True)]
            self.all_read[row] += self.read_paths[row]
        return torch.stack(
            [torch.stack([self.logits(row, path) for path in paths]) for row, paths in enumerate(self.read_paths)]
        )


def state_of(rows: int, sampling: Sampling = GREEDY, sample_drafts: bool = False, seed: int = 0) -> DecodingState:
    """A state with as much in it as choosing tokens needs."""
    one = torch.ones(rows, dtype=torch.int64)
    nothing = Features(torch.zeros(rows, 1, 1), None)
    noise = Noise(seed, torch.arange(rows))
    column = one[:, None]
    return DecodingState(column, one, nothing, column, column, one * 0, sampling, noise, sample_drafts)


def grown(paths: Paths, shape: Shape, state: DecodingState) -> Draft:
    return grow(shape, tree_indices(shape, torch.device("cpu")), paths.root(), paths.read, state)


def drafted_paths(draft: Draft, row: int) -> list[Path]:
    """The path of each node; a node stands behind its parent."""
    found: list[Path] = []
    for token, parent in zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def eagle2(paths: Paths, row: int, shape: DynamicTree) -> tuple[dict[Path, float], list[Path]]:
    """EAGLE-2 (arXiv 2406.16858, sections 4.1 and 4.2) by the book: kept nodes with values, and what was read.

    Expansion: of each layer the k nodes of the highest value, the product of the confidences along the path, get their
    k likeliest children. Reranking: of all nodes the m of the highest value, shallower ones first where they tie.
    """
    values: dict[Path, float] = {(): 1.0}
    layer: list[Path] = [()]
    expanded: list[Path] = []
    for depth in range(shape.depth):
        if depth:
            layer = sorted(layer, key=lambda path: -values[path])[: shape.width]
            expanded += layer
        grown_from, layer = layer, []
        for path in grown_from:
            distribution = paths.logits(row, path).double().softmax(0).tolist()
            for token in sorted(range(len(distribution)), key=lambda token: -distribution[token])[: shape.width]:
                values[(*path, token)] = values[path] * distribution[token]
                layer.append((*path, token))
    del values[()]
    kept = sorted(values, key=lambda path: (-values[path], len(path)))[: shape.num_nodes]
    return {path: values[path] for path in kept}, expanded


SHAPES = [(3, 2, 2), (9, 3, 3), (20, 6, 2), (30, 4, 4), (31, 3, 5), (33, 5, 3), (70, 5, 8), (200, 5, 8)]


@pytest.mark.parametrize("nodes_depth_width", SHAPES)
def test_a_dynamic_tree_is_eagle2s(nodes_depth_width: tuple[int, int, int]) -> None:
    """Nodes, what is read on the way, and who sees whom; 31 nodes fill one word of 32 columns, more take several."""
    shape = DynamicTree(*nodes_depth_width)
    for seed in range(4):
        paths = Paths(rows=3, vocab_size=11, seed=seed)
        draft = grown(paths, shape, state_of(3))
        assert draft.tokens.shape == (3, shape.num_nodes)
        assert draft.depth == shape.depth
        words = ancestor_words(draft.parents, draft.depth)
        assert words.shape[-1] == -(-(shape.num_nodes + 1) // WORD)
        seen = ((words[..., None] >> torch.arange(WORD)) & 1).flatten(2).bool()
        for row in range(3):
            expected, read = eagle2(paths, row, shape)
            found = drafted_paths(draft, row)
            assert len(set(found)) == len(found)
            assert set(found) == set(expected)
            assert sorted(paths.all_read[row]) == sorted(read)
            columns: dict[Path, int] = {(): 0, **{path: i + 1 for i, path in enumerate(found)}}
            for path, column in columns.items():
                ancestors = {columns[path[:length]] for length in range(len(path) + 1)}
                assert set(seen[row, column].nonzero()[:, 0].tolist()) == ancestors


@pytest.mark.parametrize("nodes_depth_width", SHAPES)
def test_ties_in_a_dynamic_tree(nodes_depth_width: tuple[int, int, int]) -> None:
    """Which of equal paths are kept is free; their values, and that they form a tree, is not."""
    shape = DynamicTree(*nodes_depth_width)
    for seed in range(4):
        paths = Paths(rows=3, vocab_size=11, seed=seed, by_depth=True)
        draft = grown(paths, shape, state_of(3))
        assert (draft.parents < torch.arange(shape.num_nodes)).all()
        for row in range(3):
            found = drafted_paths(draft, row)
            assert len(set(found)) == len(found)
            distributions = [
                paths.logits(row, (0,) * depth).double().softmax(0).tolist() for depth in range(shape.depth)
            ]
            values = [torch.tensor([distributions[i][x] for i, x in enumerate(path)]).prod().item() for path in found]
            expected = eagle2(paths, row, shape)[0].values()
            assert sorted(values) == pytest.approx(sorted(expected), rel=1e-5)


# Paths whose depths do not hang on each other -------------------------------------------------------------------------


def expected_accepted(logits: Tensor, paths: Iterable[Path]) -> float:
    """The mean number of accepted nodes of a tree where the logits [K, V] of each depth are the target's, too."""
    chances = logits.double().softmax(-1)
    return sum(math.prod(float(chances[depth, token]) for depth, token in enumerate(path)) for path in paths)


def all_trees(vocab_size: int, depth: int, num_nodes: int) -> list[tuple[Path, ...]]:
    """Every tree of as many nodes: sets of paths that hold what each of them begins with."""
    paths = [path for length in range(1, depth + 1) for path in itertools.product(range(vocab_size), repeat=length)]
    return [
        nodes
        for nodes in itertools.combinations(paths, num_nodes)
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
    ]


@pytest.mark.parametrize(("vocab_size", "depth"), [(2, 3), (4, 2), (3, 2)])
def test_a_ddtree_is_the_best_of_all_trees(vocab_size: int, depth: int) -> None:
    """By brute force, for every number of nodes up to five, with ties and without."""
    for num_nodes in range(depth, 6):
        shape = DDTree(num_nodes, depth)
        trees = all_trees(vocab_size, depth, num_nodes)
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            logits = 2 * torch.randn(2, depth, vocab_size, generator=generator)
            logits = logits.round() if seed % 2 else logits
            candidates = candidates_of(shape, torch.device("cpu"))
            draft = grow_ddtree(shape, candidates, logits)
            assert draft.tokens.shape == (2, num_nodes)
            assert (draft.parents < torch.arange(num_nodes)).all()
            for row in range(2):
                found = drafted_paths(draft, row)
                assert len(set(found)) == num_nodes
                best = max(expected_accepted(logits[row], tree) for tree in trees)
                assert expected_accepted(logits[row], found) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("nodes_depth", [(8, 8), (33, 4), (64, 7), (200, 15)])
def test_a_ddtree_is_that_of_a_best_first_search(nodes_depth: tuple[int, int]) -> None:
    """The paper's algorithm is the one that `likeliest_tree` follows for averages over a text."""
    shape = DDTree(*nodes_depth)
    logits = 3 * torch.randn(2, shape.depth, 40, generator=torch.Generator().manual_seed(0))
    draft = grow_ddtree(shape, candidates_of(shape, torch.device("cpu")), logits)
    ranked = logits.double().softmax(-1).sort(descending=True)
    for row in range(2):
        expected = likeliest_tree(ranked.values[row].tolist(), shape.num_nodes).choices
        tokens = ranked.indices[row]
        paths = {tuple(int(tokens[depth, rank]) for depth, rank in enumerate(path)) for path in expected}
        assert set(drafted_paths(draft, row)) == paths


def test_a_ddtree_of_more_nodes_than_there_are_paths() -> None:
    """What is left over holds no token."""
    shape = DDTree(9, 2)
    draft = grow_ddtree(shape, candidates_of(shape, torch.device("cpu")), torch.randn(1, 2, 2))
    found = [path for path in drafted_paths(draft, 0) if NO_TOKEN not in path]
    assert sorted(found) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


def test_a_ddtree_needs_independent_depths(tiny_target: Target) -> None:
    decoder = SpeculativeDecoder(tiny_target, drafter_of("eagle3", tiny_target))
    with pytest.raises(UserError, match="hangs on what it drafted before"):
        decoder.generate(PROMPTS, tree=DDTree(8, 3))


def random_static_tree(num_nodes: int, seed: int) -> StaticTree:
    """Grown by one random first child or next sibling after the other."""
    generator = torch.Generator().manual_seed(seed)
    nodes: list[Path] = []
    frontier: list[Path] = [(0,)]
    while len(nodes) < num_nodes:
        path = frontier.pop(int(torch.randint(len(frontier), (1,), generator=generator)))
        nodes.append(path)
        frontier += [new for new in ((*path[:-1], path[-1] + 1), (*path, 0)) if new[-1] < 8 and len(new) < 7]
    return StaticTree(tuple(reversed(nodes)))


@pytest.mark.parametrize("sample_drafts", [False, True], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("num_nodes", [1, 5, 31, 40, 64])
def test_a_static_tree_is_the_enumeration_of_its_paths(num_nodes: int, sample_drafts: bool) -> None:
    """Node (i, j, ...) is the j-th choice after the i-th choice; what was drawn comes with what it was drawn from."""
    sampling = Sampling(0.7, top_k=9)
    for seed in range(4):
        shape = random_static_tree(num_nodes, seed)
        paths = Paths(rows=2, vocab_size=11, seed=seed)
        draft = grown(paths, shape, state_of(2, sampling, sample_drafts, seed))
        assert draft.parents.tolist() == 2 * [[shape.choices.index(p[:-1]) if p[1:] else -1 for p in shape.choices]]
        assert draft.depth == max(map(len, shape.choices))
        inner = {path[:-1] for path in shape.choices}
        for row in range(2):
            found: dict[Path, Path] = {(): (), **dict(zip(shape.choices, drafted_paths(draft, row), strict=True))}
            assert sorted(paths.all_read[row]) == sorted(found[path] for path in inner if path)
            assert len(set(found.values())) == len(found)  # siblings are distinct
            for column, (choice, path) in enumerate(found.items()):
                if choice in inner and sample_drafts:
                    assert draft.logits is not None
                    torch.testing.assert_close(draft.logits[row, column], cut(paths.logits(row, path), sampling))
                elif choice and not sample_drafts:
                    ranking = paths.logits(row, path[:-1]).argsort(descending=True)
                    assert path[-1] == ranking[choice[-1]]


# Siblings drawn by chance ---------------------------------------------------------------------------------------------

LAW = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.06, 0.04], dtype=torch.float64)


def one_by_one(order: Path) -> float:
    """Return the chance to draw these tokens in this order, each taken out of what is then normalised."""
    left, chance = 1.0, 1.0
    for token in order:
        chance *= float(LAW[token]) / left
        left -= float(LAW[token])
    return chance


def distinct(order: Path) -> float:
    """WRONG: independent draws, thrown away unless they are all distinct."""
    return float(LAW[list(order)].prod())


def shared_evenly(order: Path) -> float:
    """WRONG: what the first token leaves is shared out evenly among the others, not in proportion."""
    even = float(LAW[order[0]]) / (len(LAW) - 1)
    second, third = (float(LAW[token]) + even for token in order[1:])
    return float(LAW[order[0]]) * second * third / (1 - second)


@pytest.mark.parametrize(("theory", "holds"), [(one_by_one, True), (distinct, False), (shared_evenly, False)])
def test_siblings_are_drawn_without_replacement(theory: Callable[[Path], float], holds: bool) -> None:
    """Three of six tokens in order, 60 000 times: 120 outcomes, and the distribution of each of the three by itself."""
    rows, most = 60_000, 3
    children, _ = state_of(rows, Sampling(1.0), sample_drafts=True, seed=1).choose_children(
        LAW.log().float().expand(rows, 1, -1), 0, most
    )
    orders = list(itertools.permutations(range(len(LAW)), most))
    expected = torch.tensor([theory(order) for order in orders], dtype=torch.float64)
    places = torch.tensor([len(LAW) ** (most - 1 - i) for i in range(most)])
    counts = torch.bincount((children[:, 0] * places).sum(1), minlength=len(LAW) ** most)
    counts = counts[(torch.tensor(orders) * places).sum(1)]
    assert counts.sum() == rows  # all distinct
    expected = expected / expected.sum() * rows
    assert (chi_square(counts, expected)[1] > ALPHA) is holds
    for place in range(most):
        marginal = torch.zeros(len(LAW), dtype=torch.float64).index_add_(0, torch.tensor(orders)[:, place], expected)
        found = torch.bincount(children[:, 0, place], minlength=len(LAW))
        p_value = chi_square(found, marginal)[1]
        assert p_value > ALPHA if holds else place == 0 or p_value < ALPHA


def test_nothing_is_drawn_where_nothing_is_left() -> None:
    state = state_of(1000, Sampling(1.0, top_k=2), sample_drafts=True)
    children, _ = state.choose_children(LAW.log().float().expand(1000, 1, -1), 0, 3)
    assert set(map(tuple, children[:, 0].tolist())) == {(0, 1, NO_TOKEN), (1, 0, NO_TOKEN)}


# Drafters -------------------------------------------------------------------------------------------------------------


TWO_LAYERS = "eagle3 of two layers"


def drafter_of(kind: str, target: Target) -> Drafter:
    """Untrained; the draft model, two of the target's four layers, is right now and then."""
    if kind == TWO_LAYERS:
        return untrained("eagle3", target, num_layers=2)
    return untrained(kind, target, **({"num_layers": 2} if kind == "draft_model" else {}))


def logits_in_a_tree(engine: BatchEngine, patch: pytest.MonkeyPatch) -> list[list[tuple[Path, Tensor]]]:
    """Of each row the paths that the drafter reads in its next draft, with the logits [V] of what follows each."""
    found: list[list[tuple[Path, Tensor]]] = [[] for _ in range(engine.num_rows)]

    def spied(grow_shape: Callable) -> Callable:
        def grow_it(shape: object, root: Tensor, read: Callable, *rest: object) -> Draft:
            last: list[list[Path]] = [[()] for _ in found]

            def spied_read(tokens: Tensor, parents: Tensor) -> Tensor:
                logits = read(tokens, parents)
                for row, (followers, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
                    last[row] = [(*last[row][p], token) for token, p in zip(followers, above, strict=True)]
                    found[row] += zip(last[row], logits[row].expand(len(last[row]), -1), strict=True)
                return logits

            for row, logits in enumerate(root):
                found[row].append(((), logits[0]))
            return grow_shape(shape, root, spied_read, *rest)

        return grow_it

    with patch.context() as context:
        for name in ("grow_static", "grow_dynamic"):
            context.setattr(tree_drafting, name, spied(getattr(tree_drafting, name)))
        engine.draft()
    return found


def logits_on_a_chain(engine: BatchEngine, tokens: Tensor, patch: pytest.MonkeyPatch) -> Tensor:
    """What a drafter that drafts these tokens [B, D] as a chain holds of the next one, [B, V]."""
    found: list[Tensor] = []
    forced = torch.cat([tokens, torch.zeros(len(tokens), 9, dtype=torch.int64)], 1)

    def choose(self: DecodingState, logits: Tensor, depth: int, out: Tensor) -> None:
        found.append(logits)
        out.copy_(forced[:, depth])

    with patch.context() as context:
        context.setattr(DecodingState, "choose", choose)
        engine.draft()
    return found[tokens.shape[1]]


@pytest.mark.parametrize("tree", [BUSHY, DynamicTree(40, 4, 4)], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [*BRANCHING, TWO_LAYERS])
def test_a_node_is_drafted_as_its_path_alone(
    kind: str, tree: StaticTree | DynamicTree, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two rounds with trees, against fresh rows that have only read the text and draft chains."""
    drafter = drafter_of(kind, tiny_target)
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    engine = BatchEngine(tiny_target, drafter, GenerationSettings(shape=tree), len(prompts), 128)
    admit(engine, [0, 1, 2, 3], prompts)
    for _ in range(2):
        engine.verify(engine.draft())
    texts = [ids[:length].tolist() for ids, length in zip(engine.state.token_ids, engine.state.lengths, strict=True)]
    fresh = BatchEngine(tiny_target, drafter, GenerationSettings(shape=Chain(tree.depth)), len(prompts), 128)
    admit(fresh, [0, 1, 2, 3], [text[:-1] for text in texts])
    for row, text in enumerate(texts):
        fresh.state.token_ids[row, len(text) - 1] = text[-1]

    found = logits_in_a_tree(engine, monkeypatch)
    assert len(found[0]) == 1 + tree.num_read
    for nodes in zip(*found, strict=True):  # the same place in the tree of every row
        tokens = torch.tensor([path for path, _ in nodes], dtype=torch.int64)
        expected = logits_on_a_chain(fresh, tokens, monkeypatch)
        torch.testing.assert_close(torch.stack([logits for _, logits in nodes]), expected, atol=1e-5, rtol=1e-5)


INDEPENDENT = [kind for kind in BRANCHING if DRAFTERS[kind].independent_depths]


@functools.lru_cache
def plain_answers(target: Target, **settings: float) -> list[list[int]]:
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    return plain.generate(PROMPTS, max_new_tokens=24, **settings).token_ids


@pytest.mark.parametrize(
    ("kind", "tree"),
    [*itertools.product(BRANCHING, (STATIC, DYNAMIC)), *itertools.product(INDEPENDENT, [DDTree(9, 3)])],
    ids=str,
)
def test_trees_leave_the_output_as_it_is(kind: str, tree: Tree, tiny_target: Target) -> None:
    decoder = SpeculativeDecoder(tiny_target, drafter_of(kind, tiny_target))
    for settings in ({}, {"temperature": 0.8, "top_k": 50, "seed": 3}):
        found = decoder.generate(PROMPTS, max_new_tokens=24, tree=tree, **settings)
        assert found.token_ids == plain_answers(tiny_target, **settings)
    mode = "without_replacement"
    if tree != STATIC:
        with pytest.raises(UserError, match="no sample"):
            decoder.generate(PROMPTS, temperature=0.8, tree=tree, verification_mode=mode)
    else:
        decoder.generate(PROMPTS, max_new_tokens=8, temperature=0.8, tree=tree, verification_mode=mode)


@pytest.mark.parametrize("tree", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_tree_accepts_more_than_its_chain(tree: StaticTree | DynamicTree, tiny_target: Target) -> None:
    """Both trees hold the likeliest chain of three, and more."""
    decoder = SpeculativeDecoder(tiny_target, drafter_of("draft_model", tiny_target))
    chain, found = (
        decoder.generate(PROMPTS, max_new_tokens=60, stop_at_eos=False, **draft).stats.total
        for draft in ({"draft_length": 3}, {"tree": tree})
    )
    assert 1 < chain.mean_acceptance_length < found.mean_acceptance_length


def test_an_ngram_drafts_no_trees(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="drafts chains only"):
        SpeculativeDecoder(tiny_target, load_drafter("ngram", tiny_target)).generate(PROMPTS, tree=STATIC)
