"""Cutting logits by temperature, top-k and top-p in kernels, and drawing from what is left, as the plain form does it.

Probabilities are rounded differently by 1e-7 or so, which can move the edge of top-p by a token where the mass before
it is that close to top_p. So what is kept lies between what the plain form keeps at a slightly smaller and at a
slightly larger top_p. What is kept has the very same value.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftsmith.models.sampling import sampling
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from draftsmith.models.sampling import cut_kernels, sampling_kernels

pytestmark = pytest.mark.usefixtures("watched_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = 1e-6
SAMPLINGS = [
    Sampling(0.7),
    Sampling(0.7, top_k=3),
    Sampling(1.3, top_k=40),
    Sampling(1.0, top_p=0.3),
    Sampling(0.6, top_p=0.95),
    Sampling(1.0, top_p=0.999),
    Sampling(0.8, top_p=0.9, top_k=20),
]


def rows_of(vocabulary: int) -> Tensor:
    """Return rows peaked, flat, of few different values, with gaps, with one possible token, and all alike."""
    logits = torch.randn(6, vocabulary) * torch.tensor([[4.0], [0.1], [1.0], [2.0], [1.0], [1.0]])
    logits[2] = logits[2].round()  # with zeros of both signs
    logits[3, torch.rand(vocabulary) < 0.5] = float("-inf")
    logits[4, 1:] = float("-inf")
    logits[5] = 2.5
    return logits


def kept(logits: Tensor, cut_at: Sampling) -> Tensor:
    return sampling.cut(logits, cut_at).isfinite()


@pytest.mark.parametrize(
    ("vocabulary", "chunk", "block", "cut_at"),
    [*((37, 16, 64, cut_at) for cut_at in SAMPLINGS), (300, 64, 128, SAMPLINGS[-1])],
    ids=str,
)
def test_cut(vocabulary: int, chunk: int, block: int, cut_at: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_kernels, "CHUNK", chunk)
    monkeypatch.setattr(cut_kernels, "BLOCK", block)
    torch.manual_seed(vocabulary)
    logits = rows_of(vocabulary)
    found = cut_kernels.cut(logits.to(DEVICE), cut_at).cpu()
    scaled = logits / cut_at.temperature
    assert torch.equal(found[found.isfinite()], scaled[found.isfinite()])
    if cut_at.top_p == 1:
        assert torch.equal(found, sampling.cut(logits, cut_at))
        return
    fewer, more = (kept(logits, replace(cut_at, top_p=cut_at.top_p + shift)) for shift in (-CLOSE, CLOSE))
    assert (found.isfinite() >= fewer).all()
    assert (found.isfinite() <= more).all()
    assert torch.equal(found.isfinite()[[0, 2, 4, 5]], kept(logits, cut_at)[[0, 2, 4, 5]])


@pytest.mark.parametrize("cut_at", [SAMPLINGS[0], SAMPLINGS[-1]], ids=str)
def test_draw(cut_at: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is the one that the plain form draws from the logits which come back, at the noise of its row."""
    monkeypatch.setattr(sampling_kernels, "CHUNK", 64)
    torch.manual_seed(0)
    logits, positions = rows_of(300).to(DEVICE), torch.arange(6, device=DEVICE)
    noise = Noise(3, torch.arange(6, device=DEVICE) + 5)
    drawn = torch.zeros(6, 2, dtype=torch.int64, device=DEVICE)
    left = cut_kernels.draw(logits, cut_at, noise, positions, Stream.DRAFT, 2, drawn[:, 1])
    uniforms = noise.uniforms(positions[:, None], Stream.DRAFT, 2)[:, 0]
    assert torch.equal(drawn[:, 1], sampling.sample(left.softmax(-1), uniforms))
    assert not drawn[:, 0].any()
    assert torch.equal(left, cut_kernels.cut(logits, cut_at))
