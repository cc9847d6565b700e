"""What each figure of a report draws. All but the batch curve and the history show the leading setting."""

import math
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from draftsmith.recipes.reports.contents import DRAFT, Contender, Measured, Result, Run, plain_step_ms, tokens_a_round
from draftsmith.recipes.reports.curves import batch_curve, settings_but
from draftsmith.recipes.reports.panel import predicted_points

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: told apart by all eyes
BASELINE_COLOUR = "#858C98"  # drafters without training are grey and dashed
DASHES = ("--", ":", "-.")
INK = "#1a1d23"  # text and axes; the page draws them in its own colour
PHASES = {"draft": "#E69F00", "verify": "#0072B2", "host": "#9AA3AF"}


def line_styles(measured: Measured) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each run and contender by name, the same in all figures."""
    trained = dict.fromkeys(
        [run.name for run in measured.alike_runs] + [c.name for c in measured.contenders if c.trained]
    )
    others = dict.fromkeys(c.name for c in measured.contenders if not c.trained)
    return {name: (colour, "-") for name, colour in zip(trained, cycle(COLOURS), strict=False)} | {
        name: (BASELINE_COLOUR, dashes) for name, dashes in zip(others, cycle(DASHES), strict=False)
    }


# --- acceptance


def acceptance_by_position(figure: Figure, measured: Measured) -> None:
    panels = figure.subplots(1, 2, sharey=True)
    fields = {
        "per_position_acceptance_rates": "Of all rounds",
        "conditional_acceptance_rates": "Where all before were accepted",
    }
    styles = line_styles(measured)
    for axes, (field, title) in zip(panels, fields.items(), strict=True):
        for contender, result in longest_chains(measured):
            rates = [math.nan if rate is None else rate for rate in result[field]]
            colour, dashes = styles[contender.name]
            axes.plot(range(1, len(rates) + 1), rates, dashes, marker="o", color=colour, label=contender.name)
        label(axes, title, "position in the draft", "")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.02)
    panels[0].set_ylabel("share accepted")
    legend(figure)


def longest_chains(measured: Measured) -> list[tuple[Contender, Result]]:
    """Of each contender the row with the longest chains, all else as at the leading setting; else its leading row."""
    found = []
    for contender in measured.contenders:
        rows = [row for row in settings_but(contender, measured.leading, *DRAFT) if row["draft_length"]]
        chains = [row for row in rows if row["tree_nodes"] is None] or rows
        if chains:
            found.append((contender, max(chains, key=lambda row: row["draft_length"])))
    return found


def acceptance_histogram(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    drawn, styles = longest_chains(measured), line_styles(measured)
    width = 0.8 / len(drawn)
    for place, (contender, result) in enumerate(drawn):
        histogram = result["acceptance_histogram"]
        shares = [rounds / max(1, sum(histogram)) for rounds in histogram]
        positions = [accepted - 0.4 + width * (place + 0.5) for accepted in range(len(histogram))]
        axes.bar(positions, shares, width * 0.92, color=styles[contender.name][0], label=contender.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axes, "Rounds by number of accepted tokens", "drafted tokens accepted", "share of rounds")
    legend(figure)


# --- speed


def round_time(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    drawn = [(one, row) for one, row in measured.leaders() if row["num_drafts"]]
    plain_step = plain_step_ms(drawn[0][1])
    for place, (_, result) in enumerate(drawn):
        left = 0.0
        for phase, colour in PHASES.items():
            width = result["milliseconds_per_round"][phase]
            name = phase if place == 0 else None
            axes.barh(place, width, 0.62, left, color=colour, label=name)
            left += width
        remark = f"{tokens_a_round(result):.2f} tokens for {left / plain_step:.2f} steps"
        axes.annotate(remark, (left, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.barh(len(drawn), plain_step, 0.62, color=INK, label="plain step")
    axes.axvline(plain_step, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(drawn) + 1), [one.name for one, _ in drawn] + ["plain decoding"])
    axes.invert_yaxis()
    axes.set_xmargin(0.42)
    label(axes, "Time of a round beside a step of plain decoding", "milliseconds", "")
    legend(figure)


def batch_speedup(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    sizes: set[int] = set()
    styles = line_styles(measured)
    for contender in measured.contenders:
        curve = batch_curve(contender, measured.leading)
        colour, dashes = styles[contender.name]
        interval_line(axes, [row["batch_size"] for row in curve], curve, colour, dashes, contender.name)
        sizes |= {row["batch_size"] for row in curve}
    plain_line(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), list(map(str, sorted(sizes))))
    axes.xaxis.set_minor_locator(NullLocator())
    label(axes, "Speedup by batch size, best draft at each, 95 % interval", "batch size", "speedup over plain decoding")
    legend(figure)


def predicted_speedup(figure: Figure, measured: Measured) -> None:
    """From costs.json and the measured acceptance length, beside what was measured."""
    axes = figure.subplots()
    styles = line_styles(measured)
    points = predicted_points(measured)
    top = 1.08 * max(max(one.predicted, one.row["speedup"]) for one in points)
    for name in dict.fromkeys(one.name for one in points):
        own = [one for one in points if one.name == name]
        found = [one.row["speedup"] for one in own]
        axes.plot([one.predicted for one in own], found, "o", color=styles[name][0], label=name, alpha=0.85)
    axes.plot([0, top], [0, top], color=INK, linewidth=1, label="equal")
    axes.fill_between([0, top], [0, 0.95 * top], [0, 1.05 * top], color=INK, alpha=0.1, linewidth=0, label="within 5 %")
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    label(axes, "Speedup predicted from costs and as measured", "predicted", "measured")
    legend(figure)


def calibration(figure: Figure, measured: Measured) -> None:
    """Of the leading contender that has it: how often drafts of some confidence were accepted, by depth."""
    contender, result = next((one, row) for one, row in measured.leaders() if row.get("calibration"))
    axes = figure.subplots()
    for depth, bins in enumerate(result["calibration"]):
        bins = [one for one in bins if one["count"]]
        points = [one["confidence"] for one in bins], [one["accepted"] for one in bins]
        axes.plot(*points, marker="o", color=COLOURS[depth % len(COLOURS)], label=f"token {depth + 1}")
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--", label="calibrated")
    label(axes, f"Confidence of {contender.name} and acceptance", "drafter's probability", "share accepted")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    legend(figure)


# --- history


def speedup_by_checkpoint(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    history(axes, measured, "speedup")
    label(axes, "Speedup by checkpoint, 95 % interval", "training step", "speedup over plain decoding")
    legend(figure)


def acceptance_by_checkpoint(figure: Figure, measured: Measured) -> None:
    axes = figure.subplots()
    history(axes, measured, "mean_acceptance_length")
    label(axes, "Acceptance length by checkpoint", "training step", "tokens per round")
    legend(figure)


def history(axes: Axes, measured: Measured, field: str) -> None:
    """A field of each run's first row over its checkpoints, beside the drafters without training."""
    styles = line_styles(measured)
    for run in measured.alike_runs:
        results = [checkpoint.results[0] for checkpoint in run.checkpoints]
        steps = [checkpoint.step for checkpoint in run.checkpoints]
        if field == "speedup":
            interval_line(axes, steps, results, styles[run.name][0], "-", run.name)
        else:
            axes.plot(steps, [row[field] for row in results], marker="o", color=styles[run.name][0], label=run.name)
    for (name, results), dashes in zip(measured.alike_runs[0].best.baselines.items(), cycle(DASHES), strict=False):
        axes.axhline(results[0][field], color=BASELINE_COLOUR, linestyle=dashes, label=f"{name} (no training)")
    plain_line(axes)
    step_axis(axes, measured.alike_runs)


