"""Speed of a pass of the target beside what memory allows: on a GPU, decoding a few rows is bound by reading.

The floor of a pass is the time to read the target's weights once, and what is kept of the texts in the batch, at the
bandwidth that a large copy reaches on the same device.
"""

import functools

import torch

from draftsmith.inference.measuring.speed import Outputs, num_passes
from draftsmith.models import Target
from draftsmith.models.target.shape import shape_of

COPIED = 1 << 30  # bytes
REPEATS = 10


@functools.cache
def memory_bandwidth(device: torch.device) -> float | None:
    """Return bytes per second, read and written, of the fastest of a few large copies; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(COPIED, dtype=torch.uint8, device=device)
    copied = torch.empty_like(source)
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        copied.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * COPIED / min(times)


def weight_bytes(target: Target) -> int:
    """Return the bytes of weights that one pass reads: all but an embedding that is not the head, looked up by rows."""
    embedding, head = target.embedding.weight, target.head_weight()
    looked_up = () if embedding is head else (embedding,)
    parameters = (weight for weight in target.model.parameters() if not any(weight is other for other in looked_up))
    return sum(weight.numel() * weight.element_size() for weight in parameters)


def bandwidth_floor_share(
    target: Target, prompts: list[list[int]], outputs: Outputs, bandwidth: float | None
) -> float | None:
    """Return the floor of all verification passes over the time they took; 1 would be reading alone.

    A request's text counts with its mean length. None where the bandwidth is unknown, and for mixtures of experts, of
    which a pass reads as many experts as its tokens ask for.
    """
    if bandwidth is None or (shape := shape_of(target)).experts:
        return None
    weights = weight_bytes(target)
    read, seconds, first = 0.0, 0.0, 0
    for batch in outputs:
        for run in batch:
            read += weights * num_passes(run)
            for number, (ids, stats) in enumerate(zip(run.token_ids, run.stats.requests, strict=True), first):
                kept = shape.kept_bytes(len(prompts[number]) + len(ids) / 2, target.dtype.itemsize)
                read += stats.num_rounds * kept
            seconds += run.timing.phases["verify"] / 1000
        first += len(batch[0].token_ids)
    return read / bandwidth / seconds if seconds else None
