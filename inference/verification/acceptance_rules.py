"""Verification rules: how many tokens of a draft are accepted, and which token the target adds behind them.

They are plain PyTorch, vectorised over the batch, with uniform numbers as arguments: the specification that the kernels
are tested against. tests/inference/test_verify.py proves the lossless rules by enumeration; docs/lossless.md says what
that means.

mode                 drafts                      draft logits  uniforms                  distribution of the output
greedy               any tree, however chosen    -             -                         the target's argmax
one_hot              any tree, however chosen    -             [B, D + 1]                exact, token for token
probabilistic        chain drawn from q          [B, N, V]     [B, N] and [B, N + 1]     exact
block                chain drawn from q          [B, N, V]     [B, N] and [B, N + 1]     exact
without_replacement  tree, siblings drawn from   [B, P, V]     [B, N] and [B, D + 1]     exact
                     q without replacement
typical              any tree, however chosen    -             -                         LOSSY
synthetic            any tree, however chosen    -             [B, D]                    LOSSY: for timing only

Shapes: B rows, N drafted tokens (nodes), T = N + 1 columns of the window (column 0 is the newest committed token, node
i stands in column i + 1), D at least the nodes on any path (D = N says that all rows are chains, whose parents may be
None), V vocabulary, P columns, at least those up to the last that has children. Logits come from `sampling.cut`, and at
least one of a row is finite.
The target's logits at column c are for what follows it, and p is their softmax. The drafter's logits at column c are
what the children of column c were drawn from, and q is their softmax. Uniforms are in (0, 1) and independent of the
drafts.

In every rule a node of NO_TOKEN (-1) is never accepted, N = 0 is plain decoding, and a coin of zero accepts nothing
that is impossible under p. The three rules that test q skip a node that cannot have been drawn, as if it were not
there: NO_TOKEN, a token of q = 0, a token that equals a sibling tried before. Where a rejection leaves no residual
(p = q up to rounding) they draw from what there was before it.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.sampling.sampling import sample
from draftsmith.models.sampling.trees import node_depths, parent_columns, parents_or_chain

VerificationMode = Literal["greedy", "one_hot", "probabilistic", "block", "without_replacement", "typical", "synthetic"]
SAMPLED_DRAFTS = ("probabilistic", "block", "without_replacement")  # modes whose drafts are drawn from draft logits
LOSSY = ("typical", "synthetic")  # modes whose output does not have the target's distribution


class Verified(NamedTuple):
    """The tokens of a draft that were accepted in each row, and the token behind them."""

    num_accepted: Tensor  # [B] int64, 0..D
    path: Tensor  # [B, D] int64 columns of the accepted nodes in order, then anything from 0 to N
    next_token: Tensor  # [B] the token after the accepted ones: bonus, or correction of the first rejected draft


def greedy(logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int) -> Verified:
    """Walk down to the child that is the target's likeliest token while there is one, then add that token itself.

    logits [B, T, V] (they need not be cut), tokens and parents [B, N]. Of equal siblings the first counts.
    """
    return walk(logits.argmax(-1), tokens, parents, depth)


def one_hot(logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int, uniforms: Tensor) -> Verified:
    """Draw the target's token after every column, walk down while a child is that token, then add the drawn token.

    Lossless whatever chose the drafts, as long as they were chosen before the draw. logits [B, T, V]; uniforms
    [B, D + 1], entry d for the token that follows a column of depth d: keyed by position, the output equals plain
    sampling token for token.
    """
    if depth == tokens.shape[1]:
        depths = torch.arange(depth + 1, device=tokens.device)
    else:
        depths = node_depths(parents_or_chain(parents, tokens), depth)
    drawn = sample(logits.softmax(-1), uniforms.gather(1, depths.expand(len(tokens), -1)))
    return walk(drawn, tokens, parents, depth)


def probabilistic(
    logits: Tensor, draft_logits: Tensor, drafts: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> Verified:
    """Token-wise rejection on a chain: accept x with probability min(1, p(x) / q(x)), else draw from (p - q)+.

    Leviathan et al., arXiv 2211.17192, appendix A.1. Lossless when each draft was drawn from exactly q. logits
    [B, N + 1, V], draft_logits [B, N, V], drafts [B, N], accept_uniforms [B, N], sample_uniforms [B, N + 1], entry n
    for the token after n accepted ones.
    """
    p, q = _distributions(logits, draft_logits)
    p_draft, q_draft = _probabilities(p, drafts), _probabilities(q, drafts)
    drawn = (drafts >= 0) & (q_draft > 0)
    accepted = drawn & (accept_uniforms * q_draft < p_draft)  # strict: a zero coin cannot accept p = 0
    num_accepted = accepted.long().cumprod(1).sum(1)
    return _finish_chain(p, q, drawn, num_accepted, torch.ones_like(p[..., 0]), sample_uniforms)


def block(
    logits: Tensor, draft_logits: Tensor, drafts: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> Verified:
    """Block verification: accept the longest beginning of a chain that passes its test, the whole chain considered.

    Sun et al., arXiv 2403.10444; arguments and guarantee as in `probabilistic`, and no fewer tokens are accepted in
    expectation. The first n drafts are accepted with probability w_n = min(1, w_{n-1} p(x_n) / q(x_n)). All of them are
    by a coin below w_n. Fewer of them are, when everything longer has failed, by a coin below z / (z + 1 - w_n), where
    z = sum (w_n p - q)+ is over what may follow them. The next token is then drawn from (w_n p - q)+.

    The outcome depends on coins and drafts beyond what is accepted. Where the next round drafts those positions again,
    it needs fresh ones: accept uniforms, and the uniforms that drafts are drawn with, must differ from round to round.
    """
    p, q = _distributions(logits, draft_logits)
    p_draft, q_draft = _probabilities(p, drafts), _probabilities(q, drafts)
    drawn = ((drafts >= 0) & (q_draft > 0)).cumprod(1).bool()  # the block of a row ends where nothing was drawn
    weights = [torch.ones_like(p[:, 0, 0])]
    for p_x, q_x, was_drawn in zip(p_draft.unbind(1), q_draft.unbind(1), drawn.unbind(1), strict=True):
        weights.append(torch.where(was_drawn, torch.minimum(weights[-1] * p_x, q_x) / q_x, 0))
    weight = torch.stack(weights, 1)  # [B, T], w_n in column n
    surplus = (weight[..., None] * p - q).clamp(min=0).sum(-1)
    room = surplus + 1 - weight
    lengths = torch.arange(weight.shape[1], device=p.device)  # [T]
    is_whole = (lengths == drawn.sum(1, keepdim=True)) | (room == 0)  # no room: p = q, and the weight is 1
    threshold = torch.where(is_whole, weight, surplus / room)[:, 1:]
    passed = drawn & (accept_uniforms < threshold)
    num_accepted = F.pad(passed * lengths[1:], (1, 0)).amax(1)
    return _finish_chain(p, q, drawn, num_accepted, weight, sample_uniforms)


def without_replacement(
    logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    depth: int,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
) -> Verified:
    """Recursive rejection on a tree: try siblings in node order, each against what remains of p and of q.

    Jeon et al., arXiv 2402.14160 (RSD-S); Chen et al. (Sequoia), arXiv 2402.12374. After a rejection p becomes
    (p - q)+ normalised, and q loses the token and is normalised, as when the next sibling was drawn. Lossless when
    siblings were drawn from q one by one without replacement and stand in that order. On a chain it is `probabilistic`.

    logits [B, T, V], draft_logits [B, P, V] (entry c: what the children of column c were drawn from), tokens, parents
    and accept_uniforms [B, N], sample_uniforms [B, D + 1], entry n for the token after n accepted ones.
    """
    p, q = _distributions(logits, draft_logits)
    parents = parents_or_chain(parents, tokens)
    rows, levels = torch.arange(len(p), device=p.device), torch.arange(depth, device=p.device)
    column = torch.zeros_like(rows)  # [B] the deepest accepted column
    num_accepted = torch.zeros_like(rows)
    path = torch.zeros(len(p), depth, dtype=torch.int64, device=p.device)
    p_remaining, q_remaining = p[:, 0], q[:, 0]  # [B, V] at `column`, without what its rejected children took
    for node in range(tokens.shape[1]):  # one pass is enough: a node stands behind its parent
        token = tokens[:, node, None].clamp(min=0)
        p_token, q_token = p_remaining.gather(1, token)[:, 0], q_remaining.gather(1, token)[:, 0]  # [B]
        tried = (parents[:, node] + 1 == column) & (tokens[:, node] >= 0) & (q_token > 0)
        accepted = tried & (accept_uniforms[:, node] * q_token < p_token)
        rejected = (tried & ~accepted)[:, None]
        path = torch.where(accepted[:, None] & (levels == num_accepted[:, None]), node + 1, path)
        column = torch.where(accepted, node + 1, column)
        num_accepted = num_accepted + accepted

        residual = _normalised((p_remaining - q_remaining).clamp(min=0))
        p_remaining = torch.where(rejected & (residual > 0).any(-1, keepdim=True), residual, p_remaining)
        q_remaining = torch.where(rejected, _normalised(q_remaining.scatter(1, token, 0)), q_remaining)
        p_remaining = torch.where(accepted[:, None], p[rows, column], p_remaining)
        q_remaining = torch.where(accepted[:, None], q[rows, column], q_remaining)
    return Verified(num_accepted, path, sample(p_remaining, sample_uniforms[rows, num_accepted]))


def typical(
    logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int, epsilon: float = 0.09, delta: float = 0.3
) -> Verified:
    """LOSSY: accept what is plausible under p, not what would have been drawn; the output has another distribution.

    Medusa's typical acceptance, Cai et al., arXiv 2401.10774, section 2.3.1. A node stands when its parent stands and
    p(x) > min(epsilon, delta exp(-H(p))) there, with H the entropy in nats. The deepest standing node wins, of several
    the one whose path is likelier under p, and of equal ones the first. The next token is the target's likeliest, as in
    the paper: nothing is drawn, and temperature only moves the thresholds. logits [B, T, V], tokens and parents [B, N].
    """
    log_p = logits.log_softmax(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)  # [B, T]
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    rows, parents = torch.arange(len(tokens), device=tokens.device), parents_or_chain(parents, tokens)
    log_chance = log_p[rows[:, None], parents + 1, tokens.clamp(min=0)]  # [B, N]
    stands = (tokens >= 0) & (log_chance.exp() > threshold.gather(1, parents + 1))

    above = parent_columns(parents)  # [B, T]
    generations = [torch.arange(above.shape[1], device=above.device).expand_as(above)]
    for _ in range(depth):
        generations.append(above.gather(1, generations[-1]))
    lines = torch.stack(generations, 1)  # [B, D + 1, T]: each column, its parent, and so on; the root repeats
    index = rows[:, None, None], lines
    all_stand = F.pad(stands, (1, 0), value=True)[index].all(1)  # [B, T]
    log_likelihood = F.pad(log_chance, (1, 0))[index].sum(1)
    length = (lines > 0).sum(1).masked_fill(~all_stand, -1)
    num_accepted = length.amax(1)
    best = log_likelihood.masked_fill(length < num_accepted[:, None], float("-inf")).argmax(1)
    from_leaf = num_accepted[:, None] - 1 - torch.arange(depth, device=tokens.device)  # [B, D]
    path = lines[rows, :, best].gather(1, from_leaf.clamp(min=0))
    return Verified(num_accepted, path, logits[rows, best].argmax(-1))


def synthetic(
    logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int, rates: Tensor, uniforms: Tensor
) -> Verified:
    """LOSSY: accept drafts by rates, whatever their tokens are, to time decoding at an acceptance that is only assumed.

    The first child of an accepted column is accepted with the conditional rate of its depth, rates [D], by the coins
    uniforms [B, D]. The next token is the target's likeliest. logits [B, T, V], tokens and parents [B, N].
    """
    (batch, num_nodes), parents = tokens.shape, parents_or_chain(parents, tokens)
    above = (parents + 1).masked_fill(tokens < 0, num_nodes + 1)  # [B, N], a column that nobody reads for NO_TOKEN
    first_child = torch.zeros(batch, num_nodes + 2, dtype=torch.int64, device=tokens.device)
    for node in range(num_nodes - 1, -1, -1):  # the first child writes last; 0 where a column has none
        first_child.scatter_(1, above[:, node, None], node + 1)
    accepts = (uniforms < rates).long().cumprod(1).bool()  # [B, D]
    column = torch.zeros(batch, 1, dtype=torch.int64, device=tokens.device)
    num_accepted = torch.zeros_like(column)
    columns = []
    for accepts_depth in accepts.unbind(1):
        child = first_child.gather(1, column)
        accepted = accepts_depth[:, None] & (child > 0)
        column = torch.where(accepted, child, column)
        num_accepted = num_accepted + accepted
        columns.append(column)
    path = torch.cat(columns, 1) if columns else tokens[:, :0]
    return Verified(num_accepted[:, 0], path, logits.argmax(-1).gather(1, column)[:, 0])


def walk(targets: Tensor, tokens: Tensor, parents: Tensor | None, depth: int) -> Verified:
    """Walk from the root to the child that is the target's token, as long as there is one; then add that token itself.

    targets [B, T]: the target's token after each column; tokens and parents [B, N].
    """
    batch, num_nodes = tokens.shape
    if depth == num_nodes:
        num_accepted = (targets[:, :num_nodes] == tokens).long().cumprod(1).sum(1)
        path = torch.arange(1, num_nodes + 1, device=tokens.device).expand_as(tokens)
        return Verified(num_accepted, path, targets.gather(1, num_accepted[:, None])[:, 0])
    assert parents is not None
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


def _distributions(logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and q, both [B, T, V]; q of a column without children is all zeros."""
    p = logits.softmax(-1)
    return p, F.pad(draft_logits.softmax(-1), (0, 0, 0, p.shape[1] - draft_logits.shape[1]))


