"""The draft that a drafter proposes, and the state that the decoder shows it.

Shapes: B rows, T tokens, M slots, N drafted tokens (nodes), K depths, P columns up to the last that has children,
V vocabulary of the target, Vd draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling.drawing import cut, draw, uniforms
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream
from draftsmith.models.target.target import Features

NO_TOKEN = -1  # fills a draft where a row has nothing to propose; matches nothing


@dataclass(eq=False)
class Draft:
    """A proposal for each row: a chain, or a tree of nodes sorted parent before child. It equals itself alone.

    Column 0 of a round's window is the newest committed token, the root of the tree; node i stands in column i + 1.
    """

    tokens: Tensor  # [B, N] int64; NO_TOKEN where there is none
    parents: Tensor | None  # [B, N] int64 index of each node's parent node, -1 for the root; may be None for a chain
    depth: int  # nodes on the longest path; N for a chain
    logits: Tensor | None = None  # [B, P, V] fp32, cut: what the children of column i were drawn from; None: no chance

    @property
    def is_chain(self) -> bool:
        return self.depth == self.tokens.shape[1]


def chain(tokens: Tensor, logits: Tensor | None = None) -> Draft:
    """Return a draft in which every token [B, N] follows the one before it; logits [B, N, V]."""
    return Draft(tokens, None, tokens.shape[1], logits)


def lookup_chain(tokens: Tensor) -> Draft:
    """Return the draft of a drafter that has nothing to say in some rounds: tokens [B, N], then NO_TOKEN."""
    if not runs_kernels(tokens.device):  # a shorter window is cheaper to verify; on a GPU all rounds have one shape
        tokens = tokens[:, : int((tokens != NO_TOKEN).any(0).sum())]
    return chain(tokens)


def with_no_token(ids: Tensor | None) -> Tensor | None:
    """Return the target ids [Vd] of a draft vocabulary and NO_TOKEN, [Vd + 1]: as an index, -1 means the last."""
    return None if ids is None else F.pad(ids, (0, 1), value=NO_TOKEN)


def in_target_vocabulary(draft: Draft, ids: Tensor | None, vocab_size: int) -> Draft:
    """Return the draft by target ids.

    `ids` are those of the vocabulary it was made in, of `with_no_token`; None: the target's vocabulary.
    """
    if ids is None:
        return draft
    logits = draft.logits
    if logits is not None:
        whole = logits.new_full((*logits.shape[:2], vocab_size), float("-inf"))
        logits = whole.index_copy(2, ids[:-1], logits)
    return replace(draft, tokens=ids[draft.tokens], logits=logits)


@dataclass
class DecodingState:
    """The state of all rows that the decoder shows a drafter at the start of a round."""

    token_ids: Tensor  # [B, M] int64 committed tokens, then anything
    lengths: Tensor  # [B] number of committed tokens; the target has not read the newest one yet
    features: Features  # of the last positions that the target read, [B, T, ...]
    positions: Tensor  # [B, T] those positions
    next_ids: Tensor  # [B, T] int64 the token behind each of those positions, as far as it is committed; any id beyond
    newest_column: Tensor  # [B] the last of them that is committed; `propose` has met none of those up to it
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
            next_ids=self.next_ids[:count],
            newest_column=self.newest_column[:count],
            noise=self.noise.first(count),
            cache=self.cache and self.cache.rows(slice(count)),
            confidence=None if self.confidence is None else self.confidence[:count],
            predictions=None if self.predictions is None else self.predictions[:count],
        )

    def newest(self) -> Tensor:
        """Return the newest committed token of each row, [B]."""
        return self.next_ids.gather(1, self.newest_column[:, None])[:, 0]

    def committed_slots(self, num_slots: int) -> Tensor:
        """Return the slots [B, T] in which a cache of `num_slots` keeps what the target read last.

        What was not committed goes to slot `num_slots`, behind the others, which no token sees.
        """
        columns = torch.arange(self.positions.shape[1], device=self.positions.device)
        return torch.where(columns <= self.newest_column[:, None], self.positions, num_slots)

    def choose(self, logits: Tensor, depth: int, out: Tensor) -> Tensor | None:
        """Write draft tokens at `depth` (from 0) to `out` [B], from logits [B, V].

        Returns the cut logits that they are drawn from, or None where they are the likeliest.
        """
        if not self.sample_drafts:
            torch.argmax(logits, -1, out=out)
            return None
        return draw(logits, self.sampling, self.noise, self.lengths, Stream.DRAFT, depth, out)

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
