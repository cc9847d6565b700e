"""Break-even lengths, best drafts and verdicts in words: all that follows from costs of rounds and acceptance."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.inference.planning.best_draft import acceptance_length, best_draft_length, rates_of_rounds
from draftsmith.inference.planning.costs import CostModel, Costs
from draftsmith.inference.planning.plans import Acceptance, BatchCosts, BestDraft, DrafterPlan, Expectation
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.recipes.configs.published_acceptance import PUBLISHED

LONGEST = 8  # draft length, where nothing else is asked for


def planned_lengths(name: str, asked: Sequence[int], most: int | None) -> list[int]:
    """Return the draft lengths to plan a drafter with; `most` is its longest draft, if it has one.

    Raises `UserError` where it drafts fewer tokens in a row than were asked for.
    """
    lengths = sorted(set(asked)) or list(range(1, min(LONGEST, most or LONGEST) + 1))
    if most is not None and lengths[-1] > most:
        raise UserError(f"--draft-length {lengths[-1]}: {name} drafts up to {most} tokens in a row")
    return lengths


# --- acceptance


def known_acceptance(texts: Sequence[str], kind: str, longest: int) -> list[Acceptance]:
    """Return what a user gave and what others published of drafters of a kind. Raises `UserError` for the former.

    `longest` is the number of drafted tokens up to which a rate for all depths is needed.
    """
    published = [entry for entry in PUBLISHED if entry.kind == kind]
    own = [read_acceptance(text, longest) for text in texts]
    return own + [Acceptance(entry.where, entry.source, [*entry.rates]) for entry in published]


def read_acceptance(text: str, longest: int) -> Acceptance:
    """Return the acceptance of an evaluation.json, by its longest chains; or one rate for every depth."""
    try:
        rate = float(text)
    except ValueError:
        return read_measured(Path(text))
    if not 0 <= rate <= 1:
        raise UserError(f"--acceptance {text}: give a rate from 0 to 1, or the path of an evaluation.json")
    return Acceptance(f"rate {rate:g}", "assumed", [rate] * longest)


def read_measured(path: Path) -> Acceptance:
    chains = [
        result
        for result in read_evaluation(path).results
        if result.setting.is_chain and result.setting.draft_length and result.acceptance.num_rounds
    ]
    if not chains:
        raise UserError(f"--acceptance {path}: no chains were measured: give another evaluation.json, or a rate")
    result = max(chains, key=lambda result: result.setting.draft_length)
    stats = result.acceptance
    rates = rates_of_rounds(stats.conditional_acceptance_rates, stats.num_drafts, stats.num_rounds)
    return Acceptance(result.setting.prompt_set, str(path), rates)


# --- what costs and acceptance lead to


def drafter_plan(
    costs: Costs,
    batches: Sequence[int],
    context: int,
    lengths: list[int],
    acceptances: list[Acceptance],
    trees: Sequence[StaticTree] = (),
) -> DrafterPlan:
    """Return what is planned for one drafter, but for its training."""
    by_batch = [batch_costs(costs, batch, context, lengths, trees) for batch in batches]
    expected = expectations(acceptances, costs, batches, context, max(lengths))
    return DrafterPlan(
        costs.drafter,
        costs.drafter_kind,
        by_batch,
        {str(tree.num_nodes): tree.depth for tree in trees},
        expected,
        {name: value for name, value in vars(costs.held_out).items() if name != "rows"},
        verdicts(costs.drafter, by_batch, expected),
    )


def expectations(
    acceptances: list[Acceptance], costs: CostModel, batches: Sequence[int], context: int, longest: int
) -> list[Expectation]:
    """Return the best drafts of at most `longest` tokens by batch size, for each acceptance."""
    return [
        Expectation(
            acceptance=acceptance,
            by_batch_size=[best_draft(acceptance.rates[:longest], costs, batch, context) for batch in batches],
        )
        for acceptance in acceptances
    ]


def batch_costs(
    costs: CostModel, batch: int, context: int, lengths: list[int], trees: Sequence[StaticTree] = ()
) -> BatchCosts:
    break_even = {str(length): costs.break_even(length, batch, context) for length in lengths}
    return BatchCosts(
        batch,
        costs.plain(batch, context),
        {str(length): costs.round(length, batch, context) for length in lengths},
        break_even,
        {str(tree.num_nodes): costs.break_even(tree.depth, batch, context, tree.num_nodes) for tree in trees},
        max((length + 1) / break_even[str(length)] for length in lengths),
    )


def best_draft(rates: Sequence[float | None], costs: CostModel, batch: int, context: int) -> BestDraft:
    length = best_draft_length(rates, costs, batch, context)
    emitted = acceptance_length(rates, length)
    return BestDraft(batch, length, emitted, costs.speedup(emitted, length, batch, context))


def verdicts(name: str, by_batch: list[BatchCosts], expected: list[Expectation]) -> list[str]:
    """Return from where on nothing pays, whatever is accepted, and then what each acceptance leads to, in words."""
    lines = []
    if hopeless := [row.batch_size for row in by_batch if row.highest_speedup <= 1]:
        lines.append(
            f"{name}: at batch {listed(hopeless)} no draft length pays even if all is accepted: speculation off"
        )
    for expectation in expected:
        drafts = expectation.by_batch_size
        best = max(drafts, key=lambda draft: draft.speedup)
        off = [draft.batch_size for draft in drafts if draft.draft_length == 0]
        text = f"{best.speedup:.2f}x at batch {best.batch_size} with draft length {best.draft_length}"
        text += f"; speculation off at batch {listed(off)}" if off else ""
        if len(off) == len(drafts):
            text = "no draft length pays at any batch size: speculation off"
        lines.append(f"{name}, accepting as {expectation.acceptance.where}: {text}")
    return lines


def listed(values: Sequence[int | str]) -> str:
    return ", ".join(map(str, values))
