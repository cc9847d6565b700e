"""Losslessness of the verification rules, by integrating over every draft and every coin.

A rule is lossless when, over drafts from q and fair coins, the tokens it emits have the law of the target. On a small
vocabulary the integral is a finite sum: a coin matters only through the intervals between its thresholds, and a uniform
grid finer than all denominators hits each interval in proportion to its length.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftsmith.inference import verify
from draftsmith.models.base import chain

V = 3
GRID = 24  # coins (i + 0.5) / 24 are exact for probabilities that are multiples of 1 / 24
COINS = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID


def random_law(generator: torch.Generator, *shape: int, denominator: int = 4) -> Tensor:
    """Distributions with probabilities that are multiples of 1 / denominator, zeros among them."""
    picks = torch.randint(0, V, (*shape, denominator), generator=generator)
    return torch.nn.functional.one_hot(picks, V).sum(-2).float() / denominator


def chain_shape(drafts: Tensor) -> tuple[Tensor, Tensor, int]:
    draft = chain(drafts)
    return draft.tokens, draft.parents, draft.depth


def test_greedy_accepts_the_longest_matching_beginning() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 0, 1]] * 4), V).float()
    drafts = torch.tensor([[1, 2, 0], [1, 2, 1], [0, 2, 0], [1, -1, 0]])
    verified = verify.greedy(logits, *chain_shape(drafts))
    assert verified.num_accepted.tolist() == [3, 2, 0, 1]
    assert verified.next_token.tolist() == [1, 0, 1, 2]


def test_no_drafts_is_plain_decoding() -> None:
    p = torch.tensor([[[0.5, 0.25, 0.25]]])
    none = torch.zeros(1, 0, dtype=torch.int64)
    coin = torch.tensor([[0.6]])
    assert verify.greedy(p, *chain_shape(none)).next_token.tolist() == [0]
    assert verify.one_hot(p.log(), *chain_shape(none), coin).next_token.tolist() == [1]
    assert verify.probabilistic(p.log(), p[:, :0], none, coin[:, :0], coin).next_token.tolist() == [1]


def first_token_law(rule: str, p: Tensor, q: Tensor) -> Tensor:
    """Law [V] of the first emitted token over all drafts of one token drawn from q [V] and all coins; p [2, V]."""
    accept, draw = (coins.flatten() for coins in torch.meshgrid(COINS, COINS, indexing="ij"))
    num = len(accept)
    law = torch.zeros(V, dtype=torch.float64)
    for draft in range(V):
        drafts = torch.full((num, 1), draft)
        draws = draw[:, None].expand(num, 2)
        if rule == "probabilistic":
            verified = verify.probabilistic(
                p.log().expand(num, 2, V), q.log().expand(num, 1, V), drafts, accept[:, None], draws
            )
        else:
            verified = verify.one_hot(p.log().expand(num, 2, V), *chain_shape(drafts), draws)
        first = torch.where(verified.num_accepted > 0, drafts[:, 0], verified.next_token)
        law += q[draft].double() * torch.bincount(first, minlength=V).double() / num
    return law


@pytest.mark.parametrize("rule", ["probabilistic", "one_hot"])
@pytest.mark.parametrize("seed", range(20))
def test_one_draft_leaves_the_law_of_the_target(rule: str, seed: int) -> None:
    """p and q with zeros, ties, disjoint and equal supports. Thresholds are multiples of 1/12 and 1/24: exact."""
    generator = torch.Generator().manual_seed(seed)
    p, q = random_law(generator, 2), random_law(generator, 1)[0]
    law = first_token_law(rule, p, q)
    # a coin is compared with p / q and with residuals in steps of 1/12 at the least, all hit by the grid of 1/24
    torch.testing.assert_close(law, p[0].double(), atol=1e-6, rtol=0)


def residual_of_another_rule(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, draws: Tensor) -> verify.Verified:
    """Accepts by p(x) alone, as if chosen without chance (lossless by itself), but then subtracts q."""
    p, q = p.exp(), q.exp()
    accepted = accept < p[:, :1].gather(-1, drafts[..., None]).squeeze(-1)
    residual = (p[:, 0] - q[:, 0]).clamp(min=0)
    return verify.Verified(accepted.long()[:, 0], drafts, verify.sample(residual, draws[:, 0]))


def no_residual(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, draws: Tensor) -> verify.Verified:
    """After a rejection draws from p itself."""
    verified = probabilistic(p, q, drafts, accept, draws)
    return verify.Verified(verified.num_accepted, drafts, verify.sample(p[:, 0].exp(), draws[:, 0]))


def other_q(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, draws: Tensor) -> verify.Verified:
    """Tests with a q that the draft was not drawn from, as after another temperature."""
    return probabilistic(p, q / 2, drafts, accept, draws)


probabilistic = verify.probabilistic


@pytest.mark.parametrize("wrong_rule", [residual_of_another_rule, no_residual, other_q])
def test_the_proof_has_teeth(wrong_rule: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known wrong rules must fail the integral that the right one passes."""
    p, q = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0, 0]]), torch.tensor([0.25, 0.75, 0.0])
    assert (first_token_law("probabilistic", p, q) - p[0]).abs().max() < 1e-6
    monkeypatch.setattr(verify, "probabilistic", wrong_rule)
    assert (first_token_law("probabilistic", p, q) - p[0]).abs().max() > 0.01


