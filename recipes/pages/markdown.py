"""Markdown in which the words of others stay words: a name or a file in it begins no link, no tag and no row.

Only what would mean something there is escaped, so that ordinary text reads as it is.
"""

import re
from typing import Any

from markupsafe import Markup

from draftsmith.models.errors import printable

PUNCTUATION = r"!-/:-@\[-`{-~"
SPECIAL = re.compile(
    rf"""
    \\(?=[{PUNCTUATION}]|$)            # a backslash that would escape what follows
    | [`*<|~$]                         # code, emphasis, tags and addresses, cells, struck-out text, formulae
    | (?<![^\W_])_ | _(?![^\W_])       # emphasis, which underscores within a word are not
    | \](?=[(\[:])                     # a link or its address
    | &(?=\#?\w+;)                     # an entity
    | :(?=//) | (?<=\bwww)\.           # an address that would become a link
    | ^\#(?=\#{{0,5}}(?:\s|$)) | ^>    # a heading, a quote
    | ^[-+](?=[-\s]|$) | ^\[(?=.\])    # a list, a rule, a box to tick
    | (?:(?<=^\d)|(?<=^\d\d))[.)](?=\s|$)   # a numbered list
    """,
    re.VERBOSE | re.IGNORECASE,
)


def escaped(text: str) -> str:
    """Return a text as a line of Markdown that shows it."""
    return SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(printable(text).split()))


def finalized(value: Any) -> Any:
    """Escape what a template of Markdown shows, as its `finalize`; what a filter has made safe stays as it is."""
    return escaped(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def code(text: str) -> Markup:
    """Return a text as code within a line, between as many backticks as it takes."""
    text = " ".join(printable(text).split()) or " "
    ticks = _longer_than_within(text, 1)
    space = " " if "`" in text[0] + text[-1] else ""
    return Markup(f"{ticks}{space}{text}{space}{ticks}")


def fenced(text: str, language: str) -> Markup:
    """Return a text as a block of code."""
    ticks = _longer_than_within(text, 3)
    end = "" if text.endswith("\n") else "\n"
    return Markup(f"{ticks}{language}\n{printable(text)}{end}{ticks}")


def _longer_than_within(text: str, least: int) -> str:
    """Return so many backticks that the text does not hold them in a row."""
    return "`" * max([least, *(len(ticks) + 1 for ticks in re.findall("`+", text))])
