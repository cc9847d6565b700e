"""The device and the dtype that a target is loaded for, the precision of training, and a CPU's products and memory."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from draftsmith.models.errors import UserError, shown
from draftsmith.models.ranges import Precision

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MOST_IN_HEAP = 32 << 20  # bytes of a tensor that malloc does not get from the system by itself, the most that it allows
_open_blocks = {True: 0, False: 0}  # of `large_products`, by whether products are large, in all threads
_lock = threading.Lock()  # held while these are counted


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device that is asked for, else the GPU if there is one, else the CPU.

    A GPU named by its index becomes the current one, on which Triton launches and CUDA graphs, events and new tensors
    are. Raises `UserError` where there is no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise UserError(f"device {shown(device)} is not a device: give cpu, cuda or cuda:N") from None
    if picked.type not in ("cpu", "cuda"):
        raise UserError(f"device {str(device)!r}: draftsmith runs on cpu and cuda")
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {str(device)!r} was asked for and there is no GPU: leave it out or give cpu")
    if picked.type == "cuda" and picked.index is not None:
        if picked.index >= torch.cuda.device_count():
            last = torch.cuda.device_count() - 1
            raise UserError(f"device {str(device)!r}: the last GPU of this machine is cuda:{last}")
        torch.cuda.set_device(picked)
    return picked


def pick_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype that is asked for, else that of the device. Raises `UserError` where it is none."""
    if dtype is None:
        return default_dtype(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"dtype {shown(dtype)}: give torch.float32, torch.bfloat16 or torch.float16")
    return dtype


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the hardware computes in it, else fp32."""
    in_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if in_bf16 else torch.float32


def trains_in_bf16(device: torch.device, precision: Precision | None) -> bool:
    """Return whether a drafter's matrix products are in bf16 in training; None: on GPUs that compute in it."""
    return default_dtype(device) == torch.bfloat16 if precision is None else precision == "bf16"


@contextmanager
def training_precision(device: torch.device, precision: Precision | None) -> Iterator[None]:
    """Compute inside the block as a drafter with fp32 weights is trained."""
    with torch.autocast(device.type, torch.bfloat16, enabled=trains_in_bf16(device, precision)), large_products():
        yield


@contextmanager
def large_products(large: bool = True) -> Iterator[None]:
    """Let a CPU use AVX-512, if it has that, for products of large fp32 matrices inside the block.

    torch computes them by MKL, which uses AVX-512 on Intel's CPUs only. On AMD's the other library that torch comes
    with, oneDNN, takes less than half of the time. torch asks it if products may be rounded to bf16. oneDNN rounds them
    on CPUs with AMX only, and AMD's have none, so results stay in fp32.

    Small products, as in decoding, take longer by oneDNN. A block with `large` false, inside of another one, leaves
    them to MKL. torch has one setting for the whole process, so the open blocks of all threads are counted, and
    behind the last one it is torch's default. What another thread computes meanwhile may differ in its last digit.
    """
    if not mkl_misses_avx512():
        yield
        return
    _count_block(large, 1)
    try:
        yield
    finally:
        _count_block(large, -1)


def _count_block(large: bool, change: int) -> None:
    """Count a block that is opened (1) or closed (-1), and tell torch what holds now."""
    with _lock:
        _open_blocks[large] += change
        precision = "ieee" if _open_blocks[False] else "bf16" if _open_blocks[True] else "none"
        torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]  # torch makes it at import


@cache
def mkl_misses_avx512() -> bool:
    """Return whether this CPU has AVX-512 that MKL does not use: one of AMD's, which alone have SSE4a, without AMX."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_f") and has.get("sse4a") and not has.get("amx_tile"))


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for what it asks for next.

    A training step on a CPU frees some tens of MiB, and the next one asks for as many. By default malloc gives them
    back to the system, which has to clear every page before it hands it out again. Only glibc's malloc is told.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, MOST_IN_HEAP)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
