"""Sources of prompts: files, folders of source text, and Hub data sets.

FILE.jsonl, FILE.json, FILE.parquet [:COLUMN]    rows as in prompt_formats.py, or one column of them
FILE.txt                                         a prompt a line
FOLDER [:SUFFIXES]                               prompts cut from source files, as in FOLDER:py,md
NAME[/CONFIG]:COLUMN[:SPLIT]                     a Hub data set, streamed; train[:1000] as SPLIT: its first 1000 rows
s3://BUCKET/FILE.jsonl.gz [:COLUMN]              a file that fsspec reads: of an object store, or behind HTTPS; streamed
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from draftsmith.data.bad_rows import BadRows
from draftsmith.data.progress import notice
from draftsmith.data.prompts.prompt_formats import Prompt, to_prompt
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import lines_of, parse_json, read_lines, read_text

RawRows = Iterable[tuple[str, Any]]  # the place of a row, for messages to the user, and the row

SOURCE_SUFFIXES = (
    *("c", "cc", "cpp", "cs", "go", "h", "hpp", "java", "js", "jl", "kt", "lua", "md", "php", "pl", "py", "r", "rb"),
    *("rs", "rst", "scala", "sh", "sql", "swift", "tex", "ts", "txt"),
)
PART_LINES = 32  # a source file is cut at the first blank line after so many lines
LONGEST_PART = 64  # lines after which it is cut where there is no blank line
MOST_SOURCES = 50_000  # files below a folder, all of whose prompts are in memory
LARGEST_SOURCE = 1 << 22  # bytes; larger files were not written by hand
PARQUET_ROWS = 256  # that are in memory at once
CHECKED_ROWS = 1000  # that are read before anything else is done
LONGEST_LINE = 1000  # characters; files with longer lines were not written by hand


def read_source(source: str, domain_column: str = "domain", bad: BadRows | None = None) -> list[Prompt]:
    """Return all prompts of a source; `bad` takes the rows that give none, and counts all.

    Raises `UserError` naming the file and line that is wrong.
    """
    bad = bad or BadRows()
    num_bad_before = len(bad.rows)
    name, rest = split_source(source)
    path = Path(name)
    if not name:
        raise UserError(f"prompts {source!r}: give a file, a folder, or a Hub dataset as NAME:COLUMN[:SPLIT]")
    if "://" in name:
        prompts = _from_rows(remote_rows(name), source, rest, domain_column, bad)
    elif path.suffix in READERS:
        if not os.path.isfile(path):  # false, too, for a name that is too long
            raise UserError(f"no prompts file {name}")
        prompts = _from_rows(READERS[path.suffix](path), source, rest, domain_column, bad)
    elif os.path.isdir(path):
        prompts = read_folder(path, tuple(filter(None, rest.split(","))) or SOURCE_SUFFIXES)
    else:
        column, _, split = rest.partition(":")
        prompts = _from_rows(hub_rows(name, column, split or "train"), source, column, domain_column, bad)
    if not prompts:
        first = f": none of {len(bad.rows)} rows gives one, the first: {bad.rows[0].reason}" if bad.rows else ""
        raise UserError(f"{source} holds no prompts{first}")
    bad.num_rows += len(prompts) + len(bad.rows) - num_bad_before
    return prompts


def split_source(source: str) -> tuple[str, str]:
    """Return the file, folder, URL or Hub name of a source, and what stands behind the colon after it."""
    if os.path.exists(source):
        return source, ""
    if "://" in source:
        name, _, column = source.rpartition(":")
        return (source, "") if "/" in column else (name, column)
    name, _, rest = source.partition(":")
    return name, rest


def source_name(source: str) -> str:
    """Return a short name of a source, such as `chat` of data/chat.jsonl:prompt."""
    return Path(split_source(source)[0]).stem


def check_beginning(source: str) -> None:
    """Read the first rows of a file of prompts. Raises `UserError` as `read_source` does; others are not looked at."""
    name, column = split_source(source)
    if (path := Path(name)).suffix in READERS and path.is_file():
        for where, row in islice(READERS[path.suffix](path), CHECKED_ROWS):
            _to_prompt(row, where, column, "domain")


def _from_rows(rows: RawRows, source: str, column: str, domain_column: str, bad: BadRows) -> list[Prompt]:
    prompts, left_out = [], []
    for where, row in rows:
        try:
            prompt = _to_prompt(row, where, column, domain_column)
        except UserError as error:
            bad.add(where, error)
            continue
        if prompt is None:
            left_out.append(where)
        else:
            prompts.append(prompt)
    if left_out:
        notice(f"{source}: left out {len(left_out)} conversations in which no user speaks, the first at {left_out[0]}")
    return prompts


def _to_prompt(row: Any, where: str, column: str, domain_column: str) -> Prompt | None:
    return to_prompt(parsed(row, where), where, column, domain_column)


# --- files


class JsonLine(str):
    """A line of JSON. It is parsed where a mistake in it leaves out no other line."""


def parsed(row: Any, where: str) -> Any:
    """Return the content of a row. Raises `UserError` for a line that is no JSON."""
    return parse_json(row, where, with_lone_surrogates=True) if isinstance(row, JsonLine) else row


def _text_rows(path: Path) -> RawRows:
    return ((place, {"prompt": line}) for place, line in read_lines(path))


def _jsonl_rows(path: Path) -> RawRows:
    return ((place, JsonLine(line)) for place, line in read_lines(path))


def _json_rows(path: Path) -> RawRows:
    try:
        rows = parse_json(read_text(path), str(path), with_lone_surrogates=True)
    except UserError as error:
        raise UserError(f"{error} (one object a line is .jsonl)") from None
    if not isinstance(rows, list):
        raise UserError(f"{path} does not hold a list of objects")
    return ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))


def _parquet_rows(path: Path) -> RawRows:
    return _parquet_rows_of(path, str(path))


def _parquet_rows_of(file: Path | IO[bytes], name: str) -> RawRows:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(PARQUET_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield f"{name} row {number}", row
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # the last two of wrong texts and dates
        raise UserError(f"{name} is not a parquet file, or damaged behind row {number}: {first_line(error)}") from None


READERS: dict[str, Callable[[Path], RawRows]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".txt": _text_rows,
}


# --- folders


def read_folder(folder: Path, suffixes: tuple[str, ...]) -> list[Prompt]:
    """Return prompts cut from the source files below a folder, in path order, without hidden files and folders.

    A file is cut into parts at the first blank line after every 32 lines (after 64 lines where there is none). The
    first half of a part's lines is a prompt, which the target continues; parts of fewer than four lines give none. The
    suffix is the domain. Files that cannot be read, are not UTF-8 or too large, or have lines of more than 1000
    characters, are left out.
    """
    prompts, left_out = [], []
    for path in sources_below(folder, suffixes):
        try:
            lines = read_text(path, LARGEST_SOURCE).split("\n")
        except UserError:
            lines = []
        if not lines or max(map(len, lines)) > LONGEST_LINE:
            left_out.append(path)
            continue
        for start, end in parts(lines):
            text = "\n".join(lines[start : start + (end - start) // 2]).rstrip()
            if end - start >= 4 and text.strip():
                prompts.append(Prompt(text=text, domain=path.suffix[1:], where=f"{path} line {start + 1}"))
    if left_out:
        notice(f"{folder}: left out {len(left_out)} files that are no hand-written text, the first is {left_out[0]}")
    if not prompts:
        raise UserError(f"{folder} holds no source files to cut prompts from, of .{', .'.join(suffixes)}")
    return prompts


def sources_below(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of these suffixes below a folder, in path order.

    Hidden ones, and those behind links to folders, are left out. Raises `UserError` for more than `MOST_SOURCES`.
    """
    found: list[Path] = []
    for root, folders, names in os.walk(folder):  # which passes over folders that cannot be read
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(root, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.suffix[1:] in suffixes]
        if len(found) > MOST_SOURCES:
            raise UserError(f"{folder} holds more than {MOST_SOURCES:,} source files: give a folder further down")
    return sorted(found)


