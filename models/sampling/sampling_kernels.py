"""Triton kernels of `sampling`: keyed noise, and drawing tokens from logits without a softmax in memory.

A row of logits is read in chunks by many programs, so that a single row too keeps a whole GPU busy. Kept of a chunk is
what it adds to the softmax: its largest logit, and its sum relative to that. Probabilities are made anew where needed.

Shapes: R rows of logits (B * T columns of a window), V vocabulary; a row is CHUNKS chunks (a power of 2, of which the
last may be empty and are then never written) of CHUNK logits. Tensors lie on one CUDA device, or in Triton's
interpreter on the CPU. No launch waits for the device.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.sampling.sampling import Stream

CHUNK = 4096  # logits that one program reads: 32 programs for a vocabulary of 128k
NUM_WARPS = 8


class Chunked(NamedTuple):
    """Cut logits, and of every chunk what it adds to the softmax of its row."""

    logits: Tensor  # [..., V] fp32, contiguous
    maxima: Tensor  # [R, CHUNKS] fp32
    sums: Tensor  # [R, CHUNKS] fp64, of exp(logit - maximum)
    means: Tensor | None  # [R, CHUNKS] fp64, of the logits under the chunk's own softmax; for entropies


def chunk_sizes(vocabulary: int) -> dict[str, int]:
    """Return how rows are cut into chunks, by the kernels' names for it."""
    num_chunks = triton.next_power_of_2(triton.cdiv(vocabulary, CHUNK))
    return {"V": vocabulary, "CHUNK": CHUNK, "CHUNKS": num_chunks, "num_warps": NUM_WARPS}


