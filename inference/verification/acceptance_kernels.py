"""Triton kernels of acceptance_rules.py: the same names, arguments and results, in one to four launches a rule.

The plain rules are the specification, also for functions without a docstring. Here no distribution over the vocabulary
is ever in memory: logits are read in chunks, and the next token is drawn from (p - lam q)+, where lam is 0 if p itself
is meant. All tensors are on one CUDA device. Logits are contiguous, since a hidden copy of them would cost more than
the rule. Nothing waits for the device, and only the results and a few numbers a chunk are allocated.

Shapes: B rows, N nodes, T = N + 1 columns, D depth, P columns with draft logits, V vocabulary in CHUNKS chunks of CHUNK
logits, NODES the power of 2 from T on. In kernels, `row` is a row of the batch, and [NODES] runs over columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.verification import sampled_draft_kernels as rejection
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.inference.verification.sampled_draft_kernels import load_tree, tree_of
from draftsmith.models.sampling.sampling_kernels import chunk_sizes, load_distribution, read_in_chunks, sample_columns


def greedy(logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int) -> Verified:
    """Do what `acceptance_rules.greedy` does, from logits in fp32, fp16 or bf16."""
    assert logits.is_contiguous()
    batch, width, vocabulary = logits.shape
    chunks = chunk_sizes(vocabulary)
    maxima = torch.empty(batch * width, chunks["CHUNKS"], dtype=torch.float32, device=logits.device)
    winners = torch.empty_like(maxima, dtype=torch.int32)
    _find_winners[(batch * width, triton.cdiv(vocabulary, chunks["CHUNK"]))](logits, maxima, winners, **chunks)
    verified = _empty(tokens, depth)
    _greedy[(batch,)](
        maxima, winners, tree_of(tokens, parents), verified, N=width - 1, NODES=_nodes(width - 1), DEPTH=depth, **chunks
    )
    return verified


def one_hot(logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int, uniforms: Tensor) -> Verified:
    """Do what `acceptance_rules.one_hot` does.

    With N = 0 it is the plain draw of a token, so that plain and speculative decoding round alike.
    """
    return walk(sample_columns(logits, parents, depth, uniforms), tokens, parents, depth)


def walk(targets: Tensor, tokens: Tensor, parents: Tensor | None, depth: int) -> Verified:
    verified = _empty(tokens, depth)
    num_nodes = tokens.shape[1]
    _walk[(len(tokens),)](
        targets.contiguous(),
        tree_of(tokens, parents),
        verified,
        N=num_nodes,
        NODES=_nodes(num_nodes),
        DEPTH=depth,
        num_warps=1,
    )
    return verified


def typical(
    logits: Tensor, tokens: Tensor, parents: Tensor | None, depth: int, epsilon: float = 0.09, delta: float = 0.3
) -> Verified:
    (p,) = read_in_chunks(logits, with_means=True)
    verified = _empty(tokens, depth)
    num_nodes = tokens.shape[1]
    sizes = {"N": num_nodes, "NODES": _nodes(num_nodes), "DEPTH": depth, **chunk_sizes(logits.shape[-1])}
    _typical[(len(tokens),)](p, tree_of(tokens, parents), verified, epsilon, delta, **sizes)
    return verified


def probabilistic(
    logits: Tensor, draft_logits: Tensor, drafts: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> Verified:
    p, q = read_in_chunks(logits, draft_logits)
    batch, num_drafts = drafts.shape
    verified, chunks = _empty(drafts, num_drafts), chunk_sizes(logits.shape[-1])
    lams, masses = p.sums.new_empty(batch), torch.empty_like(p.sums[:batch])
    drafts, coins, uniforms = drafts.contiguous(), accept_uniforms.contiguous(), sample_uniforms.contiguous()
    grid = batch, triton.cdiv(chunks["V"], chunks["CHUNK"])
    rejection.accept_chain[grid](
        p, q, drafts, coins, verified, lams, masses, N=num_drafts, NODES=_nodes(num_drafts), **chunks
    )
    rejection.draw_next[(batch,)](p, q, uniforms, verified, lams, masses, N=num_drafts, **chunks)
    return verified


def block(
    logits: Tensor, draft_logits: Tensor, drafts: Tensor, accept_uniforms: Tensor, sample_uniforms: Tensor
) -> Verified:
    p, q = read_in_chunks(logits, draft_logits)
    batch, num_drafts = drafts.shape
    verified, chunks = _empty(drafts, num_drafts), chunk_sizes(logits.shape[-1])
    lams, masses = q.sums.new_empty(batch, num_drafts), torch.empty_like(q.sums)
    drafts, coins, uniforms = drafts.contiguous(), accept_uniforms.contiguous(), sample_uniforms.contiguous()
    sizes = {"N": num_drafts, "NODES": _nodes(num_drafts), **chunks}
    grid = batch, num_drafts, triton.cdiv(chunks["V"], chunks["CHUNK"])
    rejection.weigh_block[(batch,)](p, q, drafts, lams, **sizes)
    rejection.sum_blocks[grid](p, q, lams, masses, N=num_drafts, **chunks)
    rejection.accept_block[(batch,)](p, q, drafts, coins, uniforms, verified, masses, **sizes)
    return verified


def without_replacement(
    logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    depth: int,
    accept_uniforms: Tensor,
    sample_uniforms: Tensor,
) -> Verified:
    p, q = read_in_chunks(logits, draft_logits)
    batch, num_nodes = tokens.shape
    num_parents = draft_logits.shape[1]
    verified, chunks = _empty(tokens, depth), chunk_sizes(logits.shape[-1])
    children = tokens.new_empty(batch, num_parents, dtype=torch.int32)
    lams, masses = q.sums.new_empty(batch, num_parents), torch.empty_like(q.sums)
    coins, uniforms = accept_uniforms.contiguous(), sample_uniforms.contiguous()
    tree = tree_of(tokens, parents)
    rejection.try_children[(batch, num_parents)](
        p, q, tree, coins, children, lams, masses, N=num_nodes, NODES=_nodes(num_nodes), **chunks
    )
    rejection.descend[(batch,)](
        p, q, uniforms, verified, children, lams, masses, N=num_nodes, P=num_parents, DEPTH=depth, **chunks
    )
    return verified


def _empty(tokens: Tensor, depth: int) -> Verified:
    batch = len(tokens)
    return Verified(*(tokens.new_empty(size, dtype=torch.int64) for size in ((batch,), (batch, depth), (batch,))))


def _nodes(num_nodes: int) -> int:
    return triton.next_power_of_2(num_nodes + 1)


@triton.jit
def _find_winners(logits, maxima, winners, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store the likeliest token of a chunk, and its logit."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    largest, lane = tl.max(x, 0, return_indices=True)  # the first of equals
    tl.store(maxima + row * CHUNKS + chunk, largest)
    tl.store(winners + row * CHUNKS + chunk, chunk * CHUNK + lane)


@triton.jit(do_not_specialize=["N"])
def _greedy(
    maxima,
    winners,
    tree,
    out,
    N,
    V,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns, chunks = tl.arange(0, NODES), tl.arange(0, CHUNKS)
    starts = (row * (N + 1) + columns) * CHUNKS
    exists = (columns <= N)[:, None] & (chunks * CHUNK < V)
    _, winner = tl.max(
        tl.load(maxima + starts[:, None] + chunks, mask=exists, other=float("-inf")), 1, return_indices=True
    )
    targets = tl.load(winners + starts + winner, mask=columns <= N, other=0)
    _walk_down(targets, tree, out, row, N, NODES, DEPTH)


@triton.jit(do_not_specialize=["N"])
def _walk(targets, tree, out, N, NODES: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, NODES)
    targets = tl.load(targets + row * (N + 1) + columns, mask=columns <= N, other=0)
    _walk_down(targets.to(tl.int32), tree, out, row, N, NODES, DEPTH)


@triton.jit
def _walk_down(targets, tree, out, row, N, NODES: tl.constexpr, DEPTH: tl.constexpr):
    columns, token, parent = load_tree(tree, row, N, NODES)
    column = 0
    num_accepted = 0
    for level in range(DEPTH):
        target = tl.sum(tl.where(columns == column, targets, 0), 0)
        child = tl.min(tl.where((parent == column) & (token == target), columns, NODES), 0)
        num_accepted += (child < NODES).to(tl.int32)
        column = tl.where(child < NODES, child, column)
        tl.store(out.path + row * DEPTH + level, column)
    tl.store(out.num_accepted + row, num_accepted)
    tl.store(out.next_token + row, tl.sum(tl.where(columns == column, targets, 0), 0))


@triton.jit(do_not_specialize=["N"])
def _typical(
    p,
    tree,
    out,
    epsilon,
    delta,
    N,
    V,
    NODES: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns, token, parent = load_tree(tree, row, N, NODES)
    above, parent = (row * (N + 1) + parent)[:, None], tl.maximum(parent, 0)
    drawn, chunks = (token >= 0)[:, None], tl.arange(0, CHUNKS)
    distribution, weights = load_distribution(p, above, tl.where(drawn, V, 0), CHUNK, CHUNKS)
    start, largest, total = distribution  # that each node was drawn from, [NODES, 1]
    means = tl.load(p.means + above * CHUNKS + chunks, mask=drawn & (chunks * CHUNK < V), other=0.0)
    log_total = largest + tl.log(total)
    entropy = log_total - tl.sum(weights * means, 1, keep_dims=True) / total
    log_p = tl.load(start + token[:, None], mask=drawn, other=float("-inf")) - log_total
    plausible = tl.exp(log_p) > tl.minimum(epsilon, delta * tl.exp(-entropy))

    stands = tl.sum((plausible & drawn).to(tl.int32), 1) | (columns == 0).to(tl.int32)  # [NODES]
    log_p = tl.where(columns == 0, 0.0, tl.sum(log_p, 1))
    all_stand, log_likelihood, length, ancestor = stands, log_p, (columns > 0).to(tl.int32), parent
    for _ in range(DEPTH):
        all_stand = all_stand & tl.gather(stands, ancestor, 0)
        log_likelihood += tl.gather(log_p, ancestor, 0)
        length += (ancestor > 0).to(tl.int32)
        ancestor = tl.gather(parent, ancestor, 0)
    num_accepted = tl.max(length * all_stand, 0)
    log_likelihood = tl.where((length == num_accepted) & (all_stand > 0), log_likelihood, float("-inf"))
    best = tl.min(tl.where(log_likelihood == tl.max(log_likelihood, 0), columns, NODES), 0)
    _store_line(out, row, best, num_accepted, columns, parent, DEPTH)
    tl.store(out.next_token + row, _likeliest(p, row * (N + 1) + best, V, CHUNK, CHUNKS))


@triton.jit
def _store_line(out, row, column, num_accepted, columns, parent, DEPTH: tl.constexpr):
    """Store the path that ends in `column`, and behind it the root, which is its own parent."""
    tl.store(out.num_accepted + row, num_accepted)
    for i in range(DEPTH):
        tl.store(out.path + row * DEPTH + (num_accepted - 1 - i + DEPTH) % DEPTH, column)
        column = tl.sum(tl.where(columns == column, parent, 0), 0)


@triton.jit
def _likeliest(p, row, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the likeliest token of a row of logits, of equal ones the first."""
    chunks = tl.arange(0, CHUNKS)
    in_chunk = tl.load(p.maxima + row * CHUNKS + chunks, mask=chunks * CHUNK < V, other=float("-inf"))
    chunk = tl.argmax(in_chunk, 0)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    return chunk * CHUNK + tl.argmax(tl.load(p.logits + row * V + ids, mask=ids < V, other=float("-inf")), 0)
