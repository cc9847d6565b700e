"""The sections on what to serve with: what `tune` chose, and what `plan` said before training."""

from draftsmith.inference.decoding.schedule import for_vllm
from draftsmith.inference.planning.tuning import PredictedDraft
from draftsmith.recipes.reports.report_data import Choice, ReportData
from draftsmith.recipes.reports.tables import Row, Section, draft_text, speedup_text, table_of


def choices(data: ReportData) -> Section:
    """Show the drafts that were chosen from acceptance on other prompts and from measured costs."""
    rows: list[Row] = [
        {
            "drafter": data.name_of(choice.drafter),
            "batch size": str(draft.batch_size),
            "best draft": draft_text(draft) if draft.draft_length else "speculation off",
            "tokens a round": f"{draft.acceptance_length:.2f}",
            "predicted speedup": f"{draft.speedup:.2f}×",
            "in fixed batches": f"{draft.fixed_batch_speedup:.2f}×" if draft.fixed_batch_speedup else "–",
            "measured": measured_text(data, choice, draft),
        }
        for choice in data.choices()
        for draft in choice.predicted
    ]
    note = (
        "Predicted from the acceptance on the prompts of the fit and from measured costs, for a server that fills up "
        "its batch and for fixed batches, which last as long as their slowest request; measured in fixed batches on "
        "the prompts of this report, where that draft was decoded."
    )
    return Section(
        "choice",
        "Choice",
        "The draft to serve with, chosen on prompts that this report does not measure.",
        [table_of("", rows, note, words=("drafter", "best draft"))],
        notes=[choice_text(data.name_of(choice.drafter), choice) for choice in data.choices()],
    )


def measured_text(data: ReportData, choice: Choice, draft: PredictedDraft) -> str:
    """Return the speedup of a chosen draft on the report's own prompts."""
    drafter = data.find(choice.drafter)
    rows = drafter.sound_results(data.setting) if drafter else []
    return next((speedup_text(row) for row in rows if draft.is_of(row.setting)), "–")


def choice_text(name: str, choice: Choice) -> str:
    """Return the schedule and the tree in words."""
    steps = [f"{length or 'no'} tokens from {start} on" for start, length in choice.schedule.draft_lengths]
    nodes, depth = len(choice.tree or []), max(map(len, choice.tree or []), default=0)
    shape = f"a tree of {nodes} nodes and depth {depth}" if nodes else "no tree beats the chain"
    return (
        f"{name}, fitted on {choice.fitted_on}. Schedule by running requests: {', '.join(steps)} "
        f"(vLLM: num_speculative_tokens_per_batch_size {for_vllm(choice.schedule)}); {shape}."
    )


def planned(data: ReportData) -> Section:
    lines = [
        line
        for content in data.extras.get("plan", [])
        for row in content.get("drafters", [])
        for line in row.get("verdicts", [])
    ]
    return Section("plan", "Plan", "What measured costs said before any training.", notes=lines)
