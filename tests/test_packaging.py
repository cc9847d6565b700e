"""What the wheel holds is what the folders hold, and no file outgrows a reader."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("train", "models", "data", "inference", "recipes")
MOST_LINES = 450


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_package_is_listed(folder: str) -> None:
    """A package missing from `packages` works in the checkout and is silently absent from the wheel."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {path.parent for path in (ROOT / folder).rglob("*.py")}
    names = {"draftsmith." + ".".join(path.relative_to(ROOT).parts) for path in found}
    assert names == {name for name in setuptools["packages"] if name.split(".")[1] == folder}
    assert setuptools["package-dir"][f"draftsmith.{folder}"] == folder
    assert (ROOT / folder / "py.typed").is_file(), f"{folder} hides its types"
    for path in found:
        assert (path / "__init__.py").is_file(), f"{path} is no package"


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
    }
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}
