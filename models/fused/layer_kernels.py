"""The steps of a fused layer in Triton; the twins of the same names stand in `layer_steps`.

Each is one launch, but a product of many rows, or of few where cuBLAS is faster (see `is_fused`). All arithmetic is in
fp32; tensors are fp32, fp16 or bf16. Shapes: N new tokens, H inputs and O outputs of a product, I width inside the MLP,
Hq query heads, Hkv key-value heads, D head width, M slots, R rows of a layer of the cache.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.errors import UserError
from draftsmith.models.fused import expert_kernels, layer_steps, product_kernel
from draftsmith.models.fused.expert_kernels import add_experts
from draftsmith.models.fused.layer_steps import Beside, Ending, Entry, multiply
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.slots.attention_kernel import attend as attend_slots
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Window

HEADS = tl.constexpr(4)  # heads that a program rotates
SWITCH = "DRAFTSMITH_PRODUCTS"  # this environment variable set to `fused` or `separate` chooses without measuring
CALLS = 32  # that a measurement times


class NormedBeside(NamedTuple):
    """`Beside`, as the kernel reads it."""

    hidden: Tensor  # [N, H]
    stride: int  # of a row of hidden
    weight: Tensor  # [2, H]
    eps: float


def enter(
    token_ids: Tensor,
    embedding: Tensor,
    window: Window,
    cache: SlotCache,
    reaches: set[int | None],
    beside: Beside | None = None,
) -> Entry:
    """Do what `layer_steps.enter` does, but with one packed mask: `attend` itself knows of sliding windows."""
    assert cache.angles is not None
    assert embedding.is_contiguous()
    num_words = 0 if window.ancestors is None else window.ancestors.shape[2]
    batch, length = token_ids.shape
    num_tokens, width, half = batch * length, embedding.shape[1], cache.angles.shape[2]
    x, block, pair = embedding.new_empty(num_tokens, width), min(1024, triton.next_power_of_2(width)), None
    if beside is not None:  # a program norms a whole row
        assert beside.hidden.stride(1) == 1
        assert beside.norm.weight.is_contiguous()
        x, block = embedding.new_empty(num_tokens, 2, width), triton.next_power_of_2(width)
        pair = NormedBeside(beside.hidden, beside.hidden.stride(0), beside.norm.weight, beside.norm.eps)
    mask = token_ids.new_empty(batch, 1, length, 3 + num_words, dtype=torch.int32)
    cos, sin = (cache.angles.new_empty(num_tokens, 1, signs, half) for signs in (1, 2))
    cache.written = token_ids.new_empty(num_tokens)
    enter_kernel[(num_tokens, triton.cdiv(width, block) if pair is None else 2)](
        token_ids,
        embedding,
        pair,
        cache.angles,
        window.slots,
        window.positions,
        window.prefix,
        None if window.ancestors is None else window.ancestors.contiguous(),
        cache.picked_rows,
        Entry(x, mask, cos, sin),
        cache.written,
        *token_ids.stride(),
        *window.slots.stride(),
        *window.positions.stride(),
        window.prefix.stride(0),
        length,
        cache.num_slots,
        len(cache.angles),
        num_words,
        W=width,
        HALF=half,
        BLOCK=block,
        HALF_BLOCK=triton.next_power_of_2(half),
        WORDS=triton.next_power_of_2(max(1, num_words)),
        num_warps=4 if pair is None else num_warps(block),
    )
    return Entry(x, mask, cos, sin)


@triton.jit
def enter_kernel(
    token_ids,
    embedding,
    beside,  # None where embeddings alone are read
    angles,
    slots,
    positions,
    prefix,
    ancestors,  # None for chains
    rows,  # None: the first ones
    entry,
    written,
    token_ids_b,
    token_ids_t,
    slots_b,
    slots_t,
    positions_b,
    positions_t,
    prefix_b,
    length,
    num_slots,
    num_angles,
    num_words,
    W: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Look up BLOCK values of one token's embedding; the first program of a token does all else.

    With something beside it the first program norms the embedding, and the second what is beside it.
    """
    n = tl.program_id(0).to(tl.int64)
    row, t = n // length, n % length
    embedded = embedding + tl.load(token_ids + row * token_ids_b + t * token_ids_t) * W
    if beside is None:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(entry.x + n * W + i, tl.load(embedded + i, mask=i < W), mask=i < W)
    elif tl.program_id(1) == 0:
        _norm_row(embedded, beside.weight, entry.x + n * 2 * W, beside.eps, W, BLOCK)
    else:
        other = beside.hidden + n * beside.stride
        _norm_row(other, beside.weight + W, entry.x + (n * 2 + 1) * W, beside.eps, W, BLOCK)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + row * slots_b + t * slots_t)
        position = tl.load(positions + row * positions_b + t * positions_t)
        mask = entry.mask + n * (3 + num_words)
        tl.store(mask, slot.to(tl.int32))
        tl.store(mask + 1, position.to(tl.int32))
        tl.store(mask + 2, tl.load(prefix + row * prefix_b).to(tl.int32))
        if ancestors is not None:
            word = tl.arange(0, WORDS)
            words = tl.load(ancestors + n * num_words + word, mask=word < num_words)
            tl.store(mask + 3 + word, words, mask=word < num_words)
        if rows is not None:
            row = tl.load(rows + row)
        tl.store(written + n, row * (num_slots + 1) + tl.minimum(slot, num_slots))

        j = tl.arange(0, HALF_BLOCK)
        angle = angles + tl.minimum(position, num_angles - 1) * (2 * HALF) + j
        cos = tl.load(angle, mask=j < HALF)
        sin = tl.load(angle + HALF, mask=j < HALF)
        tl.store(entry.cos + n * HALF + j, cos, mask=j < HALF)
        tl.store(entry.sin + n * 2 * HALF + j, -sin, mask=j < HALF)
        tl.store(entry.sin + (n * 2 + 1) * HALF + j, sin, mask=j < HALF)


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
    _norm_row(x + n * x_n, weight, out + n * out_n, eps, W, BLOCK)


