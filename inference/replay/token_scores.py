"""The probabilities that target and drafter give to the tokens of a text: all that a replay of decoding needs.

Logits are made for a chunk of rows at a time, so that nothing has the size [B, T, V].

Shapes: B rows, T tokens, S = B * T, K depths, R rows of a chunk, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.batch import Batch, send
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.vocabulary import draft_ids
from draftsmith.models.losses.chain_loss import ChainLoss, chunk_rows
from draftsmith.models.sampling.sampling import Sampling, cut
from draftsmith.models.target.target import Features, Target

UNRANKED = -1  # rank of a token that the drafter cannot propose, or that nobody wrote


@dataclass
class TargetScores:
    """The target's probabilities for the token after slot t, after the sampling's temperature and cut."""

    log_p: Tensor  # [B, T] fp32 of the text's token x_{t+1}
    best: Tensor  # [B, T] fp32 probability of the likeliest token


@dataclass
class DrafterScores:
    """The drafter's prediction of x_{t+2+k} from slot t: depth k of a chain that has followed the text so far."""

    log_q: Tensor  # [K, B, T] fp32 of the text's token; -inf where it cannot be drafted
    rank: Tensor  # [K, B, T] int64 place of the text's token among the drafter's, 0 for the likeliest, or UNRANKED
    confidence: Tensor  # [K, B, T] fp32 of its confidence head, or else the probability of the likeliest token; 1 of a
    # drafter without probabilities
    choice: Tensor  # [K, B, T] int64 the likeliest token, in the draft vocabulary
    num_drafted: Tensor  # [B, T] int64 tokens that are drafted where K are asked for

    @classmethod
    def blank(cls, depth: int, like: Tensor) -> "DrafterScores":
        """Return the scores of a drafter that proposes nothing on a text like [B, T]."""
        shape, device = (depth, *like.shape), like.device
        return cls(
            log_q=torch.full(shape, float("-inf"), device=device),
            rank=torch.full(shape, UNRANKED, device=device),
            confidence=torch.zeros(shape, device=device),
            choice=torch.full(shape, UNRANKED, device=device),
            num_drafted=torch.zeros(like.shape, dtype=torch.int64, device=device),
        )


def log_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities [..., V] fp32 that a sampling draws from, for greedy ones those of temperature 1."""
    return (logits.float() if sampling.greedy else cut(logits, sampling)).log_softmax(-1)


@torch.no_grad()
def score_target(target: Target, last_hidden: Tensor, batch: Batch, sampling: Sampling) -> TargetScores:
    """Return the target's scores from its last hidden states [B, T, H]."""
    hidden, following = last_hidden.flatten(0, 1), batch.token_ids.flatten().roll(-1)
    chunks = []
    for rows in torch.arange(len(hidden), device=hidden.device).split(chunk_rows(target.vocab_size)):
        log_p = log_probabilities(target.logits(hidden[rows]), sampling)
        chunks.append(torch.stack([log_p.gather(1, following[rows, None])[:, 0], log_p.amax(-1).exp()]))
    return TargetScores(*torch.cat(chunks, 1).unflatten(1, batch.token_ids.shape).unbind(0))


@torch.no_grad()
def score_drafter(drafter: Drafter, batch: Batch, features: Features, depth: int, sampling: Sampling) -> DrafterScores:
    """Return the scores of a drafter in evaluation mode that predicts from the target's features of a text."""
    device, tokens = batch.token_ids.device, batch.token_ids.flatten()
    scores = DrafterScores.blank(depth, batch.token_ids)
    scores.num_drafted.fill_(depth)
    ids = drafter.draft_to_target()
    places = tokens if ids is None else draft_ids(ids, tokens)
    predictions = drafter.depths(ChainLoss(batch), batch, features, depth)
    for k, prediction in enumerate(predictions):
        all_teachers = send(prediction.teachers, device)
        chunks = torch.arange(len(all_teachers), device=device).split(chunk_rows(drafter.target.vocab_size))
        for rows in chunks:
            teachers = all_teachers[rows]
            logits = prediction.head(prediction.hidden[rows]).float()  # [R, Vd]
            place = places[teachers + 1]
            log_q, known = log_probabilities(logits, sampling), place >= 0
            place = place.clamp(min=0)[:, None]
            slots = teachers - 1 - k
            scores.log_q[k].view(-1)[slots] = log_q.gather(1, place)[:, 0].masked_fill(~known, float("-inf"))
            scores.rank[k].view(-1)[slots] = torch.where(known, ranks(logits, place), UNRANKED)
            own = None if prediction.confidence is None else prediction.confidence[rows].sigmoid()
            scores.confidence[k].view(-1)[slots] = log_q.amax(-1).exp() if own is None else own
            scores.choice[k].view(-1)[slots] = logits.argmax(-1)
    return scores


def ranks(logits: Tensor, place: Tensor) -> Tensor:
    """Return how many logits [R, Vd] come before those at `place` [R, 1]: greater ones, and equal ones to the left."""
    own = logits.gather(1, place)
    to_the_left = torch.arange(logits.shape[1], device=logits.device) < place
    return ((logits > own) | ((logits == own) & to_the_left)).sum(1)
