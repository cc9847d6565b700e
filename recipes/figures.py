"""The figures of a report. All show the first measured setting; a run keeps its colour throughout."""

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from draftsmith.recipes.results import Contender, Result, Run

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE_COLOUR = "#6B7280"
PHASE_COLOURS = {"draft": "#E69F00", "verify": "#0072B2", "host": "#B8BEC8"}
WHITE_GROUND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}


def draw_figures(runs: list[Run], contenders: list[Contender], folder: Path) -> list[tuple[Path, str]]:
    """Write every figure into the folder; returns paths and captions."""
    folder.mkdir(exist_ok=True)
    drawn = []
    for name, (draw, caption) in FIGURES.items():
        figure = Figure(figsize=(7.2, 4.0), dpi=150, layout="constrained")
        draw(figure, runs, contenders)
        for axes in figure.axes:
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        path = folder / f"{name}.png"
        figure.savefig(path, metadata={"Software": None})
        drawn.append((path, caption))
    return drawn


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def speedup_by_checkpoint(figure: Figure, runs: list[Run], contenders: list[Contender]) -> None:
    axes = figure.subplots()
    for index, run in enumerate(runs):
        results = [checkpoint.results[0] for checkpoint in run.checkpoints]
        speedups = [result["speedup"] for result in results]
        # of a single prompt the interval is a point, which rounding may set beside the speedup
        below = [max(0.0, result["speedup"] - result["speedup_ci95"][0]) for result in results]
        above = [max(0.0, result["speedup_ci95"][1] - result["speedup"]) for result in results]
        steps = [checkpoint.step for checkpoint in run.checkpoints]
        axes.errorbar(steps, speedups, yerr=[below, above], fmt="none", capsize=4, color=colour(index))
        axes.plot(steps, speedups, marker="o", color=colour(index), label=run.name)
    for name, results in runs[0].best.baselines.items():
        axes.axhline(results[0]["speedup"], color=BASELINE_COLOUR, linestyle="--", label=f"{name} (no training)")
        axes.axhspan(*results[0]["speedup_ci95"], color=BASELINE_COLOUR, alpha=0.12, linewidth=0)
    axes.axhline(1.0, color="black", linewidth=1, label="plain decoding")
    label(axes, "Speedup by checkpoint, 95 % interval", "training step", "speedup over plain decoding")
    step_axis(axes, runs)
    axes.legend(fontsize=8)


def acceptance_by_checkpoint(figure: Figure, runs: list[Run], contenders: list[Contender]) -> None:
    axes = figure.subplots()
    for index, run in enumerate(runs):
        steps = [checkpoint.step for checkpoint in run.checkpoints]
        lengths = [checkpoint.results[0]["mean_acceptance_length"] for checkpoint in run.checkpoints]
        axes.plot(steps, lengths, marker="o", color=colour(index), label=run.name)
    for name, results in runs[0].best.baselines.items():
        length = results[0]["mean_acceptance_length"]
        axes.axhline(length, color=BASELINE_COLOUR, linestyle="--", label=f"{name} (no training)")
    axes.axhline(1.0, color="black", linewidth=1, label="plain decoding")
    label(axes, "Acceptance length by checkpoint", "training step", "tokens per round")
    step_axis(axes, runs)
    axes.legend(fontsize=8)


