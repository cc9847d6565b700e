"""A cascade: look the draft up where the text repeats itself, and let a trained drafter draft where it does not.

SuffixDecoding's hybrid (arXiv 2411.04975, section 4.3) and SAM-Decoding (arXiv 2411.10666) do the same, since a long
match is accepted more often than what a trained drafter proposes. Each row takes one of the two drafts. Drafts are
chains, and above temperature 0 they are verified in mode `one_hot`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.drafter_configs import CascadeConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, lookup_chain
from draftsmith.models.errors import UserError
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features
from draftsmith.models.training_free.ngram import Ngram
from draftsmith.models.training_free.suffix import Suffix


class Cascade(Drafter):
    """A lookup and a trained drafter. `DRAFTERS` lacks it: `load_drafter` makes it for `suffix+CHECKPOINT`."""

    kind = "cascade"
    config_class = CascadeConfig
    can_sample = False
    looks_up_first = True

    def __init__(self, config: CascadeConfig, lookup: Ngram | Suffix, trained: Drafter) -> None:
        super().__init__(config)
        if config.shortest > lookup.config.longest:
            raise UserError(
                f"drafter.shortest {config.shortest}: {lookup.kind} looks up {lookup.config.longest} tokens at most"
            )
        self.lookup, self.trained = lookup, trained
        self.layer_ids, self.max_draft_length = trained.layer_ids, trained.max_draft_length
        self.trained_for, self.prefills_from_tokens = trained.trained_for, trained.prefills_from_tokens
        self.trained_length, self.attends_to_text = trained.trained_length, trained.attends_to_text

    @property
    def knows_confidence(self) -> bool:
        """Return whether the trained drafter can tell how sure it is. What is looked up does not end by that."""
        return self.trained.knows_confidence

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> Any:
        return self.trained.new_cache(num_rows, num_slots, shape)

    def prefill(self, cache: Any, token_ids: Tensor, features: Features, window: Window) -> None:
        self.trained.prefill(cache, token_ids, features, window)

    def remember(self, token_ids: list[int]) -> None:
        self.lookup.remember(token_ids)

    def forget(self) -> None:
        self.lookup.forget()

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft by both, and take for each row what was looked up where enough tokens matched.

        Where all rows take what was looked up, a CPU does not ask the trained drafter, which then only reads what its
        next draft needs. A draft model is asked all the same: it reads with its draft.
        """
        tokens, matched = self.lookup.look_up(state, shape.depth)
        looked_up = matched >= self.config.shortest  # [B]
        if not runs_kernels(tokens.device) and not self.prefills_from_tokens and looked_up.all():
            self.trained.read_last_pass(state, int(state.newest_column.max()) + 1)
            return lookup_chain(tokens)
        draft = self.trained.propose(replace(state, own_drafts=False), shape)
        missing = tokens.shape[1] - draft.tokens.shape[1]  # where it ended its chains
        drafted = F.pad(draft.tokens, (0, missing), value=NO_TOKEN) if missing else draft.tokens
        return lookup_chain(torch.where(looked_up[:, None], tokens, drafted))

    def trainable(self) -> bool:
        """Return False: its trained part is trained by itself."""
        return False
