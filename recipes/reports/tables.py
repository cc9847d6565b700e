"""Tables, and sections made of them: written once for the page, for Markdown and for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

Tone = Literal["", "good", "bad", "alarm"]
STYLES: dict[Tone, str] = {"": "", "good": "green", "bad": "red", "alarm": "bold white on red"}


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""  # a second, smaller line
    tone: Tone = ""


Row = dict[str, Cell | str]  # by heading


@dataclass
class Table:
    """Rows of cells below headings. Columns named in `words` hold text, all others numbers."""

    title: str
    headings: list[str]
    rows: list[list[Cell]]
    note: str = ""  # what to know to read it
    words: tuple[str, ...] = ("drafter",)

    def column(self, heading: str) -> list[str]:
        """The texts of one column."""
        place = self.headings.index(heading)
        return [row[place].text for row in self.rows]


@dataclass
class Section:
    """A heading with what stands below it; nothing of it is written where it holds no data."""

    name: str  # in the address of the page, behind #
    title: str
    lead: str = ""  # what to look for
    tables: list[Table] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)  # by name; those without data are left out
    folded: list[Table] = field(default_factory=list)  # for who wants it all
    notes: list[str] = field(default_factory=list)

    def has_data(self, drawn: set[str]) -> bool:
        """`drawn`: names of the figures that there are."""
        return bool(self.tables or self.folded or self.notes or drawn.intersection(self.figures))


def table_of(
    title: str, rows: Iterable[Mapping[str, Cell | str]], note: str = "", words: Sequence[str] = ("drafter",)
) -> Table:
    """From rows by heading; a row without some heading has an empty cell there."""
    rows = list(rows)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [[as_cell(row.get(heading, "")) for heading in headings] for row in rows]
    return Table(title, headings, cells, note, tuple(words))


def as_cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def markdown(table: Table) -> str:
    """The table in Markdown, title and note included."""
    rule = [":---" if heading in table.words else "---:" for heading in table.headings]
    texts = [[f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row] for row in table.rows]
    lines = ["| " + " | ".join(map(escape, row)) + " |" for row in [table.headings, rule, *texts]]
    parts = [f"**{table.title}**" if table.title else "", "\n".join(lines), table.note]
    return "\n\n".join(filter(None, parts)) + "\n"


def escape(text: str) -> str:
    """As the cell of a table in Markdown: one line, no bar that would end the cell."""
    return " ".join(text.split()).replace("|", "\\|")


def for_terminal(table: Table, headings: Sequence[str] | None = None) -> RichTable:
    """The given columns, or all, with headings on two lines where they have two words."""
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    places = [table.headings.index(heading) for heading in headings or table.headings]
    for place in places:
        heading = table.headings[place]
        if heading in table.words:
            shown.add_column(heading.replace(" ", "\n", 1), overflow="fold", min_width=min(11, len(heading) + 4))
        else:
            shown.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(row[place].text, style=STYLES[row[place].tone]) for place in places))
    return shown


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"