def test_chains_of_two_have_the_joint_law() -> None:
    """Emitted pairs over all drafts and a product grid of coins, target with a different law after each token.

    One uniform an emitted position, as in decoding: two accept coins and three draws.
    """
    grid = (torch.arange(6, dtype=torch.float64) + 0.5) / 6
    p0, p1 = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [1.0, 0, 0]])
    q0, q1 = torch.tensor([0.5, 0.0, 0.5]), torch.tensor([[0.0, 0.5, 0.5], [0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    coins = torch.cartesian_prod(*[grid] * 4)  # two accept coins, two draws
    law = torch.zeros(V, V, dtype=torch.float64)
    for x, y in itertools.product(range(V), range(V)):
        weight = float(q0[x] * q1[x, y])
        if not weight:
            continue
        n = len(coins)
        p = torch.stack([p0, p1[x], torch.tensor([1.0, 0, 0])]).expand(n, 3, V)
        q = torch.stack([q0, q1[x]]).expand(n, 2, V)
        draws = torch.cat([coins[:, 2:], coins[:, :1]], 1)
        verified = verify.probabilistic(p.log(), q.log(), torch.tensor([[x, y]]).expand(n, 2), coins[:, :2], draws)
        first = torch.where(verified.num_accepted > 0, x, verified.next_token)
        for token in range(V):  # the round ended after one token: the next one is a plain draw from the target
            rejected = (verified.num_accepted == 0) & (first == token)
            law[token] += weight * rejected.sum().double() / n * p1[token].double()
        accepted_one = verified.num_accepted >= 1
        second = torch.where(verified.num_accepted == 2, y, verified.next_token)
        law[x] += weight * torch.bincount(second[accepted_one], minlength=V).double() / n
    torch.testing.assert_close(law, (p0[:, None] * p1).double(), atol=1e-9, rtol=0)


def test_zero_residual_falls_back_to_the_target() -> None:
    """p = q up to rounding can reject with an empty residual; 0 / 0 must not happen."""
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    verified = verify.probabilistic(
        p.log(), p[:, :1].log(), torch.tensor([[0]]), torch.tensor([[1.0]]), torch.tensor([[0.75, 0.5]])
    )
    assert verified.num_accepted.tolist() == [0]
    assert verified.next_token.tolist() == [1]


def test_zero_coin_does_not_accept_the_impossible() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[1.0, 0.0, 0.0]]])
    verified = verify.probabilistic(
        p.log(), q.log(), torch.tensor([[0]]), torch.tensor([[0.0]]), torch.tensor([[0.5, 0.5]])
    )
    assert verified.num_accepted.tolist() == [0]
    assert verified.next_token.tolist() == [1]
