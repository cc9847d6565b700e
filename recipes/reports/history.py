"""The section on a run's checkpoints over training."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from draftsmith.inference.measuring.results import Interval, Result
from draftsmith.recipes.pages.figures import (
    BASELINE_COLOUR,
    DASHES,
    INK,
    TWO_PANELS,
    Plot,
    interval_band,
    label,
    label_text,
    legend,
    line_styles,
    plain_line,
)
from draftsmith.recipes.pages.tables import Cell, Row, Section, speedup_text, table_of, tone_of
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.measured import EvaluatedRun


def history(data: ReportData) -> Section:
    rows: list[Row] = [
        {
            "run": run.name,
            "step": Cell(str(checkpoint.step), "best" if checkpoint is run.best else ""),
            "acceptance length": f"{row.acceptance.mean_acceptance_length:.2f}",
            "speedup": Cell(speedup_text(row), tone=tone_of(row)),
        }
        for run in data.runs
        for checkpoint in run.checkpoints
        for row in [checkpoint.first_result]
    ]
    plots = [
        Plot(
            "speedup_by_checkpoint",
            "What counts: tokens per second over those of plain decoding, measured in turns with it.",
            partial(draw_by_checkpoint, data, speedup, "Speedup", "speedup over plain decoding"),
        ),
        Plot(
            "acceptance_by_checkpoint",
            "Tokens a round emits. More is worth only what the rounds' extra time leaves of it.",
            partial(draw_by_checkpoint, data, acceptance_length, "Acceptance length", "tokens per round"),
        ),
        Plot(
            "training",
            training_caption(data),
            partial(draw_training, data),
            TWO_PANELS,
        ),
    ]
    return Section(
        "history",
        "History over checkpoints",
        "Where curves still rise, more training pays; where the loss falls and they do not, it will not.",
        plots=plots if data.comparable_runs else [],
        folded=[table_of("Checkpoints", rows, words=("run",))],
    )


def training_caption(data: ReportData) -> str:
    """Return how to read the curves of training, as far as this run has them."""
    kinds = {run.kind for run in data.comparable_runs}
    differ = "Losses of different families are not comparable. " if len(kinds) > 1 else ""
    return (
        f"{differ}Lines are the acceptance lengths that training sees on texts of the target, at the draft length that "
        "the drafter trains with; points are decoded, on prompts."
    )


def speedup(row: Result) -> tuple[float, Interval]:
    return row.speed.speedup, row.speed.speedup_ci95


def acceptance_length(row: Result) -> tuple[float, Interval]:
    return row.acceptance.mean_acceptance_length, row.mean_acceptance_length_ci95


def draw_by_checkpoint(
    data: ReportData, measure: Callable[[Result], tuple[float, Interval]], title: str, y: str, figure: Figure
) -> None:
    """Draw a measure of each run's first results over its checkpoints, beside the drafters without training."""
    axes, styles, interval = figure.subplots(), line_styles(data), ""
    for run in data.comparable_runs:
        steps = [checkpoint.step for checkpoint in run.checkpoints]
        measured = [measure(checkpoint.first_result) for checkpoint in run.checkpoints]
        interval_band(axes, steps, measured, styles[run.name])
        interval = ", 95 % interval" if any(ends for _, ends in measured) else interval
    baselines = data.comparable_runs[0].best.baselines
    for (name, baseline), dashes in zip(baselines.items(), cycle(DASHES), strict=False):
        value, _ = measure(baseline.results[0])
        axes.axhline(value, color=BASELINE_COLOUR, linestyle=dashes, label=label_text(f"{name} (no training)"))
    plain_line(axes)
    step_axis(axes, data.comparable_runs)
    label(axes, f"{title} by checkpoint{interval}", "training step", y)
    legend(figure)


def draw_training(data: ReportData, figure: Figure) -> None:
    losses, lengths = figure.subplots(2, 1)
    styles = line_styles(data)
    for run in data.comparable_runs:
        colour = styles[run.name].colour
        losses.plot(*series(run, "loss"), color=colour, label=styles[run.name].label)
        lengths.plot(*series(run, "simulated_acceptance_length"), color=colour, linewidth=0.6, alpha=0.5)
        lengths.plot(*series(run, "held_out_acceptance_length"), color=colour, linewidth=1.4)
        lengths.plot(*series(run, "acceptance_length"), "o", color=colour)
        for line in run.metrics:
            if line.forecast_num_steps is not None:
                ends, limits = [line.forecast_num_steps] * 2, [line.forecast_low, line.forecast_high]
                lengths.plot(ends, limits, color=colour, linewidth=5, alpha=0.3)
    label(losses, "Training loss", "training step", "loss")
    losses.set_yscale("log")
    losses.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_formatter("{x:g}")
    lines = [line for run in data.comparable_runs for line in run.metrics]
    if any(line.simulated_acceptance_length for line in lines):
        lengths.plot([], [], color=INK, linewidth=0.6, alpha=0.5, label="on text that is trained on")
    if any(line.held_out_acceptance_length for line in lines):
        lengths.plot([], [], color=INK, linewidth=1.4, label="on held-out samples")
    if any(line.acceptance_length for line in lines):
        lengths.plot([], [], "o", color=INK, label="decoded")
    if any(line.forecast_num_steps for line in lines):
        lengths.plot([], [], color=INK, linewidth=5, alpha=0.3, label="forecast of the end, 90 % interval")
    label(lengths, "Acceptance length", "training step", "tokens per round")
    for axes in (losses, lengths):
        step_axis(axes, data.comparable_runs)
    legend(figure)


def series(run: EvaluatedRun, metric: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a metric was logged, and its values."""
    points = [(line.step, value) for line in run.metrics if (value := getattr(line, metric)) is not None]
    return [step for step, _ in points], [value for _, value in points]


def step_axis(axes: Axes, runs: list[EvaluatedRun]) -> None:
    """Let the axis begin at 0, so that the distance to the first checkpoint is seen too."""
    axes.set_xlim(0, 1.04 * max(run.checkpoints[-1].step for run in runs))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
