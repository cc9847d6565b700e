"""Divergences against their definitions, and their sum over chunks against the whole."""

import math
from collections.abc import Callable

import pytest
import torch
from divergence_definitions import DEFINITIONS

from draftsmith.models.losses import chain_loss, divergences, position_weights
from draftsmith.models.losses.chain_loss import Depth, divergence_over_depths, divergence_over_rows
from draftsmith.models.losses.divergences import DIVERGENCES, Comparison, Teacher
from draftsmith.models.losses.position_weights import chances_of, d_pace

P = torch.tensor([0.5, 0.25, 0.25])
Q = torch.tensor([0.25, 0.25, 0.5])
M = (P + Q) / 2
TV = 1 - (0.25 + 0.25 + 0.25)
KL = 0.5 * math.log(2) + 0.25 * math.log(0.5)
BY_HAND = {
    "cross_entropy": -math.log(0.25),
    "forward_kl": KL,
    "reverse_kl": 0.25 * math.log(0.5) + 0.5 * math.log(2),
    "jensen_shannon": float(0.5 * (P * (P / M).log()).sum() + 0.5 * (Q * (Q / M).log()).sum()),
    "total_variation": TV,
    "lk_hybrid": math.exp(-3 * (1 - TV)) * KL + (1 - math.exp(-3 * (1 - TV))) * TV,
    "cross_entropy_and_l1": -0.1 * math.log(0.25) + 0.9 * (0.25 + 0.25),
}


@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_by_hand(name: str) -> None:
    found = DEFINITIONS[name](Q.log()[None], P.log()[None])
    torch.testing.assert_close(found, torch.tensor([BY_HAND[name]]))


@pytest.mark.parametrize("name", [name for name in DEFINITIONS if "cross_entropy" not in name])
def test_no_divergence_between_equals(name: str) -> None:
    log_p = torch.randn(4, 7).log_softmax(-1)
    torch.testing.assert_close(DEFINITIONS[name](log_p, log_p), torch.zeros(4), atol=1e-6, rtol=0)


def test_what_the_target_leaves_out_adds_nothing_to_forward_kl() -> None:
    log_p, log_q = torch.tensor([[0.0, float("-inf")]]), torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    found = DEFINITIONS["forward_kl"](log_q, log_p)
    torch.testing.assert_close(found, torch.tensor([math.log(2)]))
    found.sum().backward()
    assert log_q.grad is not None
    assert log_q.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("ids", [None, torch.tensor([0, 2, 3, 7])], ids=["whole", "reduced"])
