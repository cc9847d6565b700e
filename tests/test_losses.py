"""Divergences against their definitions, and their sum over chunks against the whole."""

import math

import pytest
import torch

from draftsmith.models import losses
from draftsmith.models.losses import DIVERGENCES, divergence_over_rows

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
}


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_by_hand(name: str) -> None:
    found = DIVERGENCES[name](Q.log()[None], P.log()[None])
    torch.testing.assert_close(found, torch.tensor([BY_HAND[name]]))


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "cross_entropy"])
def test_no_divergence_between_equals(name: str) -> None:
    log_p = torch.randn(4, 7).log_softmax(-1)
    torch.testing.assert_close(DIVERGENCES[name](log_p, log_p), torch.zeros(4), atol=1e-6, rtol=0)


def test_what_the_target_leaves_out_adds_nothing_to_forward_kl() -> None:
    log_p, log_q = torch.tensor([[0.0, float("-inf")]]), torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    found = DIVERGENCES["forward_kl"](log_q, log_p)
    torch.testing.assert_close(found, torch.tensor([math.log(2)]))
    found.sum().backward()
    assert log_q.grad is not None
    assert log_q.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_chunks_change_neither_value_nor_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, width, vocab = 11, 6, 9
    head = torch.nn.Linear(width, vocab, bias=False)
    target_head = torch.nn.Linear(width, vocab, bias=False)
    target_hidden = torch.randn(rows, width, generator=generator)
    results = []
    for chunk_elements in (1 << 24, vocab * 4):  # one chunk, then chunks of four rows
        monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk_elements)
        hidden = torch.randn(rows, width, generator=torch.Generator().manual_seed(1), requires_grad=True)
        found = divergence_over_rows(hidden, head, target_hidden, target_head, name)
        head.weight.grad = None
        found.loss.backward()
        results.append((found.loss.detach(), hidden.grad, head.weight.grad, found.correct, found.acceptance))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_reduced_vocabulary_counts_the_mass_outside_as_lost() -> None:
    """The loss compares within the draft vocabulary; acceptance and correctness with the whole."""
    p = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4]])
    ids = torch.tensor([0, 2])
    identity = torch.nn.Identity()
    drafter_logits = (p[:, ids] / p[:, ids].sum(-1, keepdim=True)).log()
    found = divergence_over_rows(drafter_logits, identity, p.log(), identity, "forward_kl", ids)
    torch.testing.assert_close(found.loss, torch.tensor(0.0), atol=1e-6, rtol=0)
    assert found.correct.tolist() == [False, True]
    torch.testing.assert_close(found.acceptance, torch.tensor(0.4 + 0.9))
