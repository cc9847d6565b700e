"""What torch.compile and the fused optimiser bring to a training step on a CPU: each form in turn, in one process.

    python benchmarks/compilation.py [--kind eagle3] [--samples DIR] [--length 512] [--rows 4] [--repeats 6]

Forward and backward pass of the drafter of the quickstart's recipe on rows packed to `--length`, with nothing compiled,
with the loss (what run.compile does), the layer, or both. CPU seconds of the process, which other programs disturb
less than the clock; the ratio is the median over rounds of all forms.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parent))
from training import write_samples

from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.decoder_layer import DecoderLayer
from draftsmith.models.drafters.medusa import ResidualBlocks
from draftsmith.models.eagle_parts.eagle_layer import UnrolledLayer
from draftsmith.models.losses.divergences import Teacher
from draftsmith.models.target.target import Features
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train.config import OptimizerConfig
from draftsmith.train.optimizer import optimizer_of

BATCH_SIZE, STEPS = 32, 3
LOSS: list[tuple[type, str]] = [(Teacher, "compare")]
LAYER: list[tuple[type, str]] = [(DecoderLayer, "finish"), (UnrolledLayer, "project"), (ResidualBlocks, "forward")]
FORMS: dict[str, list[tuple[type, str]]] = {"plain": [], "loss": LOSS, "layer": LAYER, "both": [*LOSS, *LAYER]}


def batches_of(target: Target, drafter: Drafter, plan: BatchPlan) -> list[tuple[Batch, Features]]:
    rows = [rows for step in range(STEPS) for rows in plan.micro_batches(step, 0, 1)]
    return [(batch, target.features(batch, drafter.layer_ids)) for batch in map(plan.collate, rows)]


def passes(drafter: Drafter, batches: list[tuple[Batch, Features]]) -> tuple[float, list[float]]:
    """Return the CPU seconds of forward and backward pass over all batches, and their losses."""
    losses, start = [], time.process_time()
    for batch, features in batches:
        drafter.zero_grad()
        total, count = drafter.loss(batch, features)["loss"]
        (total / count).backward()
        losses.append(float(total.detach() / count))
    return time.process_time() - start, losses


def in_turns(forms: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Return what each form takes in each round, after one to warm up."""
    rounds = [{name: take() for name, take in forms.items()} for _ in range(repeats + 1)]
    return {name: [taken[name] for taken in rounds[1:]] for name in forms}


def show(times: dict[str, list[float]], plain: str, notes: dict[str, str]) -> None:
    for name, taken in times.items():
        ratios = [one / other for one, other in zip(taken, times[plain], strict=True)]
        print(
            f"{name:8} {1000 * statistics.median(taken):8.1f} ms, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}){notes.get(name, '')}"
        )


def compare_compiled(drafter: Drafter, batches: list[tuple[Batch, Features]], repeats: int) -> None:
    parts = FORMS["both"]
    plain = {part: getattr(*part) for part in parts}
    compiled = {part: torch.compile(function, dynamic=True) for part, function in plain.items()}
    losses: dict[str, list[float]] = {}
    first: dict[str, float] = {}

    def form(name: str, chosen: Iterable[tuple[type, str]]) -> float:
        for part in parts:
            setattr(*part, compiled[part] if part in chosen else plain[part])
        start = time.perf_counter()
        taken, losses[name] = passes(drafter, batches)
        first.setdefault(name, time.perf_counter() - start)
        return taken

    times = in_turns({name: lambda name=name: form(name, FORMS[name]) for name in FORMS}, repeats)  # type: ignore[misc]
    apart = {
        name: max(abs(one - other) for one, other in zip(found, losses["plain"], strict=True))
        for name, found in losses.items()
    }
    notes = {name: f", first {first[name]:.0f} s by the clock, losses differ by {apart[name]:.0e}" for name in FORMS}
    show(times, "plain", notes)


def compare_optimisers(drafter: Drafter, repeats: int) -> None:
    optimisers = {"fused": optimizer_of(drafter, OptimizerConfig()), "unfused": torch.optim.AdamW(drafter.parameters())}

    def step(name: str) -> float:
        start = time.process_time()
        optimisers[name].step()
        return time.process_time() - start

    times = in_turns({name: lambda name=name: step(name) for name in optimisers}, repeats)  # type: ignore[misc]
    num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
    print(f"AdamW, {num_parameters / 1e6:.1f} million parameters:")
    show(times, "unfused", {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["eagle3", "medusa"], default="eagle3")
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        if args.samples is None:
            write_samples(Path(name))
        samples = read_samples(args.samples or Path(name) / "samples")
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    drafter = DRAFTERS[args.kind].from_target(RECIPES[f"quickstart_{args.kind}"]().drafter, target)
    plan = BatchPlan(samples, BATCH_SIZE, args.length, args.length * args.rows, seed=0, packing=True)
    batches = batches_of(target, drafter, plan)
    print(f"{args.kind}, 1 thread, torch {torch.__version__}, commit {git_commit()}")
    print(f"rows x tokens: {', '.join('x'.join(map(str, batch.token_ids.shape)) for batch, _ in batches)}")
    compare_compiled(drafter, batches, args.repeats)
    compare_optimisers(drafter, 5 * args.repeats)


if __name__ == "__main__":
    main()
