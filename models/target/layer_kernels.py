"""The steps of a fused layer in Triton, one launch each; the twins of the same names stand in `layer_steps`.

All arithmetic is in fp32; tensors are fp32, fp16 or bf16. Shapes: N new tokens, Hq query heads, Hkv key-value heads,
D head width, I width inside the MLP, M slots, R rows of a layer of the cache.
"""

import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.layers import DecodingNorm
from draftsmith.models.target.attention_kernel import attend as attend_slots
from draftsmith.models.target.slots import Window

HEADS = tl.constexpr(4)  # heads that a program rotates


def rms_norm(x: Tensor, norm: DecodingNorm, out: Tensor) -> None:
    assert x.ndim == 2
    assert x.stride(1) == out.stride(1) == norm.weight.stride(0) == 1
    num_tokens, width = x.shape
    block = triton.next_power_of_2(width)
    norm_kernel[(num_tokens,)](
        x, norm.weight, out, norm.eps, x.stride(0), out.stride(0), W=width, BLOCK=block, num_warps=num_warps(block)
    )


def num_warps(block: int) -> int:
    """Return the number of warps at which a thread has eight elements."""
    return min(32, max(1, block // 256))


@triton.jit
def norm_kernel(x, weight, out, eps, x_n, out_n, W: tl.constexpr, BLOCK: tl.constexpr):
    """Norm one token."""
    n = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    row = tl.load(x + n * x_n + i, mask=i < W, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / W + eps)
    weights = tl.load(weight + i, mask=i < W, other=0.0).to(tl.float32)
    tl.store(out + n * out_n + i, (row * scale * weights).to(out.dtype.element_ty), mask=i < W)


def rotate_and_store(
    heads: Tensor, stored: Tensor, cos: Tensor, sin: Tensor, norm: DecodingNorm | None, written: Tensor, flat: Tensor
) -> None:
    num_tokens, num_rotated, _, half = heads.shape
    num_stored = stored.shape[1] // (2 * half)  # 2 * Hkv
    assert heads.stride()[1:] == (2 * half, half, 1)
    assert num_tokens == 1 or heads.stride(0) == stored.stride(0)  # the stride of one token means nothing
    assert stored.stride(1) == 1
    assert stored.data_ptr() - heads.data_ptr() == (num_rotated - num_stored // 2) * 2 * half * heads.element_size()
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert written.is_contiguous()
    assert flat.is_contiguous()
    assert norm is None or norm.weight.is_contiguous()
    num_heads = num_rotated + num_stored // 2
    rotate_kernel[(num_tokens, triton.cdiv(num_heads, HEADS.value))](  # only the first axis takes more than 65,535
        heads,
        cos,
        sin,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        written,
        flat,
        stored.stride(0),
        num_rotated,
        num_stored,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
    )


@triton.jit
def rotate_kernel(
    qkv,  # [N, Hq + 2 * Hkv, 2, D / 2]
    cos,
    sin,
    weight,
    eps,
    written,
    flat,
    qkv_n,
    num_rotated,  # Hq + Hkv
    num_stored,  # 2 * Hkv
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate HEADS heads of one token: those of q change in place, those of k and v go to the cache."""
    n = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    place = head * 2 * HALF + i
    num_queries = num_rotated - num_stored // 2
    real = (head < num_queries + num_stored) & (i < HALF)
    rotated = (head < num_rotated) & (i < HALF)
    first = tl.load(qkv + n * qkv_n + place, mask=real, other=0.0).to(tl.float32)
    second = tl.load(qkv + n * qkv_n + place + HALF, mask=real, other=0.0).to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + eps)[:, None]
        scale = tl.where(rotated, scale, 1.0)
        first *= scale * tl.load(weight + place, mask=rotated, other=1.0).to(tl.float32)
        second *= scale * tl.load(weight + place + HALF, mask=rotated, other=1.0).to(tl.float32)
    c = tl.load(cos + n * HALF + i, mask=rotated, other=1.0)
    s = tl.load(sin + (2 * n + 1) * HALF + i, mask=rotated, other=0.0)
    turned_first = (first * c - second * s).to(qkv.dtype.element_ty)
    turned_second = (second * c + first * s).to(qkv.dtype.element_ty)

    query = real & (head < num_queries)
    tl.store(qkv + n * qkv_n + place, turned_first, mask=query)
    tl.store(qkv + n * qkv_n + place + HALF, turned_second, mask=query)
    kept = real & (head >= num_queries)
    slot = flat + tl.load(written + n) * num_stored * 2 * HALF + place - num_queries * 2 * HALF
    tl.store(slot, turned_first, mask=kept)
    tl.store(slot + HALF, turned_second, mask=kept)


def mask(window: Window, num_slots: int, reaches: set[int | None]) -> Tensor:
    return window.packed_mask()


def attend(query: Tensor, key: Tensor, value: Tensor, packed_mask: Tensor, scaling: float, reach: int | None) -> Tensor:
    return attend_slots(query, key, value, packed_mask, scaling, reach)


def silu_mul_(gate: Tensor, up: Tensor) -> Tensor:
    num_tokens, width = gate.shape
    assert gate.stride() == up.stride()
    assert gate.stride(1) == 1
    block = min(1024, triton.next_power_of_2(width))
    silu_kernel[(num_tokens, triton.cdiv(width, block))](gate, up, width, gate.stride(0), BLOCK=block)
    return gate


@triton.jit
def silu_kernel(gate, up, width, row, BLOCK: tl.constexpr):
    """Compute BLOCK elements of one token."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * row + i
    x = tl.load(gate + place, mask=i < width, other=0.0).to(tl.float32)
    y = tl.load(up + place, mask=i < width, other=0.0).to(tl.float32)
    tl.store(gate + place, (x * tl.sigmoid(x) * y).to(gate.dtype.element_ty), mask=i < width)
