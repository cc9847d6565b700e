"""Tables, and sections made of them: written once for the page, for Markdown and for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from draftsmith.inference.decoding.schedule import Confident
from draftsmith.inference.measuring.results import Interval, Result, Setting
from draftsmith.inference.planning.tuning import PredictedDraft
from draftsmith.models.errors import printable
from draftsmith.recipes.pages.figures import Plot
from draftsmith.recipes.pages.markdown import escaped

Tone = Literal["", "good", "bad", "alarm"]
STYLES: dict[Tone, str] = {"": "", "good": "green", "bad": "red", "alarm": "bold white on red"}


@dataclass(frozen=True)
class Bar:
    """A value with its interval as a bar of a page, in shares of the width; `one` is where plain decoding stands."""

    value: float
    low: float
    high: float
    one: float


@dataclass(frozen=True)
class Cell:
    text: str
    note: str = ""  # a second, smaller line
    tone: Tone = ""
    bar: Bar | None = None  # drawn by the page, and left out elsewhere


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
        """Return the texts of one column."""
        place = self.headings.index(heading)
        return [row[place].text for row in self.rows]


@dataclass
class Section:
    """A heading with what stands below it. A table without rows is dropped, a section without data not written."""

    name: str  # in the address of the page, behind #
    title: str
    lead: str = ""  # what to look for
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    folded: list[Table] = field(default_factory=list)  # for who wants it all
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = [table for table in self.tables if table.rows]
        self.folded = [table for table in self.folded if table.rows]

    @property
    def has_data(self) -> bool:
        return bool(self.tables or self.plots or self.folded or self.notes)


def table_of(
    title: str, rows: Iterable[Mapping[str, Cell | str]], note: str = "", words: Sequence[str] = ("drafter",)
) -> Table:
    """Return the table of rows by heading; a row without some heading has an empty cell there."""
    rows = list(rows)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    cells = [[as_cell(row.get(heading, "")) for heading in headings] for row in rows]
    return Table(title, headings, cells, note, tuple(words))


def as_cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)


def markdown(table: Table) -> str:
    """Return the table in Markdown, title and note included."""
    rule = [":---" if heading in table.words else "---:" for heading in table.headings]
    texts = [[f"{cell.text} ({cell.note})" if cell.note else cell.text for cell in row] for row in table.rows]
    first, *others = [list(map(escaped, row)) for row in [table.headings, *texts]]
    lines = ["| " + " | ".join(row) + " |" for row in [first, rule, *others]]
    parts = [f"**{escaped(table.title)}**" if table.title else "", "\n".join(lines), escaped(table.note)]
    return "\n\n".join(filter(None, parts))


def for_terminal(table: Table, headings: Sequence[str] | None = None) -> RichTable:
    """Return the given columns, or all, with headings on two lines where they have two words."""
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    places = [table.headings.index(heading) for heading in headings or table.headings]
    for place in places:
        heading = table.headings[place]
        if heading in table.words:
            shown.add_column(heading.replace(" ", "\n", 1), overflow="fold", min_width=min(11, len(heading) + 4))
        else:
            shown.add_column(heading.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(printable(row[place].text), style=STYLES[row[place].tone]) for place in places))
    return shown


# --- what stands in cells


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"


def interval_text(interval: Interval) -> str:
    """Return nothing where too little was measured for an interval."""
    return f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else ""


def ratio_text(ratio: float, interval: Interval) -> str:
    return f"{ratio:.2f}× {interval_text(interval)}".rstrip()


def speedup_text(result: Result) -> str:
    return ratio_text(result.speed.speedup, result.speed.speedup_ci95)


def tone_of(result: Result) -> Tone:
    """Return good or bad where the interval of the speedup leaves no doubt; output that is not sound is never good."""
    if result.speed.speedup_ci95 is None:
        return ""
    return "bad" if result.speed.speedup_ci95[1] < 1 else "good" if result.pays else ""


def setting_name(setting: Setting) -> str:
    """Return all that two results must share to stand side by side."""
    return name_of_load(setting, draft_text(setting))


def name_of_load(setting: Setting, *drafts: str) -> str:
    """Return what was decoded and how; the draft is named where it is given."""
    parts = [f"temperature {setting.temperature:g}", *([f"top-p {setting.top_p:g}"] if setting.top_p < 1 else [])]
    parts += [f"batch size {setting.batch_size}", *drafts, f"{setting.num_prompts} prompts of {setting.prompt_set}"]
    return ", ".join([*parts, f"up to {setting.max_new_tokens} new tokens"])


def draft_text(draft: Setting | PredictedDraft) -> str:
    """Return what a round drafts: a chain of a length, a tree, or chains by a schedule."""
    if isinstance(draft.schedule, Confident):
        return f"draft length up to {draft.schedule.longest}, by confidence {draft.schedule.least:g}"
    if draft.schedule:
        return f"draft length up to {draft.draft_length}, by schedule"
    tree = f", tree of {count(draft.tree_nodes, 'node')}" if draft.tree_nodes else ""
    return f"draft length {draft.draft_length}{tree}"
