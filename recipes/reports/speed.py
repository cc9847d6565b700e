"""The sections on speed: what rounds take, the latency of requests, and the speedup over batch sizes."""

import math
from dataclasses import astuple, dataclass
from functools import partial
from itertools import groupby, pairwise

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from draftsmith.inference.measuring.results import Percentiles, Result, Setting
from draftsmith.recipes.pages.figures import (
    INK,
    Plot,
    interval_line,
    label,
    label_text,
    legend,
    line_styles,
    plain_line,
)
from draftsmith.recipes.pages.tables import Cell, Row, Section, draft_text, percent, speedup_text, table_of, tone_of
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.measured import DrafterResult, MeasuredDrafter

PHASE_COLOURS = {"draft": "#E69F00", "verify": "#0072B2", "host": "#9AA3AF"}


# --- rounds and requests


def speed(data: ReportData) -> Section:
    rows = [(drafter, row) for drafter, row in data.at_leading_setting() if row.acceptance.num_drafts]
    latencies = [latency_cells(drafter.name, row) for drafter, row in rows]
    for _, row in rows[:1]:
        latencies.append({"drafter": "plain decoding"} | tpot_cells(row.speed.baseline_tpot_ms))
    note = (
        "TTFT: time to the first token, with medians of its parts, where they were told apart: tokenising, reading the "
        "prompt and the first round. TPOT: time a token after it."
    )
    plot = Plot(
        "round_time",
        "A drafter pays where the tokens of a round exceed its cost in steps of plain decoding.",
        partial(draw_round_time, rows),
    )
    return Section(
        "speed",
        "Speed",
        "A round pays when it emits more tokens than the plain steps it costs.",
        plots=[plot] if rows else [],
        folded=[
            table_of("A round, phase by phase", [round_cells(drafter.name, row) for drafter, row in rows]),
            table_of("Latency in milliseconds", latencies, note),
        ],
    )


def round_cells(name: str, row: Result) -> Row:
    phases = row.speed.milliseconds_per_round
    cells: Row = {
        "drafter": name,
        "draft ms": f"{phases.draft:.2f}",
        "verify ms": f"{phases.verify:.2f}",
        "host ms": f"{phases.host:.2f}",
        "round ms": f"{phases.total:.2f}",
        "plain step ms": f"{row.plain_step_ms:.2f}",
        "tokens a round": f"{row.tokens_a_round:.2f}",
        "plain steps a round": f"{row.steps_a_round:.2f}",
    }
    if row.speed.throughput_tokens_per_second:
        cells["tokens/s"] = f"{row.speed.throughput_tokens_per_second:.1f}"
    if row.speed.bandwidth_floor_share:
        cells["of the bandwidth floor"] = percent(row.speed.bandwidth_floor_share)
    return cells


def latency_cells(name: str, row: Result) -> dict[str, str]:
    first, parts = row.speed.ttft_ms, row.speed.ttft_parts_ms
    medians = {"tokenise": parts.tokenise, "prefill": parts.prefill, "first decode": parts.first_decode}
    return {
        "drafter": name,
        "TTFT p50": f"{first.p50:.1f}",
        "TTFT p95": f"{first.p95:.1f}",
        "TTFT p99": f"{first.p99:.1f}",
        **{part: f"{median:.1f}" for part, median in medians.items() if median is not None},
        **tpot_cells(row.speed.tpot_ms),
    }


def tpot_cells(tpot: Percentiles) -> dict[str, str]:
    return {"TPOT p50": f"{tpot.p50:.2f}", "TPOT p95": f"{tpot.p95:.2f}", "TPOT p99": f"{tpot.p99:.2f}"}


