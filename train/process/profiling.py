"""A trace of a few steps, for chrome://tracing or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

PASSED_OVER, TRACED = 3, 3  # steps


@contextlib.contextmanager
def profiled(run: Path, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yields what to call after each step; profile/trace.json is written after the last traced one."""
    if not enabled:
        yield lambda: None
        return
    (run / "profile").mkdir(exist_ok=True)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=PASSED_OVER - 1, warmup=1, active=TRACED, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(run / "profile" / "trace.json")),
        profile_memory=True,
        with_stack=True,
    ) as profiler:
        yield profiler.step
