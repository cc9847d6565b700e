"""The sections of a report that only some have: each from what one command or one measurement has left."""

import statistics
from collections.abc import Iterable
from typing import Any

from draftsmith.inference.load.load_test import Gain, gains, latency_text
from draftsmith.inference.planning.costs import GOAL
from draftsmith.recipes.reports.contents import DRAFT, Measured, Result, is_sound
from draftsmith.recipes.reports.curves import settings_but
from draftsmith.recipes.reports.panel import predicted_points
from draftsmith.recipes.reports.summary import (
    SummaryRow,
    by_setting,
    count,
    diagnosis_lines,
    domain_table,
    draft_text,
    is_choice,
    ratio_text,
    setting_name,
    speedup_text,
)
from draftsmith.recipes.reports.tables import Cell, Row, Section, Tone, table_of
from draftsmith.recipes.reports.verdict import tone_of


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
    rows: list[Row] = [
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
    """Of every row whose acceptance is low, whatever the report leads with: each cause once, where it costs most."""
    rows: list[Row] = []
    notes = []
    for one in [*measured.contenders, *measured.elsewhere]:
        low = [row for row in one.results if "diagnosis" in row]
        causes: dict[str, list[tuple[dict[str, Any], Result]]] = {}
        for row in low:
            for found in row["diagnosis"]:
                causes.setdefault(found["cause"], []).append((found, row))
        rows += [cause_cells(one.name, found) for found in causes.values()]
        if low and not causes:
            notes += [f"{one.name}, at {places_text(low)}: {line}." for line in diagnosis_lines(low[0])]
    words = ("drafter", "cause", "measured", "evidence", "what to do")
    return Section(
        "diagnosis",
        "Diagnosis",
        "Where acceptance is lost, and what the measurements point to.",
        [table_of("", rows, words=words)] if rows else [],
        notes=notes,
    )


def cause_cells(name: str, found: list[tuple[dict[str, Any], Result]]) -> Row:
    """One cause with the rows that it was found in."""
    costliest, _ = max(found, key=lambda one: one[0]["cost"] or 0)
    return {
        "drafter": Cell(name, places_text([row for _, row in found])),
        "cause": costliest["cause"],
        "measured": value_text(costliest["measured"]),
        "evidence": value_text(costliest["evidence"]),
        "what to do": costliest["mend"],
    }


def places_text(rows: list[Result]) -> str:
    """The first of the settings, and how many more there are."""
    first, *others = dict.fromkeys(
        f"temperature {row['temperature']:g}, {draft_text(row)}, {row['prompt_set']}" for row in rows
    )
    return f"{first} and {count(len(others), 'other setting')}" if others else first


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


def cost_model(measured: Measured) -> Section:
    """What costs.json predicts, beside what was measured."""
    points = predicted_points(measured)
    rows = [
        {
            "drafter": one.name,
            "draft": draft_text(one.row),
            "batch size": str(one.row["batch_size"]),
            "predicted": f"{one.predicted:.2f}×",
            "measured": speedup_text(one.row),
            "error": f"{100 * one.error:+.1f} %",
        }
        for one in points
    ]
    errors = sorted(abs(one.error) for one in points)
    lead = ""
    if points:
        near = sum(error <= GOAL for error in errors)
        lead = (
            f"From measured costs and the tokens of a round the speedup is predicted within {100 * GOAL:.0f} % in "
            f"{near} of {count(len(points), 'setting')}; the median error is {100 * statistics.median(errors):.1f} %."
        )
    table = table_of("Predicted and measured speedup", rows, words=("drafter", "draft"))
    notes = [] if points or not measured.leading["num_drafts"] else [unmeasured_costs_text(measured)]
    return Section("cost-model", "Cost model", lead, [], ["predicted_speedup"], [table] if rows else [], notes)


def unmeasured_costs_text(measured: Measured) -> str:
    command = f"draftsmith plan --target {measured.target} --drafter {measured.leader.drafter} --out FOLDER/plan"
    return (
        f"The costs of a round were not measured here: {command}, FOLDER being that of this report, does so in half a "
        "minute. Then draftsmith report FOLDER sets what they predict beside what was measured."
    )


def load_test(measured: Measured) -> Section:
    """Each load test: what it found, and its stages."""
    contents = measured.extras.get("load", [])
    tables = []
    for content in contents:
        stages = content["stages"]
        found = {name: gains(stages, name) for name in {row["contender"] for row in stages}}
        rows = [
            {
                "load": f"{row['load']:g}",
                "speculation": row["contender"],
                "tokens/s": f"{row['throughput_tokens_per_second']:.0f}",
                "over off": gain_cell(found[row["contender"]][row["load"]]) if row["contender"] != "off" else "1.00×",
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
        title = f"{measured.name_of(content['drafter'])}: {content['verdict']}"
        note = (
            f"Load in {unit}; times in milliseconds over so many requests, – where those are too few to tell. Over "
            "off: throughput of clients that wait for their answers, else the median time per token; from the worst to "
            "the best repeat, green or red where all agree. Goodput in red where the limits of latency were missed."
        )
        tables.append(table_of(title, rows, note, words=("speculation",)))
    return Section(
        "load-test",
        "Load test",
        "Requests that arrive on their own, with speculation off, on, and by the schedule.",
        tables,
        ["load"],
    )


def gain_cell(gain: Gain) -> Cell:
    tone: Tone = "good" if gain.lowest > 1 else "bad" if gain.highest < 1 else ""
    return Cell(ratio_text(gain.ratio, [gain.lowest, gain.highest]), tone=tone)


def choices(measured: Measured) -> Section:
    """What `draftsmith tune` has chosen, from acceptance on other prompts and measured costs."""
    rows: list[Row] = []
    notes = []
    for content in measured.extras.get("choice", []):
        name = measured.name_of(content["drafter"])
        rows += [
            {
                "drafter": name,
                "batch size": str(one["batch_size"]),
                "best draft": draft_text(one) if one["draft_length"] else "speculation off",
                "tokens a round": f"{one['acceptance_length']:.2f}",
                "predicted speedup": f"{one['speedup']:.2f}×",
                "in fixed batches": f"{one['fixed_batch_speedup']:.2f}×" if one["fixed_batch_speedup"] else "–",
                "measured": measured_text(measured, name, one),
            }
            for one in content["predicted"]
        ]
        notes.append(choice_text(name, content))
    note = (
        "Predicted from the acceptance on the prompts of the fit and from measured costs, for a server that fills up "
        "its batch and for fixed batches, which last as long as their slowest request; measured in fixed batches on "
        "the prompts of this report, where that draft was decoded."
    )
    return Section(
        "choice",
        "Choice",
        "The draft to serve with, chosen on prompts that this report does not measure.",
        [table_of("", rows, note, words=("drafter", "best draft"))] if rows else [],
        notes=notes,
    )


def measured_text(measured: Measured, name: str, one: dict[str, Any]) -> str:
    """The speedup of a chosen draft on the report's own prompts."""
    rows = [
        row
        for contender in measured.contenders
        if contender.name == name
        for row in settings_but(contender, measured.leading, "batch_size", *DRAFT)
    ]
    found = next((row for row in rows if is_choice(row, one)), None)
    return speedup_text(found) if found else "–"


def choice_text(name: str, content: dict[str, Any]) -> str:
    """The schedule and the tree in words."""
    steps = [f"{length or 'no'} tokens from {start} on" for start, length in content["schedule"]["draft_lengths"]]
    tree = content["tree"]
    shape = f"; a tree of {len(tree)} nodes and depth {max(map(len, tree))}" if tree else "; no tree beats the chain"
    vllm = content["vllm"]["num_speculative_tokens_per_batch_size"]
    return (
        f"{name}, fitted on {content['fitted_on']}. Schedule by running requests: {', '.join(steps)} "
        f"(vLLM: num_speculative_tokens_per_batch_size {vllm}){shape}."
    )


def planned(measured: Measured) -> Section:
    """What the plan made before training said."""
    lines = [
        line
        for content in measured.extras.get("plan", [])
        for row in content.get("drafters", [])
        for line in row.get("verdicts", [])
    ]
    return Section("plan", "Plan", "What measured costs said before any training.", notes=lines)


def differences(measured: Measured) -> Section:
    """Of every output that differs from plain decoding: where, and what the target holds there."""
    rows: list[Row] = [
        {
            "drafter": Cell(one.name, setting_name(result)),
            "prompt": str(found["request"] + 1),
            "token": str(found["position"] + 1),
            "plain → speculative": " → ".join(
                "end" if found[which] is None else str(found[which]) for which in ("plain_token", "speculative_token")
            ),
            "top-2 gap": f"{found['top_two_gap']:.2g}",
            "top-2 gap in fp32": f"{found['top_two_gap_fp32']:.2g}",
            "apart in fp32": apart_text(found),
            "near tie up to": f"{found['near_tie_gap']:.2g}",
            "verdict": Cell("near tie") if found["near_tie"] else Cell("DIVERGED", tone="alarm"),
        }
        for one in measured.contenders
        for result in one.results
        for found in result["lossless"]["first_differences"]
    ]
    note = (
        "The first difference of each output: prompt, place in the answer, and the two token ids; then the gap between "
        "the target's two highest logits there, re-scored in one plain pass. Apart: the logits of the two tokens; in "
        "sampling, how far the drawn number lies outside the share of one of them. A near tie is a difference between "
        "two tokens that are no further apart than the run's rounding can turn around, as measured at that place."
    )
    table = table_of("", rows, note, words=("drafter", "verdict"))
    return Section("differences", "Where outputs differ from plain decoding", tables=[table] if rows else [])


def apart_text(found: dict[str, Any]) -> str:
    """What a first difference was judged by."""
    gap = found["token_gap_fp32"] if found.get("share_gap_fp32") is None else found["share_gap_fp32"]
    return "–" if gap is None else f"{gap:.2g}"
