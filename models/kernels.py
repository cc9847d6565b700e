"""Tell where Triton kernels run: on a GPU, and, for whoever doubts a kernel, in Triton's interpreter on a CPU.

With the environment variable DRAFTSMITH_KERNELS=interpreter everything that a GPU would run through a kernel runs
through the same kernel on CPU tensors, slowly, in fp32 or fp16; rounds have the fixed shapes that they have on a GPU.
"""

import os
import sys

import torch

from draftsmith.models.errors import UserError

SWITCH = "DRAFTSMITH_KERNELS"
IN_TRITON = "TRITON_INTERPRET"  # Triton's own variable, which it reads when a kernel is defined


def runs_kernels(device: torch.device) -> bool:
    """Return whether kernels serve the tensors of a device, in rounds of fixed shapes."""
    return device.type == "cuda" or (device.type == "cpu" and SWITCH in os.environ and _interpreted())


def _interpreted() -> bool:
    """Return True. Raises `UserError` where the switch has another value, or was set when it was too late."""
    if os.environ[SWITCH] != "interpreter":
        raise UserError(f"{SWITCH}={os.environ[SWITCH]}: give interpreter, or leave it out")
    if os.environ.get(IN_TRITON) != "1":
        raise UserError(f"{SWITCH}=interpreter: set it before Python starts, or {IN_TRITON}=1 with it")
    return True


if SWITCH in os.environ and "triton" not in sys.modules:
    os.environ[IN_TRITON] = "1"
