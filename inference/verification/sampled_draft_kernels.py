"""Triton kernels of the rules that test drafts against the distribution q that drew them.

acceptance_kernels.py launches them.

What remains to draw from is always (p - lam q)+ up to a factor. Token-wise, lam is 1 after a rejection. Block
verification leaves (w p - q)+, so lam is 1 / w. Siblings without replacement: let (p - lam q)+ / mass be what remained
of p, and `untried` the sum of q over the tokens not yet tried. A rejection leaves ((p - lam q)+ / mass - q / untried)+,
which is (p - lam' q)+ up to a factor with lam' = lam + mass / untried. The tokens tried before it need no care: more of
q than of p remained of a token that was rejected, so it is 0 from then on. Where rounding leaves nothing, p is meant.

Shapes as in acceptance_kernels.py. p and q are `Chunked` logits of the target, T a row, and of the drafter, P a row (N
of a chain). A draft that cannot have been drawn counts as q = 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.sampling.sampling_kernels import load_distribution, pick, probabilities


class Tree(NamedTuple):
    """The drafted trees of a batch, as kernels read them."""

    tokens: Tensor  # [B, N]
    parents: Tensor | None  # [B, N], or one row of them expanded; None for chains
    parents_row: int  # stride of a row of parents


def tree_of(tokens: Tensor, parents: Tensor | None) -> Tree:
    """Return the trees of tokens and parents [B, N]; without parents they are chains."""
    if parents is None:
        return Tree(tokens.contiguous(), None, 0)
    assert parents.shape[1] < 2 or parents.stride(1) == 1
    return Tree(tokens.contiguous(), parents, parents.stride(0))


@triton.jit
def load_tree(tree, row, N, NODES: tl.constexpr):
    """Return columns [NODES], their tokens (-1: none), and the columns of their parents (-1: none)."""
    columns = tl.arange(0, NODES)
    is_node = (columns > 0) & (columns <= N)
    token = tl.load(tree.tokens + row * N + columns - 1, mask=is_node, other=-1)
    if tree.parents is None:
        parent = tl.where(is_node, columns - 1, -1)
    else:
        parent = tl.load(tree.parents + row * tree.parents_row + columns - 1, mask=is_node, other=-2) + 1
    return columns, token.to(tl.int32), parent.to(tl.int32)


@triton.jit
def draw(p, p_row, q, q_row, lam, masses, uniform, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Draw a token from (p - lam q)+, whose sums by chunk are in `masses`; from p if that is 0, or lam is 0."""
    chunks = tl.arange(0, CHUNKS)
    mass = tl.load(masses + chunks, mask=chunks * CHUNK < tl.where(lam > 0, V, 0), other=0.0)
    lam = tl.where(tl.sum(mass, 0) > 0, lam, 0.0)
    q_V = tl.where(lam > 0, V, 0)
    p_dist, weights = load_distribution(p, p_row, V, CHUNK, CHUNKS)
    q_dist, _ = load_distribution(q, q_row, q_V, CHUNK, CHUNKS)
    chunk, rest = pick(tl.where(lam > 0, mass, weights), uniform)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    residual = _residual(probabilities(p_dist, ids, ids < V), probabilities(q_dist, ids, ids < q_V), lam)
    lane, _ = pick(residual, rest)
    return chunk * CHUNK + lane


