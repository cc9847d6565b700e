"""N-gram lookup (prompt lookup): propose what followed the last few tokens when they stood in the text before.

It needs neither training nor a model, and is the baseline that a trained drafter has to beat.

Shapes: B rows, M slots of a row, S tokens of the longest suffix, K drafted tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.drafter_configs import NgramConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, lookup_chain
from draftsmith.models.sampling.trees import Shape


class Ngram(Drafter):
    kind = "ngram"
    config_class = NgramConfig
    can_sample = False

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        return lookup_chain(self.look_up(state, shape.depth)[0])

    def look_up(self, state: DecodingState, draft_length: int) -> tuple[Tensor, Tensor]:
        """Return what follows an earlier copy of the longest suffix that has one, [B, K], and the suffix's length [B].

        NO_TOKEN stands behind the end of the text. Where no suffix has a copy, the length is 0 and all are NO_TOKEN.
        """
        return self.continuation(state.token_ids, state.lengths, draft_length)

    def continuation(self, token_ids: Tensor, lengths: Tensor, draft_length: int) -> tuple[Tensor, Tensor]:
        """Do what `look_up` does for the first `lengths` [B] tokens of texts [B, M]."""
        config, latest = self.config, self.config.occurrence == "latest"
        start, matched = longest_match(token_ids, lengths, config.longest, config.shortest, latest)
        index = start[:, None] + torch.arange(draft_length, device=start.device)
        inside = (start[:, None] >= 0) & (index < lengths[:, None])
        tokens = token_ids.gather(1, index.clamp(min=0, max=token_ids.shape[1] - 1))
        return tokens.masked_fill(~inside, NO_TOKEN), matched


def longest_match(
    token_ids: Tensor, lengths: Tensor, longest: int, shortest: int, latest: bool = True
) -> tuple[Tensor, Tensor]:
    """Return where the text goes on after an earlier copy of each row's suffix [B], and the suffix's length [B].

    The suffix is the longest of `longest` to `shortest` tokens that has an earlier copy. Of several copies the latest
    is taken, or the earliest. Where there is none, the two numbers are -1 and 0.
    """
    ends = torch.arange(token_ids.shape[1], device=lengths.device)  # where the text goes on after a window of S tokens
    windows = F.pad(token_ids[:, :-1], (longest, 0), value=NO_TOKEN).unfold(1, longest, 1)  # [B, M, S]
    newest = lengths[:, None] + torch.arange(-longest, 0, device=lengths.device)
    suffix = token_ids.gather(1, newest.clamp(min=0))  # [B, S]
    equal = (windows == suffix[:, None]) & (ends < lengths[:, None])[..., None]
    counts = equal.flip(2).cumprod(2).sum(2)  # [B, M] tokens that equal the suffix's, from the window's end back
    matched = counts.amax(1)
    matched = matched.where(matched >= shortest, 0)
    best = (counts == matched[:, None]) & (matched > 0)[:, None]
    start = torch.where(best, ends, -1).amax(1) if latest else best.int().argmax(1)
    return start.where(matched > 0, -1), matched
