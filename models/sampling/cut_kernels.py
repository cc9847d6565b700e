"""Triton kernels of `sampling.cut`, and of a draw from what it leaves; the twins of the same names stand in `sampling`.

Nothing is sorted. A cut keeps the logits above an edge, and of those at the edge the first so many. Chunks of a row
are read by many programs, then one program finds the edge: it gathers the few logits that can be above it, and bisects
on their values. All arithmetic is in fp32, sums of probabilities in fp64.

Shapes: R rows of logits, V vocabulary, CHUNKS chunks of CHUNK logits a row as in `sampling_kernels`, GROUPS groups a
chunk, of which the largest logits are known.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.sampling.sampling import Noise, Sampling, Stream
from draftsmith.models.sampling.sampling_kernels import (
    Chunked,
    chunk_sizes,
    keyed_uniform,
    load_distribution,
    pick_from,
    summarise_chunk,
)

GROUPS = 32
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite fp32
BLOCK = 2048  # candidates that are looked at together


class Edges(NamedTuple):
    """Edges at which rows are cut: what is above an edge stays, and of what is at it the ids up to the last one."""

    edges: Tensor  # [R] fp32
    last_ids: Tensor  # [R] int32


def cut(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return `sampling.cut` of logits [..., V] in fp32, fp16 or bf16."""
    return cut_in_chunks(logits, sampling).logits


def draw(
    logits: Tensor, sampling: Sampling, noise: Noise, positions: Tensor, stream: Stream, branch: int, out: Tensor
) -> Tensor:
    """Do what `sampling.draw` does: in four launches with top-k or top-p, else in two."""
    p = cut_in_chunks(logits, sampling)
    sizes = chunk_sizes(logits.shape[-1])
    salt = branch * len(Stream) + int(stream)
    _draw[out.shape](p, noise.keys, positions.contiguous(), salt, out, out.stride(0), **sizes)
    return p.logits


def cut_in_chunks(logits: Tensor, sampling: Sampling) -> Chunked:
    """Return `sampling.cut` of logits [..., V], and of every chunk what it adds to the softmax of its row."""
    assert not sampling.greedy, "greedy decoding takes the argmax"
    logits = logits.contiguous()
    sizes = chunk_sizes(logits.shape[-1])
    num_rows, num_chunks = logits.numel() // sizes["V"], triton.cdiv(sizes["V"], sizes["CHUNK"])
    edges = None
    if sampling.top_k or sampling.top_p < 1:
        edges = _find_edges(logits.view(num_rows, -1), sampling)
    kept = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    maxima = kept.new_empty(num_rows, sizes["CHUNKS"])
    out = Chunked(kept, maxima, torch.empty_like(maxima, dtype=torch.float64), None)
    _cut_chunk[(num_rows, num_chunks)](logits, sampling.temperature, edges, out, **sizes)
    return out


def _find_edges(logits: Tensor, sampling: Sampling) -> Edges:
    """Return the edges of rows [R, V], in two launches."""
    num_rows, vocabulary = logits.shape
    sizes = chunk_sizes(vocabulary)
    num_groups = min(GROUPS, sizes["CHUNK"])
    groups = torch.empty(num_rows, sizes["CHUNKS"], num_groups, dtype=torch.float32, device=logits.device)
    maxima = torch.empty_like(groups[:, :, 0])
    rows = Chunked(logits, maxima, torch.empty_like(maxima, dtype=torch.float64), None)
    grid = num_rows, triton.cdiv(vocabulary, sizes["CHUNK"])
    _read_groups[grid](rows, sampling.temperature, groups, GROUPS=num_groups, **sizes)
    candidates = torch.empty_like(logits, dtype=torch.float32)
    ids = torch.empty_like(logits, dtype=torch.int32)
    edges = Edges(groups.new_empty(num_rows), ids.new_empty(num_rows))
    _find_edge[(num_rows,)](
        rows,
        sampling.temperature,
        groups,
        candidates,
        ids,
        edges,
        min(sampling.top_k, vocabulary),
        GROUPS=num_groups,
        TOP_P=sampling.top_p,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
        **sizes,
    )
    return edges


@triton.jit
def _load_scaled(logits, row, ids, temperature, V):
    x = tl.load(logits + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature)


