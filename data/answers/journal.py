"""Answers on disk while they are being written: whatever kills the process, what was finished is still there.

Every process appends to a journal of its own, one line a prompt: its index, its samples, and a checksum of them and of
the run, separated by tabs. A line that a kill cut short is dropped; one that is damaged, or of another run, is passed
over. When all prompts are answered, the journals become the shards of samples, in the order of the prompts.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftsmith.data.samples.folder import shard_parts, write_samples
from draftsmith.data.samples.sample import Sample, sample_line, to_sample
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import whole_folder, writing
from draftsmith.models.storage.reading import open_regular, parse_json

Place = tuple[Path, int]  # of a prompt's line: the journal, and the offset in it in bytes


class Journal:
    """The answers that one process has written, `append` after `append`. `run`: the name of what they depend on."""

    def __init__(self, folder: Path, rank: int, run: str) -> None:
        self.path, self.run = folder / f"answers-{rank}.partial", run
        with writing(self.path):
            self._file = open(self.path, "a+b")  # noqa: SIM115  # open as long as the process writes
            self._file.seek(0)
            self.num_bytes = sum(len(line) for line in self._file if line.endswith(b"\n"))
            self._file.truncate(self.num_bytes)

    def append(self, index: int, samples: list[Sample]) -> None:
        """Write the samples of a prompt. Raises `UserError` where the disk is full; what is written is kept."""
        answer = "\t".join([str(index), *(sample_line(sample).rstrip("\n") for sample in samples)]).encode()
        line = b"%b\t%b\n" % (answer, checksum(answer, self.run))
        with writing(self.path, "what is written is kept: make room, and the same command goes on"):
            self._file.write(line)
            self._file.flush()
        self.num_bytes += len(line)

    def close(self) -> None:
        """Close the file; nothing is appended any more."""
        self._file.close()


@dataclass
class AnsweredPrompts:
    """The answers that the journals of a folder hold."""

    places: dict[int, Place] = field(default_factory=dict)
    num_damaged: int = 0  # lines that are damaged or of another run


def journals_in(folder: Path) -> list[Path]:
    """Return the journals of all processes."""
    return sorted(folder.glob("answers-*.partial"))


def read_journals(folder: Path, run: str) -> AnsweredPrompts:
    """Return which prompts are answered, and where. Raises `UserError` where a journal cannot be read."""
    answered = AnsweredPrompts()
    for path in journals_in(folder):
        try:
            with open_regular(path) as file:
                offset = 0
                for line in file:
                    answer, _, told = line[:-1].rpartition(b"\t")
                    if told == checksum(answer, run):
                        answered.places.setdefault(int(answer.partition(b"\t")[0]), (path, offset))
                    elif line.endswith(b"\n"):  # others were cut by a kill
                        answered.num_damaged += 1
                    offset += len(line)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
    return answered


def checksum(answer: bytes, run: str) -> bytes:
    """Return the end of a journal's line, which tells an answer of this run from a damaged one."""
    return hashlib.sha256(run.encode() + answer).hexdigest()[:16].encode()


def merge_journals(folder: Path, run: str) -> None:
    """Write all answers into the shards of samples, in the order of their prompts, and remove the journals."""
    places = read_journals(folder, run).places
    parts = shard_parts([places[index] for index in sorted(places)])
    with whole_folder(folder) as hidden:
        write_samples(hidden, parts, samples_at)
    remove_journals(folder)


def samples_at(places: Sequence[Place]) -> Iterator[Sample]:
    """Yield the samples of answered prompts. Raises `UserError` for a line that holds none."""
    with contextlib.ExitStack() as opened:
        files = {path: opened.enter_context(open_regular(path)) for path in {path for path, _ in places}}
        for path, offset in places:
            files[path].seek(offset)
            for text in files[path].readline().split(b"\t")[1:-1]:
                yield to_sample(parse_json(text, str(path)), str(path))


def remove_journals(folder: Path) -> None:
    """Remove the journals of all processes."""
    with writing(folder):
        for path in journals_in(folder):
            path.unlink()
