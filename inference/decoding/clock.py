"""Measures the time of the phases of decoding, by the clock of the host or by CUDA events.

Marks do not wait for the device; reading the times does.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch


class PhaseClock:
    """Sums up the times of phases: that between two calls of `mark` belongs to the phase that the second one names."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []

    def mark(self, phase: str | None) -> None:
        """Let the time since the last mark belong to a phase; None: to no phase."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """Return the total of each phase. Waits for the device."""
        totals: dict[str, float] = defaultdict(float)
        for phase, milliseconds in self.intervals():
            totals[phase] += milliseconds
        return dict(totals)

    def intervals(self) -> list[tuple[str, float]]:
        """Return the phase and the milliseconds of each interval, in order. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            (phase, start.elapsed_time(end) if self._on_gpu else (end - start) * 1000)  # type: ignore
            for (_, start), (phase, end) in zip(self._marks[:-1], self._marks[1:], strict=True)
            if phase is not None
        ]


@contextlib.contextmanager
def cpu_threads(num_threads: int | None) -> Iterator[None]:
    """Compute with a number of CPU threads inside the block; None leaves it as it is.

    The operations of a small target are too short to be divided among threads: one thread may decode fastest.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
