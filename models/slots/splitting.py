"""Tools for kernels in which several programs work on one output: the last of them adds the parts up.

Each program leaves its part in scratch memory and then counts itself in. The one that finds all others counted adds the
parts up in their own order, so that a result does not depend on which program was last.
"""

import torch
import triton
import triton.language as tl


def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; of a CPU, on which programs run one by one, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def is_last(counter, count):
    """Count this program in and return whether it is the last of `count`, which may read what the others stored.

    The last sets the counter back to zero for the next launch.
    """
    tl.debug_barrier()  # one thread counts for all, after all have stored
    last = tl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    tl.store(counter, 0, mask=last)
    return last
