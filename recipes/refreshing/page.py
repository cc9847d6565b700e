"""refresh.html: what each round found and did."""

import time

from draftsmith.recipes.pages.rendering import rendered
from draftsmith.recipes.pages.tables import Cell, Row, Section, interval_text, ratio_text, table_of
from draftsmith.recipes.refreshing.judgement import Lengths
from draftsmith.recipes.refreshing.state import RefreshState, Round


def refresh_page(state: RefreshState, serving: int | None) -> str:
    """Return one page that needs no other file and no network."""
    newest = state.rounds[-1]
    rows = list(map(round_row, reversed(state.rounds)))
    lead = (
        "The newest round first. Acceptance lengths of champion and challenger on held-out prompts, with the 95 % "
        "interval of the gain: as they were decoded, and as expected at temperature 1, by which a gain is judged."
    )
    table = table_of("", rows, words=("round", "traffic", "looked", "outcome"))
    return rendered(
        "sections_page.html.j2",
        program="refresh",
        refresh=None,
        figures={},
        name=newest.target,
        title=f"Champion {serving} serves",
        tone="good" if newest.promoted else "",
        facts=[],
        text=[f"Round {newest.number}: {newest.outcome}."],
        notes=[],
        sections=[Section("rounds", "Rounds", lead, [table])],
    )


def round_row(round: Round) -> Row:
    """Return a round as a row of the table."""
    judgement = round.judgement
    return {
        "round": Cell(f"{round.number}", time.strftime("%Y-%m-%d %H:%M", time.localtime(round.time))),
        "traffic": round.traffic.text,
        "looked": round.look.reason if round.look else "–",
        "steps at most": f"{round.plan.num_steps}" if round.plan else "–",
        "on the newest": compared(judgement.new.decoded if judgement else None),
        "expected there": compared(judgement.new.expected if judgement else None),
        "expected on the old": compared(judgement.old.expected if judgement and judgement.old else None),
        "speed beside the champion": ratio_text(judgement.new.speed_ratio, judgement.new.speed_ratio_ci95)
        if judgement
        else "–",
        "outcome": Cell(round.outcome or "goes on", tone="good" if round.promoted else ""),
    }


def compared(lengths: Lengths | None) -> Cell | str:
    """Return a cell with both acceptance lengths, and the interval of the difference below them."""
    if lengths is None:
        return "–"
    return Cell(f"{lengths.champion:.2f} → {lengths.challenger:.2f}", interval_text(lengths.ci95))
