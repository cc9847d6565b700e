"""The verdict of a report: what to use, what it brings and where it stops to pay, in words made from what was measured.

What was not measured is not said.
"""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.inference.measuring.results import Environment, Result
from draftsmith.inference.measuring.teacher_forcing import gap_warning
from draftsmith.inference.planning.plans import Plan
from draftsmith.recipes.pages.tables import Tone, count, draft_text, speedup_text, tone_of
from draftsmith.recipes.report_data.contents import Replay, ReportData
from draftsmith.recipes.report_data.measured import DrafterResult, MeasuredDrafter
from draftsmith.recipes.reports.comparison_table import by_setting
from draftsmith.recipes.reports.lossless import divergences
from draftsmith.recipes.reports.serving import judged_line
from draftsmith.recipes.reports.speed import batch_curve, break_even

MOSTLY_CUT = 0.75  # share of the tokens that answers may have, from which on most of them were cut


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


def verdict_of(data: ReportData) -> Verdict:
    if not data.drafters:
        return verdict_of_studies(data)
    best, row = data.leader
    row = chosen_result(data, best, row) or row
    broken, caveats = divergences(data), caveats_of(data)
    if not row.is_sound:
        title = "There is no speedup to report: no drafter leaves the output of plain decoding as it is."
        return Verdict(title, where_text(data, best, row), "alarm", [], broken, caveats)
    text = " ".join(filter(None, (paying_text(best, row), same_output_text(best), where_text(data, best, row))))
    return Verdict(title_of(best, row), text, tone_of(row), facts(best, row), broken, caveats)


def verdict_of_studies(data: ReportData) -> Verdict:
    """Return what an engine, load tests, plans and replays say where no drafter was measured by the own decoder."""
    lines = [judged_line(data)] if data.judged else []
    lines += [f"Under load: {test.verdict}." for test in data.extras.get("load", [])]
    lines += [f"Planned, not measured. {line}." for plan in data.extras.get("plan", []) for line in plan_lines(plan)]
    lines += [replay_line(data, replay) for replay in data.extras.get("replay", [])]
    first, *others = lines
    where = f"For the target {Path(data.target).name} on {device_text(data.environment)}."
    return Verdict(first, " ".join([*others, where]), "", [], [], [])


def plan_lines(plan: Plan) -> list[str]:
    """Return the verdicts of a plan; where no acceptance is known, the acceptance that would pay."""
    row = plan.drafters[0].by_batch_size[0]
    length, needed = min(row.break_even_acceptance_length.items(), key=lambda pair: pair[1])
    pays = f"{plan.drafters[0].drafter} pays at batch size {row.batch_size} from {needed:.2f} tokens a round on"
    lines = [line for drafter in plan.drafters for line in drafter.verdicts]
    return lines or [f"{pays}, with draft length {length}"]


def replay_line(data: ReportData, replay: Replay) -> str:
    row = max(replay.results, key=lambda row: row.mean_acceptance_length)
    shape = f"a tree of {row.tree_nodes} nodes" if row.tree_nodes else f"draft length {row.draft_length}"
    tokens = f"up to {row.mean_acceptance_length:.2f} tokens a round, with {shape}"
    return f"Replayed, not timed: {data.name_of(row.drafter)} emits {tokens}."


def chosen_result(data: ReportData, best: MeasuredDrafter, row: Result) -> Result | None:
    """Return the result of the draft that was chosen on other prompts, whose speed no choice among these flatters."""
    choice = data.choice_for(best)
    if choice is None or not choice.draft_length:
        return None
    nodes = len(choice.tree) if choice.tree else None
    rows = [other for other in best.sound_results(row.setting, row.setting.batch_size) if not other.setting.schedule]
    rows = [other for other in rows if other.setting.tree_nodes == nodes]
    return next((other for other in rows if nodes or other.setting.draft_length == choice.draft_length), None)


# --- the title and the numbers below it


def title_of(best: MeasuredDrafter, row: Result) -> str:
    size = f"batch size {row.setting.batch_size}"
    speedup = f"{row.speed.speedup:.2f}×"
    if tone_of(row) == "good":
        parts = [f"{speedup} at {size}", break_even_text(batch_curve(best, row.setting))]
        return f"{', '.join(filter(None, parts))}: use {best.name}{with_draft(best, row)}."
    if row.speed.speedup_ci95 is None:
        start = "Too little was timed to tell"
    else:
        start = "Speculation does not pay" if tone_of(row) == "bad" else "No measurable gain"
    return f"{start} at {size}: the best drafter, {best.name}{with_draft(best, row)}, reaches {speedup}."


def with_draft(best: MeasuredDrafter, row: Result) -> str:
    """Return the draft to use, where there was something to choose from."""
    rows = best.sound_results(row.setting, row.setting.batch_size)
    if len({draft_text(other.setting) for other in rows}) < 2:
        return ""
    nodes = row.setting.tree_nodes
    return f" with a tree of {nodes} nodes" if nodes else f" with {draft_text(row.setting)}"


def break_even_text(curve: list[Result]) -> str:
    """Return where speculation stops to pay, as far as batch sizes were measured and intervals tell."""
    if crossing := break_even(curve):
        return f"break-even near batch size {crossing.batch_size:.0f}"
    known = [row for row in curve[1:] if row.speed.speedup_ci95]
    if unclear := [row for row in known if tone_of(row) != "good"]:
        return f"no measurable gain at batch size {unclear[0].setting.batch_size}"
    return f"still {known[-1].speed.speedup:.2f}× at batch size {known[-1].setting.batch_size}" if known else ""


