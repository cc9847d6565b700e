"""The tables of a report, or of an evaluation, in the terminal."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.measuring.teacher_forcing import gap_warning
from draftsmith.recipes.pages.tables import Cell, for_terminal
from draftsmith.recipes.report_data.measured import MeasuredDrafter, compared
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.reports.acceptance import diagnosis_lines
from draftsmith.recipes.reports.comparison_table import by_setting, comparison_table, domain_table, span_table
from draftsmith.recipes.reports.serving import judged_tables

COLUMNS = ("drafter", "acceptance length", "speedup", "tokens/s", "ms a round", "identical outputs")  # that fit


def print_summary(folder: Path, console: Console) -> None:
    """Print the comparison of a run, or of several runs, as tables, one a setting."""
    print_drafters(read_report_data(folder).all_drafters, console)


def print_evaluations(evaluations: list[Evaluation], console: Console) -> None:
    """Print evaluations as tables, one a setting; those of an engine in tables of their own."""
    print_drafters(compared([evaluation for evaluation in evaluations if evaluation.results]), console)
    for table in judged_tables(evaluations):
        console.print(Text(table.title, style="bold"), for_terminal(table))


def print_drafters(drafters: list[MeasuredDrafter], console: Console) -> None:
    """Print one table a setting, with what is wrong below the first one that shows it."""
    told: set[str] = set()
    for setting, block in by_setting(drafters).items():
        table = comparison_table(setting, block)
        for (drafter, _), cells in zip(block, table.rows, strict=False):  # below them plain decoding and baselines
            if drafter.is_trained:
                cells[0] = Cell(drafter.label)
        console.print(Text(setting, style="bold"), for_terminal(table, COLUMNS))
        for drafter, row in block:
            if warning := gap_warning(row):
                console.print(Text(f"{drafter.name}: {warning}", style="bold red"))
            lines = [f"{drafter.name}: {line}" for line in diagnosis_lines(row.diagnosis)] if drafter.is_trained else []
            for line in lines:
                if line not in told:
                    console.print(Text(line, style="yellow"))
            told.update(lines)
        for by_part in (domain_table(block), span_table(block)):
            if by_part.rows:
                console.print(Text(by_part.title), for_terminal(by_part))
