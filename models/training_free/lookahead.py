"""Lookahead decoding (arXiv 2402.02057): the target guesses several tokens ahead in parallel and improves its guesses.

The window has W places, each with its guesses from the last N - 1 rounds of Jacobi iteration. The oldest guesses of all
places, one behind the other, are the trunk of a tree. At each place the newer guesses are a side chain. The target's
likeliest token after a side chain is the place's next guess, and completes an n-gram, which goes into a pool. The
pool's n-grams that begin with the newest token are candidates, which the same pass of the target verifies. All of this
is one tree:

    newest token ─┬─ G candidates from the pool, N - 1 tokens each
                  └─ trunk of W tokens, a side chain of N - 2 tokens at each

All nodes count as drafted tokens, as each of them is read and may be accepted. The acceptance length is then what the
paper calls step compression, and the share of accepted tokens is low by design.

Shapes: B rows, W places, N tokens of an n-gram, G candidates, C n-grams of a pool.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.models.drafter_configs import LookaheadConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft
from draftsmith.models.sampling.trees import Shape, StaticTree
from draftsmith.models.target.target import Target


class Lookahead(Drafter):
    kind = "lookahead"
    config_class = LookaheadConfig
    can_sample = False
    reads_predictions = True
    max_draft_length = 64  # the tree has so many nodes for each candidate and place

    def __init__(self, config: LookaheadConfig, device: torch.device) -> None:
        super().__init__(config)
        self.device = device

    @classmethod
    def from_target(cls, config: LookaheadConfig, target: Target) -> "Lookahead":
        return cls(config, target.device)

    def own_shape(self, draft_length: int) -> StaticTree:
        """Return the tree of candidates and window; candidates are first, as a walk takes the first child that fits."""
        config = self.config
        candidates = [(g, *[0] * i) for g in range(config.candidates) for i in range(draft_length)]
        return StaticTree((*candidates, *[path for place in self._window(draft_length) for path in place]))

    def _window(self, draft_length: int) -> list[list[tuple[int, ...]]]:
        """Return the nodes of each place, from the oldest guess to the newest."""
        window = []
        for place in range(self.config.window):
            guess = (self.config.candidates, *[0] * place)
            side = (0,) if place == self.config.window - 1 else (1,)
            window.append([guess, *[(*guess, *side, *[0] * i) for i in range(draft_length - 1)]])
        return window

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "LookaheadCache":
        assert isinstance(shape, StaticTree)
        length = shape.depth - self.config.window + 1
        nodes = {path: node for node, path in enumerate(shape.choices)}
        window = [[nodes[path] for path in place] for place in self._window(length)]
        candidates = [[nodes[(g, *[0] * i)] for i in range(length)] for g in range(self.config.candidates)]
        parents = [nodes.get(path[:-1], -1) for path in shape.choices]
        window_nodes, candidate_nodes, parent = (
            torch.tensor(index, device=self.device) for index in (window, candidates, parents)
        )
        return LookaheadCache(
            parent,
            window_nodes,
            candidate_nodes,
            guesses=torch.zeros(num_rows, *window_nodes.shape, dtype=torch.int64, device=self.device),
            pool=torch.full((num_rows, self.config.pool, length + 1), NO_TOKEN, device=self.device),
        )

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Complete n-grams by the target's predictions for the last draft, move the window on, look candidates up."""
        cache: LookaheadCache = state.cache
        assert state.predictions is not None
        drafted = (state.predictions[:, 0] != NO_TOKEN)[:, None, None]  # False where this is the row's first draft
        predicted = state.predictions[:, cache.window_nodes[:, -1] + 1]  # [B, W]
        ngrams = torch.cat([cache.guesses, predicted[..., None]], 2)  # [B, W, N]
        cache.pool.copy_(add(cache.pool, ngrams).where(drafted, NO_TOKEN))
        cache.guesses.copy_(ngrams[..., 1:].where(drafted, first_guesses(state, cache.guesses)))

        candidates = ngrams_after(cache.pool, state.newest(), self.config.candidates)
        tokens = state.token_ids.new_empty(len(candidates), shape.num_nodes)
        tokens[:, cache.window_nodes] = cache.guesses
        tokens[:, cache.candidate_nodes], parent = merged(candidates, cache.candidate_nodes)
        parents = cache.parents.repeat(len(tokens), 1)
        parents[:, cache.candidate_nodes[:, 1:]] = parent
        return Draft(tokens, parents, shape.depth)


@dataclass
class LookaheadCache:
    """Places of window and candidates in the tree, and each row's guesses and n-grams."""

    parents: Tensor  # [nodes] of each node in the tree, -1 for the root
    window_nodes: Tensor  # [W, N - 1] from the oldest guess to the newest
    candidate_nodes: Tensor  # [G, N - 1]
    guesses: Tensor  # [B, W, N - 1] token ids
    pool: Tensor  # [B, C, N] token ids from old to new; NO_TOKEN where there is none

    def rows(self, index: Tensor | slice) -> "LookaheadCache":
        """Return a view of some rows. A row begins anew with its first draft: reading prompts leaves it as it is."""
        return replace(self, guesses=self.guesses[index], pool=self.pool[index])


def first_guesses(state: DecodingState, guesses: Tensor) -> Tensor:
    """Return first guesses like `guesses` [B, W, N - 1]: runs of the end of the text. The paper takes any tokens."""
    _, num_places, num_levels = guesses.shape
    place, level = (torch.arange(count, device=guesses.device) for count in (num_places, num_levels))
    index = state.lengths[:, None, None] - num_places - num_levels + place[:, None] + level
    return state.token_ids.gather(1, index.clamp(min=0).flatten(1)).view_as(guesses)


def add(pool: Tensor, ngrams: Tensor) -> Tensor:
    """Return the pool [B, C, N] with n-grams [B, W, N] added, the oldest dropped; the newest of equal ones stays."""
    added, size = ngrams.shape[1], pool.shape[1]
    pool = torch.cat([pool[:, added:], ngrams], 1)
    equal = (pool[:, :, None] == ngrams[:, None]).all(-1)  # [B, C, W]
    place = torch.arange(size, device=pool.device)
    comes_again = (equal & (place[:, None] < place[size - added :])).any(2)
    return pool.masked_fill(comes_again[..., None], NO_TOKEN)


def ngrams_after(pool: Tensor, newest: Tensor, count: int) -> Tensor:
    """Return the latest n-grams of [B, C, N] that begin with the newest token [B], without it: [B, count, N - 1]."""
    place = torch.arange(pool.shape[1], device=pool.device)
    latest = place.where(pool[..., 0] == newest[:, None], -1).topk(count).values  # [B, count]
    ngrams = pool[torch.arange(len(pool), device=pool.device)[:, None], latest.clamp(min=0), 1:]
    return ngrams.masked_fill(latest[..., None] < 0, NO_TOKEN)


def merged(candidates: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Let candidates [B, G, N - 1] that begin alike share nodes [G, N - 1], since a walk takes one of equal siblings.

    Returns the nodes' tokens [B, G, N - 1], NO_TOKEN for those that another one stands for, and the parents
    [B, G, N - 2] of all but the first of each candidate.
    """
    alike = (candidates[:, :, None] == candidates[:, None]).long().cumprod(-1)  # [B, G, G, N - 1]
    first = alike.argmax(2)  # [B, G, N - 1] the candidate whose node stands for each
    own = torch.arange(len(nodes), device=nodes.device)[:, None]
    parents = nodes[first, torch.arange(nodes.shape[1], device=nodes.device)][..., :-1]
    return candidates.where(first == own, NO_TOKEN), parents