def acceptance_by_position(figure: Figure, runs: list[Run], contenders: list[Contender]) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    fields = {
        "per_position_acceptance_rates": "Unconditional",
        "conditional_acceptance_rates": "Given that all before were accepted",
    }
    for axes, (field, title) in zip(panels, fields.items(), strict=True):
        for name, result, line_colour, style in first_results(runs, contenders):
            rates = [math.nan if rate is None else rate for rate in result[field]]
            axes.plot(range(1, len(rates) + 1), rates, style, marker="o", color=line_colour, label=name)
        label(axes, title, "position in the draft", "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.02)
    panels[0].set_ylabel("share accepted")
    panels[0].legend(fontsize=8)


def training(figure: Figure, runs: list[Run], contenders: list[Contender]) -> None:
    losses, lengths = figure.subplots(1, 2)
    for index, run in enumerate(runs):
        losses.plot(*series(run, "loss"), color=colour(index), label=run.name)
        lengths.plot(*series(run, "simulated_acceptance_length"), color=colour(index), linewidth=1.2)
        lengths.plot(*series(run, "acceptance_length"), "o", color=colour(index))
    label(losses, "Training loss", "training step", "loss")
    losses.set_yscale("log")
    losses.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    losses.legend(fontsize=8)
    lengths.plot([], [], color="black", linewidth=1.2, label="simulated in training")
    lengths.plot([], [], "o", color="black", label="measured")
    label(lengths, "Acceptance length", "training step", "tokens per round")
    lengths.legend(fontsize=8)
    for axes in (losses, lengths):
        step_axis(axes, runs)


def round_time(figure: Figure, runs: list[Run], contenders: list[Contender]) -> None:
    axes = figure.subplots()
    plain_step = contenders[0].results[0]["baseline_tpot_ms"]["p50"]
    for place, contender in enumerate(contenders):
        result = contender.results[0]
        left = 0.0
        for phase, phase_colour in PHASE_COLOURS.items():
            width = result["milliseconds_per_round"][phase]
            axes.barh(place, width, 0.6, left, color=phase_colour, label=phase if place == 0 else None)
            left += width
        steps = left / result["baseline_tpot_ms"]["p50"]
        remark = f"{steps:.2f} steps\n{result['mean_acceptance_length']:.2f} tokens"
        axes.annotate(
            remark, (left, place), (6, 0), textcoords="offset points", va="center", fontsize=8, bbox=WHITE_GROUND
        )
    axes.barh(len(contenders), plain_step, 0.6, color="#374151", label="plain step (median)")
    axes.axvline(plain_step, color="#374151", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(contenders) + 1), [one.name for one in contenders] + ["plain decoding"])
    axes.invert_yaxis()
    axes.set_xmargin(0.2)
    label(axes, "Time of a round beside a step of plain decoding", "milliseconds", "")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def acceptance_histogram(figure: Figure, runs: list[Run], contenders: list[Contender]) -> None:
    axes = figure.subplots()
    width = 0.8 / len(contenders)
    for place, (name, result, bar_colour, _) in enumerate(first_results(runs, contenders)):
        histogram = result["acceptance_histogram"]
        shares = [rounds / max(1, sum(histogram)) for rounds in histogram]
        positions = [accepted - 0.4 + width * (place + 0.5) for accepted in range(len(histogram))]
        axes.bar(positions, shares, width * 0.92, color=bar_colour, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axes, "Rounds by number of accepted tokens", "drafted tokens accepted", "share of rounds")
    axes.legend(fontsize=8)


FIGURES: dict[str, tuple[Callable[[Figure, list[Run], list[Contender]], None], str]] = {
    "speedup_by_checkpoint": (
        speedup_by_checkpoint,
        "What counts: tokens per second over those of plain decoding, measured in turns with it.",
    ),
    "acceptance_by_checkpoint": (
        acceptance_by_checkpoint,
        "Tokens a round emits. More is worth only what the rounds' extra time leaves of it.",
    ),
    "acceptance_by_position": (
        acceptance_by_position,
        "How far drafts hold. A falling right panel says that the drafter loses the thread within a draft.",
    ),
    "training": (
        training,
        "Losses of different families are not comparable. The simulated length is on training text and at the length "
        "that the drafter trains with, the measured one on held-out prompts.",
    ),
    "round_time": (
        round_time,
        "A drafter pays where the tokens of a round exceed its cost in steps of plain decoding.",
    ),
    "acceptance_histogram": (acceptance_histogram, "From drafts lost whole (0) to drafts accepted whole (right)."),
}


def first_results(runs: list[Run], contenders: list[Contender]) -> list[tuple[str, Result, str, str]]:
    """Name, result at the first setting, colour and line style of each contender."""
    colours = {run.name: colour(index) for index, run in enumerate(runs)}
    return [
        (one.name, one.results[0], colours.get(one.name, BASELINE_COLOUR), "-" if one.trained else "--")
        for one in contenders
    ]


def series(run: Run, metric: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[metric]) for line in run.metrics if metric in line]
    return [step for step, _ in points], [value for _, value in points]


def step_axis(axes: Axes, runs: list[Run]) -> None:
    """From 0, so that the distance to the first checkpoint is seen too."""
    axes.set_xlim(0, 1.04 * max(run.checkpoints[-1].step for run in runs))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(which="both", labelsize=8)
