"""The sections on what to serve with: what `tune` chose, what an engine measured, and load tests.

The figure of a load test is throughput against the 95th percentiles of TPOT and TTFT.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from draftsmith.inference.decoding.schedule import for_vllm
from draftsmith.inference.measuring.judged import JudgedResult, JudgedSetting
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.planning.tuning import PredictedDraft
from draftsmith.inference.traffic.load_test import LoadTest
from draftsmith.inference.traffic.stages import (
    IN_CHUNKS,
    OFF,
    ON,
    SCHEDULED,
    Gain,
    StageResult,
    gains,
    latency_text,
    off_beside,
    operating_points,
)
from draftsmith.recipes.pages.figures import (
    BASELINE_COLOUR,
    COLOURS,
    INK,
    TWO_PANELS,
    Plot,
    label,
    label_text,
    legend,
)
from draftsmith.recipes.pages.tables import (
    Cell,
    Row,
    Section,
    Table,
    Tone,
    draft_text,
    interval_text,
    ratio_text,
    speedup_text,
    table_of,
)
from draftsmith.recipes.report_data.contents import Choice, ReportData
from draftsmith.recipes.report_data.measured import checkpoint_names

GOODPUT, PAUSES = "goodput requests/s", "pauses p50/p95/p99"
COLOUR_OF = {OFF: BASELINE_COLOUR, ON: COLOURS[1], SCHEDULED: COLOURS[2], ON + IN_CHUNKS: COLOURS[3]}


# --- what was chosen


def choices(data: ReportData) -> Section:
    """Show the drafts that were chosen from acceptance on other prompts and from measured costs."""
    rows: list[Row] = [
        {
            "drafter": data.name_of(choice.drafter),
            "batch size": str(draft.batch_size),
            "best draft": draft_text(draft) if draft.draft_length else "speculation off",
            "tokens a round": f"{draft.acceptance_length:.2f}",
            "predicted speedup": f"{draft.speedup:.2f}×",
            "in fixed batches": f"{draft.fixed_batch_speedup:.2f}×" if draft.fixed_batch_speedup else "–",
            "measured": measured_text(data, choice, draft),
        }
        for choice in data.extras.get("choice", [])
        for draft in choice.predicted
    ]
    note = (
        "Predicted from the acceptance on the prompts of the fit and from measured costs, for a server that fills up "
        "its batch and for fixed batches, which last as long as their slowest request; measured in fixed batches on "
        "the prompts of this report, where that draft was decoded."
    )
    return Section(
        "choice",
        "Choice",
        "The draft to serve with, chosen on prompts that this report does not measure.",
        [table_of("", rows, note, words=("drafter", "best draft"))],
        notes=[choice_text(data.name_of(choice.drafter), choice) for choice in data.extras.get("choice", [])],
    )


def measured_text(data: ReportData, choice: Choice, draft: PredictedDraft) -> str:
    """Return the speedup of a chosen draft on the report's own prompts."""
    drafter = data.find(choice.drafter)
    rows = drafter.sound_results(data.setting) if drafter else []
    return next((speedup_text(row) for row in rows if draft.is_of(row.setting)), "–")


def choice_text(name: str, choice: Choice) -> str:
    """Return the schedule and the tree in words."""
    steps = [f"{length or 'no'} tokens from {start} on" for start, length in choice.schedule.draft_lengths]
    nodes, depth = len(choice.tree or []), max(map(len, choice.tree or []), default=0)
    shape = f"a tree of {nodes} nodes and depth {depth}" if nodes else "no tree beats the chain"
    return (
        f"{name}, fitted on {choice.fitted_on}. Schedule by running requests: {', '.join(steps)} "
        f"(vLLM: num_speculative_tokens_per_batch_size {for_vllm(choice.schedule)}); {shape}."
    )


# --- what an engine measured


def judged(data: ReportData) -> Section:
    """Show what an engine counted and took for each drafter, in tables of its own."""
    return Section(
        "judged",
        "Judged by an engine",
        "A serving engine drafted, counted and decoded; nothing here was measured by draftsmith's own decoder.",
        judged_tables(data.judged),
    )


