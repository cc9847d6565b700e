"""The sections of a report: what there is data for, as tables and figures with the sentence that opens them."""

from typing import Any

from draftsmith.recipes.reports.contents import DRAFT, Contender, Measured, Result, plain_step_ms, tokens_a_round
from draftsmith.recipes.reports.curves import settings_but
from draftsmith.recipes.reports.figures import longest_chains
from draftsmith.recipes.reports.findings import (
    calibration,
    choices,
    cost_model,
    diagnosis,
    differences,
    domains,
    history,
    load_test,
    planned,
)
from draftsmith.recipes.reports.panel import Profile, prediction_table
from draftsmith.recipes.reports.summary import (
    SummaryRow,
    by_setting,
    certificate_text,
    comparison_table,
    draft_text,
    speedup_text,
    summary_rows,
)
from draftsmith.recipes.reports.tables import Cell, Row, Section, Table, percent, table_of
from draftsmith.recipes.reports.verdict import tone_of


def sections(measured: Measured, profiles: list[Profile]) -> list[Section]:
    """All sections that a report may have, in order."""
    rows = summary_rows([*measured.contenders, *measured.elsewhere])
    return [
        compared(measured, rows),
        acceptance(measured),
        speed(measured),
        batches(measured),
        choices(measured),
        what_if(profiles),
        cost_model(measured),
        domains(measured, rows),
        history(measured),
        diagnosis(measured),
        calibration(measured),
        load_test(measured),
        planned(measured),
        differences(measured),
    ]


def compared(measured: Measured, rows: list[SummaryRow]) -> Section:
    blocks = by_setting(rows)
    leading = next(row.setting for row in rows if row.result is measured.leading)
    return Section(
        "drafters",
        "Drafters compared",
        "What counts is the speedup: green where its 95 % interval lies above 1, red where below. A round of plain "
        "decoding is one step.",
        [comparison_table(leading, blocks[leading])],
        folded=[comparison_table(setting, block) for setting, block in blocks.items() if setting != leading],
        notes=[
            f"Certificate of losslessness, {certificate_text(one.name, one.certificate)}"
            for one in measured.contenders
            if one.certificate
        ],
    )


# --- acceptance


def acceptance(measured: Measured) -> Section:
    drawn = longest_chains(measured)
    by_position: list[Row] = [
        {
            "drafter": Cell(one.name, draft_text(row)),
            "acceptance length": f"{row['mean_acceptance_length']:.2f}",
            **{
                f"token {i + 1}": Cell(percent(conditional), f"{percent(alone)} of rounds")
                for i, (conditional, alone) in enumerate(
                    zip(row["conditional_acceptance_rates"], row["per_position_acceptance_rates"], strict=True)
                )
            },
        }
        for one, row in drawn
        if row["num_drafts"]
    ]
    note = "The chance that a drafted token is accepted when all before it were; below it the share of all rounds."
    tables = [table_of("Acceptance by position", by_position, note)] if by_position else []
    return Section(
        "acceptance",
        "Acceptance",
        "How many tokens a round emits, and where in a draft the drafter loses the target.",
        tables + teacher_forced([(one, row) for one, row in drawn if "teacher_forced" in row]),
        ["acceptance_by_position", "acceptance_histogram"],
    )


def teacher_forced(rows: list[tuple[Contender, Result]]) -> list[Table]:
    """What the decoder accepts and what training predicts on the same texts."""
    cells: list[Row] = [
        {
            "drafter": one.name,
            "acceptance length": " / ".join(f"{side['mean_acceptance_length']:.2f}" for side in sides),
            **{
                f"token {i + 1}": " / ".join(map(percent, rates))
                for i, rates in enumerate(zip(*(side["conditional_acceptance_rates"] for side in sides), strict=True))
            },
            "difference": gap_cell(row["teacher_forced_gap"]),
        }
        for one, row in rows
        for sides in [(row, row["teacher_forced"])]
    ]
    note = (
        "In the decoder / as a training pass over the same texts predicts it. The difference is the decoder's length "
        "less the predicted one, with a 95 % interval; one beyond it and beyond 2 % is a fault: training and drafting "
        "see different features, layers, positions, tokens or draft vocabulary."
    )
    return [table_of("Measured and as training predicts it", cells, note)] if cells else []


