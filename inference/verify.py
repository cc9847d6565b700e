"""Verification rules: how much of a draft the target keeps, and the one token it adds.

Plain PyTorch, vectorised over the batch, with uniforms as arguments: this is the specification that faster forms are
tested against. Token-wise rejection is Leviathan et al., arXiv 2211.17192, appendix A.1.

Shapes: B rows, N drafted tokens (nodes), T = N + 1 columns of the window (column 0 is the newest committed token, node
i stands in column i + 1), D nodes on the longest path (N for a chain), V vocabulary. Logits come from `sampling.cut`;
the target's at column c say what follows it. A node of NO_TOKEN (-1) is never accepted.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftsmith.models.sampling import sample
from draftsmith.models.trees import node_depths

VerificationMode = Literal["greedy", "one_hot", "probabilistic"]
SAMPLED_DRAFTS = ("probabilistic",)  # modes whose drafts are drawn by chance, from the logits that come with them


@dataclass
class Verified:
    num_accepted: Tensor  # [B] int64, 0..D
    path: Tensor  # [B, D] int64 columns of the accepted nodes in order, then anything from 0 to N
    next_token: Tensor  # [B] the token after the accepted ones: bonus, or correction of the first rejected draft


def greedy(logits: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> Verified:
    """Walk down to the child that is the target's likeliest token while there is one; then add the target's own.

    logits [B, T, V] (raw ones do), tokens and parents [B, N]. Of equal siblings the first counts.
    """
    return walk(logits.argmax(-1), tokens, parents, depth)


def one_hot(logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, uniforms: Tensor) -> Verified:
    """Draw the target's token after every column, walk down while a child is that token, then add the one drawn.

    Lossless whatever chose the drafts, as long as they were chosen before the draw. logits [B, T, V]; uniforms
    [B, D + 1], entry d for the token that follows a column of depth d: keyed by position, the output equals plain
    sampling token for token.
    """
    depths = torch.arange(depth + 1, device=tokens.device) if depth == tokens.shape[1] else node_depths(parents, depth)
    drawn = sample(logits.softmax(-1), uniforms.gather(1, depths.expand(len(tokens), -1)))
    return walk(drawn, tokens, parents, depth)


def probabilistic(
    logits: Tensor, draft_logits: Tensor, drafts: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> Verified:
    """Token-wise rejection on a chain: accept x with probability min(1, p(x) / q(x)), else draw from (p - q)+.

    Lossless when each draft was drawn from exactly q. logits of p [B, N + 1, V], draft_logits of q [B, N, V],
    drafts [B, N], accept_uniforms [B, N], sample_uniforms [B, N + 1]. A residual of zero (p = q up to rounding) falls
    back to p.
    """
    p, q = logits.softmax(-1), draft_logits.softmax(-1)
    batch, num_drafts = drafts.shape
    index = drafts.clamp(min=0)[..., None]
    p_draft = p[:, :num_drafts].gather(-1, index).squeeze(-1)
    q_draft = q.gather(-1, index).squeeze(-1)
    accepted = (accept_uniforms * q_draft < p_draft) & (drafts >= 0)  # strict: a zero coin cannot accept p = 0
    num_accepted = accepted.long().cumprod(1).sum(1)

    path = torch.arange(1, num_drafts + 1, device=p.device).expand_as(drafts)
    rows = torch.arange(batch, device=p.device)
    p_next = p[rows, num_accepted]  # [B, V]
    if num_drafts == 0:
        return Verified(num_accepted, path, sample(p_next, sample_uniforms[rows, num_accepted]))
    first_rejected = num_accepted.clamp(max=num_drafts - 1)
    was_drawn = (num_accepted < num_drafts) & (drafts[rows, first_rejected] >= 0)
    residual = (p_next - q[rows, first_rejected]).clamp(min=0)
    use_residual = was_drawn & (residual.sum(-1) > 0)
    law = torch.where(use_residual[:, None], residual, p_next)
    return Verified(num_accepted, path, sample(law, sample_uniforms[rows, num_accepted]))


def walk(targets: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> Verified:
    """From the root to the child that equals the target's token, as often as there is one; then that token itself.

    targets [B, T]: the target's choice after each column; tokens and parents [B, N].
    """
    batch, num_nodes = tokens.shape
    if depth == num_nodes:
        num_accepted = (targets[:, :num_nodes] == tokens).long().cumprod(1).sum(1)
        path = torch.arange(1, num_nodes + 1, device=tokens.device).expand_as(tokens)
        return Verified(num_accepted, path, targets.gather(1, num_accepted[:, None])[:, 0])
    column = torch.zeros(batch, 1, dtype=torch.int64, device=tokens.device)
    num_accepted = torch.zeros_like(column)
    alive = torch.ones_like(column, dtype=torch.bool)
    columns = []
    for _ in range(depth):
        is_next = (parents + 1 == column) & (tokens == targets.gather(1, column))  # [B, N]
        alive = alive & is_next.any(1, keepdim=True)
        column = torch.where(alive, is_next.int().argmax(1, keepdim=True) + 1, column)
        num_accepted = num_accepted + alive
        columns.append(column)
    return Verified(num_accepted[:, 0], torch.cat(columns, 1), targets.gather(1, column)[:, 0])
