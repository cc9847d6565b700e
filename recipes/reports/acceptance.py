"""The sections on acceptance: how many tokens a round emits, where in a draft the drafter loses the target, and why."""

import math
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftsmith.inference.measuring.results import CalibrationBin, Finding, Result, TeacherForced, TeacherForcedGap
from draftsmith.recipes.pages.figures import COLOURS, INK, TWO_PANELS, Plot, label, label_text, legend, line_styles
from draftsmith.recipes.pages.tables import Cell, Row, Section, Table, count, draft_text, percent, table_of
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.measured import DrafterResult


def acceptance(data: ReportData) -> Section:
    rows = longest_chains(data)
    by_position: list[Row] = [
        {
            "drafter": Cell(drafter.name, draft_text(row.setting)),
            "acceptance length": f"{row.acceptance.mean_acceptance_length:.2f}",
            **{
                f"token {i}": Cell(percent(conditional), f"{percent(alone)} of rounds")
                for i, (conditional, alone) in enumerate(
                    zip(
                        row.acceptance.conditional_acceptance_rates,
                        row.acceptance.per_position_acceptance_rates,
                        strict=True,
                    ),
                    1,
                )
            },
        }
        for drafter, row in rows
        if row.acceptance.num_drafts
    ]
    predicted = teacher_forced(rows)
    differ = any(row.teacher_forced_gap and row.teacher_forced_gap.flagged for _, row in rows)
    if not differ:
        predicted.title = "✓ Accepted as training predicts, up to chance"
    note = "The chance that a drafted token is accepted when all before it were; below it the share of all rounds."
    plots = [
        Plot(
            "acceptance_by_position",
            "How far drafts hold. A falling lower panel says that the drafter loses the thread within a draft.",
            partial(draw_acceptance_by_position, data),
            TWO_PANELS,
        ),
        Plot(
            "acceptance_histogram",
            "From drafts lost whole (0) to drafts accepted whole (right).",
            partial(draw_acceptance_histogram, data),
        ),
    ]
    return Section(
        "acceptance",
        "Acceptance",
        "How many tokens a round emits, and where in a draft the drafter loses the target.",
        [predicted] if differ else [],
        folded=[table_of("Acceptance by position", by_position, note), *([] if differ else [predicted])],
        plots=plots if any(row.acceptance.num_drafts for _, row in longest_chains(data)) else [],
    )


def longest_chains(data: ReportData) -> list[DrafterResult]:
    """Return of each drafter the result with its longest chains at the leading setting.

    A drafter without chains has that with its longest drafts of another form.
    """
    longest = []
    for drafter in data.drafters:
        rows = [row for row in drafter.sound_results(data.setting, data.setting.batch_size) if row.setting.draft_length]
        chains = [row for row in rows if row.setting.is_chain] or rows
        if chains:
            longest.append((drafter, max(chains, key=lambda row: row.setting.draft_length)))
    return longest


def draw_acceptance_by_position(data: ReportData, figure: Figure) -> None:
    panels, styles = figure.subplots(2, 1, sharex=True), line_styles(data)
    for drafter, row in longest_chains(data):
        conditional = [math.nan if rate is None else rate for rate in row.acceptance.conditional_acceptance_rates]
        style = styles[drafter.name]
        for axes, rates in zip(panels, (row.acceptance.per_position_acceptance_rates, conditional), strict=True):
            axes.plot(range(1, len(rates) + 1), rates, style.dashes, marker="o", color=style.colour, label=style.label)
    for axes, title in zip(panels, ("Of all rounds", "Where all before were accepted"), strict=True):
        label(axes, title, "", "share accepted")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 1.02)
    panels[-1].set_xlabel("position in the draft")
    legend(figure)


def draw_acceptance_histogram(data: ReportData, figure: Figure) -> None:
    axes, styles, rows = figure.subplots(), line_styles(data), longest_chains(data)
    width = 0.8 / len(rows)
    for place, (drafter, row) in enumerate(rows):
        histogram = row.acceptance.acceptance_histogram
        shares = [rounds / max(1, sum(histogram)) for rounds in histogram]
        positions = [accepted - 0.4 + width * (place + 0.5) for accepted in range(len(histogram))]
        style = styles[drafter.name]
        axes.bar(positions, shares, width * 0.92, color=style.colour, label=style.label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axes, "Rounds by number of accepted tokens", "drafted tokens accepted", "share of rounds")
    legend(figure)


# --- what training predicts


def teacher_forced(rows: list[DrafterResult]) -> Table:
    """Return what the decoder accepts beside what training predicts on the same texts."""
    note = (
        "In the decoder / as a training pass over the same texts predicts it. The difference is the decoder's length "
        "less the predicted one, with a 95 % interval; one beyond it and beyond 2 % is a fault: training and drafting "
        "see different features, layers, positions, tokens or draft vocabulary."
    )
    cells = [
        teacher_forced_cells(drafter.name, row, row.teacher_forced, row.teacher_forced_gap)
        for drafter, row in rows
        if row.teacher_forced and row.teacher_forced_gap
    ]
    return table_of("Measured and as training predicts it", cells, note)


