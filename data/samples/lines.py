"""Samples as lines of JSON, one sample a line, to look at and to edit. An older draftsmith stored them so."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from draftsmith.data.parallel import on_all_cores
from draftsmith.data.samples.sample import Sample, sample_line, to_sample
from draftsmith.data.samples.samples import SCHEMA, Samples, pieces
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import file_hash, write_whole
from draftsmith.models.storage.reading import LARGEST_LINE, open_regular, parse_json, read_text

LINES = "samples.jsonl"
CHECKSUM = f"{LINES}.sha256"  # in the form of `sha256sum`
PART_LINES = 1 << 12  # lines that one process reads or writes at a time


class LinePart(NamedTuple):
    """Some lines of a file that stand one behind the other."""

    path: Path
    first: int  # number of the first line, from 1
    offset: int  # of it, in bytes
    size: int  # in bytes


def line_parts(path: Path) -> list[LinePart]:
    """Return all lines of a file in parts. Raises `UserError` where it cannot be read, or has a line without an end."""
    parts, first, begin, end = [], 1, 0, 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LARGEST_LINE + 1), b""), 1):
                if len(line) > LARGEST_LINE:
                    raise UserError(f"{path} line {number} has more than {LARGEST_LINE:,} bytes: no sample has")
                end += len(line)
                if number + 1 - first == PART_LINES:
                    parts.append(LinePart(path, first, begin, end - begin))
                    first, begin = number + 1, end
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return [*parts, LinePart(path, first, begin, end - begin)] if end > begin else parts


def samples_in(part: LinePart) -> Iterator[Sample]:
    """Yield the samples of some lines. Raises `UserError` for a line that holds none."""
    with open_regular(part.path) as file:
        file.seek(part.offset)
        lines = file.read(part.size).split(b"\n")
    for number, line in enumerate(lines, part.first):
        if line.strip():
            place = f"{part.path} line {number}"
            yield to_sample(parse_json(line, place), place)


def read_lines_of(folder: Path) -> pa.Table:
    """Return the columns of a folder's samples.jsonl, in memory.

    Raises `UserError` for a line that holds no sample, and for a file that was changed since it was written.
    """
    path = folder / LINES
    samples = (sample for part in line_parts(path) for sample in samples_in(part))
    table = pa.Table.from_batches(pieces(samples), SCHEMA)
    check_checksum(folder)
    return table


def check_checksum(folder: Path) -> None:
    """Raise `UserError` where samples.jsonl was changed since its checksum was written, if it was."""
    path = folder / LINES
    if (folder / CHECKSUM).is_file() and read_text(folder / CHECKSUM).split()[:1] != [file_hash(path)]:
        raise UserError(
            f"{path} was changed since `draftsmith prepare` wrote it; remove {CHECKSUM} beside it to train on the "
            "changed file"
        )


def write_lines(folder: Path, samples: Samples) -> None:
    """Write samples.jsonl and its checksum."""
    starts = range(0, len(samples), PART_LINES)
    with open(folder / LINES, "wb") as file:
        for text in on_all_cores(lambda start: _text(samples, start), starts):
            file.write(text)
    write_whole(folder / CHECKSUM, f"{file_hash(folder / LINES)}  {LINES}\n")


def _text(samples: Samples, start: int) -> bytes:
    """Return the lines of the samples from `start` on."""
    end = min(start + PART_LINES, len(samples))
    return "".join(sample_line(samples[index]) for index in range(start, end)).encode()
