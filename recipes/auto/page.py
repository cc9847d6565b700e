"""auto.html: what was tried, what was dropped and why, what came out of it, and what more time would bring."""

import math

from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.planning.costs import Costs
from draftsmith.recipes.auto.race import Rung, growth_per_doubling
from draftsmith.recipes.auto.score import Load, Score, potential
from draftsmith.recipes.auto.state import AutoState
from draftsmith.recipes.reports.report import rendered
from draftsmith.recipes.reports.tables import Cell, Row, Section, Table, setting_name, speedup_text, table_of, tone_of

MORE = 10  # times the time, for what it would bring


def auto_page(state: AutoState, evaluations: list[Evaluation], title: str, more: str | None) -> str:
    """Return one page that needs no other file and no network. `evaluations`: those of the end, the fastest first."""
    return rendered(
        "sections_page.html.j2",
        program="auto",
        refresh=None,
        figures={},
        name=state.plan.target,
        title=title,
        notes=[state.traffic.text, *([more] if more else [])],
        sections=[section for section in (result(evaluations), race(state), plan(state)) if section.has_data],
    )


def result(evaluations: list[Evaluation]) -> Section:
    """Return what was measured at the end, on prompts that nothing saw before."""
    rows = [result_row(evaluation, number) for evaluation in evaluations for number in range(len(evaluation.results))]
    return Section("result", "Measured at the end", "On prompts that chose nothing.", [table_of("", rows)])


def result_row(evaluation: Evaluation, number: int) -> Row:
    row = evaluation.results[number]
    return {
        "drafter": evaluation.drafter_kind,
        "setting": setting_name(row.setting),
        "tokens a round": f"{row.tokens_a_round:.2f}",
        "speedup": Cell(speedup_text(row), tone=tone_of(row)),
    }


def race(state: AutoState) -> Section:
    """Return how the race went, rung by rung."""
    lookups = table_of("Lookups, which need no training", map(score_row, state.lookups))
    rungs = [rung_table(number, rung) for number, rung in enumerate(state.rungs, 1)]
    lines = [rung.decision for rung in state.rungs] + ([state.over] if state.over else [])
    lead = "Speedups are predicted from acceptance on the prompts of the race and from measured costs."
    return Section("race", "The race", lead, [lookups, *rungs], notes=lines)


def rung_table(number: int, rung: Rung) -> Table:
    rows: list[Row] = [
        {
            **score_row(contender.score),
            "forecast at the end": f"{contender.potential:.2f}x",
            "at most": f"{contender.best_potential:.2f}x",
            "": "goes on" if contender.score.name in rung.kept else "dropped",
        }
        for contender in rung.contenders
    ]
    return table_of(f"Rung {number}", rows, words=("drafter", ""))


def score_row(score: Score) -> Row:
    return {
        "drafter": score.name,
        "steps": f"{score.steps}" if score.steps else "–",
        "tokens a round": f"{score.acceptance_length:.2f}",
        "draft length": f"{score.draft_length}",
        "predicted": f"{score.speedup:.2f}x [{score.low:.2f}, {score.high:.2f}]",
    }


def plan(state: AutoState) -> Section:
    """Return what the time was divided into."""
    rows: list[Row] = [
        {"drafter": kind, "ms a step": f"{1000 * seconds:.0f}"} for kind, seconds in state.plan.step_seconds.items()
    ]
    lead = (
        f"{state.plan.hours:g} hours: {state.plan.num_answers} answers of the target, {state.plan.num_rungs} rungs of "
        f"{state.plan.rung_seconds / 60:.1f} minutes, {state.plan.final_seconds / 60:.1f} minutes for the winner."
    )
    return Section("plan", "The plan", lead, [table_of("What a training step takes", rows)])


def more_time(score: Score, costs: Costs, load: Load) -> str:
    """Return what ten times the training would bring to the winner, by the growth of finished runs."""
    doublings = math.log2(MORE)
    usual, most = (potential(score, growth * doublings, costs, load) for growth in growth_per_doubling())
    return (
        f"With {MORE} times the training {score.name} would be at about {usual:.2f}x by the usual growth of runs, and "
        f"at {most:.2f}x by the highest that was seen, in place of {score.speedup:.2f}x."
    )
