"""What a process is doing: for the split of its time, and for a line that says where it is stuck."""

import contextlib
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator

import torch

from draftsmith.data.progress import notice
from draftsmith.inference.decoding.clock import PhaseClock

STAGES = ("data", "target", "drafter", "communication", "optimizer", "checkpoint", "evaluation")
BEFORE_STEPS = ("start", "storing features")  # watched like the others; no part of the time split


class Stages:
    """`enter(stage)` books the time since the last call on the stage before. On a GPU it is the device's time.

    "data": waiting for batches. "communication": waiting for, and talking to, the other processes, but for the exchange
    of gradients, which runs beside the backward pass in "drafter".
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        self.now = (BEFORE_STEPS[0], time.perf_counter())  # the stage, since when
        self._device, self._device_clock = device, PhaseClock(device)
        self._seconds: dict[str, float] = defaultdict(float)  # by the host's clock

    def enter(self, stage: str) -> None:
        assert stage in STAGES + BEFORE_STEPS
        if stage in STAGES:  # a pass that stores features would leave a mark for every batch
            self._device_clock.mark(self.now[0])
        entered, now = self.now[1], time.perf_counter()
        self._seconds[self.now[0]] += now - entered
        self.now = (stage, now)

    def training_seconds(self) -> float:
        """All but evaluations since the start, by the host's clock."""
        return sum(self._seconds[stage] for stage in STAGES if stage != "evaluation")

    def flush(self) -> dict[str, float]:
        """Seconds of each stage since the last call. Waits for the device."""
        stage = self.now[0]
        self.enter(stage)
        taken = self._device_clock.milliseconds()
        self._device_clock = PhaseClock(self._device)
        self._device_clock.mark(None)
        return {stage: taken.get(stage, 0.0) / 1000 for stage in STAGES}


@contextlib.contextmanager
def watched(stages: Stages, rank: int, num_ranks: int, stuck_after: float) -> Iterator[None]:
    """Inside the block a thread says where this process is when it has stayed at one place for `stuck_after` seconds.

    It says so again after twice the time, and so on. Processes that wait in a collective operation, and the one that
    they wait for, are told apart by the code that each is in.
    """
    done, watched_thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        told, limit = stages.now, stuck_after
        while not done.wait(min(stuck_after / 4, 5.0)):
            stage, since = now = stages.now
            if now != told:
                told, limit = now, stuck_after
            if time.perf_counter() - since >= limit:
                notice(
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
    """The function that a thread of this process is in, and the line of ours that led there."""
    stack = list(traceback.walk_stack(sys._current_frames()[thread]))  # innermost first
    modules = [(frame.f_globals.get("__name__", ""), line) for frame, line in stack]
    own = next((f", from {name}:{line}" for name, line in modules if name.startswith("draftsmith.")), "")
    return f"in {stack[0][0].f_code.co_name}{own}"
