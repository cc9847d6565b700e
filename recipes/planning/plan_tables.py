"""The tables of a plan in the terminal: what breaks even, and what known acceptance leads to."""

import itertools

from rich.console import Console
from rich.table import Table

from draftsmith.inference.planning.plans import DrafterPlan, Expectation


def print_break_even(plan: DrafterPlan, context: int, console: Console) -> None:
    console.print(f"\n{plan.drafter}: acceptance length to break even, {context} tokens of context", style="bold")
    console.print(break_even_table(plan))


def print_expected(plan: DrafterPlan, console: Console) -> None:
    if not plan.expected:
        return
    title = f"{plan.drafter}: best K and its speedup, by acceptance that others published or that you gave"
    console.print(title, style="bold")
    console.print(expected_table(plan.expected))
    for number, expectation in enumerate(plan.expected, 1):
        console.print(f" {number}: {expectation.acceptance.where} ({expectation.acceptance.source})")


def break_even_table(plan: DrafterPlan) -> Table:
    heads = [f"K={length}" for length in plan.by_batch_size[0].round_ms]
    heads += [f"{nodes} nodes, depth {depth}" for nodes, depth in plan.tree_depths.items()]
    table = Table("batch", "plain, ms", *heads, box=None)
    for row in plan.by_batch_size:
        needed = row.break_even_acceptance_length.values(), row.tree_break_even_acceptance_length.values()
        cells = [f"{length:.2f}" for length in itertools.chain(*needed)]
        table.add_row(str(row.batch_size), f"{row.plain_ms:.2f}", *cells)
    return table


def expected_table(expected: list[Expectation]) -> Table:
    table = Table("", *(f"batch {draft.batch_size}" for draft in expected[0].by_batch_size), box=None)
    for number, expectation in enumerate(expected, 1):
        drafts = expectation.by_batch_size
        table.add_row(
            str(number), *(f"K={d.draft_length} {d.speedup:.2f}x" if d.draft_length else "off" for d in drafts)
        )
    return table
