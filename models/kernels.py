"""Tells where Triton kernels run, and keeps the counters by which the programs of a kernel share their work.

Kernels run on a GPU and, to check them, in Triton's interpreter on a CPU.

With the environment variable DRAFTSMITH_KERNELS=interpreter everything that a GPU would run through a kernel runs
through the same kernel on CPU tensors, slowly, in fp32 or fp16; rounds have the fixed shapes that they have on a GPU.
"""

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from draftsmith.models.errors import UserError

SWITCH = "DRAFTSMITH_KERNELS"
IN_TRITON = "TRITON_INTERPRET"  # Triton's own variable, which it reads when a kernel is defined
NUM_COUNTERS = 2**16  # outputs of one launch that can be split
_counters: ContextVar[Tensor | None] = ContextVar("counters", default=None)


def runs_kernels(device: torch.device) -> bool:
    """Return whether kernels compute on the tensors of a device, and rounds of decoding have fixed shapes."""
    return device.type == "cuda" or (device.type == "cpu" and SWITCH in os.environ and _interpreted())


def has_flash_attention(query: Tensor) -> bool:
    """Return whether a GPU computes attention of such queries [..., D] without all pairs of tokens in memory.

    PyTorch's flash attention asks for compute capability 8, half precision and heads of up to 256 values. Where there
    is none, a warning says so once.
    """
    width = query.shape[-1]
    in_half = query.dtype in (torch.bfloat16, torch.float16)
    if in_half and width % 8 == 0 and width <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0):
        return True
    warnings.warn(
        f"this GPU has no flash attention for {query.dtype} and heads of {width} values: attention takes longer, and "
        "with EAGLE's unrolled steps memory with the square of a row's length. Lower data.max_length, and do not pack "
        "rows (data.packing=false)",
        stacklevel=2,
    )
    return False


def counters(device: torch.device) -> Tensor:
    """Return the counters for the next launch on a device, int32 [NUM_COUNTERS], which are zero between launches.

    Launches that can run at the same time must not share them. Those of one stream cannot, so each stream has its own;
    for graphs, which may be replayed on any stream, see `counting_with`.
    """
    own = _counters.get()
    if own is not None:
        assert own.device == device
        return own
    if device.type != "cuda":
        return _counters_of(device, 0)
    assert not torch.cuda.is_current_stream_capturing(), "a graph needs counters of its own"
    return _counters_of(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _counters_of(device: torch.device, stream: int) -> Tensor:
    return new_counters(device)


def new_counters(device: torch.device) -> Tensor:
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


@contextmanager
def counting_with(own: Tensor) -> Iterator[None]:
    """Let this thread's launches count with `own` counters, which a graph that records them needs while it lives."""
    token = _counters.set(own)
    try:
        yield
    finally:
        _counters.reset(token)


def _interpreted() -> bool:
    """Return True. Raises `UserError` where the switch has another value, or was set when it was too late."""
    if os.environ[SWITCH] != "interpreter":
        raise UserError(f"{SWITCH}={os.environ[SWITCH]}: give interpreter, or leave it out")
    if os.environ.get(IN_TRITON) != "1":
        raise UserError(f"{SWITCH}=interpreter: set it before Python starts, or {IN_TRITON}=1 with it")
    return True


if SWITCH in os.environ and "triton" not in sys.modules:
    os.environ[IN_TRITON] = "1"
