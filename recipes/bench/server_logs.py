"""Reads the requests that a vLLM or SGLang server has written to its log, with what they asked.

    vLLM     --enable-log-requests --uvicorn-log-level debug, with VLLM_LOGGING_LEVEL=DEBUG
    SGLang   --log-requests --log-requests-level 3, as text or --log-requests-format json

A request is taken from the most exact of the lines about it: the JSON that a client sent, then the token ids that the
server read, then the text of the prompt.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from draftsmith.data.progress import notice
from draftsmith.data.prompts.prompt_formats import Prompt, to_prompt
from draftsmith.models.errors import UserError
from draftsmith.models.storage.reading import parse_json, read_lines

MONTH_AND_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")  # of vLLM, which writes no year
DATE_AND_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")  # of SGLang
YEARS = 9  # in a row, of which one at least has a 29 February
TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""  # as Python shows a text
CUT = re.compile(rf"(?:{TEXT}|\]) \.\.\. ")  # SGLang leaves out the middle of what is long

VLLM_BODY = re.compile(r"Request \S+ JSON body: (\{.*\})\s*$")
VLLM_READ = re.compile(rf"Request (\S+) details: prompt: ({TEXT}|None), prompt_token_ids: (\[[\d, ]*\]|None), ")
VLLM_READ_OF_OLD = re.compile(rf"Received request (\S+): prompt: ({TEXT}|None), .*prompt_token_ids: (\[[\d, ]*\]|None)")
VLLM_PARAMETERS = re.compile(r"Received request (\S+): .*?params: SamplingParams\((.*)")
VLLM_LIMIT, VLLM_TEMPERATURE = re.compile(r"\bmax_tokens=(\d+)"), re.compile(r"\btemperature=([\d.]+)")
SGLANG_LIMIT = re.compile(r"'max_new_tokens': (\d+)")
SGLANG_TEMPERATURE = re.compile(r"'temperature': ([\d.]+)")
SGLANG_BODY = re.compile(r"Receive OpenAI: obj=(\{.*\})")
SGLANG_READ = re.compile(r"Receive: obj=GenerateReqInput\((.*)")
SGLANG_JSON = ("request.received.openai", "request.received")


@dataclass(frozen=True)
class LoggedRequest:
    """A request of a log."""

    prompt: Prompt | list[int]
    max_new_tokens: int | None
    seconds: float
    temperature: float | None  # None where the log does not tell


@dataclass(frozen=True)
class Asked:
    """The parameters that a request was sent with; None where the log does not tell."""

    max_new_tokens: int | None = None
    temperature: float | None = None


@dataclass
class LogContents:
    """The requests of a log by the kind of line that they stand in, and how many lines were cut by the server."""

    bodies: list[LoggedRequest]
    read: dict[str, LoggedRequest]  # by the request's own id
    asked: dict[str, Asked]  # by the request's id
    written: datetime  # when the file was last written to
    num_cut: int = 0


def read_log(path: Path) -> list[LoggedRequest]:
    """Return the requests of a server's log. Raises `UserError` where it holds none with their prompts."""
    contents = LogContents([], {}, {}, datetime.fromtimestamp(path.stat().st_mtime))
    for place, line in read_lines(path):
        _read_vllm(line, place, contents)
        _read_sglang(line, place, contents)
    requests = contents.bodies or [
        with_parameters(request, contents.asked.get(name, Asked())) for name, request in contents.read.items()
    ]
    if contents.num_cut:
        notice(
            f"{path}: {contents.num_cut} requests were cut when they were logged, and are left out: let SGLang log "
            "with --log-requests-level 3"
        )
    if not requests:
        raise UserError(
            f"{path} holds no request with its prompt: start vLLM with VLLM_LOGGING_LEVEL=DEBUG and "
            "--enable-log-requests --uvicorn-log-level debug, or SGLang with --log-requests --log-requests-level 3"
        )
    return requests


def with_parameters(request: LoggedRequest, asked: Asked) -> LoggedRequest:
    return replace(request, max_new_tokens=asked.max_new_tokens, temperature=asked.temperature)


def _read_vllm(line: str, place: str, contents: LogContents) -> None:
    if not (at := MONTH_AND_TIME.search(line)):
        return
    seconds = _seconds_without_year(at[1], contents.written, place)
    if match := VLLM_BODY.search(line):
        contents.bodies += _from_body(_json(match[1]), place, seconds)
    elif match := VLLM_READ.search(line) or VLLM_READ_OF_OLD.search(line):
        contents.read.update(_from_reading(match[1], _literal(match[2]), _literal(match[3]), place, seconds))
    if match := VLLM_PARAMETERS.search(line):
        contents.asked[match[1]] = _asked_in(match[2], VLLM_LIMIT, VLLM_TEMPERATURE)


