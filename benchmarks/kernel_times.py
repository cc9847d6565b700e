"""How long each kernel ran, and how long the device did nothing before it."""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MOST_KERNELS = 30  # that are printed


def print_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Print the kernels of a run on a GPU, or its operators on a CPU, those that took longest first."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
    events = profiler.events() or []
    events = [
        event for event in events if (event.device_type == DeviceType.CUDA if on_gpu else event.cpu_parent is None)
    ]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    times, gaps, end = defaultdict[str, list[float]](list), defaultdict[str, float](float), 0.0
    for start, stop, name in spans:
        times[name].append(stop - start)
        gaps[name] += max(0.0, start - end) if end else 0.0
        end = max(end, stop)
    total = sum(map(sum, times.values())) + sum(gaps.values())
    print(f"{total / 1000:.2f} ms, of which the device did nothing in {sum(gaps.values()) / 1000:.2f}")
    print("  calls  us each  gap us  share  kernel")
    for name in sorted(times, key=lambda name: -sum(times[name]) - gaps[name])[:MOST_KERNELS]:
        count, spent = len(times[name]), sum(times[name])
        share = (spent + gaps[name]) / total
        print(f"{count:7} {spent / count:8.2f} {gaps[name] / count:7.2f} {share:6.1%}  {name[:100]}", flush=True)
