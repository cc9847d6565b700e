"""Names, prompts and texts of others are shown as they are, and do nothing: wherever a person or a shell reads them."""

import ast
import io
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from draftsmith.data.console import SafeConsole, printable, shell_path
from draftsmith.data.progress import progress_bar
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.reports.tables import Cell, for_terminal, table_of
from draftsmith.recipes.serving.export import Exported
from draftsmith.recipes.serving.serve_commands import write_scripts

ROOT = Path(__file__).parents[2]
# All that a terminal, rich, HTML, Markdown, mathtext or a shell could take for more than a name.
NAME = (
    "-[v1] [/]:cat: \x1b[31mred\x9b2J\u202egnp\r$(touch pwned)`touch pwned`'\";\\_x_ $\\frac{1}{2}$ "
    "<script>alert(1)</script>&lt;|**b**[l](http:e)![i](x)\n# h"
)
SHOWN = (
    "-[v1] [/]:cat: \\x1b[31mred\\x9b2J\\u202egnp\\r$(touch pwned)`touch pwned`'\";\\_x_ $\\frac{1}{2}$ "
    "<script>alert(1)</script>&lt;|**b**[l](http:e)![i](x)\n# h"
)


def test_what_steers_a_terminal_is_shown_as_an_escape() -> None:
    assert printable(NAME) == SHOWN
    assert printable(NAME, kept="") == SHOWN.replace("\n", "\\n")
    plain = "def f(x):\n\treturn '漢字 🙂 é – × ½'"
    assert printable(plain) == plain
    assert printable("\ud800 \u2028 \x7f \x00") == "\\ud800 \\u2028 \\x7f \\x00"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_console_shows_any_text_as_it_is(is_terminal: bool) -> None:
    """As a line, a text with a style, a cell, a heading, a title, and the task of a progress bar."""
    console = SafeConsole(file=io.StringIO(), width=1000, force_terminal=is_terminal, color_system=None, record=True)
    table = Table(NAME, title=NAME)
    table.add_row(NAME)
    cells = for_terminal(table_of("", [{"drafter": Cell(NAME, tone="bad")}]))
    bar = progress_bar()
    bar.add_task(printable(NAME), detail="")
    for shown in (NAME, Text(printable(NAME)), table, cells, bar):
        console.print(shown)
    printed = console.export_text()
    assert [printed.count(line) for line in SHOWN.split("\n")] == [7, 7]
    console.print(Text(NAME))  # made printable after its place was measured
    printed += console.export_text()
    assert not set(printed) & set("\x1b\x9b\u202e\r")


def test_an_error_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["report", "runs", NAME])
    (line,) = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2
    assert SHOWN.replace("\n", "\\n") in line


def test_texts_reach_a_person_through_the_console_alone() -> None:
    """What is printed by other ways would not be made safe."""
    around = []
    for folder in ("models", "inference", "data", "train", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                    *("print", "rich.print", "Console", "rich.get_console", "Text.from_markup", "sys.stdout.write"),
                    "sys.stderr.write",
                ):
                    around.append((str(path.relative_to(ROOT)), ast.unparse(node)))
    assert [place for place, _ in around] == ["recipes/cli/main.py"] * 3, around


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_script_gives_names_to_the_engine_as_they_are(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell runs nothing that stands in a name, and the engine takes no name for a flag."""
    monkeypatch.chdir(tmp_path)
    name = NAME.replace("/", "") + os.fsdecode(b"\xff")
    folder = Path(name)
    folder.mkdir()
    programs = tmp_path / "programs"
    programs.mkdir()
    for program in ("vllm", "python"):
        (programs / program).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        (programs / program).chmod(0o755)
    exported = Exported(folder, engine, "eagle3", name, None, None, (engine,))
    command = write_scripts(exported, name, 3, Schedule(((1, 3), (8, 5))))[engine]
    words = subprocess.run(
        ["sh", f"{name}/serve_{engine}.sh"] if not name.startswith("-") else ["sh", f"./{name}/serve_{engine}.sh"],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
    ).stdout
    given = [os.fsdecode(word) for word in words.split(b"\0")[:-1]]
    assert given == shlex.split(command)[1:]
    assert given.count(f"./{name}") == (1 if engine == "vllm" else 2)
    assert name not in given
    assert not list(tmp_path.rglob("pwned"))


def test_a_path_is_no_flag() -> None:
    assert shell_path("-runs") == "./-runs"
    assert shell_path(Path("runs/-a")) == "runs/-a"
