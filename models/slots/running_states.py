"""Running states on the slot cache: what gated DeltaNet, Kimi delta attention, Mamba-2 and short convolutions carry on.

Such a layer keeps no keys of the text but one state, which every token changes. A draft must not change it until the
target's verdict is known. So a window of drafts is read from the state that stands, by a closed form over each token's
ancestors, and its inputs wait. The next window tells by its first slot how many tokens were kept: only then these enter
the state, one by one. A state is thereby a function of the text alone, however its tokens fell into rounds.

transformers' modules run as they are, with two functions of their files replaced while `reading` is on: the causal
convolution, and the rule by which the state changes. `state_rules` holds what these compute, `state_kernels` the same
for a GPU.

Shapes: B rows, T new tokens a row, H heads, Dk and Dv widths of keys and values, C channels of a convolution, k its
taps, G groups, N width of a Mamba-2 state, P of its heads. States and inputs of rules are fp32.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.slots import state_rules
from draftsmith.models.slots.state_buffers import RunningStates, WindowRead
from draftsmith.models.slots.state_rules import (
    advance_delta,
    advance_mamba2,
    delta_inputs,
    mamba2_inputs,
    newest,
    normalized,
)
from draftsmith.models.slots.window import Window

MOST_IN_KERNELS = 64  # columns; their sizes are those of a tile
CONVOLUTION = "causal_conv1d_fn"
_running = threading.local()  # while this thread runs a pass, `start` makes its `WindowRead`, and `read` holds it


@contextmanager
def reading(states: RunningStates, rows: Tensor | slice, window: Window) -> Iterator[None]:
    """Let this thread's pass over a window of these rows of a cache read and change their states."""
    _running.read, _running.start = None, partial(WindowRead, states, rows, window)
    try:
        yield
    finally:
        _running.read = _running.start = None


def enter_layer(layer: int) -> None:
    """Note the layer whose functions are called next, as transformers' modules tell the cache."""
    _running.read = _running.read or _running.start()
    _running.read.layer = layer


# --- the replaced functions


def replace_rules(model: PreTrainedModel) -> None:
    """Let the functions of the files that a model's modules come from look for states while a pass reads them.

    Time steps of Mamba-2 get the limits of the checkpoint. transformers' modules raise small ones to a limit that is
    meant for initialisation, and only where they read several tokens at once.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            limit = getattr(model.config.get_text_config(), "time_step_limit", None) or (0.0, float("inf"))
            module.time_step_limit = tuple(map(float, limit))
    for name in {type(part).__module__ for part in model.modules()}:
        namespace: Any = sys.modules[name]
        for function, on_states in REPLACED.items():
            stock = getattr(namespace, function, None)
            if stock is not None and not isinstance(stock, Replaced):
                setattr(namespace, function, Replaced(stock, on_states))


def has_rule(namespace: Any, layer_types: set[str]) -> bool:
    """Return whether a file of transformers' has the functions that are replaced in layers of these types."""
    functions = {function for function in REPLACED if hasattr(namespace, function)}
    return CONVOLUTION in functions and (layer_types == {"conv"} or len(functions) > 1)


@dataclass
class Replaced:
    """A function of transformers' that another takes the place of while a pass reads states."""

    stock: Callable[..., Any]
    on_states: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if getattr(_running, "read", None) is None:
            return self.stock(*args, **kwargs)
        return self.on_states(self.stock, _running.read, *args, **kwargs)


