"""State that a command keeps for its next call, sealed by a hash: what a disk or an editor has changed is not believed.

The fields of such a file depend on each other in ways that no type expresses, so a changed file is refused as a whole.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.reading import read_json_object
from draftsmith.models.storage.typed_json import from_json, to_json

T = TypeVar("T")


def write_sealed(path: Path, value: Any) -> None:
    """Write a dataclass and the hash of its fields into a JSON file, whole or not at all."""
    content = to_json(value)
    write_json(path, {"sha256": seal_of(content), "content": content})


def read_sealed(kind: type[T], path: Path, mend: str) -> T:
    """Return the value that `write_sealed` wrote. Raises `UserError`, which ends with `mend`, for a changed file."""
    sealed = read_json_object(path)
    if sealed.get("sha256") != seal_of(sealed.get("content")):
        raise UserError(f"{path} is not what draftsmith wrote there: {mend}")
    return from_json(kind, sealed["content"], str(path))


def seal_of(content: Any) -> str:
    """Return the SHA-256 in hex of what JSON holds of a value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
