"""From logits to probabilities to tokens, with noise that can be replayed.

One set of functions serves the target, the drafters and the tests: accept, residual and bonus must see exactly the
distribution that the draft was drawn from. All arithmetic is in fp32, cumulative sums in fp64.
"""

import copy
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; top_k 0 and top_p 1 leave everything in."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits [..., V] after temperature, top-k, then top-p: fp32 [..., V], -inf for what is left out.

    Their softmax is the distribution that is sampled from; target and drafter pass through here alike. Top-k keeps
    ties with the k-th token. Top-p keeps the smallest set of likeliest tokens whose mass reaches top_p; ties at its
    edge go to the lower id.
    """
    assert not sampling.greedy, "greedy decoding takes the argmax"
    scaled = logits.float() / sampling.temperature
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, scaled.shape[-1])).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, order = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.double().cumsum(-1) - ordered
        left_out = torch.zeros_like(scaled, dtype=torch.bool).scatter(-1, order, mass_before >= sampling.top_p)
        scaled = scaled.masked_fill(left_out, float("-inf"))
    return scaled


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return fp32 probabilities [..., V] of logits [..., V] after temperature, top-k and top-p."""
    return cut(logits, sampling).softmax(-1)


def sample(p: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the distribution function of p [..., V] (any positive sum) at uniforms [...] in (0, 1): token ids [...].

    A token of probability 0 is never drawn.
    """
    cumulative = p.double().cumsum(-1)
    threshold = uniforms.double()[..., None] * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=False).squeeze(-1)
    last = p.shape[-1] - 1 - (p > 0).flip(-1).int().argmax(-1)  # rounding cannot push past the last likely token
    return torch.minimum(index, last)


class Stream(IntEnum):
    """Independent noise for the purposes that one position needs it for."""

    TARGET = 0  # the token the target draws: sample-then-match, residual, bonus
    ACCEPT = 1  # the coin of a token-wise acceptance test
    DRAFT = 2  # the token the drafter draws


class Noise:
    """Uniforms keyed by (seed, request, position, stream, branch), not by the order of drawing.

    A request's noise does not depend on its neighbours in the batch, and the target's not on what was drafted, so
    that plain and speculative sampling meet the same coins.
    """

    def __init__(self, seed: int, requests: Tensor) -> None:
        """`requests` [B]: one id a row, int64, on the device where uniforms are wanted."""
        self.keys = torch.empty_like(requests)  # [B], of the rows
        self.reseed(seed)
        self.assign(slice(None), requests)

    def reseed(self, seed: int) -> None:
        """Key what is assigned from now on by another seed."""
        self._seed = _mix(torch.full((1,), seed, device=self.keys.device))

    def assign(self, rows: Tensor | slice, requests: Tensor) -> None:
        """Give rows [b] to other requests [b]."""
        self.keys[rows] = _mix(self._seed + requests)

    def first(self, count: int) -> "Noise":
        """Return the noise of the first rows, for reading only."""
        noise = copy.copy(self)
        noise.keys = self.keys[:count]
        return noise

    def uniforms(
        self, positions: Tensor, stream: Stream, branch: Tensor | int = 0, rows: Tensor | slice = slice(None)
    ) -> Tensor:
        """Return fp64 uniforms [b, T] in (0, 1) for positions [b, T] of some rows [b] or of all.

        The target's token has the position that it will stand at. Coins and drafts of a round have the position of
        its first draft and a branch [T] each: a later round never meets them again, even where it drafts for the same
        position (block verification looks at coins beyond the tokens that it accepts).
        """
        bits = _mix(_mix(self.keys[rows, None] + positions) + (branch * len(Stream) + int(stream)))
        return ((bits & ((1 << 52) - 1)).double() + 0.5) / (1 << 52)


def draw(
    logits: Tensor, sampling: Sampling, noise: Noise, positions: Tensor, stream: Stream, branch: int, out: Tensor
) -> Tensor:
    """Write a token of each row of logits [B, V], drawn at its noise, to `out` [B]; return the cut logits.

    positions [B] and the others as in `Noise.uniforms`. The cut logits are what the token is drawn from.
    """
    logits = cut(logits, sampling)
    out.copy_(sample(logits.softmax(-1), noise.uniforms(positions[:, None], stream, branch)[:, 0]))
    return logits


def _mix(x: Tensor) -> Tensor:
    """Return the finaliser of splitmix64 (Steele, Lea, Flood 2014) with logical shifts, on int64 that wraps around."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ ((x >> 31) & ((1 << 33) - 1))