def _probabilities(distributions: Tensor, drafts: Tensor) -> Tensor:
    """Return the probability [B, N] of each draft of a chain under distributions [B, T, V]."""
    return distributions[:, : drafts.shape[1]].gather(-1, drafts.clamp(min=0)[..., None]).squeeze(-1)


def _normalised(weights: Tensor) -> Tensor:
    """Return weights [B, V] scaled to a sum of 1; zeros stay zeros."""
    return F.normalize(weights, p=1, dim=-1, eps=torch.finfo(weights.dtype).tiny)


def _finish_chain(
    p: Tensor, q: Tensor, drawn: Tensor, num_accepted: Tensor, weight: Tensor, uniforms: Tensor
) -> Verified:
    """Draw the next token: from (weight p - q)+ where a drawn draft was rejected, from p where all were accepted.

    p and q [B, T, V]; drawn [B, N]; weight and uniforms [B, T].
    """
    rows = torch.arange(len(p), device=p.device)
    p_next = p[rows, num_accepted]  # [B, V]
    residual = (weight[rows, num_accepted, None] * p_next - q[rows, num_accepted]).clamp(min=0)
    use_residual = F.pad(drawn, (0, 1))[rows, num_accepted] & (residual > 0).any(-1)
    distribution = torch.where(use_residual[:, None], residual, p_next)
    path = torch.arange(1, p.shape[1], device=p.device).expand_as(drawn)
    return Verified(num_accepted, path, sample(distribution, uniforms[rows, num_accepted]))
