"""Pages, docstrings and comments name what exists, and docstrings are sentences that say what a thing does or is.

A name in backticks that looks like code is looked up: identifiers among those that the repository defines or writes as
a string, files among those of the repository or those that a command writes, flags and config keys in their
dataclasses, links among pages and their headings.
"""

import ast
import io
import re
import runpy
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from draftsmith.models import DRAFTERS
from draftsmith.recipes.cli.main import COMMANDS
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import TrainConfig

ROOT = Path(__file__).parents[1]
FLOORS = ("models", "inference", "data", "train", "recipes")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "tests/README.md"])
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
FILE = re.compile(r"[\w./-]*\.(?:py|md|jsonl?|yaml|txt|html|sh|png|css|js|j2|toml|safetensors)")

FOREIGN = {  # names of other projects that the code itself does not write
    "--enable-metrics",
    "--log-requests",
    "--log-requests-format",
    "--machine_rank",
    "--speculative-adaptive",
    "--speculative-adaptive-config",
    "--speculative-num-steps",
    "GPUModelRunner.load_model",
    "GPUModelRunner.propose_draft_token_ids",
    "VllmConfig",
    "bailing_hybrid",
    "create_custom_proposer",
}
RIDDLES = (
    "Of ",
    "What ",
    "How ",
    "Those ",
    "One ",
    "Where ",
    "Whose ",
)  # first words of a docstring that is a fragment


@cache
def files() -> set[str]:
    """Return the paths of all files that git knows or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path for path in listed if (ROOT / path).exists()}


@cache
def trees() -> dict[str, ast.Module]:
    return {path: ast.parse((ROOT / path).read_text("utf-8")) for path in files() if path.endswith(".py")}


@cache
def nodes() -> dict[str, list[ast.AST]]:
    """Return all nodes of each file's tree, those that hold others before these."""
    return {path: list(ast.walk(tree)) for path, tree in trees().items()}


@cache
def strings() -> frozenset[str]:
    """Return all strings of the code, docstrings and this file apart: they may not vouch for themselves."""
    found = set()
    for path, tree in nodes().items():
        statements = {id(node.value) for node in tree if isinstance(node, ast.Expr)}
        constants = (node for node in tree if isinstance(node, ast.Constant) and id(node) not in statements)
        if path != "tests/test_words.py":
            found |= {node.value for node in constants if isinstance(node.value, str)}
    return frozenset(found)


@cache
def identifiers() -> frozenset[str]:
    """Return every name that the code defines or uses, and every word of its strings: it could be a field of a file."""
    names = {part for path in files() for part in Path(path).with_suffix("").parts}
    for text in strings():
        names |= set(IDENTIFIER.findall(text))
    for node in chain.from_iterable(nodes().values()):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                names |= set(name.split("."))
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                names.add(name)
    return frozenset(names)


@cache
def config_keys() -> set[str]:
    """Return every dotted key of a run's config, with the settings of every kind of drafter."""
    drafter_configs = [drafter.config_class for drafter in DRAFTERS.values() if drafter.config_class]
    keys = {f"drafter.{setting.name}" for config in drafter_configs for setting in fields(config)}
    for section in fields(TrainConfig):
        keys.add(section.name)
        value = getattr(RECIPES["eagle3"](), section.name)
        if hasattr(value, "__dataclass_fields__"):
            keys |= {f"{section.name}.{setting}" for setting in value.__dataclass_fields__}
    return keys


@cache
def flags(command: str) -> set[str]:
    settings = fields(COMMANDS[command][1])
    return {f"--{setting.name.replace('_', '-')}" for setting in settings} | {"--debug", "--help"}


@cache
def all_flags() -> frozenset[str]:
    return frozenset(flag for command in COMMANDS for flag in flags(command))


def unknown(span: str) -> Iterator[str]:
    """Yield the parts of a code span that name nothing."""
    words = span.split()
    if words[0] == "draftsmith" and len(words) > 1:
        yield from unknown_in_command(words[1:])
        return
    for number, word in enumerate(words):
        word = word.strip("()[]{}\"',;:*").partition("=")[0]
        if word in FOREIGN or not word:
            continue
        if word.startswith("--"):
            if number == 0 and word not in all_flags() and word not in strings():  # those of benchmarks are strings
                yield word
        elif FILE.fullmatch(word):
            if not is_file(word):
                yield word
        elif len(words) == 1 and looks_like_code(word) and not is_defined(word):
            yield word


