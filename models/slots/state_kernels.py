"""A window of drafts on running states, in Triton; the plain forms of the same names stand in `state_rules`.

One launch takes up what was kept of the window before, a token at a time, stores the state, and reads the window by the
closed form of `read_delta`. Mamba-2 is the same rule with another change: a token adds its value as it is, where the
delta rule first takes away what the state holds for its key. The triangular system of the delta rule is solved row by
row, because a token's change is known as soon as those of its ancestors are.

Shapes: B rows, T new tokens a row, H heads, K and V widths of keys and values (Mamba-2: N and P), C channels of a
convolution, k its taps. A program has all of a head's keys and BLOCK of its values, and R >= T rows in its tiles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftsmith.models.slots.state_buffers import Buffer, WindowRead


def delta_rule(read: WindowRead, buffer: Buffer, query: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return what queries [B, T, H, K] read of states [B, H, K, V], [B, T, H, V]; inputs as `delta_inputs` has."""
    key_step, value_step = buffer.state.stride()[2:]
    return read_window(read, buffer, query, inputs, buffer.inputs, query.shape[3] ** -0.5, (key_step, value_step))


def mamba2_rule(read: WindowRead, buffer: Buffer, query: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return what queries [B, T, H, K] read of states [B, H, V, K], [B, T, H, V]; inputs as `mamba2_inputs` has."""
    value_step, key_step = buffer.state.stride()[2:]
    ordered, waiting = ([key, value, decay] for value, key, decay in (inputs, buffer.inputs))
    return read_window(read, buffer, query, ordered, waiting, 1.0, (key_step, value_step))


def read_window(
    read: WindowRead,
    buffer: Buffer,
    query: Tensor,
    inputs: list[Tensor],
    waiting: list[Tensor],
    scale: float,
    steps: tuple[int, int],
) -> Tensor:
    """Launch `read_kernel`. Inputs and waiting ones are keys, values, logarithms of decays and, or not, betas."""
    key, value, decay = (part.contiguous() for part in inputs[:3])
    beta = inputs[3].contiguous() if len(inputs) == 4 else None
    query, ancestors = query.contiguous(), read.ancestors.contiguous().view(torch.uint8)
    batch, length, heads, width = key.shape
    columns, value_width = waiting[0].shape[1], value.shape[3]
    assert query.shape == key.shape
    assert all(part.is_contiguous() and part.dtype == torch.float32 for part in (*waiting, buffer.state))
    output = query.new_empty(value.shape)
    padded = max(16, triton.next_power_of_2(width))
    block = 16 if padded >= 128 else min(32, max(16, triton.next_power_of_2(value_width)))
    per_channel = decay.ndim == 4 and decay.shape[3] > 1
    read_kernel[(triton.cdiv(value_width, block), heads, batch)](
        buffer.state,
        *(*waiting, None)[:4],
        rows_of(read),
        read.is_new.view(torch.uint8),
        read.num_kept,
        query,
        key,
        value,
        decay,
        beta,
        ancestors,
        output,
        scale,
        length,
        columns,
        heads,
        *steps,
        K=width,
        PADDED_K=padded,
        V=value_width,
        BLOCK=block,
        DECAYS=width if per_channel else 1,
        PADDED_DECAYS=padded if per_channel else 1,
        R=max(16, triton.next_power_of_2(length)),
        num_warps=4 if padded <= 64 else 8,  # whatever T is, so that a state does not depend on it
        num_stages=1,
    )
    return output


def rows_of(read: WindowRead) -> Tensor | None:
    """Return the rows [B] of a cache that a pass reads; None for the first ones."""
    return read.rows if isinstance(read.rows, Tensor) else None


@triton.jit(do_not_specialize=["length", "columns"])
def read_kernel(
    state,  # [num_rows, H, ...], of which a head's keys and values are key_step and value_step apart
    waiting_key,  # [num_rows, columns, H, K]
    waiting_value,
    waiting_decay,  # [num_rows, columns, H, DECAYS]
    waiting_beta,  # [num_rows, columns, H]; None for Mamba-2
    rows,  # [B] or None
    is_new,  # [B] bytes
    num_kept,  # [B]
    query,  # [B, T, H, K]
    key,  # [B, T, H, K]
    value,  # [B, T, H, V]
    decay,  # [B, T, H, DECAYS]
    beta,  # [B, T, H]; None for Mamba-2
    ancestors,  # [B, T, T] bytes
    output,  # [B, T, H, V]
    scale,
    length,
    columns,
    heads,
    key_step,
    value_step,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAYS: tl.constexpr,
    PADDED_DECAYS: tl.constexpr,
    R: tl.constexpr,
):
    """Take up the kept columns and read the new ones, for BLOCK values of one head of one row."""
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = b if rows is None else tl.load(rows + b)
    d = tl.arange(0, PADDED_K)
    c = tl.arange(0, PADDED_DECAYS)
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_key, in_decay, in_value = d < K, c < DECAYS, v < V

    state += (row * heads + h) * K * V + d[:, None] * key_step + v[None, :] * value_step
    in_state = in_key[:, None] & in_value[None, :]
    held = tl.where(tl.load(is_new + b) != 0, 0.0, tl.load(state, mask=in_state, other=0.0))
    for i in range(tl.load(num_kept + b).to(tl.int32)):
        at = (row * columns + i) * heads + h
        kept_key = tl.load(waiting_key + at * K + d, mask=in_key, other=0.0)
        change = tl.load(waiting_value + at * V + v, mask=in_value, other=0.0)
        held *= tl.exp(tl.load(waiting_decay + at * DECAYS + c, mask=in_decay, other=0.0))[:, None]
        if waiting_beta is not None:
            change = (change - tl.sum(held * kept_key[:, None], 0)) * tl.load(waiting_beta + at)
        held += kept_key[:, None] * change[None, :]
    tl.store(state, held, mask=in_state)

    t = tl.arange(0, R)
    real = t < length
    at = (b * length + t) * heads + h
    keys = tl.load(key + at[:, None] * K + d[None, :], mask=real[:, None] & in_key[None, :], other=0.0)
    decays = tl.load(decay + at[:, None] * DECAYS + c[None, :], mask=real[:, None] & in_decay[None, :], other=0.0)
    totals = tl.zeros((R, PADDED_DECAYS), tl.float32)  # of the logarithms up to each token
    changes = tl.zeros((R, BLOCK), tl.float32)  # that the tokens before s make
    for s in range(length):
        is_seen = (tl.load(ancestors + (b * length + s) * length + t, mask=real, other=0) != 0)[:, None]
        is_own = (t == s)[:, None]
        total = tl.sum(tl.where(is_seen, decays, 0.0), 0)
        totals = tl.where(is_own, total[None, :], totals)
        near = keys * tl.exp(tl.where(is_seen, total[None, :] - totals, float("-inf")))
        place = (b * length + s) * heads + h
        change = tl.load(value + place * V + v, mask=in_value, other=0.0)
        if beta is not None:
            own_key = tl.load(key + place * K + d, mask=in_key, other=0.0)
            known = tl.sum(held * (own_key * tl.exp(total))[:, None], 0)
            known += tl.sum(tl.sum(near * own_key[None, :], 1)[:, None] * changes, 0)
            change = (change - known) * tl.load(beta + place)
        changes = tl.where(is_own, change[None, :], changes)
        own_query = tl.load(query + place * K + d, mask=in_key, other=0.0) * scale
        found = tl.sum(held * (own_query * tl.exp(total))[:, None], 0)
        found += tl.sum(tl.sum(near * own_query[None, :], 1)[:, None] * changes, 0)
        tl.store(output + place * V + v, found, mask=in_value)


def read_convolution(read: WindowRead, buffer: Buffer, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution [B, T, C] of inputs [B, T, C] by weight [C, k], along each token's ancestors."""
    batch, length, channels = inputs.shape
    num_taps = weight.shape[1]
    waiting = buffer.inputs[0]
    assert inputs.stride(2) == 1
    assert weight.is_contiguous()
    assert buffer.state.is_contiguous()
    assert waiting.is_contiguous()
    output = inputs.new_empty(batch, length, channels)
    block = min(256, triton.next_power_of_2(channels))
    convolution_kernel[(triton.cdiv(channels, block), batch)](
        buffer.state,
        waiting,
        rows_of(read),
        read.is_new.view(torch.uint8),
        read.num_kept,
        inputs,
        weight,
        bias,
        read.taps(num_taps),
        output,
        length,
        waiting.shape[1],
        channels,
        *inputs.stride()[:2],
        TAPS=num_taps,
        PADDED_TAPS=triton.next_power_of_2(num_taps),
        BLOCK=block,
        num_warps=4,
    )
    return output


@triton.jit(do_not_specialize=["length", "columns"])
def convolution_kernel(
    state,  # [num_rows, k - 1, C]
    waiting,  # [num_rows, columns, C]
    rows,  # [B] or None
    is_new,  # [B] bytes
    num_kept,  # [B]
    inputs,  # [B, T, C]
    weight,  # [C, k]
    bias,  # [C] or None
    taps,  # [B, T, k], places in the k - 1 inputs of the state, then in the new ones
    output,  # [B, T, C]
    length,
    columns,
    channels,
    inputs_b,
    inputs_t,
    TAPS: tl.constexpr,
    PADDED_TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Convolve BLOCK channels of one row; then store the newest inputs of its text."""
    b = tl.program_id(1).to(tl.int64)
    row = b if rows is None else tl.load(rows + b)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = c < channels
    state += row * (TAPS - 1) * channels + c[None, :]
    waiting += row * columns * channels + c[None, :]
    inputs += b * inputs_b + c[None, :]
    begins, kept = tl.load(is_new + b) != 0, tl.load(num_kept + b)

    i = tl.arange(0, PADDED_TAPS)
    weights = tl.load(weight + c[None, :] * TAPS + i[:, None], mask=(i < TAPS)[:, None] & real[None, :], other=0.0)
    weights = weights.to(tl.float32)
    for t in range(length):
        place = tl.load(taps + (b * length + t) * TAPS + i, mask=i < TAPS, other=0)[:, None]
        past = past_inputs(state, waiting, kept + place, begins, channels, place < TAPS - 1, real, TAPS)
        in_new = (place >= TAPS - 1) & real[None, :]
        new = tl.load(inputs + (place - (TAPS - 1)) * inputs_t, mask=in_new, other=0.0)
        total = tl.sum(weights * (past + new).to(tl.float32), 0)  # one of them is zero
        if bias is not None:
            total += tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
        tl.store(output + (b * length + t) * channels + c, total.to(output.dtype.element_ty), mask=real)

    j = i[:, None]
    newest = past_inputs(state, waiting, kept + j, begins, channels, j < TAPS - 1, real, TAPS)
    tl.debug_barrier()  # all is read before anything is written
    tl.store(state + j * channels, newest, mask=(j < TAPS - 1) & real[None, :])


@triton.jit
def past_inputs(state, waiting, place, begins, channels, wanted, real, TAPS: tl.constexpr):
    """Return inputs [PADDED_TAPS, BLOCK] at places [PADDED_TAPS, 1] of the state with the waiting ones behind it."""
    wanted = wanted & real[None, :]
    held = tl.where(begins, 0.0, tl.load(state + place * channels, mask=wanted & (place < TAPS - 1), other=0.0))
    return held + tl.load(waiting + (place - (TAPS - 1)) * channels, mask=wanted & (place >= TAPS - 1), other=0.0)