def facts(best: MeasuredDrafter, row: Result) -> list[Fact]:
    interval, check = row.speed.speedup_ci95, row.lossless
    numbers = [
        Fact(
            "Speedup",
            f"{row.speed.speedup:.2f}×",
            "95 %: {:.2f} to {:.2f}".format(*interval) if interval else "no interval",
        ),
        acceptance_fact(row),
        Fact("Cost of a round", f"{row.steps_a_round:.2f}", "steps of plain decoding"),
    ]
    if crossing := break_even(batch_curve(best, row.setting)):
        between = f"between {crossing.last_above} and {crossing.first_below}"
        numbers.append(Fact("Break-even", f"batch {crossing.batch_size:.0f}", between))
    if check.checked:
        numbers.append(Fact("Identical outputs", f"{check.identical}/{check.checked}", "to plain decoding's"))
    return numbers


def acceptance_fact(row: Result) -> Fact:
    """Return the acceptance length, which is the tokens of a round unless there are rounds without a draft."""
    counts, draft = row.acceptance, draft_text(row.setting)
    length = f"{counts.mean_acceptance_length:.2f}"
    if counts.num_drafts in (0, counts.num_rounds):
        return Fact("Acceptance length", length, f"tokens a round, {draft}")
    share = f"{100 * counts.num_drafts / counts.num_rounds:.0f} %"
    note = f"acceptance length {length} in the {share} with a draft, {draft}"
    return Fact("Tokens a round", f"{row.tokens_a_round:.2f}", note)


# --- the text


def paying_text(best: MeasuredDrafter, row: Result) -> str:
    """Return where it does pay, where the row of the title does not: at other batch sizes, and with another draft."""
    if row.pays:
        return ""
    paying = [other for other in batch_curve(best, row.setting) if other.pays]
    elsewhere = [other for other in paying if other.setting.batch_size != row.setting.batch_size]
    sizes = ", ".join(f"{other.setting.batch_size} ({other.speed.speedup:.2f}×)" for other in elsewhere)
    parts = [f"It does pay at batch size {sizes}."] if sizes else []
    for other in paying:
        if other not in elsewhere:
            parts.append(
                f"The fastest draft measured at batch size {row.setting.batch_size} reached {speedup_text(other)} with "
                f"{draft_text(other.setting)}, but another one was chosen on other prompts, and the fastest of several "
                "is flattered by its choice."
            )
    return " ".join(parts)


def same_output_text(best: MeasuredDrafter) -> str:
    """Return whether its output is that of plain decoding, over all of its sound results."""
    checks = [row.lossless for row in best.results if row.is_sound]
    checked, identical = sum(check.checked for check in checks), sum(check.identical for check in checks)
    ties = sum(check.near_tie_divergences for check in checks)
    certificate = best.evaluation.certificate
    certified = " It passed the certificate of losslessness." if certificate and certificate.passed else ""
    if not checked:
        return f"Outputs were not compared: sampled ones share the law of plain decoding's, not the tokens.{certified}"
    outputs = f"all {checked}" if identical == checked else f"{identical} of {checked}"
    rest = "; where they differ, it is from a near tie of the target on" if ties else ""
    return f"Lossless: {outputs} compared outputs are identical to plain decoding's{rest}.{certified}"


def where_text(data: ReportData, best: MeasuredDrafter, row: Result) -> str:
    setting = row.setting
    text = (
        f"Measured at temperature {setting.temperature:g} on {count(setting.num_prompts, 'prompt')} of "
        f"{setting.prompt_set}, up to {setting.max_new_tokens} new tokens, for the target {Path(data.target).name} "
        f"on {device_text(best.environment)}."
    )
    longest = setting.num_prompts * setting.max_new_tokens
    if row.acceptance.num_emitted_tokens < MOSTLY_CUT * longest:
        return text
    return (
        f"{text} Most answers were cut at {setting.max_new_tokens} tokens: those of your traffic may gain more or less."
    )


def device_text(environment: Environment) -> str:
    return f"{environment.device} ({environment.dtype}, {count(environment.num_threads, 'CPU thread')})"


# --- what the title does not say


def caveats_of(data: ReportData) -> list[str]:
    blocks = by_setting(data.all_drafters)
    trained = [row for block in blocks.values() for drafter, row in block if drafter.is_trained]
    caveats = []
    if trained and not any(tone_of(row) == "good" for row in trained):
        caveats.append(
            "No trained drafter is measurably faster than plain decoding here: no 95 % interval lies above 1.0."
        )
    if beaten := sum(map(no_trained_drafter_is_fastest, blocks.values())):
        caveats.append(
            f"At {beaten} of {len(blocks)} settings no trained drafter beats plain decoding and the drafters "
            "that need no training."
        )
    if (quantisation := data.environment.quantisation) is not None:
        caveats.append(
            f"The target's files hold its weights in {quantisation}; here they were unpacked to "
            f"{data.environment.dtype}. An engine that computes with the quantised weights accepts about as much, for "
            "only its activations are rounded besides, but its speed is another: measure it there, by draftsmith bench."
        )
    for setting, block in blocks.items():
        warnings = [(drafter.name, gap_warning(row)) for drafter, row in block]
        caveats += [f"{name} at {setting}: {warning}." for name, warning in warnings if warning]
    return caveats + [
        f"{drafter.name} was measured elsewhere ({device_text(drafter.environment)}): it has tables of its own and is "
        "in no figure."
        for drafter in data.elsewhere
    ]


def no_trained_drafter_is_fastest(block: list[DrafterResult]) -> bool:
    """Return whether there are trained drafters, and plain decoding or one without training is faster than each."""
    trained = [row.is_sound * row.speed.speedup for drafter, row in block if drafter.is_trained]
    others = [row.is_sound * row.speed.speedup for drafter, row in block if not drafter.is_trained]
    return bool(trained) and max(trained) < max([1.0, *others])
