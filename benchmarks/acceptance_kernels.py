"""The verification rules on a GPU: kernels against their plain twins and against the bytes they must move.

    python benchmarks/acceptance_kernels.py

V 128256, B rows, a chain of 4 or a tree of 16 nodes. What must be moved are the logits, read once: the target's (bf16
for greedy, which takes them as they are, fp32 for the others) and the drafter's. The floor is the time that a copy of
as many bytes takes on this machine. Every figure is the median over runs of a CUDA graph that find nothing of theirs in
the L2 cache.
"""

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.inference.measuring.bandwidth import memory_bandwidth
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.inference.verification import acceptance_rules
from draftsmith.models.sampling import sampling
from draftsmith.models.sampling.sampling import Noise, Stream

VOCABULARY, BATCHES = 128256, (1, 8, 32)
CHAIN = [-1, 0, 1, 2]  # parents of the nodes
TREE = [-1, -1, -1, -1, 0, 0, 0, 1, 1, 4, 4, 5, 9, 9, 12, 12]
DEPTH = 5
L2_BYTES = 256 << 20  # several times that of any GPU


@dataclass
class Comparison:
    """A kernel and its twin, on the same values."""

    name: str
    kernel: Callable[[], Any]
    twin: Callable[[], Any]
    num_bytes: int


def comparisons(batch: int, vocabulary: int, device: str) -> Iterator[Comparison]:
    """Yield each rule and each way of drawing; they need triton with a CUDA device or its interpreter."""
    from draftsmith.inference.verification import acceptance_kernels
    from draftsmith.models.sampling import sampling_kernels

    def rule(name: str, *args: Any) -> Comparison:
        read = sum(arg.nbytes for arg in args if isinstance(arg, Tensor) and arg.shape[-1] == vocabulary)
        kernel, twin = getattr(acceptance_kernels, name), getattr(acceptance_rules, name)
        return Comparison(f"{name} {shape}", lambda: kernel(*args), lambda: twin(*args), read)

    for shape, parent_list, depth in (("chain", CHAIN, len(CHAIN)), ("tree", TREE, DEPTH)):
        parents = torch.tensor(parent_list, device=device).expand(batch, -1)
        logits, draft_logits, tokens = draw_inputs(parents, vocabulary)
        accept = torch.rand(tokens.shape, dtype=torch.float64, device=device)
        draws = torch.rand(batch, depth + 1, dtype=torch.float64, device=device)
        nodes = tokens, parents, depth
        yield rule("greedy", logits.to(torch.bfloat16), *nodes)
        yield rule("one_hot", logits, *nodes, draws)
        yield rule("typical", logits, *nodes)
        yield rule("without_replacement", logits, draft_logits, *nodes, accept, draws)
        if shape == "chain":
            yield rule("probabilistic", logits, draft_logits, tokens, accept, draws)
            yield rule("block", logits, draft_logits, tokens, accept, draws)

    row, coin = torch.randn(batch, vocabulary, device=device), torch.rand(batch, dtype=torch.float64, device=device)
    yield Comparison(
        "sample",
        lambda: sampling_kernels.sample(row, coin),
        lambda: sampling.sample(row.softmax(-1), coin),
        row.nbytes,
    )
    noise, positions = Noise(0, torch.arange(batch, device=device)), torch.arange(16, device=device).expand(batch, -1)
    yield Comparison(
        "noise",
        lambda: sampling_kernels.uniforms(noise.keys, positions, Stream.ACCEPT),
        lambda: noise.uniforms(positions, Stream.ACCEPT),
        positions.nbytes,
    )


def draw_inputs(parents: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [B, T, V], draft logits [B, P, V] near them, and tokens [B, N] drawn without replacement."""
    batch, num_nodes = parents.shape
    logits = 4 * torch.randn(batch, num_nodes + 1, vocabulary, device=parents.device)
    draft_logits = logits[:, : int(parents.max()) + 2] + torch.randn(vocabulary, device=parents.device)
    gumbel = -torch.empty_like(draft_logits).exponential_().log()
    likeliest = (draft_logits + gumbel).topk(4).indices  # [B, P, 4]
    siblings = (parents[0, :, None] == parents[0]).tril(-1).sum(1)
    return logits, draft_logits, likeliest[:, parents[0] + 1, siblings]


def microseconds(run: Callable[[], Any], repeats: int = 30) -> float:
    """Return the median time of a captured run that finds nothing in the L2 cache."""
    run()  # compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    filler = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        filler.zero_()
        start.record()
        graph.replay()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1000 for start, end in times)


def main() -> int:
    if not torch.cuda.is_available():
        print("error: this benchmark needs a CUDA device, and there is none", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    speed = (memory_bandwidth(torch.device("cuda", torch.cuda.current_device())) or 0.0) / 1e6  # bytes a microsecond
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {git_commit()}"
    print(f"{machine}, copies at {speed / 1e6:.2f} TB/s")
    for batch in BATCHES:
        for pair in comparisons(batch, VOCABULARY, "cuda"):
            kernel, twin, floor = microseconds(pair.kernel), microseconds(pair.twin), pair.num_bytes / speed
            times = f"kernel {kernel:8.1f} us  twin {twin:8.1f} us  floor {floor:8.1f} us"
            ratios = f"twin/kernel {twin / kernel:6.2f}  floor/kernel {floor / kernel:5.2f}"
            print(f"{pair.name:24} B {batch:2}  {times}  {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