def unknown_in_command(words: list[str]) -> Iterator[str]:
    """Yield what `draftsmith WORDS` does not understand: the command, a flag, a recipe or a config key."""
    command, *rest = words
    if command not in COMMANDS:
        yield f"draftsmith {command}"
        return
    for word in rest:
        name = word.strip("[]`.,;").partition("=")[0]
        if name.startswith("--"):
            if name not in flags(command):
                yield f"draftsmith {command} {name}"
        elif command == "train" and "=" in word and "." in name and name not in config_keys():
            yield f"draftsmith train {name}="


def looks_like_code(word: str) -> bool:
    return bool(re.fullmatch(r"[A-Za-z_][\w.]*(?:\(.*)?", word)) and bool(
        re.search(r"[a-z0-9]_[a-z0-9]|\.[a-z]|[a-z][A-Z]", word)
    )


@cache
def is_defined(word: str) -> bool:
    """Whether code has each part of a dotted name, or begins a string with it, as f"time_share_{stage}" does."""
    parts = IDENTIFIER.findall(word.replace("_SIZE", "_smoke"))  # of the names of recipes
    known = identifiers() | RECIPES.keys()
    return word in config_keys() or all(part in known or f"{part.rpartition('_')[0]}_" in known for part in parts)


@cache
def is_file(name: str) -> bool:
    """Whether a file of the repository ends with this path, or a string of the code names such a file."""
    name = name.removeprefix("./").removeprefix("../")
    if Path(name).stem.isupper():  # a placeholder
        return True
    return any(f"/{path}".endswith(f"/{name}") for path in files()) or any(
        Path(name).name in text for text in strings()
    )


def texts(path: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a Python file, each with the number of its first line."""
    for node in nodes()[path]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text
    for token in tokenize.generate_tokens(io.StringIO((ROOT / path).read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def product() -> list[str]:
    return sorted(path for path in trees() if path.split("/")[0] in FLOORS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [match[1] for match in SPAN.finditer(prose)]
    spans += [line.strip().partition("   #")[0] for line in re.findall(r"^ {4,}(draftsmith .*)$", text, re.MULTILINE)]
    missing = sorted({name for span in spans for name in unknown(span)})
    assert not missing, f"{page.name} names what is not there; mend it, or add a name of another project to FOREIGN"


def test_docstrings_and_comments_name_what_exists() -> None:
    missing = [
        f"{path}:{line} `{name}`"
        for path in product()
        for line, text in texts(path)
        for match in SPAN.finditer(text)
        for name in unknown(match[1])
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


def test_docstrings_are_sentences() -> None:
    """A docstring that begins with `Of` or `What` is a fragment, or a riddle."""
    riddles = [
        f"{path}:{node.body[0].lineno}"
        for path in product()
        for node in nodes()[path]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if (ast.get_docstring(node) or "-").startswith(RIDDLES)
    ]
    assert not riddles


def test_mutations_name_lines_that_exist() -> None:
    """benchmarks/mutations.py shows what the tests catch, as long as its lines are there."""
    mutations = runpy.run_path(str(ROOT / "benchmarks/mutations.py"))
    lost = [mutations["why_not_applicable"](mutation) for mutation in mutations["MUTATIONS"]]
    assert not list(filter(None, lost))
    assert len(lost) == 40


def test_contributing_has_a_line_for_each_wing() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    wings = [f"{path.parent.relative_to(ROOT)}/" for floor in FLOORS for path in (ROOT / floor).glob("**/__init__.py")]
    assert not [wing for wing in wings if f"`{wing}`" not in page]


def test_the_index_of_tests_is_whole() -> None:
    """A test file that the index lacks is one that nobody finds by its subject."""
    index = (ROOT / "tests/README.md").read_text("utf-8")
    tests = [path.removeprefix("tests/") for path in files() if re.fullmatch(r"tests/(\w+/)?test_\w+\.py", path)]
    assert not [test for test in tests if f"`{test}`" not in index]
