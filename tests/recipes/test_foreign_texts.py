"""Names, prompts and texts of others are shown as they are, and do nothing: wherever a person or a shell reads them."""

import ast
import io
import json
import os
import shlex
import subprocess
import warnings
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from load_tests import load_test, stage
from markdown_it import MarkdownIt
from markupsafe import Markup
from matplotlib.figure import Figure
from reports import choice_content, plan_content, replay_content, write_run, write_samples
from rich.table import Table
from rich.text import Text

from draftsmith.data.console import SafeConsole, shell_path
from draftsmith.data.progress import progress_bar
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import Evaluation, upgraded
from draftsmith.models.errors import UserError, printable
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.pages.figures import for_page, label_text, legend, save_plot
from draftsmith.recipes.pages.markdown import code, escaped, fenced
from draftsmith.recipes.pages.tables import Cell, for_terminal, table_of
from draftsmith.recipes.reports import report
from draftsmith.recipes.reports.report import build_report, evaluation_markdown
from draftsmith.recipes.serving.export import Exported
from draftsmith.recipes.serving.model_card import write_card
from draftsmith.recipes.serving.serve_commands import write_scripts

ROOT = Path(__file__).parents[2]
# All that a terminal, rich, HTML, Markdown, mathtext or a shell could take for more than a name.
NAME = (
    "-[v1] [bold]:cat: \x1b[31mred\x9b2J\u202egnp\r$(touch pwned)`touch pwned`'\";\\_x_ $\\frac{1}{2}$ "
    "<script>alert(1)<b>&lt;|**b**[l](e)![i](x) ~~s~~ www.e.com {{ 1 }} [x]: e\n# h"
)
SHOWN = (
    "-[v1] [bold]:cat: \\x1b[31mred\\x9b2J\\u202egnp\\r$(touch pwned)`touch pwned`'\";\\_x_ $\\frac{1}{2}$ "
    "<script>alert(1)<b>&lt;|**b**[l](e)![i](x) ~~s~~ www.e.com {{ 1 }} [x]: e\n# h"
)


def test_what_steers_a_terminal_is_shown_as_an_escape() -> None:
    assert printable(NAME) == SHOWN
    assert printable(NAME, kept="") == SHOWN.replace("\n", "\\n")
    plain = "def f(x):\n\treturn '漢字 🙂 é – × ½'"
    assert printable(plain) == plain
    assert printable("\ud800 \u2028 \x7f \x00") == "\\ud800 \\u2028 \\x7f \\x00"


def test_a_message_is_one_printable_line() -> None:
    """Also in Python, and however long the name that it quotes is."""
    assert str(UserError(NAME)) == SHOWN.replace("\n", "\\n")
    long = str(UserError("x" * 10**6 + "the mend"))
    assert len(long) < 2100
    assert long.endswith("the mend")


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
    # These run where no draftsmith is: one prints answers, the other the folder that the user gave.
    scripts = {"recipes/serving/assisted_generation.py", "data/features/file_service.py"}
    assert {place for place, _ in around} == {"recipes/cli/main.py", *scripts}, around


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_script_gives_names_to_the_engine_as_they_are(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell runs nothing that stands in a name, and the engine takes no name for a flag."""
    monkeypatch.chdir(tmp_path)
    name = NAME + os.fsdecode(b"\xff")
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
        ["sh", f"./{name}/serve_{engine}.sh"],
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


# --- pages, Markdown and figures

PLAIN_NAME = "plain"


def hostile_folder(folder: Path, name: str) -> Path:
    """Return a folder of runs whose names, texts and settings all hold `name`."""
    run = write_run(folder / name, 0.8, 2.0, divergences=1)
    checkpoint = run / "checkpoints/step-000400"
    (checkpoint / "evaluation.ngram.json").rename(checkpoint / f"evaluation.{name}.json")
    for path in run.glob("checkpoints/*/evaluation*.json"):
        content = json.loads(path.read_text())
        content["environment"] |= {"device": name, "command": name, "git_commit": name}
        counters = {"num_prompts": 3, "num_drafts": 9, "num_draft_tokens": 9, "num_accepted_tokens": 9}
        domain = {**counters, "num_emitted_tokens": 9, "draft_acceptance_rate": 1.0, "mean_acceptance_length": 2.0}
        finding = {"cause": name, "measured": {"x": name}, "evidence": name, "mend": name, "cost": 0.1}
        for row in content["results"]:
            row |= {"prompt_set": name, "domains": {name: {**domain, "mean_acceptance_length_ci95": None}}}
            row |= {"diagnosis": [finding]}
        path.write_text(json.dumps(content))
    config = {"target": name, "drafter": {"kind": name}, "data": {"samples": name}, "run": {"steps": 400, "seed": 0}}
    (run / "config.yaml").write_text(json.dumps(config))
    write_samples(run)
    (run / "samples.json").write_text((run / "samples.json").read_text().replace("    if a", json.dumps(name)[1:-1]))
    draft = {"batch_size": 1, "draft_length": 4, "tree_nodes": None, "acceptance_length": 2.0, "speedup": 1.5}
    choice = choice_content(str(checkpoint), 4, {**draft, "fixed_batch_speedup": None, "schedule": None})
    (run / "choice.json").write_text(json.dumps({**choice, "fitted_on": name}))
    stages = [stage(1, contender, 10.0, 5.0) for contender in ("off", "on", "scheduled")]
    (run / "load.json").write_text(json.dumps(to_json(load_test(str(checkpoint), stages, name))))
    (run / "plan.json").write_text(json.dumps(plan_content(name)))
    (run / "replay.json").write_text(json.dumps(replay_content(name)))
    return run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = hostile_folder(tmp_path_factory.mktemp("hostile"), NAME)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's on glyphs and labels
        build_report(run)
    return run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = hostile_folder(tmp_path_factory.mktemp("plain"), PLAIN_NAME)
    with pytest.MonkeyPatch.context() as patch:  # figures take seconds, and are not compared
        patch.setattr(report, "draw_plots", lambda plots, folder: {plot.name: Markup("<svg></svg>") for plot in plots})
        build_report(run)
    return run


class Elements(HTMLParser):
    """The elements of a page outside of its figures, and the text in them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, list[str]]] = []
        self.text = ""
        self.in_figure = False
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.in_figure |= tag == "svg"
        if not self.in_figure:
            self.elements.append((tag, [name for name, _ in attributes]))

    def handle_endtag(self, tag: str) -> None:
        self.in_figure &= tag != "svg"

    def handle_data(self, data: str) -> None:
        self.text += "" if self.in_figure else data


