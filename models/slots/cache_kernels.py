"""Writing and moving keys and values in a slot cache, in Triton; the twins of the same names stand in `slots`.

Shapes: B rows, T new tokens, M slots and one for padding, R = B * (M + 1), Hkv key-value heads, D head width of keys,
Dv of values, S = Hkv * (D + Dv) values that a slot holds, L nodes on a path.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


def write_slots(key: Tensor, value: Tensor, written: Tensor, flat: Tensor) -> None:
    """Store key [B, Hkv, T, D] and value [B, Hkv, T, Dv] of new tokens in rows `written` [B * T] of flat [R, S].

    One launch for both. `written` is int64 and contiguous.
    """
    batch, heads, length, width = key.shape
    assert key.shape[:3] == value.shape[:3]
    assert key.stride(3) == value.stride(3) == 1
    assert flat.is_contiguous()
    assert written.is_contiguous()
    widest = heads * max(width, value.shape[3])
    block = min(1024, triton.next_power_of_2(widest))
    write_kernel[(triton.cdiv(widest, block), length, batch)](
        key,
        value,
        written,
        flat,
        *key.stride()[:3],
        *value.stride()[:3],
        HEADS=heads,
        D=width,
        VALUE_D=value.shape[3],
        BLOCK=block,
    )


@triton.jit
def write_kernel(
    key,
    value,
    written,
    flat,
    key_b,
    key_h,
    key_t,
    value_b,
    value_h,
    value_t,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    VALUE_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store BLOCK elements of the key and of the value of one token."""
    t = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = flat + tl.load(written + b * tl.num_programs(1) + t) * (HEADS * (D + VALUE_D)) + i
    of_key, of_value = i < HEADS * D, i < HEADS * VALUE_D
    tl.store(kept, tl.load(key + b * key_b + i // D * key_h + t * key_t + i % D, mask=of_key), mask=of_key)
    if VALUE_D > 0:  # the keys of an indexer have no values
        kept += HEADS * D
        values = tl.load(value + b * value_b + i // VALUE_D * value_h + t * value_t + i % VALUE_D, mask=of_value)
        tl.store(kept, values, mask=of_value)


@dataclass
class MoveTable:
    """Tensors of a cache that one launch moves: they agree in the number of slots and in the bytes of a slot."""

    addresses: Tensor  # [P] int64
    num_slots: int  # M + 1
    slot_words: int  # of 4 bytes


def move_tables(stored: list[Tensor]) -> list[MoveTable]:
    """Return tables over tensors [B, M + 1, ...], one for most models. They hold addresses, not the tensors."""
    groups: dict[tuple[int, int], list[int]] = {}
    for tensor in stored:
        slot_bytes = tensor[0, 0].nbytes
        assert tensor.is_contiguous()
        assert slot_bytes % 4 == 0
        groups.setdefault((tensor.shape[1], slot_bytes // 4), []).append(tensor.data_ptr())
    device = stored[0].device
    return [MoveTable(torch.tensor(addresses, device=device), *size) for size, addresses in groups.items()]


def move_slots(table: MoveTable, prefix: Tensor, path: Tensor) -> None:
    """Move columns `path` [B, L] of the window at `prefix` [B] to its columns 1..L, in each tensor of the table."""
    assert path.is_contiguous()
    assert prefix.is_contiguous()
    batch, depth = path.shape
    padded_depth = triton.next_power_of_2(depth)
    block = max(16, min(4096 // padded_depth, triton.next_power_of_2(table.slot_words)))
    move_kernel[(triton.cdiv(table.slot_words, block), batch, len(table.addresses))](
        table.addresses,
        prefix,
        path,
        table.num_slots,
        table.slot_words,
        depth,
        DEPTH=padded_depth,
        BLOCK=block,
    )


@triton.jit
def move_kernel(
    addresses,
    prefix,
    path,
    num_slots,
    slot_words,
    depth,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move BLOCK words of all slots of one path in one tensor.

    A slot may be read by one thread and overwritten by another, so the barrier: all is read before any is written.
    """
    row = tl.program_id(1).to(tl.int64)
    tensor = tl.multiple_of(tl.load(addresses + tl.program_id(2)).to(tl.pointer_type(tl.int32)), 16)
    node = tl.arange(0, DEPTH)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    root = tl.load(prefix + row)
    source = tl.minimum(root + tl.load(path + row * depth + node, mask=node < depth, other=0), num_slots - 1)
    kept = tl.minimum(root + 1 + node, num_slots - 1)
    tensor += row * num_slots * slot_words + word[None, :]
    moved = ((node < depth) & (source != kept))[:, None] & (word < slot_words)[None, :]
    words = tl.load(tensor + source[:, None] * slot_words, mask=moved)
    tl.debug_barrier()
    tl.store(tensor + kept[:, None] * slot_words, words, mask=moved)