def judged_tables(evaluations: list[Evaluation]) -> list[Table]:
    """Return a table for each setting of one engine, a row for each drafter."""
    tables: dict[str, list[Row]] = {}
    for evaluation in evaluations:
        for row in evaluation.judged or []:
            tables.setdefault(judged_name(row.setting), []).append(judged_cells(evaluation, row))
    note = (
        "Acceptance is of the engine's own counters, tokens/s of the client's clock from sending a batch to its last "
        "answer, with prompts in the prefix cache. Intervals: over batches of prompts, 95 %. Speedup and identical "
        "texts are beside the server without a drafter, where there was one."
    )
    return [table_of(name, rows, note) for name, rows in tables.items()]


def judged_name(setting: JudgedSetting) -> str:
    """Return all that two rows of one table share."""
    top_p = f", top-p {setting.top_p:g}" if setting.top_p < 1 else ""
    return (
        f"{setting.judge.engine}: temperature {setting.temperature:g}{top_p}, batch size {setting.batch_size}, "
        f"{setting.prompt_set}, up to {setting.max_new_tokens} new tokens"
    )


def judged_cells(evaluation: Evaluation, row: JudgedResult) -> Row:
    speed, texts = row.speed, row.texts
    name, note = checkpoint_names(evaluation.drafter)
    return {
        "drafter": Cell(name, note),
        "acceptance length": Cell(
            f"{row.acceptance.mean_acceptance_length:.2f}", interval_text(row.mean_acceptance_length_ci95)
        ),
        "draft length": str(row.setting.draft_length),
        "tokens/s": f"{speed.tokens_per_second:.1f}",
        "speedup": ratio_text(speed.speedup, speed.speedup_ci95) if speed.speedup else "–",
        "identical texts": f"{texts.identical}/{texts.checked}" if texts else "–",
        "prompts": str(row.setting.num_prompts),
    }


def judged_line(data: ReportData) -> str:
    """Return in a sentence which of the judged drafters was accepted longest at the first setting."""
    first = data.judged[0].first
    assert isinstance(first, JudgedResult)
    rows = [
        (row, evaluation.drafter)
        for evaluation in data.judged
        for row in evaluation.judged or []
        if row.setting == first.setting
    ]
    row, drafter = max(rows, key=lambda pair: pair[0].acceptance.mean_acceptance_length)
    speedup = f", and makes it {row.speed.speedup:.2f} times as fast" if row.speed.speedup else ""
    length = f"acceptance length {row.acceptance.mean_acceptance_length:.2f}"
    return f"Judged by {first.setting.judge.engine}: {' '.join(checkpoint_names(drafter))} reaches {length}{speedup}."


# --- load tests


def load_tests(data: ReportData) -> Section:
    """Show what each load test found, and its stages."""
    tests: list[LoadTest] = data.extras.get("load", [])
    return Section(
        "load-test",
        "Load test",
        "Requests that arrive on their own, with speculation off, on, and by the schedule.",
        [short_stage_table(data.name_of(test.drafter), test) for test in tests],
        [
            Plot(
                "load",
                "Up is more throughput, left is less waiting; a number is the load, a ring the operating point within "
                "the SLA.",
                partial(draw_load, test),
                TWO_PANELS,
            )
            for test in tests[:1]
        ],
        folded=[stage_table(test) for test in tests],
    )


def short_stage_table(name: str, test: LoadTest) -> Table:
    """Return what decides: one row for each load, with what each contender gains there within the SLA."""
    table = stage_table(test)
    load, contender, gain, goodput = map(table.headings.index, ("load", "speculation", "over off", GOODPUT))
    rows: dict[str, Row] = {}
    for cells in table.rows:
        row = rows.setdefault(cells[load].text, {"load": cells[load]})
        text = f"{cells[goodput].text} requests/s"
        row[cells[contender].text] = replace(cells[gain], note=text, tone=cells[goodput].tone or cells[gain].tone)
    return table_of(f"{name}: {test.verdict}", rows.values(), "Speedup over off, and goodput below it.", words=())


