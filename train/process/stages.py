"""The stage that a process is in: for the split of its time, and for a line that says where it is stuck."""

import contextlib
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator

import torch

from draftsmith.data.progress import warn
from draftsmith.inference.decoding.clock import PhaseClock
from draftsmith.models.errors import own_place

STAGES = ("data", "target", "drafter", "communication", "optimizer", "checkpoint", "evaluation")
BEFORE_STEPS = ("start", "storing features")  # watched like the others, but no part of the time split


class Stages:
    """The stage of a process, and the time spent in each; on a GPU it is the device's time.

    "data" is waiting for batches. "communication" is waiting for, and talking to, the other processes, without the
    exchange of gradients, which runs beside the backward pass in "drafter".
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        self.now = (BEFORE_STEPS[0], time.perf_counter())  # the stage, and the time when it was entered
        self._device, self._device_clock = device, PhaseClock(device)
        self._seconds: dict[str, float] = defaultdict(float)  # by the host's clock

    def enter(self, stage: str) -> None:
        """Enter a stage; the time since the last call is spent in the stage before."""
        assert stage in STAGES + BEFORE_STEPS
        if stage in STAGES:  # a pass that stores features would leave a mark for every batch
            self._device_clock.mark(self.now[0])
        entered, now = self.now[1], time.perf_counter()
        self._seconds[self.now[0]] += now - entered
        self.now = (stage, now)

    def training_seconds(self) -> float:
        """Return the time of all stages but evaluations since the start, by the host's clock."""
        return sum(self._seconds[stage] for stage in STAGES if stage != "evaluation")

    def flush(self) -> dict[str, float]:
        """Return the seconds spent in each stage since the last call. Waits for the device."""
        stage = self.now[0]
        self.enter(stage)
        spent = self._device_clock.milliseconds()
        self._device_clock = PhaseClock(self._device)
        self._device_clock.mark(None)
        return {stage: spent.get(stage, 0.0) / 1000 for stage in STAGES}


@contextlib.contextmanager
def watched(stages: Stages, rank: int, num_ranks: int, stuck_after: float) -> Iterator[None]:
    """Let a thread say, during the block, where this process is if it stays at one place for `stuck_after` seconds.

    It says so again after twice the time, and so on. The code that each process is in tells those that wait in a
    collective operation from the one that they wait for.
    """
    done, watched_thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        last_seen, limit = stages.now, stuck_after
        while not done.wait(min(stuck_after / 4, 5.0)):
            stage, since = now = stages.now
            if now != last_seen:
                last_seen, limit = now, stuck_after
            if time.perf_counter() - since >= limit:
                warn(
                    f"process {rank} of {num_ranks} has been at step {stages.step}, {stage}, for "
                    f"{time.perf_counter() - since:.0f} s: {place_of(watched_thread)}"
                )
                limit *= 2

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def place_of(thread: int) -> str:
    """Return the function that a thread of this process is in, and the line of draftsmith that led there."""
    stack = list(traceback.walk_stack(sys._current_frames()[thread]))  # innermost first
    own = own_place(stack)
    return f"in {stack[0][0].f_code.co_name}{f', from {own}' if own else ''}"
