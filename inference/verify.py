"""Verification rules on chains: how much of a draft the target keeps, and the one token it adds.

Plain PyTorch, vectorised over the batch, with uniforms as arguments: this is the specification that faster forms are
tested against. Token-wise rejection is Leviathan et al., arXiv 2211.17192, appendix A.1.

Shapes: B rows, N drafted tokens, V vocabulary. Row b of the target's side has N + 1 entries: entry i is what the target
says after the newest committed token and the first i drafts. A draft of NO_TOKEN (-1) is never accepted.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.models.sampling import sample

VerificationMode = Literal["greedy", "one_hot", "probabilistic"]


@dataclass
class Verified:
    num_accepted: Tensor  # [B] int64, 0..N
    next_token: Tensor  # [B] the token after the accepted ones: bonus, or correction of the first rejected draft


def greedy(logits: Tensor, drafts: Tensor) -> Verified:
    """Accept while the draft is the target's likeliest token; then add the target's own. logits [B, N + 1, V]"""
    return _match(logits.argmax(-1), drafts)


def one_hot(p: Tensor, drafts: Tensor, uniforms: Tensor) -> Verified:
    """Draw the target's token at every position, accept while the draft is that token, then add the one drawn.

    Lossless whatever chose the drafts, as long as it was chosen before the draw. p [B, N + 1, V], uniforms [B, N + 1].
    With uniforms keyed by position the output equals plain sampling token for token.
    """
    return _match(sample(p, uniforms), drafts)


def probabilistic(p: Tensor, q: Tensor, drafts: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor) -> Verified:
    """Token-wise rejection: accept x with probability min(1, p(x) / q(x)), else draw from the residual (p - q)+.

    Lossless when each draft was drawn from exactly q. p [B, N + 1, V], q [B, N, V], accept_uniforms [B, N],
    sample_uniforms [B, N + 1]. A residual of zero (p = q up to rounding) falls back to p.
    """
    batch, num_drafts = drafts.shape
    index = drafts.clamp(min=0)[..., None]
    p_draft = p[:, :num_drafts].gather(-1, index).squeeze(-1)
    q_draft = q.gather(-1, index).squeeze(-1)
    accepted = (accept_uniforms * q_draft < p_draft) & (drafts >= 0)  # strict: a zero coin cannot accept p = 0
    num_accepted = accepted.long().cumprod(1).sum(1)

    rows = torch.arange(batch, device=p.device)
    p_next = p[rows, num_accepted]  # [B, V]
    if num_drafts == 0:
        return Verified(num_accepted, sample(p_next, sample_uniforms[rows, num_accepted]))
    first_rejected = num_accepted.clamp(max=num_drafts - 1)
    was_drawn = (num_accepted < num_drafts) & (drafts[rows, first_rejected] >= 0)
    residual = (p_next - q[rows, first_rejected]).clamp(min=0)
    use_residual = was_drawn & (residual.sum(-1) > 0)
    law = torch.where(use_residual[:, None], residual, p_next)
    return Verified(num_accepted, sample(law, sample_uniforms[rows, num_accepted]))


def _match(targets: Tensor, drafts: Tensor) -> Verified:
    """Accept the leading drafts that equal the target's tokens [B, N + 1]; the next token is the target's."""
    num_drafts = drafts.shape[1]
    num_accepted = (targets[:, :num_drafts] == drafts).long().cumprod(1).sum(1)
    return Verified(num_accepted, targets.gather(1, num_accepted[:, None])[:, 0])