def read_in_chunks(logits: Tensor, draft_logits: Tensor | None = None, with_means: bool = False) -> list[Chunked]:
    """Read all logits [..., V], and those of the drafter if there are any, once and in one launch."""
    vocabulary = logits.shape[-1]
    sizes = chunk_sizes(vocabulary)
    rows = []
    for tensor in (logits,) if draft_logits is None else (logits, draft_logits):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        sums = torch.empty(tensor.numel() // vocabulary, sizes["CHUNKS"], dtype=torch.float64, device=tensor.device)
        means = torch.empty_like(sums) if with_means else None
        rows.append(Chunked(tensor, torch.empty_like(sums, dtype=torch.float32), sums, means))
    num_rows = [len(side.sums) for side in rows]
    grid = (sum(num_rows), triton.cdiv(vocabulary, CHUNK))
    _read_in_chunks[grid](rows[0], rows[-1], num_rows[0], **sizes)
    return rows


def sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Return what `sampling.sample` draws from the softmax of cut logits [..., V] at uniforms [...]: ids [...]."""
    rows = logits.reshape(-1, 1, logits.shape[-1])
    return sample_columns(rows, None, 0, uniforms.reshape(-1, 1)).reshape(uniforms.shape)


def sample_columns(logits: Tensor, parents: Tensor | None, depth: int, uniforms: Tensor) -> Tensor:
    """Return a token [B, T] after every column of a window, from logits [B, T, V].

    parents [B, N] of the nodes, None for chains; uniforms [B, depth + 1], one a depth: columns of one depth share it.
    """
    (p,) = read_in_chunks(logits)
    drawn = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    sizes = chunk_sizes(logits.shape[-1])
    _sample_columns[drawn.shape](
        p, parents, 0 if parents is None else parents.stride(0), uniforms.contiguous(), drawn, DEPTH=depth, **sizes
    )
    return drawn


def uniforms(keys: Tensor, positions: Tensor, stream: Stream, branch: Tensor | int = 0) -> Tensor:
    """Return `Noise.uniforms` of rows with `keys` [B] at positions [B, T], bit for bit, in one launch: fp64 [B, T]."""
    shape = torch.broadcast_shapes(positions.shape, branch.shape if isinstance(branch, Tensor) else ())
    out = torch.empty(shape, dtype=torch.float64, device=positions.device)
    branches, salt = (branch, int(stream)) if isinstance(branch, Tensor) else (None, branch * len(Stream) + stream)
    block = 128
    _uniforms[(triton.cdiv(shape[1], block), shape[0])](
        keys, positions.contiguous(), branches, salt, out, positions.shape[1], shape[1], len(Stream), BLOCK=block
    )
    return out


@triton.jit(do_not_specialize=["num_target_rows"])
def _read_in_chunks(p, q, num_target_rows, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # int64: R * V may pass 2^31
    if row < num_target_rows:
        _read_chunk(p, row, chunk, V, CHUNK, CHUNKS)
    else:
        _read_chunk(q, row - num_target_rows, chunk, V, CHUNK, CHUNKS)


@triton.jit
def _read_chunk(rows, row, chunk, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(rows.logits + row * V + ids, mask=ids < V, other=float("-inf"))
    summarise_chunk(rows, row, chunk, x, CHUNKS)


@triton.jit
def summarise_chunk(rows, row, chunk, x, CHUNKS: tl.constexpr):
    """Store what the logits x of a chunk add to the softmax of their row."""
    largest = tl.max(x, 0)
    weights = tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)).to(tl.float64)
    total = tl.sum(weights, 0)
    tl.store(rows.maxima + row * CHUNKS + chunk, largest)
    tl.store(rows.sums + row * CHUNKS + chunk, total)
    if rows.means is not None:
        mean = tl.sum(weights * tl.where(weights > 0, x, 0.0), 0) / tl.maximum(total, 1.0)
        tl.store(rows.means + row * CHUNKS + chunk, mean)


@triton.jit
def load_distribution(rows, row, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the distribution of a row, or of rows [R, 1], and the weights of its chunks up to a factor.

    A distribution, as `probabilities` takes it, is the address of the logits, the largest logit, and the sum of
    exp(logit - largest). A row that does not exist has V = 0. Its probabilities are 0, as are those of a row that is
    -inf everywhere: the sum, which is at least 1 in every other row, is set to 1 there.
    """
    chunks = tl.arange(0, CHUNKS)
    exists = chunks * CHUNK < V
    maxima = tl.load(rows.maxima + row * CHUNKS + chunks, mask=exists, other=float("-inf"))
    largest = tl.max(maxima, -1, keep_dims=True)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.load(rows.sums + row * CHUNKS + chunks, mask=exists, other=0.0) * tl.exp(maxima - largest)
    total = tl.maximum(tl.sum(weights, -1, keep_dims=True), 1.0)
    return (rows.logits + row * V, largest, total), weights


@triton.jit
def probabilities(distribution, ids, mask):
    """Return the probabilities of the tokens `ids`: fp32, 0 outside the mask."""
    start, largest, total = distribution
    return tl.exp(tl.load(start + ids, mask=mask, other=float("-inf")) - largest) / total.to(tl.float32)


@triton.jit
def pick(weights, uniform):
    """Return the lane where the cumulative weight reaches `uniform` of the whole, and how far into its weight that is.

    A weight of 0 is never picked, unless all are: then lane 0.
    """
    lanes = tl.arange(0, weights.shape[0])
    weights = weights.to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    threshold = uniform * tl.max(cumulative, 0)
    last = tl.max(tl.where(weights > 0, lanes, 0), 0)  # rounding cannot push past it
    lane = tl.min(tl.where((cumulative >= threshold) & (weights > 0), lanes, last), 0)
    weight = tl.sum(tl.where(lanes == lane, weights, 0.0), 0)
    before = tl.sum(tl.where(lanes < lane, weights, 0.0), 0)
    return lane, (threshold - before) / weight


@triton.jit(do_not_specialize=["parents_row"])
def _sample_columns(
    p, parents, parents_row, uniforms, drawn, V, DEPTH: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    batch_row, column = tl.program_id(0), tl.program_id(1)
    depth = column
    if parents is not None:
        depth = 0
        ancestor = column
        for _ in range(DEPTH):
            depth += (ancestor > 0).to(tl.int32)
            parent = tl.load(parents + batch_row * parents_row + ancestor - 1, mask=ancestor > 0, other=-1)
            ancestor = parent.to(tl.int32) + 1
    uniform = tl.load(uniforms + batch_row * (DEPTH + 1) + depth).to(tl.float64)

    row = batch_row.to(tl.int64) * tl.num_programs(1) + column
    tl.store(drawn + row, pick_from(p, row, uniform, V, CHUNK, CHUNKS))


@triton.jit
def pick_from(p, row, uniform, V, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the token of a row that `uniform` draws."""
    distribution, weights = load_distribution(p, row, V, CHUNK, CHUNKS)
    chunk, rest = pick(weights, uniform)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    lane, _ = pick(probabilities(distribution, ids, ids < V), rest)
    return chunk * CHUNK + lane


@triton.jit(do_not_specialize=["salt", "num_positions", "T", "num_streams"])
def _uniforms(keys, positions, branches, salt, out, num_positions, T, num_streams, BLOCK: tl.constexpr):
    columns, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = columns < T
    position = tl.load(positions + row * num_positions + columns % num_positions, mask=inside, other=0)
    if branches is not None:
        salt += tl.load(branches + columns, mask=inside, other=0) * num_streams
    tl.store(out + row * T + columns, keyed_uniform(tl.load(keys + row), position, salt), mask=inside)


@triton.jit
def keyed_uniform(key, position, salt):
    """Return the uniform number of a key, a position and a salt, which is of a stream and a branch."""
    bits = _mix((key + position).to(tl.uint64, bitcast=True)) + salt.to(tl.int64).to(tl.uint64, bitcast=True)
    return ((_mix(bits) & ((1 << 52) - 1)).to(tl.float64) + 0.5) / (1 << 52)


@triton.jit
def _mix(x):
    """`sampling._mix` on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
