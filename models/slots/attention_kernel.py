"""Attention of a window's tokens over the slot cache, in Triton; `slots.slot_attention` is its plain twin.

All heads that share a key-value head are packed into the rows of one tile, so that keys and values are read once, and
the slots are split over programs (flash-decoding), so that a short batch fills the GPU too; the last of them combines
what all have found. What a row sees comes as a packed mask (`Window.packed_mask`); nothing as long as the cache is ever
built, unless the model itself chooses slots: then that choice is read.

Keys may be wider than values, as those of latent attention. The columns that a key has more, its tail, are a tile of
their own, because the width of a tile is a power of two. Where values are the first columns of the keys, they are read
once for both.

Shapes: B rows, T new tokens a row, M slots, W words of 32 columns, Hq query heads, Hkv key-value heads, G = Hq / Hkv,
D width of queries and keys, Dv of values, S splits. A tile has R <= 64 rows (t, g), t the slower, and reads N slots at
a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.kernels import NUM_COUNTERS, counters
from draftsmith.models.slots.splitting import is_last, num_multiprocessors

LOG2_E = tl.constexpr(1.4426950408889634)
PACKED = tl.constexpr(3)  # slot, position and prefix, then the ancestor words
WORD = tl.constexpr(32)
MOST_SCRATCH = 2**28  # bytes, for what splits leave to combine


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attend with query [B, Hq, T, D] to key [B, Hkv, M, D] and value [B, Hkv, M, Dv] where the mask allows.

    The mask is packed, int32 [B, 1, T, 3 + W], or bool [B, 1, T, M], which takes no sliding window. Query, key and
    value are in one dtype, fp32, fp16 or bf16, and dense along D; sinks [Hq] are in any. Returns [B, T, Hq, Dv].
    """
    batch, heads, length, key_width = query.shape
    kv_heads, num_slots, width = value.shape[1:]
    assert key.shape == (batch, kv_heads, num_slots, key_width)
    assert query.dtype == key.dtype == value.dtype
    assert query.stride(3) == key.stride(3) == value.stride(3) == 1
    is_packed = mask.dtype == torch.int32
    assert is_packed or (mask.dtype == torch.bool and sliding_window is None and mask.shape[3] == num_slots)
    num_words = mask.shape[3] - PACKED.value if is_packed else 0
    groups = heads // kv_heads
    tail = max(key_width - width, 0)
    rows, block, warps, stages = tile(length * groups, max(key_width, width), query.dtype)
    tiles = triton.cdiv(length * groups, rows)
    if splits is None:
        part_bytes = 4 * batch * length * heads * width
        splits = num_splits(batch * kv_heads * tiles, num_slots, block, part_bytes, query.device)
    assert splits == 1 or batch * kv_heads * tiles <= NUM_COUNTERS

    padded_width = max(16, triton.next_power_of_2(width))
    output = query.new_empty(batch, length, heads, width)
    attend_kernel[(tiles, splits, batch * kv_heads)](
        query,
        key,
        value,
        mask_for_kernel(mask, num_words, sliding_window),
        sinks,
        output,
        *scratch(output, splits),
        scaling * LOG2_E.value if softcap is None else scaling / softcap,
        None if softcap is None else softcap * LOG2_E.value,
        sliding_window,
        length,
        num_slots,
        kv_heads,
        num_words,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        G=groups,
        D=width,
        PADDED_D=padded_width,
        KEY_D=key_width - tail,
        TAIL=tail,
        PADDED_TAIL=max(16, triton.next_power_of_2(tail)),
        SHARED=values_in_keys(key, value),
        R=rows,
        N=block,
        PACKED_MASK=is_packed,
        TREE=num_words > 0,
        UNROLL=max(1, min(4, 2048 * warps // (rows * padded_width))),  # more would not fit into registers
        FAR=num_slots * max(key.stride(2), value.stride(2)) >= 2**31,
        num_warps=warps,
        num_stages=stages,
    )
    return output


def mask_for_kernel(mask: Tensor, num_words: int, sliding_window: int | None) -> Tensor:
    """Return a mask as the kernel reads it: without ancestors that lie before the window, and dense."""
    if sliding_window is not None and sliding_window < num_words * WORD.value:
        mask = last_ancestors(mask, sliding_window)
    return mask.contiguous().view(torch.uint8) if mask.dtype == torch.bool else mask.contiguous()


def scratch(output: Tensor, splits: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return room for the outputs [B, T, Hq, Dv] and the sums [B, T, Hq] of each split, and the counters of tiles.

    None where there is one split, which writes its output at once.
    """
    if splits == 1:
        return None, None, None
    parts = output.new_empty(splits, *output.shape, dtype=torch.float32)
    sums = output.new_empty(splits, *output.shape[:-1], dtype=torch.float32)
    return parts, sums, counters(output.device)


def values_in_keys(key: Tensor, value: Tensor) -> bool:
    """Return whether the values [..., Dv] are the first columns of the keys [..., D], in one memory."""
    same = key.untyped_storage()._cdata == value.untyped_storage()._cdata
    return same and key.storage_offset() == value.storage_offset() and key.stride() == value.stride()


def tile(num_rows: int, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return rows R and slots N of a tile, warps, stages: no spills, and room for two programs at a time on sm_90."""
    narrow = width <= 256  # else one stage of few slots: sm_86 and sm_89 have 99 KB of shared memory
    if dtype == torch.float32:  # no tensor cores
        return (16, 32, 8, 2) if narrow else (16, 16, 8, 1)
    rows = max(16, triton.next_power_of_2(num_rows))
    if width > 128:
        return (min(32, rows), 32, 4, 2) if narrow else (min(32, rows), 16, 8, 1)
    return min(64, rows), 32 if rows > 16 else 64, 4, 3


def num_splits(programs: int, num_slots: int, block: int, part_bytes: int, device: torch.device) -> int:
    """Return the number of programs that share the slots of a tile: two a multiprocessor, with a block of slots each.

    More where a cache is long, for in a batch of ragged rows all would wait for the longest; but no more than there is
    scratch for, of which each takes `part_bytes`: prompts are read by programs enough.
    """
    wanted = 2 * num_multiprocessors(device) // programs
    wanted = max(num_slots // 4096, min(wanted, triton.cdiv(num_slots, block)))
    return max(1, min(wanted, MOST_SCRATCH // part_bytes))


def in_own_chunk(packed_mask: Tensor, chunk: int) -> Tensor:
    """Return a packed mask by which, with a sliding window of a chunk, tokens see the slots of their own chunk alone.

    Each token has the last position of its chunk, from which the window reaches back to the first, and keeps the
    ancestors that are in the chunk.
    """
    position = packed_mask[..., 1:2]
    place = position % chunk  # in the chunk
    if packed_mask.shape[3] > PACKED.value:
        packed_mask = last_ancestors(packed_mask, place + 1)
    return torch.cat([packed_mask[..., :1], position - place + chunk - 1, packed_mask[..., 2:]], 3)


def last_ancestors(packed_mask: Tensor, count: int | Tensor) -> Tensor:
    """Return the packed mask with only the last `count` ancestors of each token, those at the last positions.

    Counts of each token are [B, 1, T, 1].
    """
    bits = torch.arange(WORD.value, dtype=torch.int32, device=packed_mask.device)
    words = packed_mask[..., PACKED.value :]
    seen = (words[..., None] >> bits & 1).flatten(3)  # [B, 1, T, 32 W]
    seen = seen * (seen.flip(3).cumsum(3).flip(3) <= count)
    words = (seen.unflatten(3, (-1, WORD.value)) << bits).sum(-1, dtype=torch.int32)  # bit 31 is the sign
    return torch.cat([packed_mask[..., : PACKED.value], words], 3)


@triton.jit(do_not_specialize=["length", "num_words"])  # with 1 as a constant, registers would not hold all
def attend_kernel(
    query,
    key,
    value,
    mask,  # int32 [B, T, 3 + W], or a byte for each slot [B, T, M]
    sinks,  # [Hq] or None
    output,  # [B, T, Hq, Dv]
    parts,  # [S, B, T, Hq, Dv] weighted means over the slots of each split; None for one split
    sums,  # [S, B, T, Hq] log2 of the sum of their weights; None for one split
    counters,  # one for each tile and key-value head; None for one split
    scale,
    cap,  # softcap or None; scores are powers of two, so that exp2 serves: LOG2_E is in `cap`, else in `scale`
    reach,  # sliding window or None
    length,
    num_slots,
    kv_heads,
    num_words,
    query_b,
    query_h,
    query_t,
    key_b,
    key_h,
    key_m,
    value_b,
    value_h,
    value_m,
    G: tl.constexpr,
    D: tl.constexpr,  # of values
    PADDED_D: tl.constexpr,
    KEY_D: tl.constexpr,  # of keys without their tail, D at most
    TAIL: tl.constexpr,  # the columns that keys have more than values
    PADDED_TAIL: tl.constexpr,
    SHARED: tl.constexpr,  # values are the first columns of keys
    R: tl.constexpr,
    N: tl.constexpr,
    PACKED_MASK: tl.constexpr,
    TREE: tl.constexpr,
    UNROLL: tl.constexpr,  # parts that the last program of a tile reads at a time
    FAR: tl.constexpr,  # a row's slots reach further than 32 bits count
):
    """Online softmax of one tile of query rows over one split of the slots that any of them sees."""
    split = tl.program_id(1)
    b = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(2) % kv_heads
    row = tl.program_id(0) * R + tl.arange(0, R)
    t = row // G
    head = kv_head * G + row % G
    real = t < length
    d = tl.arange(0, PADDED_D)
    kept = real[:, None] & (d < D)[None, :]

    if PACKED_MASK:
        mask_row = mask + (b * length + t) * (PACKED + num_words)
        slot = tl.load(mask_row, mask=real, other=-1)
        position = tl.load(mask_row + 1, mask=real, other=2147483647)
        prefix = tl.load(mask + b * length * (PACKED + num_words) + 2)
        end = tl.minimum(tl.max(slot, 0) + 1, num_slots)
        if reach is None:
            first = 0
            clear = prefix if TREE else tl.min(tl.where(real, slot, num_slots), 0) + 1  # all rows see all slots before
        else:
            first = tl.maximum(tl.min(position, 0) - reach + 1, 0)
            clear = 0
    else:
        mask_row = mask + (b * length + t) * num_slots
        slot, position, prefix = None, None, None
        first, clear, end = 0, 0, num_slots
    share = tl.cdiv(tl.cdiv(end - first, tl.num_programs(1)), N) * N
    low = first + split * share
    high = tl.minimum(low + share, end)
    middle = low + tl.maximum(tl.minimum(high, clear) - low, 0) // N * N

    query += b * query_b + head[:, None] * query_h + t[:, None] * query_t
    queries = tl.load(query + d[None, :], mask=real[:, None] & (d < KEY_D)[None, :], other=0.0)
    if TAIL > 0:
        of_tail = tl.arange(0, PADDED_TAIL)
        in_tail = real[:, None] & (of_tail < TAIL)[None, :]
        tail_queries = tl.load(query + KEY_D + of_tail[None, :], mask=in_tail, other=0.0)
    else:
        tail_queries = None
    if FAR:
        key_m = key_m.to(tl.int64)
        value_m = value_m.to(tl.int64)
    key += b * key_b + kv_head * key_h
    value += b * value_b + kv_head * value_h
    peak = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    mean = tl.zeros((R, PADDED_D), tl.float32)
    if sinks is not None:  # one more slot, of value zero, in the first split
        peak = tl.where(split == 0, tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E, peak)
        total = tl.where(split == 0, 1.0, total)

    for start in range(low, middle, N):
        n = start + tl.arange(0, N)
        keys = load_slots(key, key_m, n, None, KEY_D, PADDED_D)
        tails = load_slots(key + KEY_D, key_m, n, None, TAIL, PADDED_TAIL) if TAIL > 0 else None
        values = keys if SHARED else load_slots(value, value_m, n, None, D, PADDED_D)
        scores = score(queries, keys, tail_queries, tails, None, scale, cap)
        peak, total, mean = add_block(peak, total, mean, scores, values)
    for start in range(middle, high, N):
        n = start + tl.arange(0, N)
        keys = load_slots(key, key_m, n, high, KEY_D, PADDED_D)
        tails = load_slots(key + KEY_D, key_m, n, high, TAIL, PADDED_TAIL) if TAIL > 0 else None
        values = keys if SHARED else load_slots(value, value_m, n, high, D, PADDED_D)
        if PACKED_MASK:
            seen = sees(mask_row, real, slot, position, prefix, n, reach, num_words, TREE)
        else:
            seen = tl.load(mask_row[:, None] + n[None, :], mask=real[:, None] & (n < high)[None, :], other=0) != 0
        scores = score(queries, keys, tail_queries, tails, seen, scale, cap)
        peak, total, mean = add_block(peak, total, mean, scores, values)

    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    text = length * kv_heads * G  # rows of the output; within a text 32 bits count the places
    out_row = t * kv_heads * G + head
    place = out_row[:, None] * D + d[None, :]
    output += b * text * D
    if parts is None:
        tl.store(output + place, mean.to(output.dtype.element_ty), mask=kept)
    else:
        num_rows = (tl.num_programs(2) // kv_heads).to(tl.int64) * text
        parts += b * text * D
        sums += b * text
        if (low < high) | (split == 0):
            tl.store(parts + split * num_rows * D + place, mean, mask=kept)
        tl.store(sums + split * num_rows + out_row, peak + tl.log2(total), mask=real)
        counter = counters + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if is_last(counter, tl.num_programs(1)):
            filled = tl.cdiv(tl.maximum(end - first, 1), tl.maximum(share, 1))  # the splits that have slots
            mean = combine(parts, sums, place, out_row, num_rows, filled, real, kept, D, R, PADDED_D, UNROLL)
            tl.store(output + place, mean.to(output.dtype.element_ty), mask=kept)


@triton.jit
def combine(
    parts,
    sums,
    place,
    out_row,
    num_rows,
    filled,
    real,
    kept,
    D: tl.constexpr,
    R: tl.constexpr,
    PADDED_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Return the mean [R, PADDED_D] of the means over the first splits, weighted by their sums, in their order."""
    peak = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    mean = tl.zeros((R, PADDED_D), tl.float32)
    for s in tl.range(filled, loop_unroll_factor=UNROLL):
        found = tl.load(sums + s * num_rows + out_row, mask=real, other=0.0, cache_modifier=".cg")
        part = tl.load(parts + s * num_rows * D + place, mask=kept, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, found)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
        weight, rescale = tl.exp2(found - base), tl.exp2(peak - base)
        mean = mean * rescale[:, None] + part * weight[:, None]
        total = total * rescale + weight
        peak = higher
    return mean / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def sees(mask_row, real, slot, position, prefix, n, reach, num_words, TREE: tl.constexpr):
    """Return which of the slots n [N] each row sees: bool [R, N]."""
    recent = n >= 0 if reach is None else n > position[:, None] - reach
    if TREE:
        column = n - prefix
        drafted = (column >= 0) & (column < num_words * WORD)
        word = tl.load(mask_row[:, None] + PACKED + column // WORD, mask=real[:, None] & drafted, other=0)
        ancestor = ((word >> (column & (WORD - 1))) & 1) != 0
        return ancestor | ((column < 0) & recent)
    return (n <= slot[:, None]) & recent


@triton.jit
def load_slots(rows, step, n, high, D: tl.constexpr, PADDED_D: tl.constexpr):
    """Return columns of slots n [N], [N, PADDED_D]: zeros past D and, if given, from slot `high` on."""
    d = tl.arange(0, PADDED_D)
    mask = (d < D)[None, :] if high is None else (d < D)[None, :] & (n < high)[:, None]
    return tl.load(rows + n[:, None] * step + d[None, :], mask=mask, other=0.0)


@triton.jit
def score(queries, keys, tail_queries, tails, seen, scale, cap):
    """Return the scores [R, N] of N keys, without those not `seen` [R, N], None for all seen."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if tails is not None:
        scores = tl.dot(tail_queries, tl.trans(tails), scores, input_precision="ieee")
    scores *= scale
    if cap is not None:
        scores = cap * (2 * tl.sigmoid(2 * scores) - 1)  # tanh
    return scores if seen is None else tl.where(seen, scores, float("-inf"))


@triton.jit
def add_block(peak, total, mean, scores, values):
    """Online softmax: rows with scores [R, N] of N more slots add their values [N, D]."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(peak - base)
    total = total * rescale + tl.sum(weights, 1)
    mean = mean * rescale[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total, mean
