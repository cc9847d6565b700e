"""The rules by which running states change and are read, in plain PyTorch; kernels of rounds stand in `state_kernels`.

Gated DeltaNet: arXiv 2412.06464, equation 10; Kimi delta attention: arXiv 2510.26692, equation 1; Mamba-2: arXiv
2405.21060, section 3.

Shapes: B rows, T new tokens a row, H heads, Dk and Dv widths of keys and values, C channels of a convolution, k its
taps, G groups, N width of a Mamba-2 state, P of its heads. States and inputs of rules are fp32.
"""

import torch
from torch import Tensor

from draftsmith.models.slots.state_buffers import Buffer, WindowRead

# --- what a window of drafts reads. What was kept of the window before enters the state first


def read_convolution(read: WindowRead, buffer: Buffer, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution [B, T, C] of inputs [B, T, C] by weight [C, k], along each token's ancestors."""
    num_taps = weight.shape[1]
    past = torch.cat([read.begin(buffer), *read.waiting(buffer)], 1)
    state = newest(past, read.num_kept, num_taps - 1)  # [B, k - 1, C]
    buffer.state[read.rows] = state
    known = torch.cat([state, inputs], 1)  # [B, k - 1 + T, C]
    places = read.taps(num_taps).flatten(1)[..., None].expand(-1, -1, inputs.shape[2])
    tapped = known.to(weight.dtype).gather(1, places).unflatten(1, (-1, num_taps))  # [B, T, k, C]
    output = (tapped * weight.T).sum(2)
    return output if bias is None else output + bias


def delta_rule(read: WindowRead, buffer: Buffer, query: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return what queries [B, T, H, Dk] read of states [B, H, Dk, Dv], [B, T, H, Dv]; inputs as `delta_inputs` has."""
    state = advance_delta(read.begin(buffer), read.waiting(buffer), read.num_kept)
    buffer.state[read.rows] = state
    return read_delta(query, inputs, state, read.ancestors)


def mamba2_rule(read: WindowRead, buffer: Buffer, query: Tensor, inputs: list[Tensor]) -> Tensor:
    """Return what queries [B, T, H, N] read of states [B, H, P, N], [B, T, H, P]; inputs as `mamba2_inputs` has."""
    state = advance_mamba2(read.begin(buffer), read.waiting(buffer), read.num_kept)
    buffer.state[read.rows] = state
    return read_mamba2(query, inputs, state, read.ancestors)


def newest(inputs: Tensor, num_new: Tensor, count: int) -> Tensor:
    """Return the newest `count` of inputs [B, count + T, C] of which the first `num_new` [B] of the T are kept."""
    places = num_new[:, None] + torch.arange(count, device=inputs.device)
    return inputs.gather(1, places[..., None].expand(-1, -1, inputs.shape[2]))


# --- gated DeltaNet and Kimi delta attention


def delta_inputs(key: Tensor, value: Tensor, g: Tensor, beta: Tensor, normalize: bool) -> list[Tensor]:
    """Return what changes a state: keys [B, T, H, Dk], values [B, T, H, Dv], g [B, T, H, 1 or Dk], beta [B, T, H]."""
    keys = key.repeat_interleave(value.shape[2] // key.shape[2], 2).float()
    keys = normalized(keys) if normalize else keys
    return [keys, value.float(), (g if g.ndim == 4 else g[..., None]).float(), beta.float()]


def normalized(x: Tensor) -> Tensor:
    """Return vectors [..., D] of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def advance_delta(state: Tensor, inputs: list[Tensor], num_kept: Tensor) -> Tensor:
    """Return states [B, H, Dk, Dv] after the first `num_kept` [B] of the inputs, exactly as after a token at a time."""
    for i, (key, value, g, beta) in enumerate(zip(*(part.unbind(1) for part in inputs), strict=True)):
        is_kept = (i < num_kept)[:, None]
        g, beta = g.masked_fill(~is_kept[..., None], 0), beta.masked_fill(~is_kept, 0)
        state = state * g.exp()[..., None]
        change = (value - (state * key[..., None]).sum(2)) * beta[..., None]
        state = state + key[..., None] * change[:, :, None]
    return state


def read_delta(query: Tensor, inputs: list[Tensor], state: Tensor, ancestors: Tensor) -> Tensor:
    """Return what each token reads of the state after its ancestors and itself, [B, T, H, Dv], by one solve a head.

    U are the changes that the tokens make: (I + beta K K' D) U = beta (V - K e^G S), with G the sum of a token's g and
    its ancestors', and D the decay between two of them.
    """
    key, value, g, beta = inputs
    query, key, value = (part.transpose(1, 2) for part in (query * query.shape[3] ** -0.5, key, value))  # [B, H, T, D]
    g, beta = g.transpose(1, 2), beta.transpose(1, 2)[..., None]  # [B, H, T, 1 or Dk], [B, H, T, 1]
    ancestors = ancestors[:, None]
    total = ancestors.float() @ g  # G
    if g.shape[3] == 1:
        decay = decay_between(total[..., 0], ancestors)
        products, reads = (part @ key.transpose(2, 3) * decay for part in (key, query))  # [B, H, T, T]
    else:
        decay = decay_between(total.transpose(2, 3), ancestors[:, :, None])  # [B, H, Dk, T, T]
        products, reads = (torch.einsum("bhtd,bhsd,bhdts->bhts", part, key, decay) for part in (key, query))
    system = (beta * products).tril(-1)  # with ones on the diagonal, which the solver takes for granted
    known = beta * (value - (key * total.exp()) @ state)
    changes = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    return (reads @ changes + (query * total.exp()) @ state).transpose(1, 2)


def decay_between(total: Tensor, ancestors: Tensor) -> Tensor:
    """Return e^(total_t - total_s) [..., T, T] where s is an ancestor of t, else 0, of sums of logarithms [..., T]."""
    return (total[..., :, None] - total[..., None, :]).masked_fill(~ancestors, float("-inf")).exp()


# --- Mamba-2


def mamba2_inputs(hidden: Tensor, dt: Tensor, A: Tensor, B: Tensor) -> list[Tensor]:
    """Return what changes a state: dt x [B, T, H, P], B [B, T, H, N] and the decays' logarithms dt A [B, T, H]."""
    dt = dt.float()
    return [hidden.float() * dt[..., None], B.repeat_interleave(hidden.shape[2] // B.shape[2], 2).float(), dt * A]


def advance_mamba2(state: Tensor, inputs: list[Tensor], num_kept: Tensor) -> Tensor:
    """Return states [B, H, P, N] after the first `num_kept` [B] of the inputs, exactly as after a token at a time."""
    for i, (written, B, decay) in enumerate(zip(*(part.unbind(1) for part in inputs), strict=True)):
        is_kept = (i < num_kept)[:, None]
        decay, written = decay.masked_fill(~is_kept, 0), written.masked_fill(~is_kept[..., None], 0)
        state = state * decay.exp()[..., None, None] + written[..., None] * B[:, :, None]
    return state


def read_mamba2(C: Tensor, inputs: list[Tensor], state: Tensor, ancestors: Tensor) -> Tensor:
    """Return what each token reads of the state after its ancestors and itself, [B, T, H, P]."""
    written, B, decay = inputs
    C, written, B = (part.transpose(1, 2) for part in (C, written, B))  # [B, H, T, N or P]
    ancestors = ancestors[:, None]
    total = ancestors.float() @ decay.transpose(1, 2)[..., None]  # [B, H, T, 1]
    reads = C @ B.transpose(2, 3) * decay_between(total[..., 0], ancestors)
    return (reads @ written + (C * total.exp()) @ state.transpose(2, 3)).transpose(1, 2)
