"""A trace of a few steps, for chrome://tracing or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

SKIPPED_STEPS, TRACED_STEPS = 3, 3


@contextlib.contextmanager
def profiled(run: Path, enabled: bool) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step; profile/trace.json is written after the last traced step."""
    if not enabled:
        yield lambda: None
        return
    (run / "profile").mkdir(exist_ok=True)
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=SKIPPED_STEPS - 1, warmup=1, active=TRACED_STEPS, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(run / "profile" / "trace.json")),
        profile_memory=True,
        with_stack=True,
    ) as profiler:
        yield profiler.step
