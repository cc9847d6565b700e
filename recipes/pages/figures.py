"""The drawing of figures: PNG files for papers and slides, and SVG in the colours of the page."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftsmith.inference.measuring.results import Interval
from draftsmith.models.errors import printable
from draftsmith.models.storage.files import write_whole
from draftsmith.recipes.report_data.contents import ReportData

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito: told apart by all eyes
BASELINE_COLOUR = "#858C98"  # drafters without training are grey and dashed
DASHES = ("--", ":", "-.")
INK = "#1a1d23"  # text and axes; the page draws them in its own colour
WIDTH, HEIGHT, TWO_PANELS = 4.6, 3.3, 5.6  # inches; narrow, so that the text can be read on a phone
DOTS_PER_INCH = 250
LONGEST_LABEL, WIDEST_LEGEND = 40, 64  # characters
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
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # and names with $ stay names
    "svg.hashsalt": "draftsmith",  # the same figure gives the same file
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Plot:
    """A figure that there is data for: the name of its file, what it says, and the function that draws it."""

    name: str
    caption: str
    draw: Callable[[Figure], None]
    height: float = HEIGHT  # inches


def draw_plots(plots: list[Plot], folder: Path) -> dict[str, str]:
    """Write each plot as PNG into the folder; return it as an element of the page, by name."""
    return {
        plot.name: for_page(save_plot(folder / f"{plot.name}.png", plot.draw, plot.height), plot.name) for plot in plots
    }


def save_plot(path: Path, draw: Callable[[Figure], None], height: float = HEIGHT) -> str:
    """Write a figure of a height in inches as PNG, and return it as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
        draw(figure)
        png, svg = io.BytesIO(), io.StringIO()
        FigureCanvasAgg(figure).print_png(png, metadata={"Software": None})
        figure.set_layout_engine(None)  # it is laid out: `savefig` would draw it once more for that
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    write_whole(path, png.getvalue())
    return svg.getvalue()


def for_page(svg: str, name: str) -> str:
    """Return an SVG file as an element of a page with others: ids of its own, the page's ink and fonts."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: tag_for_page(tag[0], name), svg)
    return re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" data-figure="{name}">', svg)


def tag_for_page(tag: str, name: str) -> str:
    """Return a tag of an SVG file as a page has it; text between tags may hold the same words, and stays as it is."""
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(url\(|href=")#', rf"\1#{name}-", tag)
    tag = tag.replace(COLOURS[0].lower(), "var(--series)")  # too dark for a dark page
    return tag.replace(INK, "currentColor").replace("'DejaVu Sans', ", "")


# --- parts of several figures


@dataclass(frozen=True)
class LineStyle:
    """The look of a run or drafter, the same in all figures, and its name as figures show it."""

    colour: str
    dashes: str
    label: str


def label_text(name: str) -> str:
    """Return a name as a label: printable, on several lines where it is long.

    A blank of no width stands before an underscore, because matplotlib hides labels that begin with one.
    """
    text = fill(printable(name, kept=""), LONGEST_LABEL)
    return f"\u200b{text}" if text.startswith("_") else text


def line_styles(data: ReportData) -> dict[str, LineStyle]:
    """Return the styles of all runs and drafters by name."""
    runs = [run.name for run in data.comparable_runs]
    trained = dict.fromkeys(runs + [drafter.name for drafter in data.drafters if drafter.is_trained])
    others = dict.fromkeys(drafter.name for drafter in data.drafters if not drafter.is_trained)
    looks = [(name, colour, "-") for name, colour in zip(trained, cycle(COLOURS), strict=False)]
    looks += [(name, BASELINE_COLOUR, dashes) for name, dashes in zip(others, cycle(DASHES), strict=False)]
    return {name: LineStyle(colour, dashes, label_text(name)) for name, colour, dashes in looks}


def interval_line(axes: Axes, x: list[int], measured: list[tuple[float, Interval]], style: LineStyle) -> None:
    """Draw measured values over x with their intervals."""
    y = [value for value, _ in measured]
    below = [max(0.0, value - interval[0]) if interval else 0.0 for value, interval in measured]
    above = [max(0.0, interval[1] - value) if interval else 0.0 for value, interval in measured]
    axes.errorbar(x, y, yerr=[below, above], fmt="none", capsize=3, color=style.colour, linewidth=1)
    axes.plot(x, y, style.dashes, marker="o", color=style.colour, label=style.label)


def interval_band(axes: Axes, x: list[int], measured: list[tuple[float, Interval]], style: LineStyle) -> None:
    """Draw measured values over x as a line, in a band of their intervals."""
    y = [value for value, _ in measured]
    ends = [interval or (value, value) for value, interval in measured]
    low, high = [end[0] for end in ends], [end[1] for end in ends]
    axes.fill_between(x, low, high, color=style.colour, alpha=0.15, linewidth=0)
    axes.plot(x, y, style.dashes, marker="o", color=style.colour, label=style.label)


def plain_line(axes: Axes) -> None:
    axes.axhline(1.0, color=INK, linewidth=1, label="plain decoding")


def label(axes: Axes, title: str, x: str, y: str = "") -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def legend(figure: Figure) -> None:
    """Draw one legend for all panels of a figure, below them; none where nothing in them has a name."""
    named: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, handle)
    if not named:
        return
    columns = max(1, min(4, len(named), WIDEST_LEGEND // max(map(len, named))))
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=columns, frameon=False)
