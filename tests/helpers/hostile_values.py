"""Values that do not belong where they are put, in files of JSON that anybody may have written."""

import json
from collections.abc import Iterator
from typing import Any

# As JSON; None: the entry is left out. 1e308 is a number whose square is not.
VALUES = [
    *("null", "-1", "0", "1", "3", "10000000", "1000000000000", "1e308", "0.5", "true", '"x"', "[]", "[-1]"),
    *('{"a": {}}', None),
]  # fmt: skip


def paths(content: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to each entry, nested ones too."""
    for key, value in content.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


def changed(text: str, path: tuple[str, ...], value: str | None) -> str:
    """Return a text of JSON with another value at one place."""
    content = json.loads(text)
    owner = content
    for key in path[:-1]:
        owner = owner[key]
    if value is None:
        owner.pop(path[-1], None)
    else:
        owner[path[-1]] = json.loads(value)
    return json.dumps(content)
