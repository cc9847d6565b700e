"""Triton kernels of the two ends of a verification; the twins of the same names stand in `round_steps`.

Shapes: B rows, M slots a row, N drafted tokens, T = N + 1 columns of the window, D nodes on the longest path,
C columns of the features that a state keeps, E ids that end a text, W words of 32 columns. NODES and WORDS are the
powers of 2 from T and W on. In kernels, `row` is a row of the batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.inference.decoding.round_steps import Ends
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.inference.verification.sampled_draft_kernels import load_tree, tree_of
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.sampling.trees import WORD
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features

BLOCK = 2048  # values of the features that a program copies
HEAD = tl.constexpr(4)  # numbers of a record before its tokens


class Texts(NamedTuple):
    """The part of a decoding state that kernels read and write."""

    token_ids: Tensor  # [B, M]
    row: int  # stride of a row of token_ids
    lengths: Tensor  # [B]
    positions: Tensor  # [B, C]
    next_ids: Tensor  # [B, C]
    newest_column: Tensor  # [B]


class Copied(NamedTuple):
    """Features of some kind, and where they are kept."""

    source: Tensor  # [B, T, H]
    kept: Tensor  # [B, C, H]
    width: int  # H


def open_round(token_ids: Tensor, lengths: Tensor, draft: Draft) -> tuple[Tensor, Window]:
    assert token_ids.stride(1) == 1
    batch, num_nodes = draft.tokens.shape
    width = num_nodes + 1
    tokens, slots = token_ids.new_empty(batch, width), token_ids.new_empty(batch, width)
    window = Window(slots, slots, torch.empty_like(lengths))
    num_words = -(-width // WORD)
    if not draft.is_chain:
        window.positions = torch.empty_like(slots)
        window.ancestors = token_ids.new_empty(batch, width, num_words, dtype=torch.int32)
    open_kernel[(batch,)](
        token_ids,
        token_ids.stride(0),
        lengths,
        tree_of(draft.tokens, draft.parents),
        tokens,
        slots,
        window.positions,
        window.prefix,
        window.ancestors,
        num_nodes,
        num_words,
        NODES=triton.next_power_of_2(width),
        WORDS=triton.next_power_of_2(num_words),
        DEPTH=draft.depth,
    )
    return tokens, window


def close_round(state: DecodingState, ends: Ends, draft: Draft, verified: Verified, features: Features) -> Tensor:
    assert state.token_ids.stride(1) == 1
    assert state.positions.is_contiguous()
    assert state.next_ids.is_contiguous()
    batch, depth = len(state.lengths), draft.depth
    record = state.lengths.new_empty(batch, HEAD.value + 1 + depth)
    copied = [_copied(features.last_hidden, state.features.last_hidden)]
    if state.features.layers is not None:
        assert features.layers is not None
        copied.append(_copied(features.layers, state.features.layers))
    num_blocks = [triton.cdiv(part.width, BLOCK) for part in copied]
    num_nodes = draft.tokens.shape[1]
    close_kernel[(batch, 1 + (depth + 1) * sum(num_blocks))](
        Texts(
            state.token_ids,
            state.token_ids.stride(0),
            state.lengths,
            state.positions,
            state.next_ids,
            state.newest_column,
        ),
        ends,
        tree_of(draft.tokens, draft.parents),
        verified,
        copied[0],
        copied[-1],
        record,
        num_nodes,
        len(ends.eos),
        state.positions.shape[1],
        num_blocks[0],
        NODES=triton.next_power_of_2(num_nodes + 1),
        COLUMNS=triton.next_power_of_2(state.positions.shape[1]),
        DEPTH=depth,
        CHAIN=draft.is_chain,
        BLOCK=BLOCK,
    )
    return record


def _copied(source: Tensor, kept: Tensor) -> Copied:
    assert source.is_contiguous()
    assert kept.is_contiguous()
    assert source.dtype == kept.dtype
    return Copied(source, kept, source.shape[2])


@triton.jit(do_not_specialize=["N", "num_words"])
def open_kernel(
    token_ids,
    token_ids_row,
    lengths,
    tree,
    tokens,
    slots,
    positions,
    prefix,
    ancestors,  # None for chains
    N,
    num_words,
    NODES: tl.constexpr,
    WORDS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns, token, parent = load_tree(tree, row, N, NODES)
    newest = tl.load(lengths + row) - 1
    root = tl.load(token_ids + row * token_ids_row + newest)
    inside, place = columns <= N, row * (N + 1) + columns
    tl.store(tokens + place, tl.where(columns == 0, root, tl.maximum(token, 0)), mask=inside)
    tl.store(slots + place, newest + columns, mask=inside)
    tl.store(prefix + row, newest)
    if ancestors is not None:
        parent = tl.maximum(parent, 0)  # the root is its own
        words = tl.arange(0, WORDS)[None, :]
        depth = tl.zeros((NODES,), tl.int32)
        seen = tl.zeros((NODES, WORDS), tl.int32)
        ancestor = columns
        for _ in range(DEPTH + 1):
            depth += (ancestor > 0).to(tl.int32)
            seen |= tl.where(ancestor[:, None] // 32 == words, 1 << (ancestor % 32)[:, None], 0)
            ancestor = tl.gather(parent, ancestor, 0)
        tl.store(positions + place, newest + depth, mask=inside)
        kept = inside[:, None] & (words < num_words)
        tl.store(ancestors + place[:, None] * num_words + words, seen, mask=kept)


@triton.jit(do_not_specialize=["N", "num_eos", "num_columns", "num_blocks"])
def close_kernel(
    texts,
    ends,
    tree,
    verified,
    features,
    layers,
    record,
    N,
    num_eos,
    num_columns,
    num_blocks,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first program of a row closes it, each of the others copies a block of the features of one column."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1
    if part < 0:
        _close_row(texts, ends, tree, verified, record, row, N, num_eos, num_columns, NODES, COLUMNS, DEPTH, CHAIN)
    else:
        column, block = part % (DEPTH + 1), part // (DEPTH + 1)
        source = column
        if not CHAIN:
            source = tl.load(verified.path + row * DEPTH + column - 1, mask=column > 0, other=0).to(tl.int32)
        if block < num_blocks:
            _copy_block(features, row, source, column, block, N, num_columns, BLOCK)
        else:
            _copy_block(layers, row, source, column, block - num_blocks, N, num_columns, BLOCK)


@triton.jit
def _copy_block(copied, row, source, column, block, N, num_columns, BLOCK: tl.constexpr):
    i = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(copied.source + (row * (N + 1) + source) * copied.width + i, mask=i < copied.width)
    tl.store(copied.kept + (row * num_columns + column) * copied.width + i, values, mask=i < copied.width)


@triton.jit
def _close_row(
    texts,
    ends,
    tree,
    verified,
    record,
    row,
    N,
    num_eos,
    num_columns,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    CHAIN: tl.constexpr,
):
    length = tl.load(texts.lengths + row)
    num_accepted = tl.load(verified.num_accepted + row)
    columns = tl.arange(0, COLUMNS)
    in_path = columns < DEPTH
    node = columns
    if not CHAIN:
        node = tl.maximum(tl.load(verified.path + row * DEPTH + columns, mask=in_path, other=1).to(tl.int32) - 1, 0)
    tokens = tl.maximum(tl.load(tree.tokens + row * N + node, mask=in_path, other=0), 0)
    is_next = (columns == num_accepted) | (columns == DEPTH)
    tokens = tl.where(is_next, tl.load(verified.next_token + row), tokens)  # [COLUMNS], D + 1 of them
    is_token = columns <= DEPTH
    tl.store(texts.token_ids + row * texts.row + length + columns, tokens, mask=is_token)

    until_end = DEPTH + 2  # tokens up to an EOS
    for number in range(num_eos):
        ends_text = (tokens == tl.load(ends.eos + number)) & (columns <= num_accepted)
        until_end = tl.minimum(until_end, tl.min(tl.where(ends_text, columns + 1, DEPTH + 2), 0))
    limit, was_finished = tl.load(ends.limits + row), tl.load(ends.finished + row) != 0
    num_emitted = tl.minimum(tl.minimum(num_accepted + 1, until_end), limit - length)
    num_emitted = tl.where(was_finished, 0, num_emitted)
    finished = was_finished | (until_end < DEPTH + 2) | (length + num_emitted >= limit)
    _, drafted, _ = load_tree(tree, row, N, NODES)

    tl.debug_barrier()  # each thread has read the length and the flag before one writes them
    tl.store(texts.lengths + row, length + num_emitted)
    tl.store(ends.finished + row, finished)
    tl.store(texts.newest_column + row, num_accepted)
    tl.store(texts.next_ids + row * num_columns + columns, tokens, mask=is_token)
    tl.store(texts.positions + row * num_columns + columns, length - 1 + columns, mask=columns < num_columns)
    record += row * (HEAD + 1 + DEPTH)
    tl.store(record, num_emitted)
    tl.store(record + 1, tl.sum((drafted >= 0).to(tl.int64), 0))
    tl.store(record + 2, tl.minimum(num_accepted, until_end))
    tl.store(record + 3, finished.to(tl.int64))
    tl.store(record + HEAD + columns, tokens, mask=is_token)
