"""The figure of a load test: throughput against the 95th percentiles of TPOT and TTFT."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.recipes.reports.contents import Measured
from draftsmith.recipes.reports.figures import BASELINE_COLOUR, COLOURS, INK, label, legend

COLOUR_OF = {"off": BASELINE_COLOUR, "on": COLOURS[1], "scheduled": COLOURS[2]}
FIELDS = {"tpot_ms": ("Time per token", "TPOT p95, ms"), "ttft_ms": ("Time to first token", "TTFT p95, ms")}


def load_tests(figure: Figure, measured: Measured) -> None:
    """The first load test that lies in the folder."""
    draw_load(figure, measured.extras["load"][0])


def draw_load(figure: Figure, content: dict[str, Any]) -> None:
    """From the content of load.json. A line is a contender, a point a stage, with its load beside it."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (field, (title, x)) in zip(panels, FIELDS.items(), strict=True):
        draw_panel(axes, content, field)
        label(axes, title, x, "")
        limit = content["traffic"]["sla"][field]
        if limit is not None:
            axes.axvline(limit, color=INK, linestyle="--", linewidth=1)
            axes.annotate(" SLA", (limit, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
        axes.margins(0.12)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("tokens per second")
    legend(figure)


def draw_panel(axes: Axes, content: dict[str, Any], field: str) -> None:
    for name, colour in COLOUR_OF.items():
        rows = [row for row in content["stages"] if row["contender"] == name]
        xs = [row[field]["p95"] for row in rows]
        ys = [row["throughput_tokens_per_second"] for row in rows]
        axes.plot(xs, ys, "--" if name == "off" else "-", marker="o", color=colour, label=f"speculation {name}")
        for x, y, row in zip(xs, ys, rows, strict=True):
            axes.annotate(f"{row['load']:g}", (x, y), (5, 4), textcoords="offset points", fontsize=8, color=colour)
        point = content["operating_points"][name]
        if point is not None:
            place = point[field]["p95"], point["throughput_tokens_per_second"]
            axes.plot(*place, marker="o", markersize=11, markerfacecolor="none", color=colour)
