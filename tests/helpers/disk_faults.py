"""A disk that fails at a chosen moment: at the n-th change below a folder, or at a number of bytes of a file."""

import contextlib
import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


_disk: FailingDisk | None = None  # Python keeps an audit hook for ever, so there is one


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _disk is not None:
        _disk.note(event, arguments)


sys.addaudithook(_hook)


@contextlib.contextmanager
def failing_disk(folder: Path, number: int, kills: bool) -> Iterator[FailingDisk]:
    """Let the change of this number, from 1, below an absolute folder fail during the block."""
    global _disk
    _disk = FailingDisk(folder, number, kills)
    try:
        yield _disk
    finally:
        _disk = None


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to write more bytes into any file: what is written by then stays, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
