"""Imports point one way, no floor above models/ asks what kind a drafter is, and optional packages are optional."""

import ast
import importlib
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from draftsmith.models import DRAFTERS

ROOT = Path(__file__).parents[1]
WINGS = {  # the floors from the ground up, and the wings of each from the ground up
    "models": (
        *("storage", "sampling", "slots", "fused", "target", "losses"),
        *("drafter_parts", "eagle_parts", "block_parts", "mtp_heads", "drafters", "training_free"),
    ),
    "inference": ("verification", "decoding", "replay", "measuring", "planning", "traffic", "diagnosis"),
    "data": ("samples", "prompts", "answers", "features"),
    "train": ("process", "hardware", "inputs", "run_folder", "engine", "evaluation"),
    "recipes": (
        *("configs", "report_data", "pages", "reports", "evaluation", "engine_rules", "serving", "bench", "planning"),
        *("quickstart", "studies", "auto", "watching", "refreshing", "cli"),
    ),
}
FLOORS = tuple(WINGS)
# What all wings of a floor stand on. Other files beside the wings stand on top of them.
GROUND = {
    "models": (
        "batch",
        "devices",
        "drafter_configs",
        "errors",
        "half_weights",
        "kernels",
        "layers",
        "ranges",
        "text_team",
    ),
    "data": ("bad_rows", "console", "http", "parallel", "prefetch", "processes", "progress"),
    "train": ("config", "optimizer"),
}
FEWEST_FILES, MOST_FILES = 2, 14  # of a wing, so that it reads as a table of contents


@cache
def modules(folder: str) -> list[tuple[Path, ast.Module]]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [(path.relative_to(ROOT), ast.parse(path.read_text("utf-8"))) for path in paths]


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


def imported_modules(tree: ast.Module) -> set[str]:
    """Return the names of all modules that a file may import: of `from a import b`, both `a` and `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def wing_of(floor: str, path: Path) -> str | None:
    """Return the wing that a file or module (given as a path from the root) lies in; None for one beside the wings."""
    parts = path.with_suffix("").relative_to(floor).parts
    return parts[0] if parts and parts[0] in WINGS[floor] else None


@pytest.mark.parametrize("floor", FLOORS)
def test_each_wing_imports_only_those_below(floor: str) -> None:
    """A file in a wing imports its own wing, the wings before it in WINGS, and the GROUND of its floor."""
    wrong = []
    for path, tree in modules(floor):
        wing = wing_of(floor, path)
        if wing is None:
            continue
        allowed = WINGS[floor][: WINGS[floor].index(wing) + 1]
        for name in imported_modules(tree):
            parts = name.split(".")
            if parts[:2] != ["draftsmith", floor] or not (ROOT / Path(*parts[1:])).with_suffix(".py").is_file():
                continue
            if parts[2] not in (*allowed, *GROUND.get(floor, ())):
                wrong.append(f"{path} imports {name}")
    assert not wrong


def import_graph() -> dict[str, set[str]]:
    """Return what each module of the package imports of it, also inside functions and for types alone."""
    trees = {
        ".".join(["draftsmith", *path.with_suffix("").parts]).removesuffix(".__init__"): tree
        for floor in FLOORS
        for path, tree in modules(floor)
    }
    return {name: imported_modules(tree) & trees.keys() for name, tree in trees.items()}


def test_no_import_circles() -> None:
    """Modules that import nothing but modules taken out already are taken out; those in a circle would stay."""
    graph = import_graph()
    while free := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph


@pytest.mark.parametrize("floor", FLOORS)
def test_wings_read_as_a_table_of_contents(floor: str) -> None:
    found = {path.parent.name for path in (ROOT / floor).glob("*/__init__.py")}
    assert found == set(WINGS[floor])
    for wing in WINGS[floor]:
        files = [path for path in (ROOT / floor / wing).glob("*.py") if path.name != "__init__.py"]
        assert FEWEST_FILES <= len(files) <= MOST_FILES, f"{floor}/{wing} has {len(files)} files"


def names_a_family(tree: ast.Module) -> bool:
    """Whether a file compares with the name of a kind, or imports a family's module or class."""
    kinds, classes = DRAFTERS.keys() - {"none"}, {drafter_class.__name__ for drafter_class in DRAFTERS.values()}
    compared = {
        part.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.MatchValue)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    imported = imported_modules(tree)
    family_folders = tuple(f"draftsmith.models.{wing}" for wing in ("drafters", "training_free"))
    return bool(
        compared & kinds
        or {name for name in imported if name.startswith(family_folders)}
        or {name.rpartition(".")[2] for name in imported if name.startswith("draftsmith.models")} & classes
    )


# One family alone has what is asked for: transformers' assistants are draft models.
NAMES_ONE_FAMILY = {"inference/measuring/baselines.py"}


def test_no_floor_above_models_asks_for_the_kind_of_drafter() -> None:
    """A new family changes nothing in inference, data and train. "none" is the plain baseline.

    Without the import of a family's class there is no `isinstance` with it either.
    """
    naming = {
        str(path) for floor in ("inference", "data", "train") for path, tree in modules(floor) if names_a_family(tree)
    }
    assert naming <= NAMES_ONE_FAMILY


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


SCRIPTS = [path for folder in ("benchmarks", "tools", "tests/helpers") for path in sorted((ROOT / folder).glob("*.py"))]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_scripts_import_what_exists(path: Path) -> None:
    """No other test runs the benchmarks, so a renamed function would break them unseen."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("draftsmith"):
            module = importlib.import_module(str(node.module))
            names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            missing += [name for name in names if importlib.util.find_spec(f"{node.module}.{name}") is None]
    assert not missing


READS_FILES = {  # what reads JSON, YAML and tensors without bounds on what it reads
    *("json.load", "json.loads", "yaml.load", "yaml.safe_load", "torch.load"),
    *("safe_open", "load_file", "safetensors.torch.load", "safetensors.torch.load_file"),
}
MAY_READ = {
    "models/storage/reading.py",
    "models/storage/weights.py",  # the pickles of torch.save
    "recipes/serving/vllm_medusa.py",  # the last three run in an engine's environment, and import nothing of ours
    "recipes/serving/vllm_script.py",
    "recipes/serving/vllm_swap.py",
}


def functions_called(tree: ast.Module) -> list[ast.Name | ast.Attribute]:
    """Return the names of what a file calls."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in called if isinstance(node, ast.Name | ast.Attribute)]


def test_one_module_reads_what_anybody_may_have_written() -> None:
    """models/storage/reading.py bounds size, depth and numbers, and names file and line. Others would crash."""
    calls = {
        str(path): {ast.unparse(node) for node in functions_called(tree)} & READS_FILES
        for floor in FLOORS
        for path, tree in modules(floor)
    }
    assert calls["models/storage/reading.py"]
    assert not {path: found for path, found in calls.items() if found and path not in MAY_READ}
