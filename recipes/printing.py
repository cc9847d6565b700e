"""The tables of a report, or of an evaluation, in the terminal."""

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from draftsmith.recipes.replays import diagnosis_lines
from draftsmith.recipes.report import SummaryRow, baseline_cells, by_setting, cells, domain_cells, summary_rows
from draftsmith.recipes.results import compared, read_contenders, read_runs


def print_summary(folder: Path, console: Console) -> None:
    """Print the comparison of a run, or of several runs, as tables, one a setting."""
    print_rows(summary_rows(read_contenders(folder, read_runs(folder))), console)


def print_evaluations(contents: list[dict[str, Any]], console: Console) -> None:
    """Print contents of evaluation.json files as tables, one a setting."""
    print_rows(summary_rows([compared(content) for content in contents]), console)


def print_rows(rows: list[SummaryRow], console: Console) -> None:
    """One table a setting, in the columns that fit a terminal."""
    headings = ("drafter", "acceptance length", "speedup", "tokens/s", "ms a round", "identical outputs")
    text_widths = {"drafter": 11, "identical outputs": 9}  # at least
    styles = {"faster": "green", "slower": "red", "": ""}
    for setting, block in by_setting(rows).items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in headings:
            is_text = heading in text_widths
            justify: JustifyMethod = "left" if is_text else "right"
            table.add_column(
                heading.replace(" ", "\n", 1),
                justify=justify,
                no_wrap=not is_text,
                min_width=text_widths.get(heading),
                overflow="fold",
            )
        for row in block:
            texts = {heading: Text(text) for heading, text in cells(row).items()}
            if row.trained and row.note:
                texts["drafter"].append(f", {row.note}")
            texts["speedup"].stylize(styles[row.verdict])
            texts["identical outputs"].stylize("bold white on red" if row.diverged else "")
            table.add_row(*(texts[heading] for heading in headings))
        for beside in baseline_cells(block):
            table.add_row(*(beside[heading] for heading in headings))
        console.print(Text(setting, style="bold"), table)
        for row in block:
            if row.gap:
                console.print(Text(f"{row.drafter}: {row.gap}", style="bold red"))
            for line in diagnosis_lines(row.result):
                console.print(Text(f"{row.drafter}: {line}", style="yellow"))
        print_domains(block, console)


def print_domains(block: list[SummaryRow], console: Console) -> None:
    """A table of one setting by domain, where prompts have one."""
    rows = domain_cells(block)
    if not rows:
        return
    table = Table(
        *rows[0], box=box.SIMPLE_HEAD, pad_edge=False, title="acceptance length, speedup", title_justify="left"
    )
    for row in rows:
        table.add_row(*map(Text, row.values()))
    console.print(table)
