"""A matrix product for 1 to 8 rows with all that stands around it in a layer, in one launch, in Triton.

Such a product takes as long as its weights take to be read. They are read once, by programs that each have some outputs
and a piece of the sum (split K). `layer_steps.product` is its plain twin.

A value is rounded to the tensors' dtype where the separate operations of a GPU round it: the normed rows before the
product, gate and up before their own product, and what is stored. A residual and a bias are added in fp32 to the
unrounded product, as cuBLAS does. A row's result does not depend on the rows beside it, nor on their number.

Shapes: N <= ROWS rows, H inputs, O outputs of the weight, S splits. A program has TILE outputs and reads DEPTH inputs
at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.fused.layer_steps import Ending
from draftsmith.models.kernels import NUM_COUNTERS, counters
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.slots.splitting import is_last, num_multiprocessors

MOST_ROWS = 8
ROWS = tl.constexpr(MOST_ROWS)  # of a tile, the narrow side of a tensor core's smallest product
TILE = 64
CHUNK = tl.constexpr(1024)  # inputs that the norm reads at a time


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm: DecodingNorm | None = None,
    bias: Tensor | None = None,
    ending: Ending = "write",
    splits: int | None = None,
) -> None:
    """Do what `layer_steps.product` does for x [N, H] of at most 8 rows and weight [H, O]; all in one dtype.

    x and `out` are dense along their last dimension. `splits`: by default as many as fill the GPU.
    """
    (num_rows, width), outputs = x.shape, weight.shape[1]
    assert num_rows <= MOST_ROWS
    assert weight.shape[0] == width
    assert out.shape == (num_rows, outputs // 2 if ending == "gate" else outputs)
    assert x.dtype == weight.dtype == out.dtype
    assert x.stride(1) == out.stride(1) == 1
    assert norm is None or norm.weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    assert weight.numel() < 2**31
    depth, stages = (32, 2) if x.dtype == torch.float32 else (128, 3)
    tiles = triton.cdiv(outputs, TILE)
    if splits is None:
        splits = num_splits(tiles, triton.cdiv(width, depth), x.device)
    assert splits == 1 or tiles <= NUM_COUNTERS
    parts = x.new_empty(splits, num_rows, outputs, dtype=torch.float32) if splits > 1 else None
    product_kernel[(tiles, splits)](
        x,
        weight,
        None if norm is None else norm.weight,
        bias,
        out,
        parts,
        counters(x.device) if splits > 1 else None,
        0.0 if norm is None else norm.eps,
        num_rows,
        outputs,
        x.stride(0),
        out.stride(0),
        *weight.stride(),
        WIDTH=width,
        ENDING=ending,
        TILE=TILE,
        DEPTH=depth,
        S=splits,
        num_warps=4,
        num_stages=stages,
    )


def num_splits(tiles: int, blocks: int, device: torch.device) -> int:
    """Return the number of programs that share the inputs of a tile: in all four a multiprocessor, of 4 blocks each.

    It does not depend on the number of rows, of which each then has the same result among any others.
    """
    return max(1, min(4 * num_multiprocessors(device) // tiles, blocks // 4))


@triton.jit(do_not_specialize=["num_rows", "eps"])  # one program for all numbers of rows
def product_kernel(
    x,
    weight,
    norm,  # [H] or None
    bias,  # [O] or None
    out,
    parts,  # [S, N, O] fp32, sums over the inputs of each split; None for one split
    counters,  # one for each tile of outputs; None for one split
    eps,
    num_rows,
    outputs,
    x_n,
    out_n,
    weight_h,
    weight_o,
    WIDTH: tl.constexpr,
    ENDING: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    S: tl.constexpr,
):
    """TILE outputs of all rows, from the inputs of one split. With a gate, even outputs are gates and odd ones ups."""
    split = tl.program_id(1)
    n = tl.arange(0, ROWS)
    o = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = o // 2 + o % 2 * (outputs // 2) if ENDING == "gate" else o
    real, kept = n < num_rows, o < outputs
    if norm is not None:
        scales = row_scales(x, n, real, x_n, eps, WIDTH)

    share: tl.constexpr = tl.cdiv(tl.cdiv(WIDTH, DEPTH), S) * DEPTH
    total = tl.zeros((TILE, ROWS), tl.float32)
    for start in range(split * share, tl.minimum(split * share + share, WIDTH), DEPTH):
        h = start + tl.arange(0, DEPTH)
        inside = h < WIDTH
        weights = tl.load(
            weight + column[:, None] * weight_o + h[None, :] * weight_h,
            mask=kept[:, None] & inside[None, :],
            other=0.0,
        )
        rows = tl.load(x + n[None, :] * x_n + h[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        if norm is not None:
            factors = tl.load(norm + h, mask=inside, other=0.0).to(tl.float32)
            rows = (rows.to(tl.float32) * scales[None, :] * factors[:, None]).to(weights.dtype)
        total = tl.dot(weights, rows, total, input_precision="ieee")

    if S == 1:
        store(total, bias, out, out_n, column, o, n, num_rows, outputs, ENDING, TILE)
    else:
        held = kept[:, None] & real[None, :]
        part = parts + n[None, :] * outputs + o[:, None]
        tl.store(part + split * num_rows * outputs, total, mask=held)
        if is_last(counters + tl.program_id(0), S):
            total = tl.zeros((TILE, ROWS), tl.float32)
            for s in tl.static_range(S):
                total += tl.load(part + s * num_rows * outputs, mask=held, other=0.0, cache_modifier=".cg")
            store(total, bias, out, out_n, column, o, n, num_rows, outputs, ENDING, TILE)


@triton.jit
def row_scales(x, n, real, x_n, eps, WIDTH: tl.constexpr):
    """Return one over the root mean square of each row, fp32 [ROWS]."""
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for start in tl.static_range(0, WIDTH, CHUNK):
        h = start + tl.arange(0, CHUNK)[None, :]
        values = tl.load(x + n[:, None] * x_n + h, mask=real[:, None] & (h < WIDTH), other=0.0).to(tl.float32)
        squares += values * values
    return tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)


@triton.jit
def store(total, bias, out, out_n, column, o, n, num_rows, outputs, ENDING: tl.constexpr, TILE: tl.constexpr):
    """Finish the product of a tile, fp32 [TILE, ROWS], and store it."""
    dtype = out.dtype.element_ty
    if bias is not None:
        total += tl.load(bias + column, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
    if ENDING == "gate":
        pairs = tl.permute(tl.reshape(total.to(dtype), (TILE // 2, 2, ROWS)), (0, 2, 1))
        gate, up = tl.split(pairs)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        total = gate * tl.sigmoid(gate) * up
        o = tl.program_id(0) * (TILE // 2) + tl.arange(0, TILE // 2)
        outputs = outputs // 2
    place = out + n[None, :] * out_n + o[:, None]
    held = (o < outputs)[:, None] & (n < num_rows)[None, :]
    if ENDING == "add":
        total += tl.load(place, mask=held, other=0.0).to(tl.float32)
    tl.store(place, total.to(dtype), mask=held)
