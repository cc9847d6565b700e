"""The making of a page from its template. Every page is one file, which needs no other file and no network."""

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from draftsmith.models.errors import printable
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.configs.playground_data import playground_data

SCRIPTS = ("panel.js", "playground.js", "story.js")


def playground_page() -> str:
    """Return the page of the playground alone, which needs no data, no other file and no network."""
    return rendered("playground_page.html.j2")


def rendered(template: str, scripts: Sequence[str] = SCRIPTS, **values: Any) -> str:
    """Return a page from its template, with style, scripts and the playground's data, which all pages share."""
    shared = {"style": page_file("report.css"), "script": "\n".join(map(page_file, scripts))}
    return templates().get_template(template).render(playground=to_json(playground_data()), **shared, **values)


@cache
def templates() -> Environment:
    """Return the templates of pages, each compiled once in a process."""
    return Environment(
        loader=FunctionLoader(page_file),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else printable(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page_file(name: str) -> str:
    """Return the text of a template, style or script."""
    return resources.files("draftsmith.recipes.pages").joinpath("templates", name).read_text(encoding="utf-8")
