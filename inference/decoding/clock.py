"""Time spent in the phases of decoding, by CPU clock or CUDA events, without waiting for the device."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch


class PhaseClock:
    """`mark(phase)` books the time since the last mark on a phase; `None` starts anew."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []

    def mark(self, phase: str | None) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def milliseconds(self) -> dict[str, float]:
        """Total of each phase. Waits for the device."""
        totals: dict[str, float] = defaultdict(float)
        for phase, milliseconds in self.intervals():
            totals[phase] += milliseconds
        return dict(totals)

    def intervals(self) -> list[tuple[str, float]]:
        """Phase and milliseconds of each time that was booked, in order. Waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [
            (phase, start.elapsed_time(end) if self._on_gpu else (end - start) * 1000)  # type: ignore
            for (_, start), (phase, end) in zip(self._marks[:-1], self._marks[1:], strict=True)
            if phase is not None
        ]


@contextlib.contextmanager
def cpu_threads(num_threads: int | None) -> Iterator[None]:
    """Compute with so many CPU threads inside the block; None leaves them as they are.

    The operations of a small target are too short to be worth sharing out: one thread may decode fastest.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
