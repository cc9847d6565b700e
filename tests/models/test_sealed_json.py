"""State that is sealed: what is read is what was written, or refused."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftsmith.models.errors import UserError
from draftsmith.models.storage.sealed_json import read_sealed, write_sealed


@dataclass(frozen=True)
class Step:
    name: str
    numbers: list[float]


def test_what_was_sealed_is_read_and_what_was_changed_is_not(tmp_path: Path) -> None:
    path, step = tmp_path / "state.json", Step("é", [0.1, 1e-300, 3.0])
    write_sealed(path, step)
    assert read_sealed(Step, path, "restore it") == step
    changed = json.loads(path.read_text())
    path.write_text(json.dumps(changed))  # laid out otherwise
    assert read_sealed(Step, path, "restore it") == step
    changed["content"]["numbers"][2] = 4.0
    path.write_text(json.dumps(changed))
    with pytest.raises(UserError, match=r"state.json is not what draftsmith wrote there: restore it"):
        read_sealed(Step, path, "restore it")


@pytest.mark.parametrize("content", ["{}", '{"sha256": null}', "[]", '{"content": {"name": "x", "numbers": []}}'])
def test_what_has_no_seal_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json"):
        read_sealed(Step, tmp_path / "state.json", "restore it")
