"""The verdict of a report: what to use, what it brings and where it stops to pay, in words made from what was measured.

What was not measured is not said.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftsmith.recipes.reports.contents import (
    DRAFT,
    Contender,
    Measured,
    Result,
    is_sound,
    steps_a_round,
    tokens_a_round,
)
from draftsmith.recipes.reports.curves import batch_curve, break_even, settings_but
from draftsmith.recipes.reports.summary import (
    PLAIN,
    by_setting,
    count,
    draft_text,
    lossless_text,
    setting_name,
    summary_rows,
)
from draftsmith.recipes.reports.tables import Tone


@dataclass
class Fact:
    """A number of the verdict, to be seen at a glance."""

    name: str
    value: str
    note: str


@dataclass
class Verdict:
    title: str  # the answer, in a line
    text: str  # what stands behind it, in two or three sentences
    tone: Tone
    facts: list[Fact]
    broken: list[str]  # measurements whose output was not that of plain decoding
    caveats: list[str]  # what a reader of the title alone would miss

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verdict(measured: Measured) -> Verdict:
    row, best = measured.leading, measured.leader
    row = chosen_row(measured, best, row) or row
    broken, caveats = divergences(measured), caveats_of(measured)
    if not is_sound(row):
        return Verdict(
            "There is no speedup to report: no drafter leaves the output of plain decoding as it is.",
            where_text(measured, best, row),
            "alarm",
            [],
            broken,
            caveats,
        )
    sentences = [
        speed_text(best, row),
        elsewhere_text(best, row),
        trained_text(measured, best, row),
        same_output_text(best),
        where_text(measured, best, row),
    ]
    text = " ".join(filter(None, sentences))
    return Verdict(title(measured, best, row), text, tone_of(row), facts(best, row), broken, caveats)


def chosen_row(measured: Measured, best: Contender, row: Result) -> Result | None:
    """The row of the draft that was chosen on other prompts, whose speed no choice among these has flattered."""
    choice = measured.extra_of("choice", best)
    if choice is None or not choice["draft_length"]:
        return None
    nodes = len(choice["tree"]) if choice["tree"] else None
    rows = [
        other for other in settings_but(best, row, *DRAFT) if other["tree_nodes"] == nodes and not other.get("schedule")
    ]
    return next((other for other in rows if nodes or other["draft_length"] == choice["draft_length"]), None)


def facts(best: Contender, row: Result) -> list[Fact]:
    interval = row["speedup_ci95"]
    crossing = break_even(batch_curve(best, row))
    found = [
        Fact(
            "Speedup",
            f"{row['speedup']:.2f}×",
            "95 %: {:.2f} to {:.2f}".format(*interval) if interval else "no interval",
        ),
        acceptance_fact(row),
        Fact("Cost of a round", f"{steps_a_round(row):.2f}", "plain steps"),
    ]
    if crossing and crossing.is_clear:
        between = f"between {crossing.last_above} and {crossing.first_below}"
        found.append(Fact("Break-even", f"batch {crossing.batch_size:.0f}", between))
    check = row["lossless"]
    if check["checked"]:
        found.append(Fact("Identical outputs", f"{check['identical']}/{check['checked']}", "to plain decoding's"))
    return found


def acceptance_fact(row: Result) -> Fact:
    """The acceptance length, which is the tokens of a round unless there are rounds without a draft."""
    if row["num_drafts"] in (0, row["num_rounds"]):
        return Fact("Acceptance length", f"{row['mean_acceptance_length']:.2f}", f"tokens a round, {draft_text(row)}")
    share = f"{100 * row['num_drafts'] / row['num_rounds']:.0f} %"
    note = f"acceptance length {row['mean_acceptance_length']:.2f} in the {share} with a draft, {draft_text(row)}"
    return Fact("Tokens a round", f"{tokens_a_round(row):.2f}", note)


def tone_of(row: Result) -> Tone:
    low, high = row["speedup_ci95"] or (0.0, math.inf)
    return "good" if low > 1 else "bad" if high < 1 else ""


# --- the title


def title(measured: Measured, best: Contender, row: Result) -> str:
    size = f"batch size {row['batch_size']}"
    if best.kind == PLAIN:
        return f"Only plain decoding was measured: {row['tokens_per_second']:.1f} tokens per second at {size}."
    if row["speedup_ci95"] is None:
        return f"Too little was timed to tell at {size}: the best drafter, {best.name}, reaches {row['speedup']:.2f}×."
    if tone_of(row) == "bad":
        return f"Speculation does not pay at {size}: the best drafter, {best.name}, reaches {row['speedup']:.2f}×."
    if tone_of(row) == "":
        return f"No measurable gain at {size}: the best drafter, {best.name}, reaches {row['speedup']:.2f}×."
    parts = [f"{row['speedup']:.2f}× at {size}", break_even_text(batch_curve(best, row))]
    return f"{', '.join(filter(None, parts))}: use {best.name}{with_draft(best, row)}."


def with_draft(best: Contender, row: Result) -> str:
    """The draft to use, where there was something to choose from."""
    drafts = {tuple(other[name] for name in DRAFT) for other in settings_but(best, row, *DRAFT)}
    if len(drafts) < 2:
        return ""
    return (
        f" with a tree of {row['tree_nodes']} nodes"
        if row["tree_nodes"]
        else f" with draft length {row['draft_length']}"
    )


def break_even_text(curve: list[Result]) -> str:
    """Where speculation stops to pay, as far as batch sizes were measured and intervals tell."""
    crossing = break_even(curve)
    if crossing and crossing.is_clear:
        return f"break-even near batch size {crossing.batch_size:.0f}"
    known = [row for row in curve[1:] if row["speedup_ci95"]]
    unclear = next((row for row in known if tone_of(row) != "good"), None)
    if unclear:
        return f"no measurable gain at batch size {unclear['batch_size']}"
    if known:
        return f"still {known[-1]['speedup']:.2f}× at batch size {known[-1]['batch_size']}"
    return ""


# --- the sentences below it


def speed_text(best: Contender, row: Result) -> str:
    interval = row["speedup_ci95"]
    sure = "95 % interval {:.2f} to {:.2f}".format(*interval) if interval else "too little was timed for an interval"
    return (
        f"{best.name}{best.note and f' ({best.note})'} decodes {row['speedup']:.2f}× as fast as plain decoding "
        f"({sure}): a round emits {tokens_a_round(row):.2f} tokens and costs "
        f"{steps_a_round(row):.2f} steps of plain decoding."
    )


def elsewhere_text(best: Contender, row: Result) -> str:
    """The batch sizes at which it does pay, where the smallest is not among them."""
    if tone_of(row) == "good":
        return ""
    paying = [other for other in batch_curve(best, row) if tone_of(other) == "good"]
    sizes = ", ".join(f"{other['batch_size']} ({other['speedup']:.2f}×)" for other in paying)
    return f"It does pay at batch size {sizes}." if paying else ""


def trained_text(measured: Measured, best: Contender, row: Result) -> str:
    """How the best trained drafter does, where one without training is faster."""
    rows = [
        (other["speedup"], one.name)
        for one in measured.contenders
        if one.trained
        for other in settings_but(one, row, *DRAFT)
    ]
    if best.trained or best.kind == PLAIN or not rows:
        return ""
    speedup, name = max(rows)
    return f"{best.name} needs no training; the best trained drafter, {name}, reaches {speedup:.2f}×."


def same_output_text(best: Contender) -> str:
    """Whether its output is that of plain decoding, over all of its sound rows."""
    checks = [row["lossless"] for row in best.results if is_sound(row)]
    checked, identical, ties = (
        sum(check[name] for check in checks) for name in ("checked", "identical", "near_tie_divergences")
    )
    certified = " It passed the certificate of losslessness." if (best.certificate or {}).get("passed") else ""
    if not checked:
        return f"Outputs were not compared: sampled ones share the law of plain decoding's, not the tokens.{certified}"
    outputs = f"all {checked}" if identical == checked else f"{identical} of {checked}"
    rest = f", the other {ties} part from it at near ties of the target only" if ties else ""
    return f"Lossless: {outputs} compared outputs are identical to plain decoding's{rest}.{certified}"


def where_text(measured: Measured, best: Contender, row: Result) -> str:
    env = best.environment
    return (
        f"Measured at temperature {row['temperature']:g} on {count(row['num_prompts'], 'prompt')} of "
        f"{row['prompt_set']}, up to {row['max_new_tokens']} new tokens, for the target {Path(measured.target).name} "
        f"on {env['device']} ({env['dtype']}, {count(env['num_threads'], 'CPU thread')})."
    )


# --- what the title does not say


def caveats_of(measured: Measured) -> list[str]:
    rows = summary_rows([*measured.contenders, *measured.elsewhere])
    blocks = by_setting(rows)
    found, beaten = [], []
    if any(row.trained for row in rows) and not any(row.trained and row.tone == "good" for row in rows):
        found.append(
            "No trained drafter is measurably faster than plain decoding here: no 95 % interval lies above 1.0."
        )
    for setting, block in blocks.items():
        fastest = max((row for row in block if row.sound), key=lambda row: row.result["speedup"])
        if not fastest.trained and any(row.trained for row in block):
            name = "plain decoding" if fastest.drafter == PLAIN else f"{fastest.drafter}, which needs no training"
            beaten.append(f"At {setting}, no trained drafter beats {name} ({fastest.result['speedup']:.2f}×).")
    if len(beaten) > 2:
        beaten = [
            f"At {len(beaten)} of {len(blocks)} settings no trained drafter beats plain decoding and the drafters that "
            "need no training."
        ]
    found += beaten + [f"{row.drafter} at {row.setting}: {row.gap}." for row in rows if row.gap]
    return found + [
        f"{one.name} was measured elsewhere ({one.environment['device']}, {one.environment['dtype']}, "
        f"{count(one.environment['num_threads'], 'CPU thread')}): it has tables of its own and is in no figure."
        for one in measured.elsewhere
    ]


def divergences(measured: Measured) -> list[str]:
    """Every measurement, of any checkpoint or contender, whose output was not that of plain decoding."""
    of_runs = [
        (f"{name} beside {run.name}, step {checkpoint.step}" if name else f"{run.name}, step {checkpoint.step}", result)
        for run in measured.runs
        for checkpoint in run.checkpoints
        for name, results in {"": checkpoint.results, **checkpoint.baselines}.items()
        for result in results
    ]
    known = {id(result) for _, result in of_runs}
    compared = [
        (", ".join(filter(None, (one.name, one.note))), result)
        for one in [*measured.contenders, *measured.elsewhere]
        for result in one.results
        if id(result) not in known
    ]
    return [
        f"{name}, {setting_name(result)}: {lossless_text(result)}"
        for name, result in of_runs + compared
        if result["lossless"]["divergences"]
    ]
