"""Functions of the standard library, a text that every machine with Python has.

The embedded target is trained on it and the quickstart takes its prompts from it, so that nothing is downloaded.
Files, not functions, are held out: functions of one file resemble each other.
"""

import ast
import functools
import hashlib
import sysconfig
import textwrap
from pathlib import Path

# Left out: tests (not shipped everywhere), what was installed on top, and tables that are hardly code.
EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "lib2to3", "turtledemo", "pydoc_data",
}  # fmt: skip
HELD_OUT_SHARE = 16  # one file in so many


def stdlib_functions(held_out: bool) -> list[str]:
    """Return the source of every function and method, dedented, without duplicates, in path order.

    With `held_out` they are of the files that training never sees: one in sixteen, by a hash of the file's path.
    """
    return [function for group in stdlib_groups(held_out) for function in group]


def stdlib_groups(held_out: bool) -> list[list[str]]:
    """Return the functions of `stdlib_functions` in groups: the methods of one class, or one function alone."""
    groups = _all_groups()
    seen = {function for group in groups[False] for function in group} if held_out else set()
    return without_duplicates(groups[held_out], seen)


@functools.cache  # reading all files takes seconds
def _all_groups() -> dict[bool, list[list[str]]]:
    """Return the groups by whether they are held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    groups: dict[bool, list[list[str]]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not EXCLUDED_FOLDERS.intersection(name.parts[:-1]):
            is_held_out = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0
            groups[is_held_out] += function_groups(path)
    return groups


def without_duplicates(groups: list[list[str]], seen: set[str]) -> list[list[str]]:
    """Return the groups without functions that stand in an earlier one or in `seen`, to which they are added."""
    kept = []
    for group in groups:
        new = [function for function in dict.fromkeys(group) if function not in seen]
        seen.update(new)
        kept += [new] if new else []
    return kept


def function_groups(path: Path) -> list[list[str]]:
    """Return the functions of a file, dedented: the methods of each top-level class, and each top-level function alone.

    Their decorators are left out. A file that is no Python or not in UTF-8, of which some lie around, has none.
    """
    try:
        source = path.read_text("utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # ValueError: bytes that are no UTF-8, or zeros
        return []
    lines = source.splitlines(keepends=True)
    groups = []
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        spans = [lines[member.lineno - 1 : member.end_lineno] for member in members if isinstance(member, kinds)]
        functions = [textwrap.dedent("".join(span)).rstrip() + "\n" for span in spans]
        groups.append([function for function in functions if _parses(function)])
    return [group for group in groups if group]


def _parses(function: str) -> bool:
    """Return whether a function is Python on its own; one with a string at the left margin cannot be dedented."""
    try:
        ast.parse(function)
    except SyntaxError:
        return False
    return True


def function_prompt(function: str) -> str:
    """Return the part of a function that a programmer types before asking for the rest.

    That is the signature with the docstring, if it has one; never the whole function. No line break ends it: tokenizers
    join line break and indentation, so a prompt that ends in one asks for something that training never showed.
    """
    definition = definition_of(function)
    body = definition.body
    first = body[1] if len(body) > 1 and ast.get_docstring(definition) is not None else body[0]
    lines = function.splitlines(keepends=True)
    return ("".join(lines[: first.lineno - 1]) or lines[0]).rstrip()


def definition_of(function: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    """Return the parsed form of a function's source."""
    definition = ast.parse(function).body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    return definition