def gap_cell(gap: dict[str, Any]) -> Cell:
    interval = ", ".join(f"{end:+.2f}" for end in gap["ci95"] or [])
    text = f"{gap['difference']:+.2f}{interval and f' [{interval}]'}"
    return Cell(f"{text} GAP", tone="alarm") if gap["flagged"] else Cell(text)


# --- speed


def speed(measured: Measured) -> Section:
    rows = [(one, row) for one, row in measured.leaders() if row["num_drafts"]]
    rounds = [
        {
            "drafter": one.name,
            **{f"{phase} ms": f"{milliseconds:.2f}" for phase, milliseconds in row["milliseconds_per_round"].items()},
            "round ms": f"{sum(row['milliseconds_per_round'].values()):.2f}",
            "plain step ms": f"{plain_step_ms(row):.2f}",
            "tokens a round": f"{tokens_a_round(row):.2f}",
            "step cost ratio": f"{row['step_cost_ratio']:.2f}",
            **bandwidth_cells(row),
        }
        for one, row in rows
    ]
    latencies = [latency_cells(one.name, row, "tpot_ms") for one, row in rows]
    if rows:
        latencies.append(latency_cells("plain decoding", rows[0][1], "baseline_tpot_ms"))
    note = (
        "TTFT: time to the first token, split into medians of tokenising, reading the prompt and the first round. "
        "TPOT: time a token after it."
    )
    tables = [table_of("A round, phase by phase", rounds), table_of("Latency in milliseconds", latencies, note)]
    return Section(
        "speed",
        "Speed",
        "A round pays when it emits more tokens than the plain steps it costs.",
        tables if rows else [],
        ["round_time"],
    )


def bandwidth_cells(row: Result) -> dict[str, str]:
    """Throughput, and how near plain reading of the weights from memory comes to it, where that was measured."""
    found = {}
    if row.get("throughput_tokens_per_second"):
        found["tokens/s"] = f"{row['throughput_tokens_per_second']:.1f}"
    if row.get("bandwidth_floor_share"):
        found["of the bandwidth floor"] = percent(row["bandwidth_floor_share"])
    return found


def latency_cells(name: str, row: Result, field_name: str) -> dict[str, str]:
    drafts = field_name == "tpot_ms"
    first, parts = row["ttft_ms"], row.get("ttft_parts_ms", {})
    return {
        "drafter": name,
        **{f"TTFT {q}": f"{first[q]:.1f}" if drafts else "–" for q in first},
        **{
            part.replace("_", " "): f"{value:.1f}" if drafts and value is not None else "–"
            for part, value in parts.items()
        },
        **{f"TPOT {q}": f"{value:.2f}" for q, value in row[field_name].items()},
    }


def batches(measured: Measured) -> Section:
    """Speedup of each drafter and draft by batch size."""
    leading = measured.leading
    rows: list[Row] = []
    for one in measured.contenders:
        found = settings_but(one, leading, "batch_size", *DRAFT)
        for draft in sorted({(row["draft_length"], row["tree_nodes"] or 0) for row in found}):
            same = [row for row in found if (row["draft_length"], row["tree_nodes"] or 0) == draft]
            cells = {
                f"batch size {row['batch_size']}": Cell(speedup_text(row), tone=tone_of(row))
                for row in sorted(same, key=lambda row: row["batch_size"])
            }
            rows.append({"drafter": one.name, "draft": draft_text(same[0]), **cells})
    several = len({row["batch_size"] for one in measured.contenders for row in one.results}) > 1
    table = table_of("Speedup over plain decoding at the same batch size", rows, words=("drafter", "draft"))
    return Section(
        "batches",
        "Batch sizes",
        "Speedup is a curve over the batch size, never one number: the fuller the machine, the more a drafted token "
        "costs.",
        [table] if several else [],
        ["batch_curve"],
    )


def what_if(profiles: list[Profile]) -> Section:
    return Section(
        "what-if",
        "What if",
        "Speedup = tokens a round / (draft + verification + host), in plain steps. The sliders start at what was "
        "measured.",
        folded=[prediction_table(profile) for profile in profiles],
    )
