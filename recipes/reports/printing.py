"""The tables of a report, or of an evaluation, in the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from draftsmith.recipes.reports.contents import compared, read_contenders, read_runs
from draftsmith.recipes.reports.summary import (
    SummaryRow,
    by_setting,
    comparison_table,
    diagnosis_lines,
    domain_table,
    summary_rows,
)
from draftsmith.recipes.reports.tables import Cell, for_terminal

COLUMNS = ("drafter", "acceptance length", "speedup", "tokens/s", "ms a round", "identical outputs")  # that fit


def print_summary(folder: Path, console: Console) -> None:
    """Print the comparison of a run, or of several runs, as tables, one a setting."""
    print_rows(summary_rows(read_contenders(folder, read_runs(folder))), console)


def print_evaluations(contents: list[dict[str, Any]], console: Console) -> None:
    """Print contents of evaluation.json files as tables, one a setting."""
    print_rows(summary_rows(compared(contents)), console)


def print_rows(rows: list[SummaryRow], console: Console) -> None:
    """One table a setting, with what is wrong below the first one that shows it."""
    told: set[str] = set()
    for setting, block in by_setting(rows).items():
        table = comparison_table(setting, block)
        for row, cells in zip(block, table.rows, strict=False):  # below them those of baselines
            if row.trained and row.note:
                cells[0] = Cell(f"{row.drafter}, {row.note}")
        console.print(Text(setting, style="bold"), for_terminal(table, COLUMNS))
        for row in block:
            if row.gap:
                console.print(Text(f"{row.drafter}: {row.gap}", style="bold red"))
            lines = [f"{row.drafter}: {line}" for line in diagnosis_lines(row.result)] if row.trained else []
            for line in lines:
                if line not in told:
                    console.print(Text(line, style="yellow"))
            told |= set(lines)
        if by_domain := domain_table(block):
            console.print(Text(by_domain.title), for_terminal(by_domain))