def stage_table(test: LoadTest) -> Table:
    """Return one row for each load and contender."""
    gains_by_contender = {stage.contender: gains(test.stages, stage.contender) for stage in test.stages}
    rows: list[Row] = [
        {
            "load": f"{stage.load:g}",
            "speculation": stage.contender,
            "tokens/s": f"{stage.throughput_tokens_per_second:.0f}",
            "over off": "1.00×"
            if stage.contender == off_beside(stage.contender)
            else gain_cell(gains_by_contender[stage.contender][stage.load]),
            "drafted a round": f"{stage.mean_draft_length:.1f}",
            "requests": f"{stage.num_counted}",
            "TTFT p50/p95/p99": latency_text(stage.ttft_ms, stage.num_counted),
            "TPOT p50/p95/p99": latency_text(stage.tpot_ms, stage.num_counted),
            PAUSES: latency_text(stage.pause_ms, stage.num_counted) if stage.pause_ms else "–",
            GOODPUT: goodput_cell(stage),
        }
        for stage in test.stages
    ]
    unit = "requests at once" if test.stages[0].mode == "concurrency" else "requests a second"
    note = (
        f"Load in {unit}; times in milliseconds over so many requests, – where those are too few to tell. A pause is "
        "the longest time of a request between two of its tokens. Over off: throughput of clients that wait for their "
        "answers, else the median time per token; goodput where one of both misses the SLA; with 95 % interval over "
        "repeats. Goodput, the requests a second that keep the limits of latency, is red where the SLA was missed."
    )
    return table_of("All stages", rows, note, words=("speculation",))


def gain_cell(gain: Gain) -> Cell:
    if gain.interval is None:
        return Cell(gain.text)
    tone: Tone = "good" if gain.interval[0] > 1 else "bad" if gain.interval[1] < 1 else ""
    return Cell(ratio_text(gain.ratio, gain.interval), tone=tone)


def goodput_cell(stage: StageResult) -> Cell:
    text = f"{stage.goodput_requests_per_second:.2f}"
    if stage.within_sla is None:
        return Cell(f"{text} (too few to tell)")
    return Cell(text) if stage.within_sla else Cell(f"{text} (SLA missed)", tone="bad")


def draw_load(test: LoadTest, figure: Figure) -> None:
    """Draw a load test: a line is a contender, a point a stage, with its load beside it."""
    sla = test.traffic.settings.sla
    above, below = figure.subplots(2, 1, sharey=True)
    draw_panel(above, test, lambda stage: stage.tpot_ms.p95, sla.tpot_ms)
    draw_panel(below, test, lambda stage: stage.ttft_ms.p95, sla.ttft_ms)
    label(above, "Time per token", "TPOT p95, ms", "tokens per second")
    label(below, "Time to first token", "TTFT p95, ms", "tokens per second")
    legend(figure)


def draw_panel(axes: Axes, test: LoadTest, latency: Callable[[StageResult], float], limit: float | None) -> None:
    for name, best in operating_points(test.stages).items():
        stages, colour = [stage for stage in test.stages if stage.contender == name], COLOUR_OF.get(name, INK)
        places = [(latency(stage), stage.throughput_tokens_per_second) for stage in stages]
        style = "--" if name == off_beside(name) else "-"
        axes.plot(*zip(*places, strict=True), style, marker="o", color=colour, label=label_text(f"speculation {name}"))
        for stage, place in zip(stages, places, strict=True):
            axes.annotate(f"{stage.load:g}", place, (5, 4), textcoords="offset points", fontsize=8, color=colour)
        if best is not None:
            place = latency(best), best.throughput_tokens_per_second
            axes.plot(*place, marker="o", markersize=11, markerfacecolor="none", color=colour)
    if limit is not None:
        axes.axvline(limit, color=INK, linestyle="--", linewidth=1)
        axes.annotate(" SLA", (limit, 0.02), xycoords=("data", "axes fraction"), fontsize=8)
    axes.margins(0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