@pytest.mark.parametrize("name", list(DEFINITIONS))
@pytest.mark.parametrize(("side_by_side", "bias"), [(False, False), (False, True), (True, True)])
def test_gradients_of_all_depths_in_chunks(
    name, side_by_side: bool, bias: bool, ids: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of two teachers against autograd through the definition; depths share teachers and one of the heads.

    The second depth weighs each of its rows. Each depth goes through its head alone, as on a CPU, or side by side with
    those of the same head, as on a GPU. A CPU computes the products of a head without a bias without autograd.
    """
    generator = torch.Generator().manual_seed(0)
    width, vocab, weights = 6, 9, (1.0, torch.tensor([0.5, 0.2, 0.9]), 2.0)
    target_hidden = torch.randn(8, width, generator=generator)
    target_head = torch.nn.Linear(width, vocab, bias=False).requires_grad_(False)
    heads = [torch.nn.Linear(width, vocab if ids is None else len(ids), bias) for _ in range(2)]
    heads = [heads[0], heads[0], heads[1]]
    hidden = [torch.randn(n, width, generator=generator, requires_grad=True) for n in (5, 3, 4)]
    teachers = [torch.tensor(t) for t in ([0, 1, 2, 5, 6], [1, 2, 6], [3, 4, 5, 6])]
    trained = [*hidden, *heads[0].parameters(), *heads[2].parameters()]

    log_p = target_head(target_hidden)
    log_p = (log_p if ids is None else log_p[:, ids]).log_softmax(-1)
    expected = [
        DEFINITIONS[name](head(h).log_softmax(-1), log_p[t]) for h, head, t in zip(hidden, heads, teachers, strict=True)
    ]
    total = sum((w * loss).sum() for w, loss in zip(weights, expected, strict=True))
    gradients = torch.autograd.grad(total, trained)

    monkeypatch.setattr(chain_loss, "chunk_rows", lambda vocabulary: 2)
    monkeypatch.setattr(chain_loss, "runs_kernels", lambda device: side_by_side)
    monkeypatch.setattr(chain_loss, "teacher_from", Teacher.from_logits)
    monkeypatch.setattr(chain_loss, "GPU_ROWS", 5)  # of two depths, hence two teachers
    monkeypatch.setattr(chain_loss, "PAGE", chain_loss.LINE)  # so rows are whole pages apart, and get a line more
    depths = [Depth(*depth) for depth in zip(hidden, heads, teachers, weights, strict=True)]
    found, rows = divergence_over_depths(depths, target_hidden, target_head, name, ids)
    torch.testing.assert_close(found, total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        [row.loss for row in rows], [loss.sum().detach() for loss in expected], atol=1e-5, rtol=1e-5
    )
    for one, other in zip(torch.autograd.grad(3 * found, trained), gradients, strict=True):
        torch.testing.assert_close(one, 3 * other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "lk_hybrid"])
def test_gradients_in_double_precision(name) -> None:
    """By differences; the LK hybrid leaves out the gradient through its weight."""
    log_p = torch.randn(3, 8, dtype=torch.float64).log_softmax(-1)
    p = log_p.exp()
    teacher = Teacher(p, log_p, torch.zeros(3, 1), (p * log_p).sum(-1), torch.ones(3, 1), p.argmax(-1))

    class Divergence(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            log_q = logits.log_softmax(-1)
            loss, gradient = DIVERGENCES[name](log_q, log_q.exp(), teacher)
            ctx.save_for_backward(gradient)
            return loss

        @staticmethod
        def backward(ctx, grad):
            return grad[:, None] * ctx.saved_tensors[0]

    assert torch.autograd.gradcheck(Divergence.apply, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("vocab", [7, 384])  # groups of one logit, and of six
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_blocks_of_rows_are_the_plain_form(
    name, dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows a block; equal logits, of which the first is chosen, far ones, and a vocabulary that is reduced."""
    monkeypatch.setattr(divergences, "CACHED", 2 * vocab)
    logits, weights = torch.randn(5, vocab).to(dtype), torch.linspace(0.5, 2, 5)
    logits[1], logits[2, 3:5], logits[3] = 0, 50, 30 * logits[3]
    teacher = Teacher.from_logits(torch.randn(8, 2 * vocab), torch.arange(0, 2 * vocab, 2))[2:7]
    expected = teacher.compare(logits, weights, name, True)
    found = teacher.compare_in_blocks(logits.clone(), weights, name, True)
    assert found.gradient is not None
    assert expected.gradient is not None
    assert torch.equal(found.choice, expected.choice)
    for one, other in ((found.loss, expected.loss), (found.acceptance, expected.acceptance)):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.gradient, expected.gradient.to(dtype), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", [Teacher.compare, Teacher.compare_in_blocks])
def test_a_teacher_without_acceptance_has_the_same_loss(form: Callable[..., Comparison]) -> None:
    logits, target_logits, weights = torch.randn(5, 12), torch.randn(5, 12), torch.rand(5)
    told, untold = (
        form(Teacher.from_logits(target_logits, None, tells), logits.clone(), weights, "lk_hybrid", True)
        for tells in (True, False)
    )
    assert told.acceptance is not None
    assert untold.acceptance is untold.choice is None
    assert untold.gradient is not None
    torch.testing.assert_close((untold.loss, untold.gradient), (told.loss, told.gradient))


def test_reduced_vocabulary_counts_the_mass_outside_as_lost() -> None:
    """The loss compares within the draft vocabulary; acceptance and correctness with the whole."""
    p = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]])
    ids = torch.tensor([0, 2])
    identity = torch.nn.Identity()
    drafter_logits = (p[:, ids] / p[:, ids].sum(-1, keepdim=True)).log()
    found = divergence_over_rows(drafter_logits, identity, p.log(), identity, "forward_kl", ids)
    torch.testing.assert_close(found.loss, torch.tensor(0.0), atol=1e-6, rtol=0)
    assert found.correct.tolist() == [False, True]
    torch.testing.assert_close(found.acceptance, torch.tensor([0.4, 0.9]))


# Weights of depths ----------------------------------------------------------------------------------------------------


def test_d_pace_by_hand() -> None:
    """Chances of 1, 0.5 and 0 are raised to 1, 0.75 and 0.5, and a draft reaches as far as their product."""
    chances = torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]], requires_grad=True)
    counted = torch.tensor([[True, True, True], [True, True, False]])
    found = d_pace(chances, counted)
    reached = [1.0, 0.75, 0.375]
    expected = [[sum(reached), sum(reached[1:]), reached[2]], [reached[0] + reached[1], reached[1], 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert not found.requires_grad


def test_chances_are_those_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_weights, "chunk_rows", lambda vocabulary: 2)
    hidden, head = torch.randn(5, 4), torch.nn.Linear(4, 7)
    tokens = torch.tensor([3, 0, -1, 6, 2])
    expected = head(hidden).softmax(-1)[range(5), tokens].detach()
    expected[2] = 0  # cannot be drafted
    torch.testing.assert_close(chances_of(tokens, hidden, head), expected)
