"""Functions of the standard library, a text that every machine with Python has.

The embedded target is trained on it and the quickstart takes its prompts from it, so that nothing is downloaded.
Files, not functions, are held out: functions of one file resemble each other.
"""

import ast
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
    root = Path(sysconfig.get_paths()["stdlib"])
    # by whether they are held out; dicts keep the order and drop duplicates
    functions: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(name.parts[:-1]):
            continue
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # lib-tk leftovers and deliberate bad files
            continue
        is_held_out = int(hashlib.sha256(name.as_posix().encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0
        functions[is_held_out].update(dict.fromkeys(_functions(tree, source)))
    return [function for function in functions[held_out] if not (held_out and function in functions[False])]


def _functions(tree: ast.Module, source: str) -> list[str]:
    """Return the top-level functions and the methods of top-level classes, without their decorators."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = []
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        nodes += [member for member in members if isinstance(member, kinds)]
    lines = source.splitlines(keepends=True)
    segments = ("".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes)
    functions = [textwrap.dedent(segment).rstrip() + "\n" for segment in segments]
    return [function for function in functions if _parses(function)]


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
    definition = ast.parse(function).body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    body = definition.body
    first = body[1] if len(body) > 1 and ast.get_docstring(definition) is not None else body[0]
    lines = function.splitlines(keepends=True)
    return ("".join(lines[: first.lineno - 1]) or lines[0]).rstrip()
