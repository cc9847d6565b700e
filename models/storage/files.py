"""Writing of files and folders, whole or not at all.

Whatever interrupts a write (a kill, a signal, a full disk), what is found afterwards is the old content or all of the
new.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError, printable
from draftsmith.models.storage.reading import open_regular

PARTIAL = ".partial"  # hidden folder that is being written
COMPLETE = ".complete"  # hidden folder whose files, all written, move into the folder around it
ROOM_IN_NAMES = 20  # bytes by which the hidden name of a file that is being written is longer than its own
# Texts of the system that libraries put into errors of their own where a disk cannot be written to.
DISK_FAULTS = tuple(
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.EACCES, errno.ENOTDIR)
)
AGAIN = "nothing is left half written: mend that, and give the same command again"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all, and make its folder where there is none. Text is written in UTF-8.

    Lone surrogates, which UTF-8 cannot hold, are written as escapes. The content goes into a hidden file beside it,
    which then takes its name. Raises `UserError` where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # processes may write the same file at once
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(content, indent=indent) + "\n")


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises `OSError` where it cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder to write into; its files move to the folder `path` when the block ends without an error.

    A new folder appears at once. Files for one that exists are all written before the first of them moves there, and a
    process that is killed between two moves leaves the rest to `finish_moving`. Errors name `path` in place of the
    hidden folder. The caller makes sure that no other process writes there (`locked`).
    """
    exists = path.is_dir()
    partial = path / PARTIAL if exists else path.with_name(f".{path.name}{PARTIAL}")
    with writing(path):
        finish_moving(path)
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            partial.mkdir(parents=True)
            yield partial
            sync(partial)
            partial.replace(path / COMPLETE if exists else path)
            finish_moving(path)
        except UserError as error:
            raise UserError(str(error).replace(printable(str(partial)), printable(str(path)))) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def finish_moving(folder: Path) -> None:
    """Move those files into a folder that `whole_folder` wrote for it and that are not there yet.

    They replace files of the same names. A checksum moves before its file. Nothing loads the others without
    config.json: an older one is removed first, and the new one moves last.
    """
    complete = folder / COMPLETE
    if not complete.is_dir():
        return
    files = [path for path in complete.rglob("*") if path.is_file()]
    for config in (path for path in files if path.name == "config.json"):
        (folder / config.relative_to(complete)).unlink(missing_ok=True)
    for path in sorted(files, key=lambda path: (path.name != "config.json", path), reverse=True):
        place = folder / path.relative_to(complete)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(complete)


def sync(folder: Path) -> None:
    """Wait until the files are on the disk: a renamed folder with empty files would pass for a whole one."""
    for path in folder.rglob("*"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextlib.contextmanager
def writing(path: Path, mend: str = AGAIN) -> Iterator[None]:
    """Raise `UserError`, which ends with the mend, where the block fails to write to `path`: no room, no permission."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if (fault := disk_fault(error)) is None:
            raise
        raise UserError(f"cannot write to {path}: {fault}; {mend}") from error


def disk_fault(error: Exception) -> str | None:
    """Return in words why a file could not be written; None where the error is of something else."""
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError):
        return error.strerror or str(error)
    return next((text for text in DISK_FAULTS if text in str(error)), None)


def point_link(link: Path, place: Path) -> None:
    """Let a link lead to a place, in one step: at any moment it leads to the one before or to this one."""
    temporary = link.with_name(f".{link.name}")
    temporary.unlink(missing_ok=True)
    os.symlink(place, temporary)
    temporary.replace(link)


def real_path(path: Path) -> Path:
    """Return the absolute path without links.

    A link that leads to itself stays as it is, where `Path.resolve` raises RuntimeError before Python 3.13.
    """
    return Path(os.path.realpath(path))


def require_writable(folder: Path) -> None:
    """Raise `UserError` where a folder cannot be made or written to. Nothing is made."""
    if "\0" in str(folder):
        raise UserError(f"{str(folder)!r} is no name of a folder")
    if not real_path(folder).name:
        raise UserError(f"{folder} is the root of the file system: give a folder in it")
    with writing(folder, "give another folder"):
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not existing.is_dir():
            kind = "a link to nothing" if existing.is_symlink() and not existing.exists() else "a file"
            raise UserError(f"cannot write to {folder}: {existing} is {kind}; give another folder")
        longest = os.pathconf(existing, "PC_NAME_MAX") - ROOM_IN_NAMES
        if any(len(os.fsencode(part)) > longest for part in folder.parts):
            raise UserError(f"cannot write to {folder}: give names of at most {longest} bytes")
        with contextlib.suppress(FileNotFoundError):
            folder.lstat()  # tells of a path that is too long as a whole
        with tempfile.TemporaryFile(dir=existing):
            pass


@contextlib.contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make a folder, with those above it, for the time of the block. Those that stay empty are removed again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