@triton.jit
def _norm_row(x, weight, out, eps, W: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.load(x + i, mask=i < W, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / W + eps)
    weights = tl.load(weight + i, mask=i < W, other=0.0).to(tl.float32)
    tl.store(out + i, (row * scale * weights).to(out.dtype.element_ty), mask=i < W)


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
    num_heads, block = num_rotated + num_stored // 2, triton.next_power_of_2(half)
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
        BLOCK=block,
        num_warps=num_warps(HEADS.value * block),
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


def attend(query: Tensor, key: Tensor, value: Tensor, packed_mask: Tensor, scaling: float, reach: int | None) -> Tensor:
    return attend_slots(query, key, value, packed_mask, scaling, reach)


@dataclass(frozen=True)
class ProductKind:
    """All that the time of a product depends on."""

    num_rows: int
    width: int  # H
    outputs: int  # O of the weight
    dtype: torch.dtype
    device: torch.device
    normed: bool
    biased: bool
    ending: Ending


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm: DecodingNorm | None = None,
    bias: Tensor | None = None,
    ending: Ending = "write",
) -> None:
    (num_rows, width), outputs = x.shape, weight.shape[1]
    kind = ProductKind(num_rows, width, outputs, x.dtype, x.device, norm is not None, bias is not None, ending)
    form = product_kernel.product if is_fused(kind) else separate_product
    form(x, weight, out, norm, bias, ending)


def is_fused(kind: ProductKind) -> bool:
    """Return whether a product is done by one kernel: if it has few rows, and on a GPU if that was measured as faster.

    Raises `UserError` where the environment variable has another value than its two.
    """
    if kind.num_rows > product_kernel.MOST_ROWS:
        return False
    if SWITCH not in os.environ:
        return kind.device.type == "cpu" or is_faster_fused(kind)
    if os.environ[SWITCH] not in ("fused", "separate"):
        raise UserError(f"{SWITCH}={os.environ[SWITCH]}: give fused or separate, or leave it out")
    return os.environ[SWITCH] == "fused"


@functools.cache
def is_faster_fused(kind: ProductKind) -> bool:
    """Return whether one kernel is faster than separate launches, by a measurement on the GPU that waits for it.

    A round is first measured, then recorded in a graph: what is recorded has run before.
    """
    return milliseconds(product_kernel.product, kind) <= milliseconds(separate_product, kind)


def milliseconds(form: Callable[..., None], kind: ProductKind) -> float:
    """Return the GPU's time for calls of one form of a product, on weights that its cache does not hold."""
    like = torch.empty(0, dtype=kind.dtype, device=kind.device)
    nbytes = kind.width * kind.outputs * kind.dtype.itemsize
    cache = torch.cuda.get_device_properties(kind.device).L2_cache_size
    weights = like.new_ones(min(CALLS, 1 + 2 * cache // nbytes), kind.outputs, kind.width)
    x = like.new_ones(kind.num_rows, kind.width)
    out = like.new_zeros(kind.num_rows, kind.outputs // 2 if kind.ending == "gate" else kind.outputs)
    norm = DecodingNorm(like.new_ones(kind.width), 1e-6) if kind.normed else None
    bias = like.new_zeros(kind.outputs) if kind.biased else None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    form(x, weights[0].t(), out, norm, bias, kind.ending)  # compiles
    torch.cuda._sleep(2**25)  # cycles, some 20 ms, in which the host gets ahead of the GPU
    start.record()
    for i in range(CALLS):
        form(x, weights[i % len(weights)].t(), out, norm, bias, kind.ending)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def separate_product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    norm: DecodingNorm | None = None,
    bias: Tensor | None = None,
    ending: Ending = "write",
) -> None:
    """Do what `product` does by cuBLAS, with launches of their own for a norm and a gate."""
    if norm is not None:
        normed = torch.empty_like(x)
        rms_norm(x, norm, out=normed)
        x = normed
    if ending == "add":
        assert bias is None
        out.addmm_(x, weight)
    elif ending == "write":
        multiply(x, weight, bias, out)
    else:
        silu_mul(multiply(x, weight, bias), out)


def experts(x: Tensor, normed: Tensor, mixture: Any) -> None:
    """Do what `layer_steps.experts` does; for few tokens experts are two kernels behind the mixture's own router."""
    if len(x) * mixture.gate.top_k > expert_kernels.MOST_PAIRS:
        layer_steps.experts(x, normed, mixture)
        return
    _, shares, ids = mixture.gate(normed)
    add_experts(x, normed, mixture.experts.gate_up_proj, mixture.experts.down_proj, ids, shares)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up to `out` [N, I]; gates stand before ups in gate_up [N, 2 * I]."""
    num_tokens, width = out.shape
    assert gate_up.is_contiguous()
    assert out.is_contiguous()
    block = min(1024, triton.next_power_of_2(width))
    silu_kernel[(num_tokens, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block)


@triton.jit
def silu_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Compute BLOCK elements of one token."""
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(0).to(tl.int64)
    x = tl.load(gate_up + n * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    y = tl.load(gate_up + (2 * n + 1) * width + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(out + n * width + i, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=i < width)
