"""The figures of a report: PNG files for papers and slides, and SVG in the colours of the page."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from draftsmith.recipes.reports import figures
from draftsmith.recipes.reports.contents import Measured
from draftsmith.recipes.reports.curves import batch_curve
from draftsmith.recipes.reports.load_figure import load_tests
from draftsmith.recipes.reports.panel import predicted_points

SIZE = (6.4, 3.9)  # inches
DOTS_PER_INCH = 200
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": figures.INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "draftsmith",  # the same figure gives the same file
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), figures.INK),
}


@dataclass(frozen=True)
class Plot:
    """A figure, for whom it says what, and whether there is anything to draw."""

    caption: str
    draw: Callable[[Figure, Measured], None]
    has_data: Callable[[Measured], bool]


@dataclass
class Drawn:
    path: Path  # of the PNG
    caption: str
    svg: str  # an element for the page


def has_rounds(measured: Measured) -> bool:
    return any(row["num_drafts"] for _, row in measured.leaders())


def has_history(measured: Measured) -> bool:
    return bool(measured.alike_runs)


def has_batches(measured: Measured) -> bool:
    return any(len(batch_curve(one, measured.leading)) > 1 for one in measured.contenders)


def has_costs(measured: Measured) -> bool:
    return bool(predicted_points(measured))


def has_calibration(measured: Measured) -> bool:
    return any(row.get("calibration") for _, row in measured.leaders())


def has_load(measured: Measured) -> bool:
    return bool(measured.extras.get("load"))


PLOTS = {
    "acceptance_by_position": Plot(
        "How far drafts hold. A falling right panel says that the drafter loses the thread within a draft.",
        figures.acceptance_by_position,
        has_rounds,
    ),
    "acceptance_histogram": Plot(
        "From drafts lost whole (0) to drafts accepted whole (right).", figures.acceptance_histogram, has_rounds
    ),
    "round_time": Plot(
        "A drafter pays where the tokens of a round exceed its cost in steps of plain decoding.",
        figures.round_time,
        has_rounds,
    ),
    "batch_curve": Plot(
        "Plain decoding gets cheaper a token as batches grow, verification does not: below the line speculation costs.",
        figures.batch_speedup,
        has_batches,
    ),
    "predicted_speedup": Plot(
        "Costs were measured apart from any text: what is off the line is due to prompts and emptying batches.",
        figures.predicted_speedup,
        has_costs,
    ),
    "calibration": Plot(
        "On the diagonal the drafter knows how often it is right; below it, it is too sure of itself.",
        figures.calibration,
        has_calibration,
    ),
    "load": Plot(
        "Up is more throughput, left is less waiting; a number is the load, a ring the operating point within the SLA.",
        load_tests,
        has_load,
    ),
    "speedup_by_checkpoint": Plot(
        "What counts: tokens per second over those of plain decoding, measured in turns with it.",
        figures.speedup_by_checkpoint,
        has_history,
    ),
    "acceptance_by_checkpoint": Plot(
        "Tokens a round emits. More is worth only what the rounds' extra time leaves of it.",
        figures.acceptance_by_checkpoint,
        has_history,
    ),
    "training": Plot(
        "Losses of different families are not comparable. The simulated length is on training text and at the length "
        "that the drafter trains with, the measured one on held-out prompts.",
        figures.training,
        has_history,
    ),
}


def draw_figures(measured: Measured, folder: Path) -> dict[str, Drawn]:
    """Write every figure that there is data for into the folder."""
    folder.mkdir(exist_ok=True)
    return {
        name: draw_figure(folder / f"{name}.png", plot, measured)
        for name, plot in PLOTS.items()
        if plot.has_data(measured)
    }


def draw_figure(path: Path, plot: Plot, measured: Measured) -> Drawn:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        plot.draw(figure, measured)
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
        svg = io.StringIO()
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return Drawn(path, plot.caption, for_page(svg.getvalue(), path.stem))


def for_page(svg: str, name: str) -> str:
    """An SVG file as an element of a page with others: its ids its own, its ink the page's, its fonts the page's."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = svg.replace(figures.INK, "currentColor").replace("'DejaVu Sans', ", "")
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" data-figure="{name}">', svg)
