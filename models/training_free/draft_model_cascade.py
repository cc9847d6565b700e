"""A cascade of two draft models: a small one proposes, a larger one filters, the target decides.

This is the vertical cascade of CS Drafting (arXiv 2312.11462), with one pass of the larger model a round. At each depth
the larger model picks the token that it would draft alone, from the same noise. The proposals of the small one are kept
as far as they equal these picks, and so is the pick behind them. The draft is thus the beginning of the larger model's
own draft, and every rule of verification holds for it.

Shapes: B rows, K depths, H hidden width, V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.models.drafter_configs import DraftModelCascadeConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, chain
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelCache
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling.trees import Chain, Shape
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.models.target.target import Features


@dataclass
class CascadeCache:
    """The caches of both models."""

    small: DraftModelCache
    large: DraftModelCache

    def rows(self, index: Tensor | slice) -> "CascadeCache":
        """Return a view of some rows."""
        return CascadeCache(self.small.rows(index), self.large.rows(index))


class DraftModelCascade(Drafter):
    """Two draft models. `DRAFTERS` lacks it: `load_drafter` makes it for `SMALL+LARGE`."""

    kind = "draft_model_cascade"
    config_class = DraftModelCascadeConfig
    prefills_from_tokens = True

    def __init__(self, small: DraftModel, large: DraftModel) -> None:
        super().__init__(DraftModelCascadeConfig())
        self.small, self.large = small, large
        self.trained_for = large.trained_for

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> CascadeCache:
        small_shape = Chain(max(1, shape.depth - 1))
        return CascadeCache(
            self.small.new_cache(num_rows, num_slots, small_shape), self.large.new_cache(num_rows, num_slots, shape)
        )

    def prefill(self, cache: CascadeCache, token_ids: Tensor, features: Features, window: Window) -> None:
        self.small.prefill(cache.small, token_ids, features, window)
        self.large.prefill(cache.large, token_ids, features, window)

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        proposed = self.proposed(state, shape.depth - 1)  # [B, K - 1]
        logits = self.larger_logits(state, proposed)  # [B, K, V]
        picks = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
        cut_logits = [state.choose(logits[:, depth], depth, picks[:, depth]) for depth in range(logits.shape[1])]
        drawn_from = [drawn for drawn in cut_logits if drawn is not None]  # where drafts are the likeliest, none
        kept = torch.ones_like(picks, dtype=torch.bool)
        kept[:, 1:] = (picks[:, :-1] == proposed).cumprod(1).bool()
        if state.least_confidence or state.confidence is not None:
            known = torch.stack(drawn_from, 1) if drawn_from else logits
            confidence = known.float().softmax(-1).amax(-1)
            kept[:, 1:] &= confidence.cumprod(1)[:, :-1] >= state.least_confidence
            if state.confidence is not None:
                state.confidence[:, : picks.shape[1]] = confidence
        # On a CPU a shorter window is cheaper to verify; on a GPU all rounds have one shape.
        width = picks.shape[1] if runs_kernels(picks.device) else int(kept.any(0).sum())
        tokens = picks.masked_fill(~kept, NO_TOKEN)[:, :width]
        return chain(tokens, torch.stack(drawn_from[:width], 1) if drawn_from else None)

    def proposed(self, state: DecodingState, depth: int) -> Tensor:
        """Return the small model's draft [B, depth], however unsure it is.

        It reads all that the last round committed, also where nothing is asked of it.
        """
        if not depth:
            window = chain_window(state.positions[:, 0] + 1, state.positions.shape[1])
            self.small.read(state.token_ids.gather(1, window.slots), window, state.cache.small)
            return state.token_ids[:, :0]
        small_state = replace(state, cache=state.cache.small, own_drafts=False, confidence=None, least_confidence=0.0)
        return self.small.propose(small_state, Chain(depth)).tokens

    def larger_logits(self, state: DecodingState, proposed: Tensor) -> Tensor:
        """Return the larger model's logits [B, K, V] behind the newest token and each proposed one [B, K - 1].

        Of the committed text it has not read the newest token, nor the one before it where its own pick was accepted.
        """
        cache = state.cache.large
        if not state.own_drafts:
            window = chain_window(state.positions[:, 0] + 1, state.positions.shape[1])
            self.large.read(state.token_ids.gather(1, window.slots), window, cache)
        slots = state.lengths[:, None] + torch.arange(-2, proposed.shape[1], device=proposed.device)
        tokens = torch.cat([state.token_ids.gather(1, slots[:, :2]), proposed], 1)
        hidden = self.large.read(tokens, Window(slots, slots, slots[:, 0]), cache)[:, 1:]
        logits: Tensor = self.large.head(hidden)
        return logits

    def trainable(self) -> bool:
        """Return False: each of its models is trained by itself."""
        return False
