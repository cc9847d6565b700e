"""The chosen experts of a few tokens in two launches, in Triton.

Such a pass takes as long as the weights of its experts take to be read. Each pair of a token and an expert that it
chose has programs of its own; tokens that share an expert find its weights in the cache of the GPU.
`layer_steps.experts` is the plain twin.

Gates and ups are rounded to the tensors' dtype before their product, and so is an expert's output before its weight, as
separate operations round them. A token's result does not depend on the tokens beside it.

Shapes: N tokens, K experts of each, E experts in all, H hidden width, I width inside an expert.
"""

import triton
import triton.language as tl
from torch import Tensor

MOST_PAIRS = 64  # of a token and an expert; of more, all tokens of an expert are multiplied at once
TILE, DEPTH = 8, 512  # outputs of a program, and inputs that it reads at a time


def add_experts(x: Tensor, normed: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, shares: Tensor) -> None:
    """Add to x [N, H] what the experts `ids` [N, K] make of the normed x, each by its share [N, K].

    gate_up [E, 2 * I, H] has the gates before the ups; down [E, H, I].
    """
    (num_tokens, width), num_chosen, inner_width = x.shape, ids.shape[1], down.shape[2]
    assert gate_up.shape[1:] == (2 * inner_width, width)
    assert all(tensor.is_contiguous() for tensor in (x, normed, gate_up, down, ids, shares))
    inner = x.new_empty(num_tokens * num_chosen, inner_width)
    gate_experts_kernel[(len(inner), triton.cdiv(inner_width, TILE))](
        normed, gate_up, ids, inner, K=num_chosen, H=width, INNER=inner_width, TILE=TILE, DEPTH=DEPTH, num_warps=4
    )
    add_experts_kernel[(num_tokens, triton.cdiv(width, TILE))](
        inner, down, ids, shares, x, K=num_chosen, H=width, INNER=inner_width, TILE=TILE, DEPTH=DEPTH, num_warps=4
    )


@triton.jit
def gate_experts_kernel(
    normed,
    gate_up,
    ids,
    inner,
    K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """TILE inner values of one pair: silu(gate) * up."""
    pair = tl.program_id(0)
    expert = tl.load(ids + pair).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, rows = normed + pair // K * H, gate_up + expert * 2 * INNER * H
    gate = dot_rows(row, rows, i, i < INNER, H, TILE, DEPTH).to(inner.dtype.element_ty).to(tl.float32)
    up = dot_rows(row, rows + INNER * H, i, i < INNER, H, TILE, DEPTH).to(inner.dtype.element_ty).to(tl.float32)
    tl.store(inner + pair * INNER + i, (gate * tl.sigmoid(gate) * up).to(inner.dtype.element_ty), mask=i < INNER)


@triton.jit
def add_experts_kernel(
    inner,
    down,
    ids,
    shares,
    x,
    K: tl.constexpr,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """TILE outputs of one token: the sum over its experts, by their shares, and what is in x."""
    n = tl.program_id(0)
    h = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.load(x + n * H + h, mask=h < H, other=0.0).to(tl.float32)
    for k in range(K):
        pair = n * K + k
        expert = tl.load(ids + pair).to(tl.int64)
        output = dot_rows(inner + pair * INNER, down + expert * H * INNER, h, h < H, INNER, TILE, DEPTH)
        total += output.to(x.dtype.element_ty).to(tl.float32) * tl.load(shares + pair).to(tl.float32)
    tl.store(x + n * H + h, total.to(x.dtype.element_ty), mask=h < H)


@triton.jit
def dot_rows(row, rows, o, kept, WIDTH: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr):
    """Return the products of a row [WIDTH] with the rows `o` [TILE] of a matrix [.., WIDTH], fp32 [TILE]."""
    total = tl.zeros((TILE, DEPTH), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        j = start + tl.arange(0, DEPTH)
        values = tl.load(row + j, mask=j < WIDTH, other=0.0).to(tl.float32)
        held = kept[:, None] & (j < WIDTH)[None, :]
        weights = tl.load(rows + o[:, None] * WIDTH + j[None, :], mask=held, other=0.0).to(tl.float32)
        total += weights * values[None, :]
    return tl.sum(total, 1)
