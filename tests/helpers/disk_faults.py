"""A disk that fails at a chosen moment: at the n-th change below a folder, or at a number of bytes of a file."""

import contextlib
import errno
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

WRITING = os.O_WRONLY | os.O_RDWR
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.truncate")


class Killed(BaseException):
    """Stands for SIGKILL: nothing below the folder changes any more, whatever the code does to clean up."""


class FailingDisk:
    """Counts the changes below a folder, and lets one fail: with a full disk, or as the last one before death."""

    def __init__(self, folder: Path, number: int, kills: bool) -> None:
        self.folder, self.number, self.kills = str(folder), number, kills
        self.seen = 0

    @property
    def has_failed(self) -> bool:
        return self.seen >= self.number

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not (event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING)):
            return
        path = arguments[0]
        if not isinstance(path, str | Path) or (os.path.isabs(path) and not str(path).startswith(self.folder)):
            return
        self.seen += 1
        if self.kills and self.has_failed:
            raise Killed
        if self.seen == self.number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


Contents = dict[str, bytes | Path | None]  # by path: of a file its bytes, of a link its place, of a folder None


def contents(folder: Path) -> Contents:
    """Return everything below a folder, folders before what is in them.

    It is read again where another thread, such as one that writes a checkpoint, has moved something meanwhile.
    """
    found: Contents = {}
    try:
        for path in sorted(folder.rglob("*")):
            content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[str(path.relative_to(folder))] = content
    except FileNotFoundError:
        return contents(folder)
    return found


def restore(folder: Path, found: Contents) -> None:
    """Give a folder these contents and no others."""
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in found.items():
        if isinstance(content, Path):
            (folder / name).symlink_to(content)
        elif content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


class RecordingDisk(FailingDisk):
    """Keeps the contents of the folder as they were before each change: what a kill at that moment would leave."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sys.maxsize, kills=True)
        self.states: list[Contents] = []

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        seen = self.seen
        super().note(event, arguments)
        if self.seen > seen and (found := contents(Path(self.folder))) not in self.states[-1:]:
            self.states.append(found)


_disk: FailingDisk | None = None  # Python keeps an audit hook for ever, so there is one


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _disk is not None:
        _disk.note(event, arguments)


sys.addaudithook(_hook)


D = TypeVar("D", bound=FailingDisk)


@contextlib.contextmanager
def _in_place(disk: D) -> Iterator[D]:
    global _disk
    _disk = disk
    try:
        yield disk
    finally:
        _disk = None


@contextlib.contextmanager
def failing_disk(folder: Path, number: int, kills: bool) -> Iterator[FailingDisk]:
    """Let the change of this number, from 1, below an absolute folder fail during the block."""
    with _in_place(FailingDisk(folder, number, kills)) as disk:
        yield disk


@contextlib.contextmanager
def recorded_changes(folder: Path) -> Iterator[list[Contents]]:
    """Yield a list that holds, after the block, what was below an absolute folder before each change in the block."""
    with _in_place(RecordingDisk(folder)) as disk:
        yield disk.states


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to write more bytes into any file: what is written by then stays, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
