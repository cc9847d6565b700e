"""Writing files so that nobody ever reads half of one."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from draftsmith.models.errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all, and make its folder where there is none.

    The text goes into a hidden file beside it, which then takes its name: a reader, and a process that starts again
    after it was killed, finds the old content or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # processes may write the same file at once
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """Write a JSON file whole or not at all."""
    write_whole(path, json.dumps(content, indent=indent) + "\n")


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


def require_writable(folder: Path) -> None:
    """Make the folder, or raise `UserError` saying why it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have been quicker
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