def teacher_forced_cells(name: str, row: Result, predicted: TeacherForced, gap: TeacherForcedGap) -> Row:
    rates = zip(row.acceptance.conditional_acceptance_rates, predicted.conditional_acceptance_rates, strict=True)
    interval = "[{:+.2f}, {:+.2f}]".format(*gap.ci95) if gap.ci95 else ""
    difference = f"{gap.difference:+.2f} {interval}".rstrip()
    return {
        "drafter": name,
        "acceptance length": f"{row.acceptance.mean_acceptance_length:.2f} / {predicted.mean_acceptance_length:.2f}",
        **{f"token {i}": f"{percent(rate)} / {percent(forced)}" for i, (rate, forced) in enumerate(rates, 1)},
        "difference": Cell(f"{difference} GAP", tone="alarm") if gap.flagged else difference,
    }


# --- calibration


def calibration(data: ReportData) -> Section:
    rows: list[Row] = []
    plots: list[Plot] = []
    for drafter, row in data.at_leading_setting():
        if row.calibration:
            errors = enumerate(row.calibration_error or [], 1)
            cells = {f"token {depth}": f"{error:.3f}" for depth, error in errors if error is not None}
            rows.append({"drafter": drafter.name, **cells})
            plots.append(
                Plot(
                    "calibration",
                    "On the diagonal the drafter knows how often it is right; below it, it is too sure of itself.",
                    partial(draw_calibration, drafter.name, row.calibration),
                )
            )
    note = "Mean distance between the drafter's probability of its token and the share accepted, weighted by number."
    return Section(
        "calibration",
        "Calibration",
        "Whether the drafter's confidence can be believed: an adaptive draft length and a dynamic tree stand on it.",
        [table_of("Calibration error by position", rows, note)],
        plots[:1],
    )


def draw_calibration(name: str, bins_by_depth: list[list[CalibrationBin]], figure: Figure) -> None:
    """Draw how often drafts of some confidence were accepted, by depth."""
    axes = figure.subplots()
    for depth, bins in enumerate(bins_by_depth):
        bins = [part for part in bins if part.count]
        points = [part.confidence for part in bins], [part.accepted for part in bins]
        axes.plot(*points, marker="o", color=COLOURS[depth % len(COLOURS)], label=f"token {depth + 1}")
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--", label="calibrated")
    label(axes, label_text(f"Confidence of {name} and acceptance"), "drafter's probability", "share accepted")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    legend(figure)


# --- causes of low acceptance


def diagnosis(data: ReportData) -> Section:
    """List the causes for every result whose acceptance is low: each cause once, where it costs most."""
    rows: list[Row] = []
    notes = []
    for drafter in data.all_drafters:
        low = [row for row in drafter.results if row.diagnosis is not None]
        causes: dict[str, list[tuple[Finding, Result]]] = {}
        for row in low:
            for finding in row.diagnosis or []:
                causes.setdefault(finding.cause, []).append((finding, row))
        rows += [cause_cells(drafter.name, findings) for findings in causes.values()]
        if low and not causes:
            notes.append(f"{drafter.name}, at {places_text(low)}: {diagnosis_lines([])[0]}.")
    return Section(
        "diagnosis",
        "Diagnosis",
        "Where acceptance is lost, and what the measurements point to.",
        [table_of("", rows, words=("drafter", "cause", "measured", "evidence", "what to do"))],
        notes=notes,
    )


def cause_cells(name: str, findings: list[tuple[Finding, Result]]) -> Row:
    """Return one cause with the results that it was found in."""
    costliest, _ = max(findings, key=lambda pair: pair[0].cost or 0)
    return {
        "drafter": Cell(name, places_text([row for _, row in findings])),
        "cause": costliest.cause,
        "measured": value_text(costliest.measured),
        "evidence": costliest.evidence,
        "what to do": costliest.mend,
    }


def places_text(rows: list[Result]) -> str:
    """Return the first of the settings, and how many more there are."""
    first, *others = dict.fromkeys(
        f"temperature {row.setting.temperature:g}, {draft_text(row.setting)}, {row.setting.prompt_set}" for row in rows
    )
    return f"{first} and {count(len(others), 'other setting')}" if others else first


def value_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {value_text(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    return "–" if value is None else str(value)


def diagnosis_lines(findings: list[Finding] | None) -> list[str]:
    """Return what a diagnosis says, a cause a line; nothing for None, where acceptance is not low."""
    if findings is None:
        return []
    if not findings:
        return ["acceptance is low, and nothing wrong was found: train longer, or on more text like these prompts"]
    return [f"{finding.cause}: {finding.evidence}. To mend it, {finding.mend}" for finding in findings]
