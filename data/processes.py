"""Which of several processes this one is, and its device."""

import os

import torch


def rank_and_num_ranks() -> tuple[int, int]:
    """Return this process's rank, from 0, and the number of processes, as launchers tell them; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def device_of_process() -> str | None:
    """Return the GPU of this process where a launcher started several; None leaves the choice to the target."""
    local_rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{local_rank}" if local_rank and torch.cuda.is_available() else None