def test_names_change_nothing_in_a_page_but_its_text(hostile: Path, plain: Path) -> None:
    page, plain_page = (Elements((run / "report.html").read_text("utf-8")) for run in (hostile, plain))
    assert page.elements == plain_page.elements
    assert page.text.count(SHOWN) > 60
    assert not set(page.text) & set("\x1b\x9b\u202e\r")


def test_figures_show_names_as_they_are(tmp_path: Path) -> None:
    """No formulae are made of them, no label is hidden, as matplotlib hides those that begin with an underscore."""
    for name in (NAME, "_hidden", '#1a1d23 id="x" href="#x" \'DejaVu Sans\', ', "x" * 200):

        def draw(figure: Figure, name: str = name) -> None:
            axes = figure.subplots()
            axes.plot([0, 1], [0, 1], label=label_text(name))
            axes.set_title(label_text(name))
            axes.set_yticks([0], [label_text(name)])
            legend(figure)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            svg = for_page(save_plot(tmp_path / "x.png", draw), "x")
        root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1))
        shown = "".join("".join("".join(text.itertext()) for text in root.iter("text")).split()).replace("\u200b", "")
        assert shown.count("".join(printable(name, kept="").split())) == 3


def tokens(markdown: str) -> list[str]:
    """The structure of a text in Markdown, with HTML and addresses as GitHub reads them."""
    parser = MarkdownIt("gfm-like")
    return [
        part.type
        for token in parser.parse(markdown)
        for part in [token, *(token.children or [])]
        if part.type != "text"
    ]


MARKUP = [
    *(NAME, "# h", "- a", "+ a", "1. a", "12) a", "> a", "---", "- - -", "***", "===", "```", "~~~", "`a`", "a `b`"),
    *("*a*", "_a_", "__a__", "~a~", "<b>", "</b>", "<!-- a", "&lt;", "[a](b)", "![a](b)", "[a]: b", "[a][a]", "[x] a"),
    *("https://e.com", "www.e.com", "<http://e.com>", "a | b", "\\", "a\\", "\\|", "\\`a\\`", "    a", "\ta"),
    *("a\n\n# b", "a\r# b", "$a$ $$b$$"),
]


@pytest.mark.parametrize("text", MARKUP)
def test_no_text_is_markup_in_markdown(text: str) -> None:
    """As a paragraph, in bold, in a heading, a list and a table, and as code, it is what it is."""

    def page(text: str) -> str:
        cell = escaped(text)
        blocks = [cell, f"**x {cell}**", f"# {cell}", f"* {cell}", f"> {cell}", f"x {code(text)}", fenced(text, "sh")]
        return "\n\n".join([*blocks, f"| a | b |\n| --- | --- |\n| {cell} | c |", "end"])

    assert tokens(page(text)) == tokens(page("plain"))
    first = MarkdownIt("gfm-like").parse(page(text))[1]
    assert "".join(part.content for part in first.children or []) == " ".join(printable(text).split())


@pytest.mark.parametrize(
    "text", ["draft_model", "1.2× [1.0, 1.4]", "+0.02", "-0.5 [-1.0, 0.1]", "3.5 %", "a (b), c: d; e/f"]
)
def test_ordinary_text_reads_as_it_is(text: str) -> None:
    assert escaped(text) == text


def test_names_change_nothing_in_markdown_but_its_text(hostile: Path, plain: Path, tmp_path: Path) -> None:
    """In report.md, evaluation.md and a model card."""
    for number, (name, run) in enumerate(((NAME, hostile), (PLAIN_NAME, plain))):
        content = json.loads(next(run.glob("checkpoints/*400/evaluation.json")).read_text())
        measured = from_json(Evaluation, upgraded({**content, "target": name}))
        directory = tmp_path / str(number)
        directory.mkdir()
        exported = Exported(directory, "vllm", name, name, name, 4, ("vllm",))
        write_card(exported, run / "checkpoints/step-000400", {name: name}, measured, None)
        (directory / "evaluation.md").write_text(evaluation_markdown([measured], []))
        (directory / "report.md").write_text((run / "report.md").read_text("utf-8"))
    for file in ("README.md", "evaluation.md", "report.md"):
        pages = [(tmp_path / number / file).read_text("utf-8") for number in "01"]
        pages = [page.split("\n---\n", 1)[1] if file == "README.md" else page for page in pages]
        assert tokens(pages[0]) == tokens(pages[1]), file
        assert not set(pages[0]) & set("\x1b\x9b\u202e\r")