def training(figure: Figure, measured: Measured) -> None:
    losses, lengths = figure.subplots(1, 2)
    styles = line_styles(measured)
    for run in measured.alike_runs:
        colour = styles[run.name][0]
        losses.plot(*series(run, "loss"), color=colour, label=run.name)
        lengths.plot(*series(run, "simulated_acceptance_length"), color=colour, linewidth=1.2)
        lengths.plot(*series(run, "acceptance_length"), "o", color=colour)
    label(losses, "Training loss", "training step", "loss")
    losses.set_yscale("log")
    losses.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    lengths.plot([], [], color=INK, linewidth=1.2, label="simulated in training")
    lengths.plot([], [], "o", color=INK, label="measured")
    label(lengths, "Acceptance length", "training step", "tokens per round")
    for axes in (losses, lengths):
        step_axis(axes, measured.alike_runs)
    legend(figure)


def series(run: Run, metric: str) -> tuple[list[int], list[float]]:
    points = [(line["step"], line[metric]) for line in run.metrics if metric in line]
    return [step for step, _ in points], [value for _, value in points]


# --- parts


def interval_line(axes: Axes, x: list[int], rows: list[Result], colour: str, dashes: str, name: str) -> None:
    """Speedups over x with their intervals."""
    speedups = [row["speedup"] for row in rows]
    intervals = [row["speedup_ci95"] or [row["speedup"]] * 2 for row in rows]
    below = [max(0.0, speedup - low) for speedup, (low, _) in zip(speedups, intervals, strict=True)]
    above = [max(0.0, high - speedup) for speedup, (_, high) in zip(speedups, intervals, strict=True)]
    axes.errorbar(x, speedups, yerr=[below, above], fmt="none", capsize=3, color=colour, linewidth=1)
    axes.plot(x, speedups, dashes, marker="o", color=colour, label=name)


def plain_line(axes: Axes) -> None:
    axes.axhline(1.0, color=INK, linewidth=1, label="plain decoding")


def step_axis(axes: Axes, runs: list[Run]) -> None:
    """From 0, so that the distance to the first checkpoint is seen too."""
    axes.set_xlim(0, 1.04 * max(run.checkpoints[-1].step for run in runs))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))


def label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def legend(figure: Figure) -> None:
    """One for all panels of a figure, below them."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=min(4, len(named)), frameon=False
    )
