"""The sections on studies in which no text was decoded for time: plans before training, and replays."""

from itertools import groupby

from draftsmith.inference.planning.plans import DrafterPlan, Plan
from draftsmith.recipes.pages.tables import Cell, Row, Section, Table, interval_text, table_of
from draftsmith.recipes.report_data.contents import Replay, ReplayedDraft, ReportData


def planned(data: ReportData) -> Section:
    """Show from which acceptance on each drafter pays, and what known acceptance leads to."""
    plans: list[Plan] = data.extras.get("plan", [])
    tables = [
        table
        for plan in plans
        for row in plan.drafters
        for table in (break_even_table(row, plan.context), expected_table(row))
    ]
    return Section(
        "plan",
        "Plan",
        "What measured costs said before any training.",
        tables,
        notes=[line for plan in plans for row in plan.drafters for line in row.verdicts],
    )


def break_even_table(plan: DrafterPlan, context: int) -> Table:
    rows: list[Row] = [
        {
            "batch size": str(row.batch_size),
            "plain step ms": f"{row.plain_ms:.2f}",
            **{
                f"draft length {length}": f"{needed:.2f}" for length, needed in row.break_even_acceptance_length.items()
            },
            **{f"tree of {nodes}": f"{needed:.2f}" for nodes, needed in row.tree_break_even_acceptance_length.items()},
        }
        for row in plan.by_batch_size
    ]
    note = (
        f"Tokens a round, the target's own one counted, that a draft has to reach to pay; {context} tokens of context."
    )
    return table_of(f"{plan.drafter}: acceptance length to break even", rows, note, words=())


def expected_table(plan: DrafterPlan) -> Table:
    rows: list[Row] = [
        {
            "accepting as": Cell(expectation.acceptance.where, expectation.acceptance.source),
            **{
                f"batch size {draft.batch_size}": Cell(f"{draft.speedup:.2f}×", f"draft length {draft.draft_length}")
                if draft.draft_length
                else "off"
                for draft in expectation.by_batch_size
            },
        }
        for expectation in plan.expected
    ]
    return table_of(f"{plan.drafter}: best draft and its predicted speedup", rows, words=("accepting as",))


def replayed(data: ReportData) -> Section:
    """Show the acceptance length of each drafter at each draft, as scored on recorded texts."""
    replays: list[Replay] = data.extras.get("replay", [])
    return Section(
        "replay",
        "Replay",
        "Tokens a round by draft length, from one recording of the target. No time was measured.",
        [replay_table(data, list(rows)) for replay in replays for _, rows in groupby(replay.results, recording_of)],
    )


def recording_of(row: ReplayedDraft) -> tuple[str, float]:
    return row.prompt_set, row.temperature


def replay_table(data: ReportData, drafts: list[ReplayedDraft]) -> Table:
    lines: dict[tuple[str, str], Row] = {}
    for draft in drafts:
        name = data.name_of(draft.drafter)
        line = lines.setdefault(
            (draft.drafter, draft.verification_mode), {"drafter": Cell(name, draft.verification_mode)}
        )
        tree = f"tree of {draft.tree_nodes}, {draft.draft_length} deep"
        shape = tree if draft.tree_nodes else f"draft length {draft.draft_length}"
        line[shape] = Cell(f"{draft.mean_acceptance_length:.2f}", interval_text(draft.mean_acceptance_length_ci95))
    return table_of(f"{drafts[0].prompt_set}, temperature {drafts[0].temperature:g}", lines.values())
