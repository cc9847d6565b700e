"""Which of several processes this one is."""

import os


def rank_and_num_ranks() -> tuple[int, int]:
    """Return this process's rank, from 0, and the number of processes, as launchers tell them; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
