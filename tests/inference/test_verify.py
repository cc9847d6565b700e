"""The verification rules keep the distribution of the target; rules that are known to be wrong do not.

A rule is lossless when, over the drafts as they are drawn and over fair coins, the tokens that a round emits, continued
by the target to a fixed length, have the target's joint distribution.
tests/helpers/exact_distributions.py computes both sides without sampling.
"""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from exact_distributions import (
    EXACT,
    KINDS,
    RULES,
    Drafts,
    Rule,
    RuleInputs,
    World,
    all_drafts,
    depth_of,
    distances,
    independent,
    likeliest,
    measure,
    one_by_one,
    outcomes,
    random_world,
    siblings,
)
from torch import Tensor

from draftsmith.inference.verification import acceptance_rules
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.sampling.sampling import sample

# The proof ------------------------------------------------------------------------------------------------------------

CHAINS = [[], [-1], [-1, 0], [-1, 0, 1]]
TREES = [[-1, -1], [-1, -1, -1], [-1, -1, 0, 0], [-1, -1, 0, 0, 1, 1], [-1, 0, 0, 1, 2], [-1, -1, 0, 1, 2]]
SHAPES = [(rule, chain) for rule in ("probabilistic", "block") for chain in CHAINS]
SHAPES += [("without_replacement", shape) for shape in CHAINS + TREES]


@pytest.mark.parametrize(("rule", "parents"), SHAPES)
def test_sampled_drafts_leave_the_distribution_of_the_target(rule: str, parents: list[int]) -> None:
    """Drafts of full size, and drafts that stop by themselves: what was drafted decides whether drafting goes on."""
    for vocab_size in [3, *(size for size in (4, 5) if size ** len(parents) <= 256)]:
        worlds = [random_world(kind, depth_of(parents), vocab_size, seed) for kind in KINDS for seed in range(2)]
        cases = [(world, all_drafts(world, parents, stop=stop)) for world in worlds for stop in (False, True)]
        assert max(distances(RULES[rule], parents, cases)) < EXACT


def any_tokens(parents: list[int], vocab_size: int, seed: int) -> Drafts:
    """One draft that nothing was drawn for: twins among siblings, nodes without a token."""
    tokens = torch.randint(NO_TOKEN, vocab_size, (len(parents),), generator=torch.Generator().manual_seed(seed))
    return [(1.0, tokens.tolist())]


@pytest.mark.parametrize("parents", [[-1, 0, 1], *TREES])
def test_sample_then_match_leaves_the_distribution_of_the_target_whatever_is_drafted(parents: list[int]) -> None:
    worlds = [random_world(kind, depth_of(parents), 3, seed) for kind in ("any", "cut") for seed in range(8)]
    cases = [(world, any_tokens(parents, 3, seed)) for seed, world in enumerate(worlds)]
    assert max(distances(RULES["one_hot"], parents, cases)) < EXACT


@pytest.mark.parametrize("parents", [[-1, 0, 1], *TREES])
def test_sample_then_match_is_rejection_of_drafts_held_certain(parents: list[int]) -> None:
    """Same probability, in fractions, of every path and next token as trying siblings one by one: accept x with p(x),
    else strike it out of p and normalise."""
    world = random_world("any", depth_of(parents), 4, seed=3)
    ((_, draft),) = drafts = all_drafts(world, parents, likeliest)  # distinct siblings
    expected: dict[tuple[tuple[int, ...], int], Fraction] = {}

    def visit(path: tuple[int, ...], reach: Fraction) -> None:
        depth, row = world.context([draft[column - 1] for column in path])
        left = [Fraction(chance).limit_denominator(6) for chance in world.p[depth][row].tolist()]
        for node, parent in enumerate(parents):
            if parent != (path[-1] if path else 0) - 1 or not sum(left):
                continue
            chance = left[draft[node]] / sum(left)
            visit((*path, node + 1), reach * chance)
            reach *= 1 - chance
            left[draft[node]] = Fraction(0)
        for token, chance in enumerate(left):
            expected[path, token] = reach * chance / sum(left) if chance else Fraction(0)

    visit((), Fraction(1))
    found = {
        (tuple(x.path), x.next_token): x.probability for x in outcomes(RULES["one_hot"], parents, [(world, drafts)])
    }
    assert found.keys() <= expected.keys()
    for key, probability in expected.items():
        assert abs(found.get(key, 0.0) - float(probability)) < EXACT


