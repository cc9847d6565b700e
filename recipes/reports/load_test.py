"""The section on load tests, and their figure: throughput against the 95th percentiles of TPOT and TTFT."""

from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.inference.load.load_test import Gain, gains, latency_text
from draftsmith.recipes.reports.figures import BASELINE_COLOUR, COLOURS, INK, Plot, label, legend
from draftsmith.recipes.reports.report_data import ReportData
from draftsmith.recipes.reports.tables import Cell, Row, Section, Table, Tone, ratio_text, table_of

COLOUR_OF = {"off": BASELINE_COLOUR, "on": COLOURS[1], "scheduled": COLOURS[2]}
PANELS = {"tpot_ms": ("Time per token", "TPOT p95, ms"), "ttft_ms": ("Time to first token", "TTFT p95, ms")}


def load_tests(data: ReportData) -> Section:
    """Show what each load test found, and its stages."""
    contents = data.extras.get("load", [])
    return Section(
        "load-test",
        "Load test",
        "Requests that arrive on their own, with speculation off, on, and by the schedule.",
        [stage_table(data.name_of(content["drafter"]), content) for content in contents],
        [
            Plot(
                "load",
                "Up is more throughput, left is less waiting; a number is the load, a ring the operating point within "
                "the SLA.",
                partial(draw_load, content),
            )
            for content in contents[:1]
        ],
    )


def stage_table(name: str, content: dict[str, Any]) -> Table:
    stages = content["stages"]
    gains_by_contender = {row["contender"]: gains(stages, row["contender"]) for row in stages}
    rows: list[Row] = [
        {
            "load": f"{row['load']:g}",
            "speculation": row["contender"],
            "tokens/s": f"{row['throughput_tokens_per_second']:.0f}",
            "over off": "1.00×"
            if row["contender"] == "off"
            else gain_cell(gains_by_contender[row["contender"]][row["load"]]),
            "drafted a round": f"{row['mean_draft_length']:.1f}",
            "requests": f"{row['num_counted']}",
            "TTFT p50/p95/p99": latency_text(row, "ttft_ms"),
            "TPOT p50/p95/p99": latency_text(row, "tpot_ms"),
            "goodput requests/s": Cell(
                f"{row['goodput_requests_per_second']:.2f}", tone="" if row["within_sla"] else "bad"
            ),
        }
        for row in stages
    ]
    unit = "requests at once" if stages[0]["mode"] == "concurrency" else "requests a second"
    note = (
        f"Load in {unit}; times in milliseconds over so many requests, – where those are too few to tell. Over "
        "off: throughput of clients that wait for their answers, else the median time per token; from the worst to "
        "the best repeat, green or red where all agree. Goodput in red where the limits of latency were missed."
    )
    return table_of(f"{name}: {content['verdict']}", rows, note, words=("speculation",))


def gain_cell(gain: Gain) -> Cell:
    tone: Tone = "good" if gain.lowest > 1 else "bad" if gain.highest < 1 else ""
    return Cell(ratio_text(gain.ratio, (gain.lowest, gain.highest)), tone=tone)


def draw_load(content: dict[str, Any], figure: Figure) -> None:
    """Draw the content of load.json: a line is a contender, a point a stage, with its load beside it."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (field, (title, x)) in zip(panels, PANELS.items(), strict=True):
        draw_panel(axes, content, field)
        label(axes, title, x)
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
