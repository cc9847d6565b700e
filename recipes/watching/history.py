"""Readings kept in a small local database, so that a later `watch` knows what was usual."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError
from draftsmith.models.storage.reading import parse_json
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.recipes.watching.readings import Reading

KEPT_DAYS = 90
TABLE = "CREATE TABLE IF NOT EXISTS readings (server TEXT, time REAL, reading TEXT, PRIMARY KEY (server, time))"
OF_SERVER = "SELECT reading FROM readings WHERE server = ? ORDER BY time"


class History:
    """The readings of all servers, of the last 90 days. Raises `UserError` for a file that is no such database."""

    def __init__(self, path: Path | None) -> None:
        """Without a path nothing is kept beyond this process."""
        self.path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path or ":memory:")
        except (sqlite3.Error, OSError) as error:
            raise self._unusable(error) from None
        self._change(TABLE)

    def add(self, server: str, reading: Reading) -> None:
        """Keep what happened between two looks, and forget what is too old."""
        row = (server, reading.time, json.dumps(to_json(reading)))
        self._change("INSERT OR REPLACE INTO readings VALUES (?, ?, ?)", row)
        self._change("DELETE FROM readings WHERE time < ?", (reading.time - 86_400 * KEPT_DAYS,))

    def servers(self) -> list[str]:
        """Return the servers that were looked at, by their addresses."""
        return [str(name) for name in self._column("SELECT DISTINCT server FROM readings ORDER BY server")]

    def newest(self, server: str, number: int) -> list[Reading]:
        """Return so many of the newest readings of a server, the oldest of them first."""
        return list(self._read(f"{OF_SERVER} DESC LIMIT ?", (server, number)))[::-1]

    def of(self, server: str) -> Iterator[Reading]:
        """Yield the readings of a server, the oldest first."""
        return self._read(OF_SERVER, (server,))

    def _read(self, query: str, values: tuple[str | int, ...]) -> Iterator[Reading]:
        place = f"--history {self.path}"
        for text in self._column(query, values):
            yield from_json(Reading, parse_json(str(text), place), place)

    def _column(self, query: str, values: tuple[str | int, ...] = ()) -> Iterator[Any]:
        """Yield the only column of a query's rows."""
        try:
            for (value,) in self._database.execute(query, values):
                yield value
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise self._unusable(error) from None

    def _change(self, statement: str, values: tuple[str | float, ...] = ()) -> None:
        try:
            self._database.execute(statement, values)
            self._database.commit()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: Exception) -> UserError:
        return UserError(f"--history {self.path} cannot be used ({error}): give another file, or remove it")
