"""Answers on disk while they are being written: whatever kills the process, what was finished is still there.

Every process appends to a journal of its own, one line a prompt: its index, then its samples, separated by tabs. A
line that a kill cut short is dropped. When all prompts are answered, the journals become samples.jsonl, in the order
of the prompts, in one rename.
"""

import contextlib
from pathlib import Path

from draftsmith.data.samples.samples import Sample, sample_line, write_samples
from draftsmith.models.files import writing


class Journal:
    """The answers that one process has written, `append` after `append`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"answers-{rank}.partial"
        with writing(self.path):
            self._file = open(self.path, "a+b")  # noqa: SIM115  # open as long as the process writes
            self._file.seek(0)
            self.num_bytes = self._file.read().rfind(b"\n") + 1
            self._file.truncate(self.num_bytes)

    def append(self, index: int, samples: list[Sample]) -> None:
        """Write the samples of a prompt. Raises `UserError` where the disk is full; what is written is kept."""
        parts = [str(index), *(sample_line(sample).rstrip("\n") for sample in samples)]
        line = ("\t".join(parts) + "\n").encode()
        with writing(self.path, "what is written is kept: make room, and the same command goes on"):
            self._file.write(line)
            self._file.flush()
        self.num_bytes += len(line)

    def close(self) -> None:
        """Close the file; nothing is appended any more."""
        self._file.close()


def written_lines(folder: Path) -> dict[int, tuple[Path, int]]:
    """Return the place of each answered prompt's line: journal and offset in bytes."""
    places: dict[int, tuple[Path, int]] = {}
    for path in sorted(folder.glob("answers-*.partial")):
        offset = 0
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    places.setdefault(int(line.partition(b"\t")[0]), (path, offset))
                offset += len(line)
    return places


def merge_journals(folder: Path) -> None:
    """Write all answers into samples.jsonl, in the order of their prompts, and remove the journals."""
    places = written_lines(folder)
    with contextlib.ExitStack() as opened:
        files = {path: opened.enter_context(open(path, "rb")) for path in {path for path, _ in places.values()}}

        def answers(index: int) -> list[bytes]:
            path, offset = places[index]
            files[path].seek(offset)
            return [sample + b"\n" for sample in files[path].readline().rstrip(b"\n").split(b"\t")[1:]]

        write_samples(folder, (sample for index in sorted(places) for sample in answers(index)))
    remove_journals(folder)


def remove_journals(folder: Path) -> None:
    """Remove the journals of all processes."""
    with writing(folder):
        for path in folder.glob("answers-*.partial"):
            path.unlink()