# Block verification accepts more --------------------------------------------------------------------------------------


def mean_accepted(rule: Rule, parents: list[int], cases: list[tuple[World, Drafts]]) -> list[float]:
    means = [0.0] * len(cases)
    for outcome in outcomes(rule, parents, cases):
        means[outcome.case] += outcome.probability * len(outcome.path)
    return means


def best_mean(world: World, draft: list[int], chance: float = 1.0, weight: float = 1.0) -> float:
    """Sum over drafts of q(x_1..n) min(1, w p / q): what block verification attains, and no lossless rule can pass."""
    depth, row = world.context(draft)
    if depth == len(world.q) - 1:
        return 0.0
    mean = 0.0
    for token, (p, q) in enumerate(zip(world.p[depth][row].tolist(), world.q[depth][row].tolist(), strict=True)):
        if q:
            stands = min(1.0, weight * p / q)
            mean += chance * q * stands + best_mean(world, [*draft, token], chance * q, stands)
    return mean


@pytest.mark.parametrize("parents", CHAINS[1:])
def test_block_verification_accepts_the_most(parents: list[int]) -> None:
    """As proved in arXiv 2403.10444: never fewer tokens than token by token, and as many as any lossless rule could."""
    worlds = [random_world(kind, len(parents), 3, seed) for kind in KINDS for seed in range(5)]
    cases = [(world, all_drafts(world, parents)) for world in worlds]
    block = mean_accepted(RULES["block"], parents, cases)
    gains = [b - t for b, t in zip(block, mean_accepted(RULES["probabilistic"], parents, cases), strict=True)]
    assert min(gains) > -EXACT
    assert max(gains) < EXACT if len(parents) == 1 else max(gains) > 0.05  # one draft leaves nothing to gain
    assert block == pytest.approx([best_mean(world, []) for world in worlds], abs=EXACT)


PAPER = World(  # the motivating example of arXiv 2403.10444: no context, target (1/3, 2/3), drafter (2/3, 1/3)
    [torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64).expand(2**d, 2) for d in range(4)],
    [torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64).expand(2**d, 2) for d in range(4)],
)


def test_the_example_of_the_block_verification_paper() -> None:
    cases = [(PAPER, all_drafts(PAPER, [-1, 0]))]
    assert mean_accepted(RULES["probabilistic"], [-1, 0], cases) == pytest.approx([10 / 9], abs=EXACT)
    assert mean_accepted(RULES["block"], [-1, 0], cases) == pytest.approx([11 / 9], abs=EXACT)


# Wrong rules, known from published code, must fail --------------------------------------------------------------------


def shared_noise(r: RuleInputs) -> Verified:
    """The drafts are drawn with the uniforms that the target draws with."""
    r.tokens = sample(r.draft_logits.softmax(-1)[:, : r.depth], r.draw[:, : r.depth])
    return RULES["probabilistic"](r)


def other_temperature(r: RuleInputs) -> Verified:
    """Tests with a q that the drafts were not drawn from."""
    r.draft_logits = r.draft_logits / 2
    return RULES["probabilistic"](r)


def no_residual(r: RuleInputs) -> Verified:
    """After a rejection draws from p itself."""
    verified = RULES["probabilistic"](r)
    distribution = r.logits.softmax(-1)[torch.arange(len(r.tokens)), verified.num_accepted]
    return Verified(verified.num_accepted, verified.path, sample(distribution, r.draw[:, 0]))


def plain_residual(r: RuleInputs) -> Verified:
    """Accepts by blocks, then draws from (p - q)+ as if it had gone token by token."""
    finish = acceptance_rules._finish_chain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            acceptance_rules, "_finish_chain", lambda p, q, d, n, w, u: finish(p, q, d, n, torch.ones_like(w), u)
        )
        return RULES["block"](r)


def without_twins(tokens: list[int], q: list[float]) -> list[int]:
    return [NO_TOKEN if token in tokens[:i] else token for i, token in enumerate(tokens)]


def if_confident(tokens: list[int], q: list[float]) -> list[int]:
    return [token if q[token] > 0.3 else NO_TOKEN for token in tokens]


def by_confidence(tokens: list[int], q: list[float]) -> list[int]:
    return sorted(tokens, key=lambda token: -q[token])


def unchanged(tokens: list[int], q: list[float]) -> list[int]:
    return tokens


