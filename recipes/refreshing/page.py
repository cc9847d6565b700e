"""refresh.html: what each round found and did."""

import time

from draftsmith.recipes.refreshing.judgement import Comparison
from draftsmith.recipes.refreshing.state import RefreshState, Round
from draftsmith.recipes.reports.report import rendered
from draftsmith.recipes.reports.tables import Cell, Row, Section, interval_text, ratio_text, table_of


def refresh_page(state: RefreshState, serving: int | None) -> str:
    """Return one page that needs no other file and no network."""
    newest = state.rounds[-1]
    rows = [round_row(one) for one in reversed(state.rounds)]
    lead = "The newest round first. Acceptance lengths are those of champion and challenger on held-out prompts."
    table = table_of("", rows, words=("round", "traffic", "looked", "outcome"))
    return rendered(
        "sections_page.html.j2",
        program="refresh",
        refresh=None,
        figures={},
        name=newest.target,
        title=f"champion {serving} serves",
        notes=[f"Round {newest.number}: {newest.outcome}."],
        sections=[Section("rounds", "Rounds", lead, [table])],
    )


def round_row(one: Round) -> Row:
    """Return a round as a row of the table."""
    judgement = one.judgement
    return {
        "round": Cell(f"{one.number}", time.strftime("%Y-%m-%d %H:%M", time.localtime(one.time))),
        "traffic": one.traffic.text,
        "looked": one.look.reason if one.look else "–",
        "steps at most": f"{one.plan.num_steps}" if one.plan else "–",
        "on the newest": compared(judgement.new if judgement else None),
        "on the old": compared(judgement.old if judgement else None),
        "speed beside the champion": ratio_text(judgement.new.speed_ratio, judgement.new.speed_ratio_ci95)
        if judgement
        else "–",
        "outcome": Cell(one.outcome or "goes on", tone="good" if one.promoted else ""),
    }


def compared(found: Comparison | None) -> Cell | str:
    """Return a comparison as a cell: both acceptance lengths, and the interval of the difference below them."""
    if found is None:
        return "–"
    return Cell(f"{found.champion:.2f} → {found.challenger:.2f}", interval_text(found.ci95))
