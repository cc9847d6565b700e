"""The one console: whatever others have written, in names, prompts or files, it is shown and does nothing else."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from draftsmith.models.errors import printable


def shell_path(path: str | Path) -> str:
    """Return a path as an argument of a command, which does not take it for a flag where it begins with a dash."""
    return f"./{path}" if str(path).startswith("-") else str(path)


class SafeConsole(Console):
    """A console that shows text as it is: nothing in it is markup, and nothing reaches the terminal unprintable.

    Lines are not broken, so that a path or a command in them can be copied.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, "soft_wrap": True, **settings})

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text as rich does, made printable before it is measured."""
        return super().render_str(printable(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, and make the text of every segment printable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


@cache
def shared_console() -> SafeConsole:
    """Return the console of this process, which its progress bars share."""
    return SafeConsole()


def say(text: str | Text, style: str = "") -> None:
    """Print a text to the console of this process."""
    shared_console().print(text, style=style)