def convolve(
    stock: Callable[..., Tensor],
    read: WindowRead,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the causal convolution [B, C, T] of inputs [B, C, T], weight [C, k], behind the inputs of the state."""
    inputs, num_taps = hidden_states.transpose(1, 2), weight.shape[1]
    name, shape = ("convolution", read.layer), (num_taps - 1, inputs.shape[2])
    buffer = read.states.buffer(name, shape, [inputs[:, :1] if read.num_text is not None else inputs], inputs.dtype)
    if read.num_text is not None:
        past = torch.cat([read.begin(buffer), *read.waiting(buffer)], 1)
        known = torch.cat([newest(past, read.num_kept, num_taps - 1), inputs], 1)  # [B, k - 1 + T, C]
        buffer.state[read.rows] = newest(known, read.num_text, num_taps - 1)
        return stock(known.transpose(1, 2), weight, bias, activation=activation)[..., num_taps - 1 :]
    output = rules_for(inputs).read_convolution(read, buffer, inputs, weight, bias)
    read.let_wait(buffer, [inputs])
    output = output if activation is None else ACT2FN[activation](output)
    return output.to(inputs.dtype).transpose(1, 2)


def rules_for(inputs: Tensor) -> Any:
    """Return the module that reads windows of drafts with such inputs [B, T, ...]: kernels, or their plain forms."""
    if runs_kernels(inputs.device) and inputs.shape[1] <= MOST_IN_KERNELS:
        from draftsmith.models.slots import state_kernels

        return state_kernels
    return state_rules


def gated_delta(
    stock: Callable[..., Any],
    read: WindowRead,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return what heads read of the states [B, T, H, Dv], and the states, for queries and keys [B, T, Hk, Dk].

    `g` is the logarithm of the decay: of a head [B, T, H], or of each of its channels [B, T, H, Dk].
    """
    shape = (value.shape[2], key.shape[3], value.shape[3])
    name = ("rule", read.layer)
    if read.num_text is not None:
        waiting = delta_inputs(key[:, :1], value[:, :1], g[:, :1], beta[:, :1], use_qk_l2norm_in_kernel)
        buffer = read.states.buffer(name, shape, waiting, torch.float32)
        state = advance_delta(read.begin(buffer), read.waiting(buffer), read.num_kept)
        is_text = torch.arange(key.shape[1], device=key.device) < read.num_text[:, None]  # [B, T]
        g = g.masked_fill(~is_text.view(*is_text.shape, *[1] * (g.ndim - 2)), 0)
        beta = beta.masked_fill(~is_text[..., None], 0)
        output, state = stock(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        buffer.state[read.rows] = state
        return output, state
    inputs = delta_inputs(key, value, g, beta, use_qk_l2norm_in_kernel)
    buffer = read.states.buffer(name, shape, inputs, torch.float32)
    queries = query.repeat_interleave(value.shape[2] // query.shape[2], 2).float()
    queries = normalized(queries) if use_qk_l2norm_in_kernel else queries
    output = rules_for(key).delta_rule(read, buffer, queries, inputs)
    read.let_wait(buffer, inputs)
    return output.to(query.dtype), buffer.state


def mamba2(
    stock: Callable[..., Any],
    read: WindowRead,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Return what heads read of the states [B, T, H, P], and the states [B, H, P, N].

    `hidden_states` [B, T, H, P] and `dt` [B, T, H] change them by `B` [B, T, G, N] and A [H]; `C` [B, T, G, N] reads.
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    heads, width = hidden_states.shape[2:]
    shape = (heads, width, B.shape[3])
    name = ("rule", read.layer)
    if read.num_text is not None:
        waiting = mamba2_inputs(hidden_states[:, :1], dt[:, :1], A, B[:, :1])
        buffer = read.states.buffer(name, shape, waiting, torch.float32)
        state = advance_mamba2(read.begin(buffer), read.waiting(buffer), read.num_kept)
        is_text = torch.arange(dt.shape[1], device=dt.device) < read.num_text[:, None]
        dt = dt.masked_fill(~is_text[..., None], 0)
        output, state = stock(
            hidden_states, dt, A, B, C, chunk_size=chunk_size, D=D, initial_states=state, return_final_states=True
        )
        buffer.state[read.rows] = state
        return output, state
    inputs = mamba2_inputs(hidden_states, dt, A, B)
    buffer = read.states.buffer(name, shape, inputs, torch.float32)
    queries = C.repeat_interleave(heads // C.shape[2], 2).float()
    output = rules_for(dt).mamba2_rule(read, buffer, queries, inputs)
    read.let_wait(buffer, inputs)
    output = output if D is None else output + D[..., None] * hidden_states.float()
    return output.contiguous(), buffer.state


REPLACED: dict[str, Callable[..., Any]] = {
    CONVOLUTION: convolve,
    "torch_chunk_gated_delta_rule": gated_delta,
    "chunk_kimi_delta_attention": gated_delta,
    "mamba2_chunk_scan": mamba2,
}
