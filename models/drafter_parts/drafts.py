"""The draft that a drafter proposes, and the state that the decoder shows it.

Shapes: B rows, T tokens, M slots, N drafted tokens (nodes), K depths, P columns up to the last that has children,
V vocabulary of the target, Vd draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling.drawing import cut, draw, uniforms
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream
from draftsmith.models.target.target import Features

NO_TOKEN = -1  # fills a draft where a row has nothing to propose; matches nothing


@dataclass
class Draft:
    """A proposal for each row: a chain, or a tree of nodes sorted parent before child.

    Column 0 of a round's window is the newest committed token, the root of the tree; node i stands in column i + 1.
    """

    tokens: Tensor  # [B, N] int64; NO_TOKEN where there is none
    parents: Tensor  # [B, N] int64 index of each node's parent node, -1 for the root
    depth: int  # nodes on the longest path; N for a chain
    logits: Tensor | None = None  # [B, P, V] fp32, cut: what the children of column i were drawn from; None: no chance

    @property
    def is_chain(self) -> bool:
        return self.depth == self.tokens.shape[1]


def chain(tokens: Tensor, logits: Tensor | None = None) -> Draft:
    """Return a draft in which every token [B, N] follows the one before it; logits [B, N, V]."""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return Draft(tokens, parents, tokens.shape[1], logits)


def lookup_chain(tokens: Tensor) -> Draft:
    """Return the draft of a drafter that has nothing to say in some rounds: tokens [B, N], then NO_TOKEN."""
    if not runs_kernels(tokens.device):  # a shorter window is cheaper to verify; on a GPU all rounds have one shape
        tokens = tokens[:, : int((tokens != NO_TOKEN).any(0).sum())]
    return chain(tokens)


def in_target_vocabulary(draft: Draft, ids: Tensor | None, vocab_size: int) -> Draft:
    """Return the draft by target ids. `ids` [Vd] are those of the vocabulary it was made in; None: the target's."""
    if ids is None:
        return draft
    tokens = torch.where(draft.tokens < 0, draft.tokens, ids[draft.tokens])  # NO_TOKEN stays
    logits = draft.logits
    if logits is not None:
        whole = logits.new_full((*logits.shape[:2], vocab_size), float("-inf"))
        logits = whole.index_copy(2, ids, logits)
    return replace(draft, tokens=tokens, logits=logits)


@dataclass
class DecodingState:
    """The state of all rows that the decoder shows a drafter at the start of a round."""

    token_ids: Tensor  # [B, M] int64 committed tokens, then anything
    lengths: Tensor  # [B] number of committed tokens; the target has not read the newest one yet
    features: Features  # of the last positions that the target read, [B, T, ...]
    positions: Tensor  # [B, T] those positions
    num_new: Tensor  # [B] how many of them, from the left, are committed tokens that `propose` has not met
    sampling: Sampling
    noise: Noise
    sample_drafts: bool  # draw draft tokens by chance (probabilistic verification) or take the likeliest
    cache: Any = None  # the drafter's own, of `new_cache`
    own_drafts: bool = True  # what the last round verified was this drafter's draft
    least_confidence: float = 0.0  # a chain ends where the drafter's confidence in what it has drafted is below this
    confidence: Tensor | None = (
        None  # [B, K] where somebody asks: at each depth of its head, or the chance of the likeliest token
    )
    predictions: Tensor | None = None  # [B, N + 1] the target's likeliest token after each column of the last draft;
    # NO_TOKEN in rows that have had none; for drafters that read it

    def first(self, count: int) -> "DecodingState":
        """Return a view of the first rows: what is written to it stays."""
        if count == len(self.lengths):
            return self
        return replace(
            self,
            token_ids=self.token_ids[:count],
            lengths=self.lengths[:count],
            features=self.features.first(count),
            positions=self.positions[:count],
            num_new=self.num_new[:count],
            noise=self.noise.first(count),
            cache=self.cache and self.cache.rows(slice(count)),
            confidence=None if self.confidence is None else self.confidence[:count],
            predictions=None if self.predictions is None else self.predictions[:count],
        )

    def newest(self) -> Tensor:
        """Return the newest committed token of each row, [B]."""
        return self.token_ids.gather(1, self.lengths[:, None] - 1)[:, 0]

    def choose(self, logits: Tensor, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return draft tokens [B] at `depth` (from 0) from logits [B, V], and the cut logits they are drawn from."""
        if not self.sample_drafts:
            return logits.argmax(-1), None
        return draw(logits, self.sampling, self.noise, self.lengths, Stream.DRAFT, depth)

    def choose_children(self, logits: Tensor, depth: int, most: int) -> tuple[Tensor, Tensor | None]:
        """Return `most` distinct draft tokens [B, W, most] at `depth` from logits [B, W, V], and the cut logits.

        The likeliest, or drawn one by one without replacement: the order of logits + Gumbel noise is one of drawing
        (arXiv 1903.06059, section 3). NO_TOKEN when there are no more. All W share their noise. A walk down the tree
        meets one of them at most, and which one hangs on other noise.
        """
        if not self.sample_drafts:
            return logits.topk(most).indices, None
        logits = cut(logits, self.sampling)
        branch = depth * logits.shape[-1] + torch.arange(logits.shape[-1], device=logits.device)
        coins = uniforms(self.noise, self.lengths[:, None], Stream.DRAFT, branch)  # [B, V]
        scores, tokens = (logits - (-coins.log()).log().float()[:, None]).topk(most)
        return tokens.masked_fill(scores == float("-inf"), NO_TOKEN), logits


def stack_chain(chosen: list[tuple[Tensor, Tensor | None]]) -> Draft:
    """Return one chain from the (tokens [B], cut logits [B, V] or None) of each depth."""
    tokens = torch.stack([tokens for tokens, _ in chosen], 1)
    drawn_from = [logits for _, logits in chosen if logits is not None]
    return chain(tokens, torch.stack(drawn_from, 1) if drawn_from else None)
