"""Imports point one way, no floor above models/ asks what kind a drafter is, and optional packages are optional."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.models import DRAFTERS

ROOT = Path(__file__).parents[1]
FLOORS = ("models", "inference", "data", "train", "recipes")  # from the ground up


def modules(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))


def imported_floors(tree: ast.Module) -> set[str]:
    """Floors named by any import of the file, also by those inside functions."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("draftsmith.")}


@pytest.mark.parametrize("floor", FLOORS)
def test_each_floor_imports_only_those_below(floor: str) -> None:
    """recipes > train > data > inference > models.

    A `__main__.py` is a command, not a part of its folder: it calls the command line and stands beside it on top.
    """
    allowed = set(FLOORS[: FLOORS.index(floor) + 1])
    above = {str(path): imported_floors(tree) - allowed for path, tree in modules(floor) if path.name != "__main__.py"}
    assert above
    assert not {path: floors for path, floors in above.items() if floors}


@pytest.mark.parametrize("floor", ["inference", "data", "train"])
def test_no_branch_on_the_kind_of_drafter(floor: str) -> None:
    """A new family changes nothing here: no comparison and no `case` names a kind. "none" is the plain baseline."""
    kinds = DRAFTERS.keys() - {"none"}
    branches = [
        f"{path}:{node.lineno}"
        for path, tree in modules(floor)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.MatchValue)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in kinds
    ]
    assert not branches


WITHOUT_OPTIONAL = """
import importlib, importlib.machinery, sys

OPTIONAL = {"datasets", "deepspeed", "wandb"}
find_spec = importlib.machinery.PathFinder.find_spec

@staticmethod
def not_installed(name, path=None, target=None):
    return None if name.partition(".")[0] in OPTIONAL else find_spec(name, path, target)

importlib.machinery.PathFinder.find_spec = not_installed
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not OPTIONAL & sys.modules.keys()
"""


def test_every_module_imports_without_optional_packages() -> None:
    """They look not installed, also to transformers and accelerate."""
    paths = [path.with_suffix("") for floor in FLOORS for path, _ in modules(floor) if path.name != "__main__.py"]
    names = [".".join(["draftsmith", *path.parts]).removesuffix(".__init__") for path in paths]
    result = subprocess.run([sys.executable, "-c", WITHOUT_OPTIONAL, *names], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
