"""auto.html: what was tried, what was dropped and why, what came out of it, and what more time would bring."""

import math

from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.planning.costs import Costs
from draftsmith.recipes.auto.budget import in_words
from draftsmith.recipes.auto.race import Rung, growth_to_come
from draftsmith.recipes.auto.score import Score, ServingLoad, growth_per_doubling, potential
from draftsmith.recipes.auto.state import AutoState
from draftsmith.recipes.pages.rendering import rendered
from draftsmith.recipes.pages.tables import Row, Section, Table, name_of_load, ratio_text, table_of
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.reading import report_data_of
from draftsmith.recipes.reports.comparison_table import ranking_table
from draftsmith.recipes.reports.verdict import verdict_of

MORE = 10  # times the time, for what it would bring
NONE_KEEPS_SLA = "no drafter keeps the SLA on this traffic at this load"


def auto_page(state: AutoState, evaluations: list[Evaluation], within: list[Evaluation], lines: list[str]) -> str:
    """Return one page that needs no other file and no network.

    `evaluations` are those of the end, and `within` what of them is not shown to break the SLA. `lines` stand below
    the verdict.
    """
    data = report_data_of(evaluations)
    verdict = verdict_of(report_data_of(within or evaluations))
    return rendered(
        "sections_page.html.j2",
        program="auto",
        refresh=None,
        figures={},
        name=state.plan.target,
        title=verdict.title if within else f"N{NONE_KEEPS_SLA[1:]}.",
        tone=verdict.tone if within else "bad",
        facts=verdict.facts if within else [],
        text=[verdict.text, *lines],
        notes=[*verdict.broken, *verdict.caveats],
        sections=[section for section in (result(data), race(state), plan(state)) if section.has_data],
    )


def result(data: ReportData) -> Section:
    """Return what was measured at the end, in turns, on prompts that nothing saw before."""
    rows = [(drafter, row) for drafter in data.all_drafters for row in drafter.results]
    table = ranking_table(name_of_load(rows[0][1].setting), rows)
    return Section("result", "Measured at the end", "In turns, on prompts that chose nothing.", [table])


def race(state: AutoState) -> Section:
    """Return how the race went, rung by rung."""
    lookups = table_of("Lookups, which need no training", map(score_row, state.lookups))
    probes = [table_of("Probes", map(score_row, state.probes))] if state.probes else []
    rungs = [rung_table(number, rung) for number, rung in enumerate(state.rungs, 1)]
    lines = [rung.decision for rung in state.rungs] + ([state.over] if state.over else [])
    lines += [state.tuned.text] if state.tuned else []
    lead = (
        "Speedups are predicted from acceptance on the prompts of the race and from measured costs. They are of "
        "rounds: whole texts, to which the reading of the prompt belongs, gain less."
    )
    if any(score.within_sla is not None for score in state.lookups):
        lead += " Only requests that are predicted to keep the SLA count."
    return Section("race", "The race", lead, [lookups, *probes, *rungs], notes=lines)


def rung_table(number: int, rung: Rung) -> Table:
    rows: list[Row] = [
        {
            **score_row(contender.score),
            "growth a doubling": f"{contender.growth:.2f}",
            "forecast at the end": f"{contender.potential:.2f}×",
            "at most": f"{contender.best_potential:.2f}×",
            "then": "goes on" if contender.score.name in rung.kept else "dropped",
        }
        for contender in rung.contenders
    ]
    return table_of(f"Rung {number}", rows, words=("drafter", "then"))


def score_row(score: Score) -> Row:
    return {
        "drafter": score.name,
        "steps": f"{score.steps}" if score.steps else "–",
        "tokens a round": f"{score.acceptance_length:.2f}",
        "draft length": f"{score.draft_length}",
        "predicted": ratio_text(score.speedup, (score.low, score.high)),
        **({} if score.within_sla is None else {"within the SLA": f"{score.within_sla:.0%}"}),
    }


def plan(state: AutoState) -> Section:
    """Return what the time was divided into."""
    rows: list[Row] = [
        {
            "drafter": kind,
            "ms a step": f"{1000 * seconds:.0f}",
            "pays from an acceptance rate of": "–" if (rate := state.needed_rates[kind]) is None else f"{rate:.2f}",
        }
        for kind, seconds in state.plan.step_seconds.items()
    ]
    lead = (
        f"{in_words(state.plan.hours)}: {state.plan.num_answers} answers of the target, {state.plan.num_rungs} rungs "
        f"of {state.plan.rung_seconds / 60:.1f} minutes, {state.plan.final_seconds / 60:.1f} minutes for the winner."
    )
    summaries = [summary.text for summary in (state.traffic, state.answers) if summary]
    notes = [f"{text[:1].upper()}{text[1:]}." for text in summaries]
    return Section(
        "plan",
        "The plan",
        lead,
        [table_of("What a training step takes, and what must be learnt to pay", rows)],
        notes=notes,
    )


def more_time(before: Score, score: Score, costs: Costs, load: ServingLoad) -> str:
    """Return what ten times the training would bring to the winner, by its growth since the score before."""
    growth = max(0.0, growth_per_doubling(before, score))
    usual, undiminished = growth_to_come(growth, MORE)[0], growth * math.log2(MORE)
    reached, most = (potential(score, added, costs, load) for added in (usual, undiminished))
    return (
        f"With {MORE} times the training {score.name} would be at about {reached:.2f}×, in place of "
        f"{score.speedup:.2f}×, and at {most:.2f}× if each doubling of the steps added as much as the last one."
    )
