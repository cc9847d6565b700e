"""Predicted against measured speedup, at settings that the cost model was not fitted on, for every kind of drafter.

    python benchmarks/cost_model.py FOLDER [--thread-time] [--kinds ...] [--settings N] [--beside OTHER_FOLDER]

Costs of each drafter are fitted once, as `evaluate` does. Then settings are drawn for each drafter from all batch
sizes, contexts, chains and trees, the same ones in each run. Each is decoded in turns with plain decoding, and is
given its `predicted_speedup`. A fit knows other contexts than those, and draft lengths that are powers of 2. Costs do
not depend on what a drafter has learned: trained kinds are used as they are made, and hardly anything of theirs is
accepted. Lookups and cascades accept what they find in real text. FOLDER keeps costs and rows: give the same command
again to go on.
`--beside` tells how far the measured speedups lie from those of an earlier call in another folder: no prediction can be
nearer to a measurement than another measurement is.
`--thread-time` counts the time of the computing thread instead of the wall's, for a machine that does other things too.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.counters import Interval
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.inference.measuring.results import Result
from draftsmith.inference.planning.cost_measurement import CostRange, measure_costs, usual_tree
from draftsmith.inference.planning.costs import GOAL, Costs
from draftsmith.inference.planning.predictions import with_prediction
from draftsmith.models import Drafter, Target, load_drafter, save_drafter
from draftsmith.models.storage.reading import read_typed
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.budget import new_drafter
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

PROMPTS = Path(__file__).resolve().parent / "results" / "held_out_40.jsonl"
KINDS = (
    *("eagle3", "eagle", "p_eagle", "medusa", "hydra", "mlp_speculator", "draft_model", "dflash", "dspark", "domino"),
    *("ngram", "suffix", "suffix+medusa", "suffix+eagle3"),
)
TREE_NODES, TREE_DEPTH = 16, 4
BATCHES, CONTEXTS, LENGTHS = (1, 2, 4, 8), (32, 128, 360), (3, 5, 7)
NEW_TOKENS, BATCHES_TIMED, REPEATS = 40, 12, 1


@dataclass(frozen=True)
class ComparedSetting:
    """A setting with its predicted and its measured speedup."""

    drafter: str
    draft: str
    batch: int
    context: int
    tokens_a_round: float
    predicted: float
    predicted_ci95: Interval
    measured: float
    measured_ci95: Interval

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_explained(self) -> bool:
        """Whether the error is within the goal, or the intervals of both overlap."""
        if abs(self.error) <= GOAL:
            return True
        if self.predicted_ci95 is None or self.measured_ci95 is None:
            return False
        return self.predicted_ci95[0] <= self.measured_ci95[1] and self.measured_ci95[0] <= self.predicted_ci95[1]


# --- what is measured


def drafter_named(name: str, target: Target, folder: Path) -> Drafter:
    """Return a drafter without training, of the sizes of the quickstart; trained kinds are kept for cascades."""
    lookup, _, kind = name.rpartition("+")
    if kind in ("ngram", "suffix"):
        return load_drafter(name, target)
    path = folder / "drafters" / kind
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        save_drafter(new_drafter(RECIPES[f"quickstart_{kind}"](), target), path)
    return load_drafter(f"{lookup}+{path}" if lookup else path, target)


def texts_of(functions: list[list[int]], context: int, count: int) -> PromptSet:
    """Return prompts of about so many tokens: begun functions one behind the other, cut at different lengths."""
    texts = []
    for place in range(count):
        text: list[int] = []
        while len(text) < context:
            text += functions[(place + len(text)) % len(functions)]
        texts.append(text[: context - place % 4 * context // 8])
    return PromptSet(f"context {context}", texts)


@dataclass(frozen=True)
class DrawnSetting:
    """A batch size, a context and a draft, in whose place 0 stands for the tree."""

    batch: int
    context: int
    length: int

    @property
    def draft(self) -> str:
        return f"chain of {self.length}" if self.length else f"tree of {TREE_NODES}"

    @property
    def measured(self) -> MeasureSettings:
        draft = self.length or usual_tree(TREE_NODES, TREE_DEPTH)
        return MeasureSettings(draft=draft, batch_size=self.batch, max_new_tokens=NEW_TOKENS, repeats=REPEATS)


def drawn_settings(name: str, drafter: Drafter, count: int) -> list[DrawnSetting]:
    """Return settings of a drafter, drawn by its name; all batch sizes and contexts occur about equally often."""
    most = drafter.max_draft_length or max(LENGTHS)
    lengths = [length for length in LENGTHS if length <= most]
    if drafter.can_branch and most >= TREE_DEPTH:
        lengths.append(0)
    chance = random.Random(name)
    places = list(itertools.product(BATCHES, CONTEXTS))
    drawn: list[DrawnSetting] = []
    while len(drawn) < min(count, len(places) * len(lengths)):
        chance.shuffle(places)
        for batch, context in places:
            setting = DrawnSetting(batch, context, chance.choice(lengths))
            if setting not in drawn:
                drawn.append(setting)
    return drawn[:count]


def compared(name: str, setting: DrawnSetting, row: Result) -> ComparedSetting:
    """Return a row with its prediction. Raises `ValueError` where nothing was drafted."""
    if row.predicted_speedup is None:
        raise ValueError(f"{name} drafted nothing: {setting}")
    return ComparedSetting(
        name,
        setting.draft,
        setting.batch,
        setting.context,
        row.tokens_a_round,
        row.predicted_speedup,
        row.predicted_speedup_ci95,
        row.speed.speedup,
        row.speed.speedup_ci95,
    )


def costs_of(name: str, drafter: Drafter, target: Target, folder: Path, reach: CostRange) -> Costs:
    """Return the costs in the folder, measured where they are not there yet."""
    path = folder / "costs" / f"{name}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_json(measure_costs(target, drafter, reach, name))))
        print(f"{name}: costs measured", flush=True)
    return read_typed(Costs, path)


def measure_all(args: argparse.Namespace, target: Target) -> list[ComparedSetting]:
    """Measure what is not in the folder yet, and return all rows in it."""
    reach = CostRange(max(BATCHES), max(CONTEXTS), 8, TREE_NODES, args.seconds)
    path, rows = args.folder / "rows.jsonl", read_rows(args.folder)
    functions = read_prompt_set(str(PROMPTS), target, None, NEW_TOKENS).token_ids
    done = {(row.drafter, row.draft, row.batch, row.context) for row in rows}
    for name in args.kinds:
        drafter = drafter_named(name, target, args.folder)
        costs = costs_of(name, drafter, target, args.folder, reach)
        for setting in drawn_settings(name, drafter, args.settings):
            if (name, setting.draft, setting.batch, setting.context) in done:
                continue
            prompts = texts_of(functions, setting.context, BATCHES_TIMED * setting.batch)
            measured = measure(target, {name: drafter}, prompts, setting.measured)
            rows.append(compared(name, setting, with_prediction(measured[name], costs)))
            with path.open("a") as file:
                file.write(json.dumps(asdict(rows[-1])) + "\n")
            print(line_of(rows[-1]), flush=True)
    return rows


# --- what is shown


def table(rows: list[ComparedSetting]) -> list[str]:
    """Return a line for each setting, then summaries by drafter, draft, batch size and context, and of all."""
    heads = f"{'batch':>5} {'context':>7} {'tokens':>6} {'predicted':>9} {'measured':>8} {'error':>7}"
    lines = [f"{'drafter':<15} {'draft':<11} {heads}"]
    lines += map(line_of, sorted(rows, key=lambda row: (row.drafter, row.draft, row.context, row.batch)))
    parts: list[Callable[[ComparedSetting], str]] = [
        lambda row: row.drafter,
        lambda row: row.draft,
        lambda row: f"batch size {row.batch}",
        lambda row: f"context {row.context}",
        lambda row: "all",
    ]
    lines.append("")
    for part in parts:
        for name in dict.fromkeys(map(part, rows)):
            lines.append(summary(name, [row for row in rows if part(row) == name]))
    return lines


def line_of(row: ComparedSetting) -> str:
    numbers = f"{row.tokens_a_round:>6.2f} {row.predicted:>9.2f} {row.measured:>8.2f} {row.error:>+7.1%}"
    reach = "" if row.measured_ci95 is None else " [{:.2f}, {:.2f}]".format(*row.measured_ci95)
    return f"{row.drafter:<15} {row.draft:<11} {row.batch:>5} {row.context:>7} {numbers}{reach}"


def summary(name: str, rows: list[ComparedSetting]) -> str:
    errors = np.array([row.error for row in rows])
    sizes = np.abs(errors)
    return (
        f"{name:<15} {len(rows):>4} settings; error: mean {errors.mean():+.1%}, median size {np.median(sizes):.1%}, "
        f"90th percentile {np.quantile(sizes, 0.9):.1%}; within {GOAL:.0%} at {(sizes <= GOAL).mean():.0%}, "
        f"or within both intervals at {np.mean([row.is_explained for row in rows]):.0%}"
    )


def repeatability(rows: list[ComparedSetting], earlier: list[ComparedSetting]) -> str:
    """Return how far two measurements of the same settings lie apart."""
    known = {(row.drafter, row.draft, row.batch, row.context): row.measured for row in earlier}
    keys = [(row.drafter, row.draft, row.batch, row.context) for row in rows]
    ratios = [row.measured / known[key] - 1 for row, key in zip(rows, keys, strict=True) if key in known]
    sizes = np.abs(ratios)
    return (
        f"measured twice: {len(ratios)} settings; median difference {np.median(sizes):.1%}, largest {sizes.max():.1%}, "
        f"within {GOAL:.0%} at {(sizes <= GOAL).mean():.0%}"
    )


def read_rows(folder: Path) -> list[ComparedSetting]:
    """Return the rows in a folder; none where nothing was measured yet."""
    path = folder / "rows.jsonl"
    return [ComparedSetting(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def draw(rows: list[ComparedSetting], path: Path) -> None:
    """Draw measured against predicted speedups, a colour for each drafter."""
    figure, axes = plt.subplots(figsize=(5.5, 5.5))
    for name in dict.fromkeys(row.drafter for row in rows):
        chosen = [row for row in rows if row.drafter == name]
        axes.plot([row.measured for row in chosen], [row.predicted for row in chosen], "o", markersize=3, label=name)
    line = np.array([0.95 * min(*axes.get_xlim(), *axes.get_ylim()), max(*axes.get_xlim(), *axes.get_ylim())])
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.fill_between(line, 0.95 * line, 1.05 * line, color="grey", alpha=0.2, label="within 5 %")
    axes.set(xlabel="measured speedup", ylabel="predicted speedup", xlim=line, ylim=line)
    axes.set_aspect("equal")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--settings", type=int, default=12, help="of each drafter")
    parser.add_argument("--seconds", type=float, default=20, help="of measuring costs, about, for each drafter")
    parser.add_argument("--thread-time", action="store_true")
    parser.add_argument("--beside", type=Path, metavar="OTHER_FOLDER")
    args = parser.parse_args()
    if args.thread_time:
        time.perf_counter = time.thread_time  # what the decoder's own clock reads, too
    args.folder.mkdir(parents=True, exist_ok=True)
    with cpu_threads(1):
        target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
        env = environment(target)
        rows = measure_all(args, target)
    clock = "time of the computing thread" if args.thread_time else "wall time"
    head = f"{env.command}, {env.device}, 1 thread, {clock}, commit {env.git_commit}"
    twice = [repeatability(rows, read_rows(args.beside))] if args.beside else []
    text = "\n".join([head, "", *table(rows), *twice]) + "\n"
    (args.folder / "cost_model.txt").write_text(text)
    draw(rows, args.folder / "cost_model.png")
    print(text)


if __name__ == "__main__":
    main()
