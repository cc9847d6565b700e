"""Attention over the slot cache on a GPU: the kernel against its plain twin and against the bytes it must move.

    python benchmarks/attention_kernel.py [--tiles]

Shapes of one layer of Llama-3.1-8B in bf16: Hq 32 query heads, Hkv 8 key-value heads, D 128. B rows read a tree of T
columns after `context` slots each. Every figure is the mean over a CUDA graph that runs through enough layers to leave
nothing in the L2 cache. The floor is the time that a copy of as many bytes takes on this machine. `--tiles` tries other
tiles than `attention_kernel.tile` picks.
"""

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import triton
from torch import Tensor, nn

from draftsmith.inference.measuring.bandwidth import memory_bandwidth
from draftsmith.models.kernels import counting_with, new_counters
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots import attention_kernel, cache_kernels
from draftsmith.models.slots import cache as slots
from draftsmith.models.slots.attention import slot_attention
from draftsmith.models.slots.window import Window, chain_window

QUERY_HEADS, KV_HEADS, WIDTH, LAYERS = 32, 8, 128, 32
CONTEXTS, COLUMNS, BATCHES = (512, 4096, 16384), (1, 5, 16, 64), (1, 8, 32)
L2_BYTES = 256 << 20  # several times that of any GPU
TILES = [(block, warps, stages) for block in (32, 64, 128) for warps in (4, 8) for stages in (2, 3, 4)]


def microseconds(runs: list[Callable[[], object]], repeats: int = 20) -> float:
    """Return the mean time of one run, all captured in one graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph, counters = torch.cuda.CUDAGraph(), new_counters(torch.device("cuda"))
    with counting_with(counters), torch.cuda.graph(graph):
        for run in runs:
            run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / repeats / len(runs)


def tree_window(batch: int, context: int, columns: int) -> Window:
    """Return a window of rows at `context`, with a binary tree each."""
    prefix = torch.full((batch,), context, device="cuda")
    window = chain_window(prefix, columns)
    if columns == 1:
        return window
    parents = ((torch.arange(columns - 1, device="cuda") + 1) // 2 - 1).expand(batch, -1)
    depth = columns.bit_length()
    positions = prefix[:, None] + node_depths(parents, depth)
    return Window(window.slots, positions, prefix, ancestor_words(parents, depth))


class Layers:
    """Queries, and the caches of as many layers as leave nothing in the L2 cache."""

    def __init__(self, context: int, columns: int, batch: int) -> None:
        num_slots = context + columns
        self.bytes = 2 * batch * num_slots * KV_HEADS * WIDTH * 2 + 2 * batch * columns * QUERY_HEADS * WIDTH * 2
        number = max(2, min(LAYERS, L2_BYTES // self.bytes + 1))
        self.caches = [new(2, batch, num_slots, KV_HEADS, WIDTH).transpose(2, 3) for _ in range(number)]
        self.query = new(batch, columns, QUERY_HEADS, WIDTH).transpose(1, 2)
        window = tree_window(batch, context, columns)
        self.packed, self.mask = window.packed_mask(), window.bool_mask(num_slots)

    def kernel(self) -> float:
        return microseconds([partial(self.run_kernel, *cache) for cache in self.caches])

    def run_kernel(self, key: Tensor, value: Tensor) -> Tensor:
        return attention_kernel.attend(self.query, key, value, self.packed, WIDTH**-0.5)

    def twin(self) -> float:
        return microseconds([partial(self.run_twin, *cache) for cache in self.caches])

    def run_twin(self, key: Tensor, value: Tensor) -> Tensor:
        return slot_attention(nn.Identity(), self.query, key, value, self.mask)[0]

    def error(self) -> float:
        return (self.run_kernel(*self.caches[0]) - self.run_twin(*self.caches[0])).abs().max().item()


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def compare(what: str, kernel: float, twin: float, floor: float) -> None:
    ratios = f"twin/kernel {twin / kernel:6.2f}  floor/kernel {floor / kernel:5.2f}"
    print(f"{what}  kernel {kernel:9.1f} us  twin {twin:9.1f} us  {ratios}", flush=True)


def compare_attention(speed: float) -> None:
    for context, columns, batch in itertools.product(CONTEXTS, COLUMNS, BATCHES):
        layers = Layers(context, columns, batch)
        what = f"context {context:5}  T {columns:2}  B {batch:2}  error {layers.error():.1e}"
        compare(what, layers.kernel(), layers.twin(), layers.bytes / speed)


def compare_moves(batch: int, speed: float) -> None:
    """Move the accepted path of 4 nodes in all layers at once; every node changes its slot."""
    stored = [new(batch, 512, KV_HEADS, WIDTH) for _ in range(2 * LAYERS)]
    prefix = torch.full((batch,), 400, device="cuda")
    path = torch.tensor([2, 5, 9, 13], device="cuda").repeat(batch, 1)
    (table,) = cache_kernels.move_tables(stored)
    kernel = microseconds([lambda: cache_kernels.move_slots(table, prefix, path)])
    twin = microseconds([lambda: slots.move_slots(stored, prefix, path)])
    moved = 2 * len(stored) * path.numel() * KV_HEADS * WIDTH * 2
    compare(f"keep_path in {LAYERS} layers  B {batch:2}", kernel, twin, moved / speed)


def compare_tiles() -> None:
    """Print the fastest five tiles (slots, warps, stages) for the rows that each T gives."""
    picked = attention_kernel.tile
    for context, columns, batch in itertools.product((512, 16384), (1, 5, 16), (1, 32)):
        layers = Layers(context, columns, batch)
        rows = picked(columns * QUERY_HEADS // KV_HEADS, WIDTH, torch.bfloat16)[0]
        times = []
        for shape in [picked(rows, WIDTH, torch.bfloat16)[1:], *TILES]:
            attention_kernel.tile = lambda *_, rows=rows, shape=shape: (rows, *shape)
            with suppress(triton.OutOfResources):
                times.append((round(layers.kernel(), 1), shape))
        fastest = ", ".join(f"{shape} {time}" for time, shape in sorted(times[1:])[:5])
        print(
            f"context {context} T {columns} B {batch} R {rows}: now {times[0][1]} {times[0][0]} us; {fastest}",
            flush=True,
        )


def main() -> int:
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device, and there is none", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    speed = (memory_bandwidth(torch.device("cuda", torch.cuda.current_device())) or 0.0) / 1e6  # bytes a microsecond
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copies at {speed / 1e6:.2f} TB/s")
    if "--tiles" in sys.argv:
        compare_tiles()
    else:
        compare_attention(speed)
        for batch in BATCHES:
            compare_moves(batch, speed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
