"""Names of all kernels: functions under `@triton.jit` that a line of draftsmith launches."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("models", "data", "inference", "train", "recipes")


def launched_kernels() -> set[str]:
    """Return the name of every kernel `k` of which somewhere `k[grid](...)` stands."""
    launched, compiled = set(), set()
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(func=ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name))):
                        launched.add(name)
                    case ast.FunctionDef(name=name, decorator_list=decorators):
                        if any("triton.jit" in ast.unparse(decorator) for decorator in decorators):
                            compiled.add(name)
    return launched & compiled