@triton.jit
def sum_residual(p, p_row, q, q_row, lam, masses, chunk, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store the sum of (p - lam q)+ over a chunk in `masses`."""
    p_dist, _ = load_distribution(p, p_row, V, CHUNK, CHUNKS)
    q_dist, _ = load_distribution(q, q_row, V, CHUNK, CHUNKS)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    residual = _residual(probabilities(p_dist, ids, ids < V), probabilities(q_dist, ids, ids < V), lam)
    tl.store(masses + chunk, tl.sum(residual, 0))


@triton.jit
def _residual(p, q, lam):
    return tl.maximum(p.to(tl.float64) - lam * q, 0.0)


@triton.jit
def draft_probabilities(rows, row, width, token, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the probabilities [NODES] of each draft n under distribution n of a row; 0 where there is no draft.

    `width` is the number of distributions of a row.
    """
    exists = (token >= 0)[:, None]
    at = (row * width + tl.arange(0, token.shape[0]))[:, None]
    distribution, _ = load_distribution(rows, at, tl.where(exists, V, 0), CHUNK, CHUNKS)
    return tl.sum(probabilities(distribution, token[:, None], exists), 1)


@triton.jit
def load_chain(p, q, drafts, row, N, V, NODES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the numbers of the drafts of a chain and their p and q, [NODES]; q is 0 where none was drawn."""
    nodes = tl.arange(0, NODES)
    token = tl.load(drafts + row * N + nodes, mask=nodes < N, other=-1)
    p_x = draft_probabilities(p, row, N + 1, token, V, CHUNK, CHUNKS)
    return nodes, p_x, draft_probabilities(q, row, N, token, V, CHUNK, CHUNKS)


@triton.jit(do_not_specialize=["N"])
def accept_chain(
    p, q, drafts, coins, out, lams, masses, N, V, NODES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Token-wise: store how many drafts are accepted, lam, and the sum over one chunk of what remains then.

    The program of every chunk tests the drafts by itself, which is cheaper than another launch.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nodes, p_x, q_x = load_chain(p, q, drafts, row, N, V, NODES, CHUNK, CHUNKS)
    coin = tl.load(coins + row * N + nodes, mask=nodes < N, other=1.0).to(tl.float64)
    accepted = (q_x > 0) & (coin * q_x < p_x)  # strict: a zero coin cannot accept p = 0
    num_accepted = tl.min(tl.where(accepted, NODES, nodes), 0)
    was_drawn = tl.sum(tl.where(nodes == num_accepted, q_x, 0.0), 0) > 0
    if was_drawn:
        p_row, q_row = row * (N + 1) + num_accepted, row * N + num_accepted
        sum_residual(p, p_row, q, q_row, 1.0, masses + row * CHUNKS, chunk, V, CHUNK, CHUNKS)
    if chunk == 0:
        tl.store(lams + row, was_drawn.to(tl.float64))
        tl.store(out.num_accepted + row, num_accepted)
        tl.store(out.path + row * N + nodes, nodes + 1, mask=nodes < N)


@triton.jit(do_not_specialize=["N"])
def draw_next(p, q, uniforms, out, lams, masses, N, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Token-wise: draw the token after the accepted drafts."""
    row = tl.program_id(0).to(tl.int64)
    num_accepted = tl.load(out.num_accepted + row)
    p_row, q_row, masses = row * (N + 1) + num_accepted, row * N + num_accepted, masses + row * CHUNKS
    uniform = tl.load(uniforms + p_row).to(tl.float64)
    token = draw(p, p_row, q, q_row, tl.load(lams + row), masses, uniform, V, CHUNK, CHUNKS)
    tl.store(out.next_token + row, token)


@triton.jit
def block_weights(nodes, p_x, q_x, NODES: tl.constexpr):
    """Return how many drafts were drawn, and w_n of the first n of them, fp64 [NODES]."""
    num_drawn = tl.min(tl.where(q_x > 0, NODES, nodes), 0)
    weights = tl.where(nodes == 0, 1.0, 0.0).to(tl.float64)
    weight = tl.sum(weights, 0)
    for n in range(NODES - 1):
        p_n = tl.sum(tl.where(nodes == n, p_x, 0.0), 0)
        q_n = tl.sum(tl.where(nodes == n, q_x, 0.0), 0)
        weight = tl.minimum(weight * p_n, q_n) / tl.where(q_n > 0, q_n, 1.0)
        weights = tl.where(nodes == n + 1, weight, weights)
    return num_drawn, weights


@triton.jit(do_not_specialize=["N"])
def weigh_block(p, q, drafts, lams, N, V, NODES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Block verification: store 1 / w_n, or 0 where w_n is 0 or the draft behind was not drawn."""
    row = tl.program_id(0).to(tl.int64)
    nodes, p_x, q_x = load_chain(p, q, drafts, row, N, V, NODES, CHUNK, CHUNKS)
    num_drawn, weights = block_weights(nodes, p_x, q_x, NODES)
    tl.store(lams + row * N + nodes, _inverse(tl.where(nodes < num_drawn, weights, 0.0)), mask=nodes < N)


@triton.jit(do_not_specialize=["N"])
def sum_blocks(p, q, lams, masses, N, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Block verification: store the sum over one chunk of (p - q / w_n)+ after the first n drafts."""
    row, n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    lam = tl.load(lams + row * N + n)
    if lam > 0:
        p_row, q_row = row * (N + 1) + n, row * N + n
        sum_residual(p, p_row, q, q_row, lam, masses + q_row * CHUNKS, chunk, V, CHUNK, CHUNKS)


@triton.jit
def _inverse(weight):
    """Return 1 / weight, or 0 where it is 0."""
    return tl.where(weight > 0, 1 / tl.where(weight > 0, weight, 1.0), 0.0)


@triton.jit(do_not_specialize=["N"])
def accept_block(
    p, q, drafts, coins, uniforms, out, masses, N, V, NODES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Block verification: find the longest beginning that passes, and draw the token after it."""
    row = tl.program_id(0).to(tl.int64)
    nodes, p_x, q_x = load_chain(p, q, drafts, row, N, V, NODES, CHUNK, CHUNKS)
    num_drawn, weights = block_weights(nodes, p_x, q_x, NODES)
    chunks = tl.arange(0, CHUNKS)
    was_summed = ((nodes < num_drawn) & (weights > 0))[:, None] & (chunks * CHUNK < V)
    mass = tl.load(masses + (row * N + nodes)[:, None] * CHUNKS + chunks, mask=was_summed, other=0.0)
    surplus = weights * tl.sum(mass, 1)
    room = surplus + 1 - weights
    is_whole = (nodes == num_drawn) | (room == 0)  # no room: p = q, and the weight is 1
    threshold = tl.where(is_whole, weights, surplus / tl.where(is_whole, 1.0, room))
    is_length = (nodes > 0) & (nodes <= num_drawn)
    coin = tl.load(coins + row * N + nodes - 1, mask=is_length, other=1.0)
    num_accepted = tl.max(tl.where(is_length & (coin < threshold), nodes, 0), 0)
    tl.store(out.num_accepted + row, num_accepted)
    tl.store(out.path + row * N + nodes, nodes + 1, mask=nodes < N)

    weight = tl.sum(tl.where((nodes == num_accepted) & (nodes < num_drawn), weights, 0.0), 0)
    p_row, q_row = row * (N + 1) + num_accepted, row * N + num_accepted
    uniform = tl.load(uniforms + p_row).to(tl.float64)
    token = draw(p, p_row, q, q_row, _inverse(weight), masses + q_row * CHUNKS, uniform, V, CHUNK, CHUNKS)
    tl.store(out.next_token + row, token)


@triton.jit(do_not_specialize=["N"])
def try_children(
    p, q, tree, coins, children, lams, masses, N, V, NODES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Without replacement: store the child of a column that is accepted (0: none), and lam of what remains otherwise.

    All columns are tried side by side, also those that the walk does not reach. Siblings are tried one by one, with a
    pass over the vocabulary after each rejection.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    q_row = row * tl.num_programs(1) + column
    p_dist, _ = load_distribution(p, row * (N + 1) + column, V, CHUNK, CHUNKS)
    q_dist, _ = load_distribution(q, q_row, V, CHUNK, CHUNKS)
    columns, token, parent = load_tree(tree, row, N, NODES)
    waiting = (parent == column) & (token >= 0)
    child = tl.min(tl.where(waiting, columns, NODES), 0)
    accepted = 0
    lam, tried = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    mass, untried = tl.full((), 1.0, tl.float64), tl.full((), 1.0, tl.float64)
    while child < NODES:
        x = tl.sum(tl.where(columns == child, token, 0), 0)
        p_x, q_x = tl.sum(probabilities(p_dist, x, True), 0), tl.sum(probabilities(q_dist, x, True), 0)
        coin = tl.load(coins + row * N + child - 1).to(tl.float64)
        waiting = waiting & (token != x)  # an equal sibling cannot have been drawn
        if q_x > 0:
            untried = tl.maximum(untried, q_x)  # rounding may make it less
            if coin * q_x * mass < (p_x - lam * q_x) * untried:
                accepted = child
                waiting = waiting & (columns < 0)
            else:
                tried += q_x
                lam += mass / untried
                mass, untried = _sum_chunks(p_dist, q_dist, lam, masses + q_row * CHUNKS, V, CHUNK)
                untried -= tried
        child = tl.min(tl.where(waiting, columns, NODES), 0)
    tl.store(children + q_row, accepted)
    tl.store(lams + q_row, lam)


@triton.jit
def _sum_chunks(p_dist, q_dist, lam, masses, V, CHUNK: tl.constexpr):
    """Store the sum of (p - lam q)+ by chunk in `masses`; return that over all chunks, and the sum of q."""
    mass, q_sum = tl.full((), 0.0, tl.float64), tl.full((), 0.0, tl.float64)
    chunk = 0
    while chunk * CHUNK < V:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        q_x = probabilities(q_dist, ids, ids < V)
        in_chunk = tl.sum(_residual(probabilities(p_dist, ids, ids < V), q_x, lam), 0)
        tl.store(masses + chunk, in_chunk)
        mass += in_chunk
        q_sum += tl.sum(q_x.to(tl.float64), 0)
        chunk += 1
    return mass, q_sum


@triton.jit(do_not_specialize=["N", "P"])
def descend(
    p,
    q,
    uniforms,
    out,
    children,
    lams,
    masses,
    N,
    P,
    V,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Without replacement: walk from the root to the accepted child while there is one, and draw the token after it."""
    row = tl.program_id(0).to(tl.int64)
    column = 0
    num_accepted = 0
    for level in range(DEPTH):
        child = tl.load(children + row * P + column, mask=column < P, other=0)
        num_accepted += (child > 0).to(tl.int32)
        column = tl.where(child > 0, child, column)
        tl.store(out.path + row * DEPTH + level, column)
    tl.store(out.num_accepted + row, num_accepted)

    p_row, q_row = row * (N + 1) + column, row * P + column
    uniform = tl.load(uniforms + row * (DEPTH + 1) + num_accepted).to(tl.float64)
    lam = tl.load(lams + q_row, mask=column < P, other=0.0)
    token = draw(p, p_row, q, q_row, lam, masses + q_row * CHUNKS, uniform, V, CHUNK, CHUNKS)
    tl.store(out.next_token + row, token)