def parts(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the lines [start, end) of each part of a file; blank lines between parts belong to none."""
    start = 0
    while start < len(lines):
        if not lines[start].strip():
            start += 1
            continue
        limit = min(start + LONGEST_PART, len(lines))
        end = next((i for i in range(start + PART_LINES, limit) if not lines[i].strip()), limit)
        yield start, end
        start = end


# --- elsewhere


def remote_rows(url: str) -> RawRows:
    """Yield the rows of a file that fsspec opens, as they arrive; one that is compressed is unpacked."""
    import fsspec

    try:
        password = urlsplit(url).password
    except ValueError as error:  # such as brackets around no address
        raise UserError(f"prompts {url} is no URL ({error})") from None
    if password:
        raise UserError(f"prompts {url.partition('://')[0]}://...: the URL holds a password, which files would keep")
    suffixes = [suffix for suffix in Path(url).suffixes if suffix in REMOTE]
    if not suffixes:
        raise UserError(
            f"prompts {url}: give the URL of a {', '.join(REMOTE)} file, such as s3://BUCKET/chats.jsonl.gz"
        )
    try:
        with fsspec.open(url, "rb", compression="infer") as file:
            yield from REMOTE[suffixes[-1]](file, url)
    except UserError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise UserError(f"{url} cannot be read: {first_line(error)}") from None


REMOTE: dict[str, Callable[[IO[bytes], str], RawRows]] = {
    ".jsonl": lambda file, url: ((place, JsonLine(line)) for place, line in lines_of(file, url)),
    ".txt": lambda file, url: ((place, {"prompt": line}) for place, line in lines_of(file, url)),
    ".parquet": _parquet_rows_of,
}


def hub_rows(name: str, column: str, split: str) -> RawRows:
    """Yield the rows of a Hub data set as they arrive; of another split than `train` or `train[:1000]`, once all have.

    Nothing but the rows that are asked for is loaded.
    """
    if not column:
        known = ", ".join(READERS)
        raise UserError(f"prompts {name!r}: give a {known} file, a folder, or a Hub dataset as NAME:COLUMN[:SPLIT]")
    from datasets import load_dataset
    from huggingface_hub.utils import validate_repo_id

    path, config = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:]) or None
    streamed = re.fullmatch(r"([^\[+]+)(?:\[:(\d+)\])?", split)
    try:
        validate_repo_id(path)  # of a path, all that lies below it would be looked through
        if streamed:
            rows = load_dataset(path, config, split=streamed[1], streaming=True)
            rows = rows.take(int(streamed[2])) if streamed[2] else rows
        else:
            rows = load_dataset(path, config, split=split)
        for number, row in enumerate(rows, 1):
            yield f"{name}:{column}:{split} row {number}", row
    except Exception as error:  # datasets has dozens of its own, beside those of what it reads with
        raise UserError(f"Hub dataset {name!r} does not load: {first_line(error)}") from None
