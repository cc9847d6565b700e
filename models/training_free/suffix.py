"""Suffix decoding (arXiv 2411.04975): continue the longest suffix that stood before, in this text or in earlier ones.

Where the suffix stood several times, each place votes for what followed it there. The longer the match, the longer the
draft. It needs neither training nor a model, and pays in traffic that repeats itself: agents, edits, retries.

The paper keeps suffix trees; here a text is compared with the whole corpus at once, in operations of fixed shape.

Shapes: B rows, M slots of a row, H tokens of history, P places of the corpus, C copies of a suffix, K drafted tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.drafter_configs import SuffixConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, lookup_chain
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling.trees import Shape

NOTHING = NO_TOKEN - 1  # stands before the beginning of a text; equals neither a token nor NO_TOKEN


class Suffix(Drafter):
    kind = "suffix"
    config_class = SuffixConfig
    can_sample = False

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__(config)
        self.history: Tensor  # [H] int64 finished texts from old to new, at the right end, NO_TOKEN after each
        self.register_buffer("history", torch.full((config.history,), NO_TOKEN), persistent=False)
        self.num_kept = 0  # tokens in `history`

    def remember(self, token_ids: list[int]) -> None:
        """Add a text in place: rounds that were recorded on a GPU read the history where it is."""
        newest = torch.tensor([*token_ids, NO_TOKEN], device=self.history.device)
        self.history.copy_(torch.cat([self.history, newest])[len(newest) :])
        self.num_kept = min(self.num_kept + len(newest), len(self.history))

    def forget(self) -> None:
        self.history.fill_(NO_TOKEN)
        self.num_kept = 0

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        return lookup_chain(self.look_up(state, shape.depth)[0])

    def look_up(self, state: DecodingState, draft_length: int) -> tuple[Tensor, Tensor]:
        """Return each row's draft [B, K], filled up with NO_TOKEN, and the length of the suffix that matched [B]."""
        config = self.config
        history = self.history
        if not runs_kernels(history.device):  # on a GPU all rounds have one shape
            history = history[len(history) - self.num_kept :]
        corpus = corpus_of(history, state.token_ids, state.lengths)
        suffix = newest_tokens(state.token_ids, state.lengths, config.longest)
        places, matched = longest_matches(corpus, suffix, config.copies)
        matched = matched.where(matched >= config.shortest, 0)
        following = tokens_after(corpus, places, draft_length)
        num_drafted = (config.tokens_per_match * matched).long()
        return vote(following, num_drafted, config.least_share), matched


def corpus_of(history: Tensor, token_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the texts to look in [B, P]: the history [H], then each row's own text; NO_TOKEN stands behind each."""
    slots = torch.arange(token_ids.shape[1], device=token_ids.device)
    own = token_ids.masked_fill(slots >= lengths[:, None], NO_TOKEN)
    return torch.cat([history.expand(len(own), -1), own], 1)


def newest_tokens(token_ids: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Return the last tokens of each text from the newest back, [B, count]."""
    index = lengths[:, None] - 1 - torch.arange(count, device=lengths.device)
    return token_ids.gather(1, index.clamp(min=0)).masked_fill(index < 0, NOTHING)


def longest_matches(corpus: Tensor, suffix: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """Find the longest beginning of `suffix` [B, S], read backwards, in the corpus [B, P].

    Returns the places [B, C] of its newest token, the latest first, -1 where there are no more, and its length [B].
    Places that nothing follows do not count. All places are compared at once, one token further back at a time.
    """
    num_places, longest = corpus.shape[1], suffix.shape[1]
    padded = F.pad(corpus, (longest, 1), value=NO_TOKEN)
    equal = padded[:, longest + 1 :] != NO_TOKEN  # [B, P] something follows
    matched = torch.zeros_like(corpus, dtype=torch.int32)
    for back in range(longest):
        equal &= padded[:, longest - back : longest - back + num_places] == suffix[:, back, None]
        matched += equal
    most = matched.amax(1, keepdim=True)
    places = torch.arange(num_places, device=corpus.device).where((matched == most) & (most > 0), -1)
    return places.topk(min(copies, num_places)).values, most[:, 0].long()


def tokens_after(corpus: Tensor, places: Tensor, count: int) -> Tensor:
    """Return what stands behind places [B, C] of the corpus [B, P], of which -1 is none: [B, C, count]."""
    index = places[..., None] + torch.arange(1, count + 1, device=places.device)
    padded = F.pad(corpus, (0, count), value=NO_TOKEN)
    tokens = padded.gather(1, index.clamp(min=0).flatten(1)).view_as(index)
    return tokens.masked_fill(places[..., None] < 0, NO_TOKEN)


def vote(following: Tensor, num_drafted: Tensor, least_share: float) -> Tensor:
    """Return the draft [B, K] from what followed each copy [B, C, K] of a suffix, the latest first.

    At each depth the copies that agreed with the draft so far vote for the next token; of equal numbers of votes the
    latest copy wins. A draft ends after `num_drafted` [B] tokens, and where less than `least_share` of the copies
    agree with it.
    """
    going = following[..., 0] != NO_TOKEN  # [B, C] copies that vote
    least = (least_share * going.sum(1)).clamp(min=1)
    drafted = []
    for depth, tokens in enumerate(following.unbind(2)):
        going &= tokens != NO_TOKEN
        agree = (tokens[:, :, None] == tokens[:, None]) & going[:, None]  # [B, C, C]
        votes, winner = (agree.sum(2) * going).max(1)
        token = tokens.gather(1, winner[:, None])[:, 0].where((votes >= least) & (depth < num_drafted), NO_TOKEN)
        going &= tokens == token[:, None]
        drafted.append(token)
    return torch.stack(drafted, 1)