def _read_sglang(line: str, place: str, contents: LogContents) -> None:
    if line.startswith("{"):
        _read_sglang_json(line, place, contents)
        return
    match = SGLANG_BODY.search(line) or SGLANG_READ.search(line)
    at = DATE_AND_TIME.search(line)
    if not match or not at:
        return
    seconds = _seconds(at[1], place)
    if CUT.search(match[1]):
        contents.num_cut += 1
    elif match.re is SGLANG_BODY:
        contents.bodies += _from_body(_literal(match[1]), place, seconds)
    else:
        fields = {
            name: _literal(value[1])
            for name, form in (("text", f"({TEXT}|None)"), ("input_ids", r"(\[[\d, ]*\]|None)"))
            if (value := re.search(rf"\b{name}={form}", match[1]))
        }
        contents.read.update(_from_reading(place, fields.get("text"), fields.get("input_ids"), place, seconds))
        contents.asked[place] = _asked_in(match[1], SGLANG_LIMIT, SGLANG_TEMPERATURE)


def _read_sglang_json(line: str, place: str, contents: LogContents) -> None:
    row = _json(line)
    if not isinstance(row, dict) or row.get("event") not in SGLANG_JSON or not isinstance(row.get("obj"), dict):
        return
    seconds, asked = _seconds(str(row.get("timestamp"))[:26], place), row["obj"]
    if row["event"] == SGLANG_JSON[0]:
        contents.bodies += _from_body(asked, place, seconds)
        return
    ids = asked.get("input_ids")
    ids = ids if isinstance(ids, list) and all(isinstance(token, int) for token in ids) else None
    contents.read.update(_from_reading(place, asked.get("text"), ids, place, seconds))
    parameters = asked.get("sampling_params")
    if isinstance(parameters, dict):
        contents.asked[place] = Asked(_limit(parameters, "max_new_tokens"), _temperature(parameters))


def _from_body(body: Any, place: str, seconds: float) -> Iterator[LoggedRequest]:
    """Yield the request that a client sent, if it asks for text."""
    if not isinstance(body, dict) or not ("messages" in body or isinstance(body.get("prompt"), str)):
        return
    kept = {name: body[name] for name in ("messages", "prompt", "tools") if body.get(name) is not None}
    if prompt := to_prompt(kept, place):
        limit = _limit(body, "max_completion_tokens") or _limit(body, "max_tokens")
        yield LoggedRequest(prompt, limit, seconds, _temperature(body))


def _asked_in(text: str, limit: re.Pattern[str], temperature: re.Pattern[str]) -> Asked:
    """Return the parameters in a text that Python shows."""
    longest, heat = limit.search(text), temperature.search(text)
    return Asked(int(longest[1][:9]) if longest else None, float(heat[1]) if heat else None)


def _limit(parameters: dict[str, Any], name: str) -> int | None:
    limit = parameters.get(name)
    return limit if isinstance(limit, int) and limit > 0 else None


def _temperature(parameters: dict[str, Any]) -> float | None:
    temperature = parameters.get("temperature")
    return float(temperature) if isinstance(temperature, int | float) and 0 <= temperature <= 100 else None


def _from_reading(name: str, text: Any, token_ids: Any, place: str, seconds: float) -> dict[str, LoggedRequest]:
    """Return the request by its name, if the line holds token ids or a text."""
    if isinstance(token_ids, list) and token_ids:
        return {name: LoggedRequest(token_ids, None, seconds, None)}
    if isinstance(text, str) and text.strip():
        return {name: LoggedRequest(Prompt(text=text, where=place), None, seconds, None)}
    return {}


def _literal(text: str) -> Any:
    """Return the value that Python shows so; None for what is no plain value."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _json(text: str) -> Any:
    """Return the content of a JSON text; None where a log cut it."""
    try:
        return parse_json(text, "a line of a log")
    except UserError:
        return None


def _seconds_without_year(text: str, written: datetime, place: str) -> float:
    """Return the time of a line as seconds, in the newest year in which it is not later than the file's own time."""
    latest = written + timedelta(days=1)  # the server may count hours in another time zone
    for year in range(latest.year, latest.year - YEARS, -1):
        try:
            at = datetime.fromisoformat(f"{year}-{text}")
        except ValueError:
            continue
        if at <= latest:
            return at.replace(tzinfo=timezone.utc).timestamp()
    return _seconds(text, place)  # raises


def _seconds(text: str, place: str) -> float:
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).replace(tzinfo=timezone.utc).timestamp()
    except ValueError:
        raise UserError(f"{place} has the time {text[:40]!r}, which is none") from None