@triton.jit(do_not_specialize=["temperature"])
def _cut_chunk(logits, temperature, edges, out, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Store a chunk without what is cut, and what is left of its softmax; edges of None cut nothing."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load_scaled(logits, row, ids, temperature, V)
    if edges is not None:
        edge, last = tl.load(edges.edges + row), tl.load(edges.last_ids + row)
        x = tl.where((x > edge) | ((x == edge) & (ids <= last)), x, float("-inf"))
    tl.store(out.logits + row * V + ids, x, mask=ids < V)
    summarise_chunk(out, row, chunk, x, CHUNKS)


@triton.jit(do_not_specialize=["temperature"])
def _read_groups(rows, temperature, groups, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr):
    """Store what a chunk adds to the softmax of its row, and the largest logit of each of its groups."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = _load_scaled(rows.logits, row, chunk * CHUNK + tl.arange(0, CHUNK), temperature, V)
    summarise_chunk(rows, row, chunk, x, CHUNKS)
    largest = tl.max(tl.reshape(x, (GROUPS, CHUNK // GROUPS)), 1)
    tl.store(groups + (row * CHUNKS + chunk) * GROUPS + tl.arange(0, GROUPS), largest)


@triton.jit(do_not_specialize=["temperature", "top_k"])
def _find_edge(
    rows,
    temperature,
    groups,
    candidates,
    candidate_ids,
    edges,
    top_k,  # 0: all
    V,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find where one row is cut.

    The k largest groups hold k logits that are not below the largest of the k-th, so the k-th logit is not either.
    Probabilities below (1 - top_p) / V sum to less than 1 - top_p: all of them can be left out.
    """
    row = tl.program_id(0).to(tl.int64)
    distribution, weights = load_distribution(rows, row, V, CHUNK, CHUNKS)
    largest, total = tl.max(distribution[1], 0), tl.max(distribution[2], 0)
    above = total
    top_p = tl.full((), TOP_P, tl.float64)
    edge = tl.full((), LOWEST, tl.float32)
    num_groups = tl.cdiv(V, CHUNK) * GROUPS
    if CHUNKS > 1 and (top_k > 0) & (top_k <= num_groups):
        edge = _edge(groups + row * CHUNKS * GROUPS, num_groups, None, top_k.to(tl.float64), edge, largest, BLOCK)
    if TOP_P < 1:
        least = largest + tl.log((1 - top_p) * total / V).to(tl.float32)
        edge = tl.maximum(edge, tl.maximum(least - 0.01, LOWEST))  # less than rounding can matter

    candidates += row * V
    candidate_ids += row * V
    count = tl.full((), 0, tl.int32)
    for start in range(0, V, BLOCK):  # gathered in the order of their ids
        ids = start + tl.arange(0, BLOCK)
        x = _load_scaled(rows.logits, row, ids, temperature, V)
        taken = (x >= edge).to(tl.int32)
        place = count + tl.cumsum(taken, 0) - 1
        tl.store(candidates + place, x, mask=taken > 0)
        tl.store(candidate_ids + place, ids, mask=taken > 0)
        count += tl.sum(taken, 0)
    tl.debug_barrier()  # they are read by other threads

    last = V
    if top_k > 0:
        edge = _edge(candidates, count, None, top_k.to(tl.float64), edge, largest, BLOCK)
        above, total = _weigh(candidates, count, largest, edge, BLOCK)
    if TOP_P < 1:
        edge = _edge(candidates, count, largest, top_p * total, edge, largest, BLOCK)
        above, from_edge = _weigh(candidates, count, largest, edge, BLOCK)
        weight = tl.maximum(tl.exp(edge - largest).to(tl.float64), 1e-60)
        num_kept = tl.minimum(tl.ceil((top_p * total - above) / weight), count.to(tl.float64)).to(tl.int32)
        last = _id_of(candidates, candidate_ids, count, edge, num_kept, BLOCK)
    tl.store(edges.edges + row, edge)
    tl.store(edges.last_ids + row, last)


@triton.jit
def _edge(values, count, largest, wanted, low, high, BLOCK: tl.constexpr):
    """Return the largest of the values whose weight, with all above it, reaches `wanted`; if none does, `low`.

    A weight is 1, or where the `largest` value is given exp(value - largest). All lies between the values low and high.
    The order of fp32 numbers is that of their bits, so that 32 halvings are enough; each goes on to the next value.
    """
    low_key, high_key = _key(low), _key(high)
    while low_key < high_key:
        middle = low_key + (high_key - low_key + 1) // 2
        bound = _value(middle)
        reached = tl.full((), 0.0, tl.float64)
        least, most = tl.full((), float("inf"), tl.float32), tl.full((), LOWEST, tl.float32)
        for start in range(0, count, BLOCK):
            x = _candidates(values, start, count, BLOCK)
            reached += _weight(x, x >= bound, largest)
            least = tl.minimum(least, tl.min(tl.where(x >= bound, x, float("inf")), 0))
            most = tl.maximum(most, tl.max(tl.where(x < bound, x, LOWEST), 0))
        if reached >= wanted:
            low_key = tl.minimum(tl.maximum(_key(least), middle), high_key)
        else:
            high_key = tl.maximum(tl.minimum(_key(most), middle - 1), low_key)
    return _value(low_key)


@triton.jit
def _weigh(values, count, largest, edge, BLOCK: tl.constexpr):
    """Return the sums of exp(value - largest) of the values above the edge, and of those from the edge on."""
    above = tl.full((), 0.0, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, BLOCK):
        x = _candidates(values, start, count, BLOCK)
        above += _weight(x, x > edge, largest)
        total += _weight(x, x >= edge, largest)
    return above, total


@triton.jit
def _candidates(values, start, count, BLOCK: tl.constexpr):
    i = start + tl.arange(0, BLOCK)
    return tl.load(values + i, mask=i < count, other=float("-inf"))


@triton.jit
def _weight(x, counted, largest):
    """Return the weight of those of x that are counted: their number, or the sum of exp(x - largest)."""
    weights = tl.where(counted, 1.0, 0.0) if largest is None else tl.where(counted, tl.exp(x - largest), 0.0)
    return tl.sum(weights.to(tl.float64), 0)


@triton.jit
def _id_of(values, ids, count, edge, number, BLOCK: tl.constexpr):
    """Return the id of the number-th of the values at the edge, or of the last."""
    before = 0
    last = 0
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at_edge = (_candidates(values, start, count, BLOCK) == edge).to(tl.int32)
        kept = (at_edge > 0) & (before + tl.cumsum(at_edge, 0) <= number)
        last = tl.maximum(last, tl.max(tl.where(kept, tl.load(ids + i, mask=kept, other=0), 0), 0))
        before += tl.sum(at_edge, 0)
    return last


@triton.jit
def _key(value):
    """Return the place of a finite fp32 number among all of them, int64; those of -0.0 and 0.0 are neighbours."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    """Return the fp32 number at a place."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["salt", "out_row"])
def _draw(p, keys, positions, salt, out, out_row, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    uniform = keyed_uniform(tl.load(keys + row), tl.load(positions + row), salt)
    tl.store(out + row * out_row, pick_from(p, row, uniform, V, CHUNK, CHUNKS))