def worst(rule: Rule, parents: list[int], draw: Callable = one_by_one, edit: Callable = unchanged) -> float:
    """The largest distance over a few worlds, the drafts edited by what the drafter holds of them at the root."""
    worlds = [random_world("any", depth_of(parents), 4, seed) for seed in range(20)]
    cases: list[tuple[World, Drafts]] = []
    for world in worlds:
        q = world.q[0][0].tolist()
        cases.append((world, [(weight, edit(tokens, q)) for weight, tokens in all_drafts(world, parents, draw)]))
    return max(distances(rule, parents, cases))


def test_independent_drafts_with_their_twins_are_lossless() -> None:
    """The right forms of rules that fail below, from the code of the wrong ones: the proof does not fail everything."""
    assert worst(siblings, [-1, -1, -1], independent) < EXACT
    assert worst(lambda r: siblings(r, remove=True, renormalise=True), [-1, -1]) < EXACT


WRONG: dict[str, tuple] = {
    "q is not renormalised after a rejection": (lambda r: siblings(r, remove=True), [-1, -1]),
    "twins of independent drafts are dropped": (siblings, [-1, -1], independent, without_twins),
    "the likeliest drafts, tested as if drawn from q": (RULES["without_replacement"], [-1, -1], likeliest),
    "a draft is dropped because its own q is low": (RULES["probabilistic"], [-1], one_by_one, if_confident),
    "drawn siblings are tried by confidence": (RULES["without_replacement"], [-1, -1], one_by_one, by_confidence),
    "drafter and target draw with the same uniforms": (shared_noise, [-1]),
    "typical acceptance": (RULES["typical"], [-1, -1]),
    "q of another temperature": (other_temperature, [-1]),
    "p instead of the residual": (no_residual, [-1]),
    "block verification with the residual of one token": (plain_residual, [-1, 0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_proof_fails_a_wrong_rule(name: str) -> None:
    assert worst(*WRONG[name]) > 0.01


# From round to round --------------------------------------------------------------------------------------------------

DRAFT, ACCEPT, DRAW = range(3)  # what a position has noise for


def distance_of_two_rounds(rule: str, replayed: list[int]) -> float:
    """Of the distribution of two tokens, when a second round drafts positions that the first had drafted too.

    The second has noise of its own, but for what is `replayed`: that is kept by position, and comes again.
    """
    p, q = torch.tensor([0.5, 0.5], dtype=torch.float64), torch.tensor([0.9, 0.1], dtype=torch.float64)

    def one_round(noise: Tensor) -> Tensor:
        """[R, 3, 3] -> two drafted tokens, number of accepted ones, next token: [R, 4]"""
        logits, draft_logits = p.log().expand(len(noise), 3, 2), q.log().expand(len(noise), 2, 2)
        drafts = sample(draft_logits.softmax(-1), noise[:, DRAFT, :2])
        verified = getattr(acceptance_rules, rule)(logits, draft_logits, drafts, noise[:, ACCEPT, :2], noise[:, DRAW])
        return torch.cat([drafts, verified.num_accepted[:, None], verified.next_token[:, None]], 1)

    def play(row: Tensor, coins: Tensor) -> Tensor:
        noise = coins.view(len(coins), 2, 3, 4).clone()  # round, purpose, position
        noise[:, 1, replayed] = noise[:, 0, replayed]
        first, second = one_round(noise[:, 0, :, 0:3]), one_round(noise[:, 1, :, 1:4])
        return torch.cat([first, second.where(first[:, 2:3] == 0, -1)], 1)  # the second if the first gave one token

    distribution = -torch.outer(p, p)
    for (_, *label), volume in measure(play, 1, 24).items():
        emitted = []
        for x, y, num_accepted, next_token in (label[:4], label[4:]):
            emitted += [*[x, y][: max(num_accepted, 0)], next_token]
        distribution[emitted[0], emitted[1]] += volume
    return float(distribution.abs().sum() / 2)


def test_noise_kept_by_position_suits_rules_that_stop_at_a_rejection() -> None:
    assert distance_of_two_rounds("probabilistic", [DRAFT, ACCEPT, DRAW]) < EXACT


def test_block_verification_needs_fresh_noise_every_round() -> None:
    """It has looked at the coins and drafts behind the place where it stops."""
    assert distance_of_two_rounds("block", [DRAW]) < EXACT
    assert distance_of_two_rounds("block", [DRAFT]) > 0.01
    assert distance_of_two_rounds("block", [ACCEPT]) > 0.01
