"""The sections of a report that only some have: each from what one command or one measurement has left."""

from collections.abc import Iterable
from typing import Any

from draftsmith.recipes.results import Measured, is_sound
from draftsmith.recipes.summary import SummaryRow, by_setting, domain_table, setting_name, speedup_text
from draftsmith.recipes.tables import Cell, Section, table_of
from draftsmith.recipes.verdict import tone_of


def domains(measured: Measured, rows: list[SummaryRow]) -> Section:
    leading = next(row.setting for row in rows if row.result is measured.leading)
    table = domain_table(by_setting(rows)[leading])
    return Section(
        "domains",
        "Domains",
        "The same drafter on each kind of prompt. A domain that falls behind wants training text of its own.",
        [table] if table else [],
    )


def history(measured: Measured) -> Section:
    rows = [
        {
            "run": run.name,
            "step": Cell(str(checkpoint.step), "best" if checkpoint is run.best else ""),
            "acceptance length": f"{row['mean_acceptance_length']:.2f}",
            "speedup": Cell(speedup_text(row), tone=tone_of(row) if is_sound(row) else ""),
        }
        for run in measured.runs
        for checkpoint in run.checkpoints
        for row in checkpoint.results[:1]
    ]
    return Section(
        "history",
        "History over checkpoints",
        "Where curves still rise, more training pays; where the loss falls and they do not, it will not.",
        figures=["speedup_by_checkpoint", "acceptance_by_checkpoint", "training"],
        folded=[table_of("Checkpoints", rows, words=("run",))] if rows else [],
    )


def diagnosis(measured: Measured) -> Section:
    rows = [
        {
            "drafter": one.name,
            "cause": str(found["cause"]).replace("_", " "),
            "measured": value_text(found["measured"]),
            "evidence": value_text(found["evidence"]),
            "what to do": found["mend"],
        }
        for one, row in measured.leaders()
        for found in row.get("diagnosis") or []
    ]
    words = ("drafter", "cause", "measured", "evidence", "what to do")
    return Section(
        "diagnosis",
        "Diagnosis",
        "Where acceptance is lost, and what the measurements point to.",
        [table_of("", rows, words=words)] if rows else [],
    )


def value_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {value_text(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    return "–" if value is None else str(value)


def calibration(measured: Measured) -> Section:
    rows = [
        {
            "drafter": one.name,
            **{
                f"token {depth + 1}": f"{error:.3f}"
                for depth, error in enumerate(map(calibration_error, row["calibration"]))
                if error is not None
            },
        }
        for one, row in measured.leaders()
        if row.get("calibration")
    ]
    note = "Mean distance between the drafter's probability of its token and the share accepted, weighted by number."
    return Section(
        "calibration",
        "Calibration",
        "Whether the drafter's confidence can be believed: an adaptive draft length and a dynamic tree stand on it.",
        [table_of("Calibration error by position", rows, note)] if rows else [],
        ["calibration"],
    )


def calibration_error(bins: Iterable[dict[str, float]]) -> float | None:
    bins = list(bins)
    total = sum(one["count"] for one in bins)
    return sum(one["count"] * abs(one["confidence"] - one["accepted"]) for one in bins) / total if total else None


def differences(measured: Measured) -> Section:
    """Of every output that differs from plain decoding: where, and what the target holds there."""
    rows = [
        {
            "drafter": Cell(one.name, setting_name(result)),
            "prompt": str(found["request"] + 1),
            "token": str(found["position"] + 1),
            "plain → speculative": " → ".join(
                "end" if found[which] is None else str(found[which]) for which in ("plain_token", "speculative_token")
            ),
            "top-2 gap": f"{found['top_two_gap']:.2g}",
            "top-2 gap in fp32": f"{found['top_two_gap_fp32']:.2g}",
            "near tie up to": f"{found['near_tie_gap']:.2g}",
            "verdict": Cell("near tie") if found["near_tie"] else Cell("DIVERGED", tone="alarm"),
        }
        for one in measured.contenders
        for result in one.results
        for found in result["lossless"]["first_differences"]
    ]
    note = (
        "The first difference of each output: prompt, place in the answer, and the two token ids; then the gap between "
        "the target's two highest logits there, re-scored in one plain pass. A near tie is a difference between two "
        "tokens that are no further apart in fp32 than the run's rounding can turn around, as measured at that place."
    )
    table = table_of("", rows, note, words=("drafter", "verdict"))
    return Section("differences", "Where outputs differ from plain decoding", tables=[table] if rows else [])
