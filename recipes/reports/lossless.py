"""Whether output is that of plain decoding: counts in words, certificates, and each output that differs."""

from dataclasses import replace

from draftsmith.inference.measuring.results import Certificate, Difference, LosslessCheck, Result
from draftsmith.inference.verification.acceptance_rules import LOSSY
from draftsmith.recipes.pages.tables import Cell, Row, Section, count, setting_name, table_of
from draftsmith.recipes.report_data.contents import ReportData


def lossless_text(result: Result) -> str:
    """Return how many outputs equal those of plain decoding; a lossy mode is named."""
    mode = result.setting.verification_mode
    return f"LOSSY ({mode})" if mode in LOSSY else check_text(result.lossless)


def check_text(check: LosslessCheck) -> str:
    """Return the counts of one comparison with plain decoding."""
    if not check.checked:
        return "not compared"
    text = f"{check.identical}/{check.checked}"
    if check.near_tie_divergences:
        text += f", {count(check.near_tie_divergences, 'near tie')}"
    if check.divergences:
        text += f", {check.divergences} DIVERGED"
    return text


def certificate_text(drafter: str, certificate: Certificate | None) -> str:
    """Return what a certificate says, in a line."""
    if certificate is None:
        return f"{drafter}: nothing to certify, it drafts nothing"
    sampled = ", ".join(
        f"{mode}{' (lossy, the control)' if mode in LOSSY else ''} p = {test.p_value:.2g}"
        for mode, test in certificate.sampled.items()
    )
    greedy = "; ".join(f"{size.replace('_', ' ')}: {check_text(check)}" for size, check in certificate.greedy.items())
    passed = "output is the target's" if certificate.passed else "OUTPUT IS NOT THE TARGET'S"
    control = "" if certificate.control_found else "; too few tokens to find lossy output"
    return f"{drafter}: {passed} (greedy {greedy}; sampled {sampled}{control})"


def divergences(data: ReportData) -> list[str]:
    """Return a line for every measurement, of any checkpoint or drafter, whose output was not plain decoding's."""
    measured = [
        (", ".join(filter(None, (drafter.name, drafter.note))), drafter.evaluation) for drafter in data.all_drafters
    ]
    for run in data.runs:
        for checkpoint in run.checkpoints:
            place = f"{run.name}, step {checkpoint.step}"
            measured.append((place, checkpoint.evaluation))
            measured += [(f"{name}, measured beside {place}", beside) for name, beside in checkpoint.baselines.items()]
    lines = [
        f"{name}, {setting_name(row.setting)}: {lossless_text(row)}"
        for name, evaluation in measured
        for row in evaluation.results
        if row.lossless.divergences
    ]
    return list(dict.fromkeys(lines))  # a run's best checkpoint is a drafter, too


def differences(data: ReportData) -> Section:
    """List every output that differs from plain decoding: where, and what the target holds there."""
    rows: list[Row] = [
        {
            "drafter": Cell(drafter.name, setting_name(row.setting)),
            "prompt": str(difference.request + 1),
            "token": str(difference.position + 1),
            "plain → speculative": f"{token_text(difference.plain_token)} → {token_text(difference.speculative_token)}",
            "top-2 gap": f"{difference.top_two_gap:.2g}",
            "top-2 gap in fp32": f"{difference.top_two_gap_fp32:.2g}",
            "apart in fp32": apart_text(difference),
            "near tie up to": f"{difference.near_tie_gap:.2g}",
            "verdict": Cell("near tie") if difference.near_tie else Cell("DIVERGED", tone="alarm"),
        }
        for drafter in data.drafters
        for row in drafter.results
        for difference in row.lossless.first_differences
    ]
    note = (
        "The first difference of each output: prompt, place in the answer, and the two token ids; then the gap between "
        "the target's two highest logits there, re-scored in one plain pass. Apart: the logits of the two tokens; in "
        "sampling, how far the drawn number lies outside the share of one of them. A near tie is a difference between "
        "two tokens that are no further apart than the run's rounding can turn around, as measured at that place."
    )
    table = table_of("", rows, note, words=("drafter", "verdict"))
    section = Section("differences", "Where outputs differ from plain decoding")
    if any(cell.tone for row in table.rows for cell in row):
        section.tables = [table]
    elif table.rows:
        section.lead = "Each at a near tie: two tokens that the target holds equally likely, up to rounding."
        section.folded = [replace(table, title=count(len(table.rows), "first difference"))]
    return section


def token_text(token: int | None) -> str:
    return "end" if token is None else str(token)


def apart_text(difference: Difference) -> str:
    """Return what a first difference was judged by."""
    gap = difference.token_gap_fp32 if difference.share_gap_fp32 is None else difference.share_gap_fp32
    return "–" if gap is None else f"{gap:.2g}"
