"""Readings kept in a small local database, so that a later `watch` knows what was usual."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from draftsmith.models.errors import UserError
from draftsmith.models.reading import parse_json
from draftsmith.models.typed_json import from_json
from draftsmith.recipes.watching.readings import Latency, Reading
from draftsmith.train.engine.vllm_counters import Counters

KEPT_DAYS = 90
TABLE = """CREATE TABLE IF NOT EXISTS readings (
    server TEXT, time REAL, drafts INTEGER, draft_tokens INTEGER, accepted INTEGER, per_position TEXT, gauge REAL,
    ttft_seconds REAL, ttft_count INTEGER, tpot_seconds REAL, tpot_count INTEGER, running REAL,
    PRIMARY KEY (server, time))"""
OF_SERVER = "SELECT * FROM readings WHERE server = ? ORDER BY time"


class History:
    """The readings of all servers, of the last 90 days. Raises `UserError` for a file that is no such database."""

    def __init__(self, path: Path | None) -> None:
        """Without a path nothing is kept beyond this process."""
        self.path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path or ":memory:")
            self._database.execute(TABLE)
            self._database.commit()
        except (sqlite3.Error, OSError) as error:
            raise UserError(f"--history {path} cannot be used ({error}): give another file, or remove it") from None

    def add(self, server: str, reading: Reading) -> None:
        """Keep what happened between two looks, and forget what is too old."""
        counters = reading.counters
        row = (
            server,
            reading.time,
            counters.num_drafts,
            counters.num_draft_tokens,
            counters.num_accepted_tokens,
            json.dumps(counters.accepted_per_position),
            reading.accepted,
            reading.ttft.seconds,
            reading.ttft.count,
            reading.tpot.seconds,
            reading.tpot.count,
            reading.running,
        )
        try:
            self._database.execute(f"INSERT OR REPLACE INTO readings VALUES ({','.join('?' * len(row))})", row)
            self._database.execute("DELETE FROM readings WHERE time < ?", (reading.time - 86_400 * KEPT_DAYS,))
            self._database.commit()
        except sqlite3.Error as error:
            raise UserError(f"--history {self.path} cannot be written ({error})") from None

    def servers(self) -> list[str]:
        """Return the servers that were looked at, by their addresses."""
        return [name for (name,) in self._database.execute("SELECT DISTINCT server FROM readings ORDER BY server")]

    def newest(self, server: str, number: int) -> list[Reading]:
        """Return so many of the newest readings of a server, the oldest of them first."""
        return list(self._read(f"{OF_SERVER} DESC LIMIT ?", (server, number)))[::-1]

    def of(self, server: str) -> Iterator[Reading]:
        """Yield the readings of a server, the oldest first."""
        return self._read(OF_SERVER, (server,))

    def _read(self, query: str, values: tuple[str | int, ...]) -> Iterator[Reading]:
        for row in self._database.execute(query, values):
            _, time, drafts, draft_tokens, accepted, per_position, gauge, *rest = row
            ttft_seconds, ttft_count, tpot_seconds, tpot_count, running = rest
            counters = Counters(
                drafts, draft_tokens, accepted, tuple(from_json(list[int], parse_json(per_position, "--history")))
            )
            ttft, tpot = Latency(ttft_seconds, ttft_count), Latency(tpot_seconds, tpot_count)
            yield Reading(time, counters, gauge, ttft, tpot, running)
