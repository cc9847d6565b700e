"""On which targets DFlash's one pass beats EAGLE-3's chain, by the roofline of a GPU; nothing is measured here.

    python benchmarks/block_crossover.py

It prints the tables of docs/block_drafters.md. The first ones hold how many times EAGLE-3's acceptance length DFlash
needs to be as fast, which is the ratio of their rounds. The last one says where DFlash is faster at what was accepted,
each drafter at its best draft length: on the quickstart's target (benchmarks/results/families_lengths.txt, of
`families.py compare RUNS lengths`), and as others published it.
"""

from dataclasses import dataclass
from functools import cache

from roofline import CONFIGS, CONTEXT, shape_of

from draftsmith.inference.planning.gpu_roofline import Assumptions, Machine, RooflineCosts, TargetTimes
from draftsmith.inference.planning.gpus import GPUS
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS
from draftsmith.recipes.planning.drafter_shapes import drafter_shape
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

QUICKSTART = "the quickstart's"
TARGETS = (QUICKSTART, "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")
GPU = "H100"
PASSES_MS = (0.4, 0.1)  # of a drafter's pass beside its weights: as fitted to engines, and with little left to save
BATCHES, DRAFT_LENGTHS = (1, 8), (4, 8)


@dataclass(frozen=True)
class Accepted:
    """Acceptance lengths of chains of both drafters, by draft length."""

    source: str
    eagle3: dict[int, float]
    dflash: dict[int, float]


DSPARK_PAPER = "DSpark's paper, T=1"  # arXiv 2607.05147, table 1
ACCEPTED = [
    Accepted("the quickstart's, two CPU minutes", {4: 2.03, 8: 2.13}, {4: 1.68}),
    Accepted("the quickstart's, twelve CPU minutes", {4: 2.53, 8: 2.74}, {4: 1.99, 8: 1.99}),
    Accepted(f"Qwen3-4B, GSM8K, {DSPARK_PAPER}", {7: 5.14}, {7: 5.40}),
    Accepted(f"Qwen3-4B, MT-Bench, {DSPARK_PAPER}", {7: 2.39}, {7: 3.07}),
    Accepted(f"Qwen3-8B, GSM8K, {DSPARK_PAPER}", {7: 5.30}, {7: 5.33}),
    Accepted(f"Qwen3-8B, MT-Bench, {DSPARK_PAPER}", {7: 2.66}, {7: 3.11}),
    Accepted(f"Gemma4-12B, GSM8K, {DSPARK_PAPER}", {7: 5.87}, {7: 5.45}),
]


@cache
def costs(target: str, kind: str, pass_ms: float) -> RooflineCosts:
    """Return the times of a drafter of this kind in the shape of its recipe, which the quickstart's target has too."""
    times = TargetTimes(shape_of(target), Machine(GPUS[GPU], assumptions=Assumptions(draft_pass_ms=pass_ms)))
    recipe = f"quickstart_{kind}" if target == QUICKSTART else kind
    return RooflineCosts(times, drafter_shape(recipe, CONFIGS[target], target)[0])


def needed(target: str, pass_ms: float, batch: int, draft_length: int) -> float:
    """Return how many times EAGLE-3's acceptance length DFlash needs to be as fast."""
    dflash, eagle3 = (costs(target, kind, pass_ms).round(draft_length, batch, CONTEXT) for kind in ("dflash", "eagle3"))
    return dflash / eagle3


def best_speedup(target: str, kind: str, accepted: dict[int, float], pass_ms: float, batch: int) -> float:
    own = costs(target, kind, pass_ms)
    return max(own.speedup(length, draft_length, batch, CONTEXT) for draft_length, length in accepted.items())


def needed_table(batch: int) -> str:
    settings = [(pass_ms, draft_length) for pass_ms in PASSES_MS for draft_length in DRAFT_LENGTHS]
    names = [f"{pass_ms} ms, K={draft_length}" for pass_ms, draft_length in settings]
    lines = [f"| target | weights | {' | '.join(names)} |", f"|---|---:|{'---:|' * len(settings)}"]
    for target in TARGETS:
        cells = [f"{needed(target, pass_ms, batch, draft_length):.2f}" for pass_ms, draft_length in settings]
        lines.append(f"| {target} | {weights_text(shape_of(target).num_weights)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def weights_text(number: float) -> str:
    return f"{number / 1e9:.1f} B" if number > 1e8 else f"{number / 1e6:.1f} M"


def faster_on(row: Accepted, pass_ms: float, batch: int) -> str:
    """Return on which of the targets DFlash is faster, in words; they stand in the order of their size."""
    faster = [
        target
        for target in TARGETS
        if best_speedup(target, "dflash", row.dflash, pass_ms, batch)
        > best_speedup(target, "eagle3", row.eagle3, pass_ms, batch)
    ]
    assert faster == [*TARGETS[: len(faster)]]  # the larger the target, the less the passes of its drafter count
    return "all" if len(faster) == len(TARGETS) else f"up to {faster[-1]}" if faster else "none"


def accepted_table() -> str:
    settings = [(pass_ms, batch) for pass_ms in PASSES_MS for batch in BATCHES]
    names = [f"{pass_ms} ms, batch {batch}" for pass_ms, batch in settings]
    lines = [f"| acceptance on | EAGLE-3 | DFlash | {' | '.join(names)} |"]
    lines.append(f"|---|---|---|{'---|' * len(settings)}")
    for row in ACCEPTED:
        lengths = [
            ", ".join(f"{length:.2f} (K={draft_length})" for draft_length, length in own.items())
            for own in (row.eagle3, row.dflash)
        ]
        cells = [row.source, *lengths]
        cells += [faster_on(row, *setting) for setting in settings]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    from transformers import AutoConfig

    CONFIGS["Qwen3-0.6B"] = PUBLIC_TARGETS["qwen3_0_6b"].config
    CONFIGS[QUICKSTART] = AutoConfig.from_pretrained(EMBEDDED_TARGET)
    print(f"{GPU}, bf16, {CONTEXT} tokens of context, greedy chains; {Assumptions()}\n")
    for batch in BATCHES:
        print(
            f"DFlash needs so many times EAGLE-3's acceptance length, batch {batch}, by the time of a drafter's pass:\n"
        )
        print(needed_table(batch) + "\n")
    print(f"DFlash is faster on these targets:\n\n{accepted_table()}")


if __name__ == "__main__":
    main()
