"""Every rule's kernels give what the rule gives: element by element, on the same coins, with no tolerance.

On a CPU the kernels run in Triton's interpreter (see conftest.py), on a CUDA device as they are. Kernel and reference
round differently, by about 1e-6 of a probability. So coins are chosen that lie MARGIN away at least from whatever they
are compared with, and rounding decides nothing.
"""

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.inference.verification import acceptance_rules
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.sampling import sampling
from draftsmith.models.sampling.sampling import Noise, Stream
from draftsmith.models.sampling.trees import node_depths

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from draftsmith.inference.verification import acceptance_kernels
from draftsmith.models.sampling import sampling_kernels

pytestmark = pytest.mark.usefixtures("watched_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MARGIN = 5e-4
LIKELY = 6  # tokens that drafts are made of
KINDS = ("random", "ties", "one_hot", "p is q", "gaps")  # of the rows of a batch, in turn
SIZES = [(12, 16, 5), (37, 16, 5), (1000, 512, 3)]  # vocabulary, chunk, rows


@dataclass
class Case:
    """A batch in which every row has its own tree and its own kind of distributions."""

    logits: Tensor  # [B, T, V]
    draft_logits: Tensor  # [B, N, V], entry c for the children of column c
    tokens: Tensor  # [B, N]
    parents: Tensor  # [B, N]
    depth: int

    @property
    def tree(self) -> tuple[Tensor, Tensor, int]:
        return self.tokens, self.parents, self.depth


def random_logits(likely: Tensor, *shape: int) -> Tensor:
    """A third is -inf; the likely tokens have most of the mass."""
    logits = torch.randn(shape)
    logits[torch.rand(shape) < 0.3] = float("-inf")
    logits[..., likely] = 4 + 1.5 * torch.randn(*shape[:-1], len(likely))
    return logits


def random_parents(batch: int, num_nodes: int) -> Tensor:
    """Bushy trees: the root and the first nodes have all the children."""
    rows = [[int(torch.randint(-1, min(node, 2), ())) for node in range(num_nodes)] for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.int64).view(batch, num_nodes)


def make_case(vocabulary: int, batch: int, num_nodes: int, kinds: tuple[str, ...] = KINDS, chain: bool = False) -> Case:
    likely = torch.randperm(vocabulary)[:LIKELY]
    logits = random_logits(likely, batch, num_nodes + 1, vocabulary)
    draft_logits = random_logits(likely, batch, num_nodes, vocabulary)
    tokens = likely[torch.randint(len(likely), (batch, num_nodes))]  # twins among siblings too
    parents = random_parents(batch, num_nodes)
    if chain:
        parents = torch.arange(-1, num_nodes - 1).expand(batch, -1)
    for row in range(batch):
        match kinds[row % len(kinds)]:
            case "ties":
                logits[row] = torch.randint(0, 2, logits[row].shape) * 2.0
                draft_logits[row] = torch.randint(0, 2, draft_logits[row].shape) * 2.0
            case "one_hot":
                winners = likely[torch.randint(len(likely), (num_nodes + 1, 1))]
                logits[row] = torch.full_like(logits[row], float("-inf")).scatter(-1, winners, 0.0)
            case "p is q":
                draft_logits[row] = logits[row, :-1]
            case "gaps":  # nothing was proposed, or what cannot have been drawn
                impossible, missing = (torch.rand(num_nodes) < 0.25 for _ in range(2))
                draft_logits[row, parents[row, impossible] + 1, tokens[row, impossible]] = float("-inf")
                tokens[row, missing] = -1
    depth = int(node_depths(parents, num_nodes).max()) if num_nodes else 0
    return Case(logits, draft_logits, tokens, parents, depth)


def agree(one: Verified, other: Verified) -> Tensor:
    """Which rows are the same in all that counts: [B]."""
    counts = torch.arange(one.path.shape[1]) < one.num_accepted[:, None]
    same_path = ((one.path == other.path) | ~counts).all(1)
    return (one.num_accepted == other.num_accepted) & (one.next_token == other.next_token) & same_path


def settled_coins(rule: Callable[..., Verified], *shapes: tuple[int, int]) -> list[Tensor]:
    """Coins with which the rule gives the same when all of them are MARGIN less, and MARGIN more.

    An outcome is a list of coins being below some threshold or not, thresholds that depend on no coin but through what
    came before. So no threshold that was met lies within MARGIN of its coin.
    """
    coins = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    for _ in range(200):
        coins = [coin.clamp(2 * MARGIN, 1 - 2 * MARGIN) for coin in coins]
        less, more = (rule(*[coin + shift for coin in coins]) for shift in (-MARGIN, MARGIN))
        loose = ~agree(less, more)
        if not loose.any():
            return coins
        for coin in coins:
            coin[loose] = torch.rand_like(coin[loose])
    raise AssertionError("no such coins found")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # on a GPU the twins have no such algorithm
    yield
    torch.use_deterministic_algorithms(False)


def run(kernel: Callable[..., Any], *args: Any) -> Any:
    """On DEVICE, and back."""
    args = tuple(arg.to(DEVICE) if isinstance(arg, Tensor) else arg for arg in args)
    with poisoned_memory():
        result = kernel(*args)
    return Verified(*(x.cpu() for x in result)) if isinstance(result, Verified) else result.cpu()


def assert_same(rule: str, *args: Any) -> Verified:
    expected = getattr(acceptance_rules, rule)(*args)
    verified = run(getattr(acceptance_kernels, rule), *args)
    assert agree(verified, expected).all(), (verified, expected)
    assert (
        (verified.path >= 0) & (verified.path < args[0].shape[1])
    ).all()  # what does not count is a column all the same
    return verified


@pytest.fixture(autouse=True)
def _small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary too has several."""
    if "chunk" in request.fixturenames:
        monkeypatch.setattr(sampling_kernels, "CHUNK", request.getfixturevalue("chunk"))


@pytest.mark.parametrize(("vocabulary", "chunk", "batch"), SIZES)
class TestSame:
    def test_greedy(self, vocabulary: int, chunk: int, batch: int) -> None:
        case = make_case(vocabulary, batch, 6)
        assert_same("greedy", case.logits, *case.tree)

    def test_one_hot(self, vocabulary: int, chunk: int, batch: int) -> None:
        case = make_case(vocabulary, batch, 6)
        coins = settled_coins(partial(acceptance_rules.one_hot, case.logits, *case.tree), (batch, case.depth + 1))
        assert_same("one_hot", case.logits, *case.tree, *coins)

    def test_typical(self, vocabulary: int, chunk: int, batch: int) -> None:
        case = make_case(
            vocabulary, 5, 6, ("random", "one_hot", "gaps")
        )  # ties of likelihoods are a matter of rounding
        loose, strict = (acceptance_rules.typical(case.logits, *case.tree, 0.09 * x, 0.3 * x) for x in (0.999, 1.001))
        assert agree(loose, strict).all()
        assert_same("typical", case.logits, *case.tree)

    @pytest.mark.parametrize("rule", ["probabilistic", "block"])
    def test_chains(self, rule: str, vocabulary: int, chunk: int, batch: int) -> None:
        case = make_case(vocabulary, batch, 3, chain=True)
        args = case.logits, case.draft_logits, case.tokens
        coins = settled_coins(partial(getattr(acceptance_rules, rule), *args), (batch, 3), (batch, 4))
        assert_same(rule, *args, *coins)

    def test_without_replacement(self, vocabulary: int, chunk: int, batch: int) -> None:
        case = make_case(vocabulary, batch, 6)
        num_parents = int(case.parents.max()) + 2
        args = case.logits, case.draft_logits[:, :num_parents].contiguous(), *case.tree
        coins = settled_coins(partial(acceptance_rules.without_replacement, *args), (batch, 6), (batch, case.depth + 1))
        assert_same("without_replacement", *args, *coins)


def test_many_siblings_are_rejected() -> None:
    """Children of the root that the drafter likes more than the target: what is left changes with each, but no twin."""
    logits, draft_logits = torch.randn(24, 6, 12), torch.randn(24, 1, 12)
    tokens = (draft_logits - logits[:, :1])[:, 0].topk(3).indices[:, [0, 0, 1, 2, 1]]
    args = logits, draft_logits, tokens, torch.full_like(tokens, -1), 1
    coins = settled_coins(partial(acceptance_rules.without_replacement, *args), (24, 5), (24, 2))
    assert_same("without_replacement", *args, *coins)


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_chains_that_end_early(rule: str) -> None:
    """Two drafts, then none or one that cannot have been drawn; a rejection leaves much of flat distributions."""
    logits, draft_logits, tokens = torch.randn(32, 4, 12), torch.randn(32, 3, 12), torch.randint(0, 12, (32, 3))
    draft_logits[::2, 2] = draft_logits[::2, 2].scatter(1, tokens[::2, 2:], float("-inf"))
    tokens[1::2, 2] = -1
    args = logits, draft_logits, tokens
    coins = settled_coins(partial(getattr(acceptance_rules, rule), *args), (32, 3), (32, 4))
    assert_same(rule, *args, *coins)


def test_of_deep_nodes_the_likeliest_path_wins() -> None:
    """All tokens are plausible, so four paths compete."""
    tokens, parents = torch.randint(0, 5, (16, 6)), torch.tensor([[-1, -1, 0, 0, 1, 1]]).expand(16, -1)
    assert (assert_same("typical", 0.3 * torch.randn(16, 7, 5), tokens, parents, 2).num_accepted == 2).all()


RULES = ["greedy", "one_hot", "typical", "probabilistic", "block", "without_replacement"]


def arguments(rule: str, case: Case, accept: float | Tensor, draw: float | Tensor) -> tuple[Any, ...]:
    """Of a rule on a case, with the same coin everywhere or with one for each row [B]."""
    batch, num_nodes = case.tokens.shape
    accept, draw = (torch.as_tensor(coin, dtype=torch.float64).expand(batch)[:, None] for coin in (accept, draw))
    accept_coins, draws = accept.repeat(1, num_nodes), draw.repeat(1, case.depth + 1)
    match rule:
        case "greedy" | "typical":
            return case.logits, *case.tree
        case "one_hot":
            return case.logits, *case.tree, draws
        case "without_replacement":
            return case.logits, case.draft_logits, *case.tree, accept_coins, draws
        case _:
            return case.logits, case.draft_logits, case.tokens, accept_coins, draws


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [1, 4])
def test_no_drafts_is_plain_decoding(rule: str, batch: int) -> None:
    case = make_case(9, batch, 0)
    args = arguments(rule, case, 0.5, 0.3)
    plain = sampling.sample(case.logits[:, 0].softmax(-1), torch.full((batch,), 0.3))
    verified = assert_same(rule, *args)
    assert torch.equal(verified.next_token, case.logits[:, 0].argmax(-1) if rule in ("greedy", "typical") else plain)


@pytest.mark.parametrize("rule", ["probabilistic", "block", "without_replacement"])
@pytest.mark.parametrize("chunk", [4])
def test_what_is_left_after_a_rejection_that_should_not_be(rule: str, chunk: int) -> None:
    """p = q rejects nothing but a coin of 1, and leaves nothing to draw from: then p it is."""
    case = make_case(8, 2, 1, ("p is q",), chain=True)
    assert not assert_same(rule, *arguments(rule, case, 1.0, 0.7)).num_accepted.any()


@pytest.mark.parametrize("rule", ["probabilistic", "block", "without_replacement"])
@pytest.mark.parametrize("coin", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_the_impossible_is_never_accepted_or_drawn(rule: str, coin: float) -> None:
    """Token 1 alone is possible for the target, in the middle of a vocabulary of which the drafter likes the rest."""
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), float("-inf")]).expand(2, 3, 4).contiguous()
    draft_logits = torch.tensor([0.0, float("-inf"), 1.0, 2.0]).expand(2, 2, 4).contiguous()
    case = Case(logits, draft_logits, torch.tensor([[0, 2], [3, 1]]), torch.tensor([[-1, 0]] * 2), 2)
    verified = run(getattr(acceptance_kernels, rule), *arguments(rule, case, coin, max(coin, 2.0**-53)))
    assert verified.num_accepted.tolist() == [0, 0]
    assert verified.next_token.tolist() == [1, 1]


@pytest.mark.parametrize("chunk", [16])
@pytest.mark.parametrize("coin", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_extreme_coins_draw_the_first_and_the_last_token_that_is_possible(coin: float, chunk: int) -> None:
    logits = torch.randn(3, 40)
    logits[:, [0, 1, 2, 17, 38, 39]] = float("-inf")
    drawn = run(sampling_kernels.sample, logits, torch.full((3,), coin, dtype=torch.float64))
    assert drawn.tolist() == [3 if coin < 0.5 else 37] * 3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [4])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_row_without_a_distribution_does_no_harm(rule: str, chunk: int) -> None:
    """Padded and finished rows may hold anything: they get some token id and some columns, the others their own."""
    case = make_case(10, 3, 3, ("random",), chain=True)
    args = arguments(rule, case, torch.tensor([0.3, 0.4, 0.5]), 0.6)
    alone = run(getattr(acceptance_kernels, rule), *args)
    case.logits[1] = case.draft_logits[1] = float("-inf")
    verified = run(getattr(acceptance_kernels, rule), *args)
    assert agree(verified, alone)[[0, 2]].all()
    assert 0 <= verified.next_token[1] < 10
    assert 0 <= verified.num_accepted[1] <= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_greedy_reads_half_precision(dtype: torch.dtype) -> None:
    """Few bits, so that the largest logit is often there twice: the first counts."""
    case = make_case(50, 4, 5)
    assert_same("greedy", case.logits.to(dtype), *case.tree)


def test_greedy_on_a_large_vocabulary() -> None:
    """Equal winners at both ends of the vocabulary, and at both sides of where chunks meet."""
    logits = torch.zeros(1, 4, 128256)
    logits[0, 0, [4095, 4096, 128255]] = logits[0, 2, [0, 128255]] = logits[0, 3, 128255] = 1.0
    tokens, parents = torch.tensor([[4096, 4095, 0]]), torch.tensor([[-1, -1, 1]])
    verified = assert_same("greedy", logits, tokens, parents, 2)
    assert verified.path.tolist() == [[2, 3]]
    assert verified.next_token.tolist() == [128255]


def test_one_row_of_parents_may_serve_the_batch() -> None:
    """A static tree is one row, expanded; tokens and coins may be slices."""
    case = make_case(20, 3, 5, ("random",))
    parents = case.parents[:1].expand(3, -1)
    depth = int(node_depths(parents, 5).max())
    tokens = torch.stack([case.tokens, case.tokens], 2)[..., 0]
    coins = settled_coins(partial(acceptance_rules.one_hot, case.logits, tokens, parents, depth), (3, depth + 1))
    wide = torch.cat([coins[0], coins[0]], 1)[:, : depth + 1]
    assert_same("one_hot", case.logits, tokens, parents, depth, wide)


@pytest.mark.parametrize("chunk", [16])
def test_a_token_after_every_column_of_a_tree(chunk: int) -> None:
    """Columns of one depth share a coin."""
    logits, parents = torch.randn(3, 7, 50) * 3, random_parents(3, 6)
    uniforms, p = torch.rand(3, 7, dtype=torch.float64), logits.softmax(-1)
    coins = uniforms.gather(1, node_depths(parents, 6))
    settled = sampling.sample(p, coins - MARGIN) == sampling.sample(p, coins + MARGIN)
    assert settled.float().mean() > 0.8
    drawn = run(sampling_kernels.sample_columns, logits, parents, 6, uniforms)
    assert torch.equal(drawn[settled], sampling.sample(p, coins)[settled])


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("branch", [0, 2**20, torch.randint(0, 2**20, (150,))])
@pytest.mark.parametrize("num_positions", [1, 150])
def test_noise_is_the_same_bit_for_bit(stream: Stream, branch: Tensor | int, num_positions: int) -> None:
    noise = Noise(-7, torch.tensor([0, 1, -1, 2**62, 123456789]))
    positions = torch.randint(0, 2**40, (5, num_positions))
    expected = noise.uniforms(positions, stream, branch)
    assert torch.equal(run(sampling_kernels.uniforms, noise.keys, positions, stream, branch), expected)


def test_benchmark() -> None:
    """It needs a GPU and says so; its calls are tried here, on little."""
    path = Path(__file__).parents[2] / "benchmarks/acceptance_kernels.py"
    benchmark = runpy.run_path(str(path))
    for case in benchmark["comparisons"](1, 40, str(DEVICE)):
        assert case.num_bytes > 0
        assert type(case.kernel()) is type(case.twin())
    if not torch.cuda.is_available():
        assert benchmark["main"]() == 2