def draw_round_time(rows: list[DrafterResult], figure: Figure) -> None:
    axes = figure.subplots()
    plain_step = rows[0][1].plain_step_ms
    for place, (_, row) in enumerate(rows):
        left, phases = 0.0, astuple(row.speed.milliseconds_per_round)
        for (phase, colour), width in zip(PHASE_COLOURS.items(), phases, strict=True):
            axes.barh(place, width, 0.62, left, color=colour, label=phase if place == 0 else None)
            left += width
        remark = f"{row.tokens_a_round:.2f} tokens for {left / plain_step:.2f} steps"
        axes.annotate(remark, (left, place), (6, 0), textcoords="offset points", va="center", fontsize=8)
    axes.barh(len(rows), plain_step, 0.62, color=INK, label="plain step")
    axes.axvline(plain_step, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(rows) + 1), [label_text(drafter.name) for drafter, _ in rows] + ["plain decoding"])
    axes.invert_yaxis()
    axes.set_xmargin(0.8)  # for the remarks
    label(axes, "Time of a round and of a plain step", "milliseconds")
    legend(figure)


# --- over batch sizes


def batches(data: ReportData) -> Section:
    """Show the speedup of each drafter and draft by batch size."""
    rows: list[Row] = []
    for drafter in data.drafters:
        results = sorted(drafter.sound_results(data.setting), key=lambda row: row.setting.batch_size)
        for (*_, draft), same in groupby(sorted(results, key=draft_key), draft_key):
            cells = {f"batch size {row.setting.batch_size}": Cell(speedup_text(row), tone=tone_of(row)) for row in same}
            rows.append({"drafter": drafter.name, "draft": draft, **cells})
    several = len({row.setting.batch_size for drafter in data.drafters for row in drafter.results}) > 1
    table = table_of("Speedup over plain decoding at the same batch size", rows, words=("drafter", "draft"))
    plot = Plot(
        "batch_curve",
        "Below the line speculation is slower than plain decoding at that batch size. Bars are 95 % intervals.",
        partial(draw_batch_speedup, data),
    )
    return Section(
        "batches",
        "Batch sizes",
        "Speedup is a curve over the batch size, never one number: the fuller the machine, the more a drafted token "
        "costs.",
        [table] if several else [],
        [plot] if any(len(batch_curve(drafter, data.setting)) > 1 for drafter in data.drafters) else [],
    )


def draft_key(row: Result) -> tuple[int, int, str]:
    return row.setting.draft_length, row.setting.tree_nodes or 0, draft_text(row.setting)


def batch_curve(drafter: MeasuredDrafter, like: Setting) -> list[Result]:
    """Return its fastest sound result at each batch size, one that pays before others; smallest batch first.

    All else but the draft is as given.
    """
    best: dict[int, Result] = {}
    for row in sorted(drafter.sound_results(like), key=lambda row: (row.pays, row.speed.speedup)):
        best[row.setting.batch_size] = row
    return [best[size] for size in sorted(best)]


@dataclass(frozen=True)
class BreakEven:
    """The batch size at which the best measured speedup falls below 1, between two measured ones."""

    batch_size: float  # on the straight line between both, over the logarithm of the batch size
    last_above: int
    first_below: int


def break_even(curve: list[Result]) -> BreakEven | None:
    """Return None unless the curve crosses 1 from above and the intervals on both sides leave no doubt of it."""
    for row, following in pairwise(curve):
        above, below = row.speed.speedup, following.speed.speedup
        if above > 1 >= below:
            sizes = row.setting.batch_size, following.setting.batch_size
            low, high = map(math.log, sizes)
            size = math.exp(low + (high - low) * (above - 1) / (above - below))
            is_clear = tone_of(row) == "good" and tone_of(following) == "bad"
            return BreakEven(size, *sizes) if is_clear else None
    return None


def draw_batch_speedup(data: ReportData, figure: Figure) -> None:
    axes, styles = figure.subplots(), line_styles(data)
    sizes: set[int] = set()
    for drafter in data.drafters:
        curve = batch_curve(drafter, data.setting)
        x = [row.setting.batch_size for row in curve]
        speedups = [(row.speed.speedup, row.speed.speedup_ci95) for row in curve]
        interval_line(axes, x, speedups, styles[drafter.name])
        sizes.update(x)
    plain_line(axes)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), list(map(str, sorted(sizes))))
    axes.xaxis.set_minor_locator(NullLocator())
    label(axes, "Speedup by batch size, best draft at each, 95 % interval", "batch size", "speedup over plain decoding")
    legend(figure)
