"""How the target and a drafter rate the tokens of a given text, place by place: all that a replay of decoding needs.

Logits are made for a chunk of rows at a time, so that nothing has the size [B, T, V].

Shapes: B rows, T tokens, S = B * T, K depths, R rows of a chunk, V target vocabulary, Vd draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.drafting.base import Drafter
from draftsmith.models.losses.chain_loss import ChainLoss, chunk_rows
from draftsmith.models.sampling.sampling import Sampling, cut
from draftsmith.models.target.target import Features, Target

UNRANKED = -1  # of a token that the drafter cannot propose, or that nobody wrote


@dataclass
class TargetScores:
    """Of the law that the target held at t, and of x_{t+1} in it, after the sampling's temperature and cut."""

    log_p: Tensor  # [B, T] fp32
    best: Tensor  # [B, T] fp32 probability of the likeliest token
    entropy: Tensor  # [B, T] fp32, nats


@dataclass
class DrafterScores:
    """Of the prediction of x_{t+2+k} from slot t: depth k of a chain that has followed the text so far."""

    log_q: Tensor  # [K, B, T] fp32 of the text's token; -inf where it cannot be drafted
    rank: Tensor  # [K, B, T] int64 its place among the drafter's tokens, 0 for the likeliest, or UNRANKED
    confidence: Tensor  # [K, B, T] fp32 probability of the likeliest token
    choice: Tensor  # [K, B, T] int64 that token, in the draft vocabulary


def law(logits: Tensor, sampling: Sampling) -> Tensor:
    """log-probabilities [..., V] in fp32 that the sampling draws from; greedy decoding has those of temperature 1."""
    return (logits.float() if sampling.greedy else cut(logits, sampling)).log_softmax(-1)


@torch.no_grad()
def score_target(target: Target, last_hidden: Tensor, batch: Batch, sampling: Sampling) -> TargetScores:
    """From the target's last hidden states [B, T, H]."""
    hidden, following = last_hidden.flatten(0, 1), batch.token_ids.flatten().roll(-1)
    found = []
    for rows in torch.arange(len(hidden), device=hidden.device).split(chunk_rows(target.vocab_size)):
        log_p = law(target.logits(hidden[rows]), sampling)
        own = log_p.gather(1, following[rows, None])[:, 0]
        entropy = torch.special.entr(log_p.exp()).sum(-1)
        found.append(torch.stack([own, log_p.amax(-1).exp(), entropy]))
    return TargetScores(*torch.cat(found, 1).unflatten(1, batch.token_ids.shape).unbind(0))


@torch.no_grad()
def score_drafter(
    drafter: Drafter, batch: Batch, features: Features, depth: int, sampling: Sampling, ids: Tensor | None = None
) -> DrafterScores:
    """Of a drafter in evaluation mode. `ids` [Vd]: read its draft vocabulary as these tokens, not by its own map."""
    shape, device = (depth, *batch.token_ids.shape), batch.token_ids.device
    scores = DrafterScores(
        torch.full(shape, float("-inf"), device=device),
        torch.full(shape, UNRANKED, device=device),
        torch.zeros(shape, device=device),
        torch.full(shape, UNRANKED, device=device),
    )
    ids = drafter.draft_to_target() if ids is None else ids
    places = batch.token_ids.flatten() if ids is None else draft_ids(ids, batch.token_ids.flatten())
    predictions = drafter.depths(ChainLoss(batch.loss_mask), batch, features, depth)
    for k, prediction in enumerate(predictions):
        chunks = torch.arange(len(prediction.teachers), device=device).split(chunk_rows(drafter.target.vocab_size))
        for rows in chunks:
            teachers = prediction.teachers[rows]
            logits = prediction.head(prediction.hidden[rows]).float()  # [R, Vd]
            place = places[teachers + 1]
            log_q, known = law(logits, sampling), place >= 0
            place = place.clamp(min=0)[:, None]
            slots = teachers - 1 - k
            own = log_q.gather(1, place)[:, 0]
            scores.log_q[k].view(-1)[slots] = own.masked_fill(~known, float("-inf"))
            scores.rank[k].view(-1)[slots] = torch.where(known, ranks(logits, place), UNRANKED)
            scores.confidence[k].view(-1)[slots] = log_q.amax(-1).exp()
            scores.choice[k].view(-1)[slots] = logits.argmax(-1)
    return scores


def ranks(logits: Tensor, place: Tensor) -> Tensor:
    """How many logits [R, Vd] come before those at `place` [R, 1]: greater ones, and equal ones to the left."""
    own = logits.gather(1, place)
    to_the_left = torch.arange(logits.shape[1], device=logits.device) < place
    return ((logits > own) | ((logits == own) & to_the_left)).sum(1)


def draft_ids(ids: Tensor, token_ids: Tensor) -> Tensor:
    """Where tokens [S] stand in the draft vocabulary of target ids [Vd]; -1 where they do not."""
    ordered, order = ids.sort()
    found = torch.searchsorted(ordered, token_ids).clamp(max=len(ids) - 1)
    return torch.where(ordered[found] == token_ids, order[found], -1)
