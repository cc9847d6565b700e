"""Traces: what was asked of a server, and when.

    FILE.jsonl, .json, .parquet, .txt    prompts in the forms of data/prompts; an OpenAI request's "max_tokens" is kept
    FILE.jsonl, FILE.csv                 arrivals and lengths without texts: Mooncake's, Azure's and BurstGPT's traces
    FILE.log                             the log of a vLLM or SGLang that logs its requests (server_logs.py)

A row may say when it arrived, in seconds, as milliseconds of an epoch, or as a date with a time.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from typing import Any

from draftsmith.data.prompts.prompt_formats import FIELDS, Prompt, to_prompt
from draftsmith.data.prompts.sources import READERS, RawRows, parsed, read_source
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import MOST
from draftsmith.models.storage.reading import JsonObject, read_lines
from draftsmith.recipes.bench.server_logs import LoggedRequest, read_log

TIMES = ("timestamp", "time", "arrival_time", "created_at", "TIMESTAMP", "Timestamp")
LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
LENGTHS = (  # names of the lengths of prompt and answer, and the milliseconds of a unit of the times beside them
    ("input_length", "output_length", 1.0),  # Mooncake
    ("ContextTokens", "GeneratedTokens", 1000.0),  # Azure
    ("Request tokens", "Response tokens", 1000.0),  # BurstGPT
)
EPOCH_MILLISECONDS = 1e11  # numbers from there on are milliseconds of an epoch: as seconds they lie in the year 5138


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace; `prompt` is None where only its length is known."""

    prompt: Prompt | list[int] | None
    num_prompt_tokens: int | None  # None: the prompt tells
    max_new_tokens: int | None  # None: as long as the settings let all answers get
    is_exact: bool  # the answer had so many tokens, and was not cut at them
    seconds: float | None  # time of its arrival since that of the first; None: no times are known


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace in the order of their arrival.

    Raises `UserError` naming the file and line that is wrong, and where only some of the requests have a time.
    """
    requests = list(_requests(path))
    if not requests:
        raise UserError(f"{path} holds no requests")
    timed = [request.seconds for request in requests if request.seconds is not None]
    if len(timed) not in (0, len(requests)):
        raise UserError(f"{path}: {len(timed)} of {len(requests)} requests have a time: give all of them one, or none")
    if not timed:
        return requests
    first = min(timed)
    requests.sort(key=lambda request: request.seconds or 0.0)
    return [replace(request, seconds=(request.seconds or 0.0) - first) for request in requests]


def _requests(path: Path) -> Iterator[TraceRequest]:
    if path.suffix == ".log":
        yield from map(_from_log, read_log(path))
        return
    if not path.is_file() or path.suffix not in (".csv", *READERS):
        for prompt in read_source(str(path)):
            yield TraceRequest(prompt, None, None, False, None)
        return
    for place, row in _csv_rows(path) if path.suffix == ".csv" else READERS[path.suffix](path):
        if isinstance(row, Prompt):
            yield TraceRequest(row, None, None, False, None)
        elif (request := _from_row(parsed(row, place), place)) is not None:
            yield request


def _from_log(logged: LoggedRequest) -> TraceRequest:
    return TraceRequest(logged.prompt, None, logged.max_new_tokens, False, logged.seconds)


def _csv_rows(path: Path) -> RawRows:
    lines = [line for _, line in read_lines(path)]
    try:
        return [(f"{path} line {number}", row) for number, row in enumerate(csv.DictReader(lines), 2)]
    except csv.Error as error:
        raise UserError(f"{path} is no CSV file: {error}") from None


def _from_row(row: Any, place: str) -> TraceRequest | None:
    """Return the request of a row; None for a conversation in which no user speaks."""
    if not isinstance(row, dict):
        raise UserError(f"{place} is no object")
    if not any(row.get(name) is not None for name in FIELDS):
        return _from_lengths(row, place)
    prompt = to_prompt(row, place)
    if prompt is None:
        return None
    body = row["body"] if isinstance(row.get("body"), dict) else row
    limit = next((body[name] for name in LIMITS if body.get(name) is not None), None)
    times = [seconds_of(row[name], place) for name in TIMES if row.get(name) is not None]
    return TraceRequest(
        prompt,
        None,
        None if limit is None else _count(limit, place),
        False,
        times[0] if times else None,
    )


def _from_lengths(row: JsonObject, place: str) -> TraceRequest:
    for of_prompt, of_answer, milliseconds in LENGTHS:
        if row.get(of_prompt) is None:
            continue
        times = [seconds_of(row[name], place, milliseconds) for name in TIMES if row.get(name) is not None]
        if not times:
            raise UserError(f"{place} has lengths and no time: give one of {', '.join(TIMES)}")
        return TraceRequest(
            None, _count(row[of_prompt], place), max(1, _count(row.get(of_answer), place, 0)), True, times[0]
        )
    names = " or ".join(f"{first!r} and {second!r}" for first, second, _ in LENGTHS)
    raise UserError(f"{place} has neither a prompt ({', '.join(FIELDS)}) nor lengths ({names})")


def _count(value: Any, place: str, least: int = 1) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and least <= int(text[:12]) <= MOST):
        raise UserError(f"{place} holds {text[:40]!r} where a number of tokens is meant")
    return int(text)


def seconds_of(value: Any, place: str, milliseconds: float = 1000.0) -> float:
    """Return the seconds of a time: a number in units of so many milliseconds, or a date with a time.

    Raises `UserError` for what is no time.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return _seconds_of_date(value, place)
    if isinstance(value, bool) or not isfinite(number) or number < 0:
        raise UserError(f"{place} holds {str(value)[:40]!r} where a time is meant")
    return number / 1000 if number >= EPOCH_MILLISECONDS else number * milliseconds / 1000


def _seconds_of_date(value: Any, place: str) -> float:
    text = re.sub(r"(\.\d{6})\d+", r"\1", str(value)[:80]).strip().replace("Z", "+00:00")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"{place} holds {str(value)[:40]!r} where a time is meant: give seconds, or YYYY-MM-DD HH:MM:SS"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
