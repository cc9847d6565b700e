"""A GPU for Triton to compile kernels for, on a machine without one."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Gpu:
    """A driver that answers what Triton asks before it compiles."""

    sm: int = 90  # H100 and H200

    def get_current_device(self) -> int:
        return self.sm  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.sm, 32)
