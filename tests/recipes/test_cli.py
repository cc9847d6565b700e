"""The command line: a mistake costs one line and exit code 2, and a command twice gives the same numbers twice."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args, get_type_hints

import pytest
import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.progress import progress_bar
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.recipes.cli.main import COMMANDS, MOVED, main, parse
from draftsmith.recipes.configs import command_settings
from draftsmith.recipes.configs.named_files import check_names
from draftsmith.recipes.configs.recipes import RECIPES, TARGET_RECIPES
from draftsmith.train.config import contents

ACCEPTANCE = """
    num_rounds num_drafts num_draft_tokens num_accepted_tokens num_emitted_tokens mean_acceptance_length
    draft_acceptance_rate per_position_acceptance_rates conditional_acceptance_rates acceptance_histogram
"""


def run_cli(*arguments: Any) -> int:
    """The exit code, whether returned or raised by argparse."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as exit:
        return int(exit.code or 0)


def save_new_drafter(kind: str, target: Target, directory: Path) -> Path:
    torch.manual_seed(0)
    drafter_class = DRAFTERS[kind]
    save_drafter(drafter_class.from_target(drafter_class.config_class(kind=kind), target), directory)
    return directory


@pytest.fixture(scope="module")
def files(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the cases below name in braces."""
    folder = tmp_path_factory.mktemp("files")
    contents = {
        "good": "heat the iron\nheats it again, and\nreturn [iron.hit()\n",
        "empty": "\n",
        "long": "heat the iron\n" + "x" * tiny_target.context,
    }
    found = {"target": str(tiny_target_dir), "regular_file": str(folder / "good.txt")}
    for name, content in contents.items():
        (folder / f"{name}.txt").write_text(content)
        found[name] = str(folder / f"{name}.txt")
    found["malformed"] = str(folder / "malformed.jsonl")
    (folder / "malformed.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    found["medusa"] = str(save_new_drafter("medusa", tiny_target, folder / "medusa"))
    found["draft_model"] = str(save_new_drafter("draft_model", tiny_target, folder / "draft_model"))
    prepare(tiny_target, found["good"], folder / "samples", PrepareSettings(max_new_tokens=8))
    found["samples"] = str(folder / "samples")
    (folder / "run/checkpoints/step-000002").mkdir(parents=True)
    found["run"] = str(folder / "run")
    return found


@pytest.fixture(scope="module")
def wide_dir(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir(hidden_size=48)


@pytest.fixture(scope="module")
def other_vocabulary_dir(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir(vocab_size=320)


@pytest.fixture(autouse=True)
def _stay_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no directory is looked up on the Hub; the library read its variables at import."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


EVALUATE = "evaluate --target {target} --out {out} --drafter ngram --repeats 1 --max-new-tokens 8 --prompts "
PREPARE = "prepare --target {target} --out {out} --max-new-tokens 8 --prompts "
TRAIN = "train medusa target={target} run.dir={out} data.samples=nowhere "
GENERATE = "generate x --target {target} --drafter "

MISTAKES = {
    "no such target": ("evaluate --target /no/target --drafter ngram --prompts {good} --out {out}", "no target"),
    "no such target on the Hub": ("generate x --target no/target --drafter ngram", "no target"),
    "no such target to train for": ("train medusa target=/no/target data.samples={samples} run.dir={out}", "no target"),
    "no such drafter": (GENERATE + "/no/drafter", "no drafter"),
    "draft length beside a schedule": (
        GENERATE + "ngram --draft-length 2 --schedule s.json",
        "leave out --draft-length",
    ),
    "plain decoding as a drafter": (
        "evaluate --target {target} --drafter none --prompts {good} --out {out}",
        "plain decoding is measured beside each drafter anyway",
    ),
    "drafter to be trained": (GENERATE + "eagle3", "needs a checkpoint"),
    "drafter of another width": (
        "generate x --target {wide} --drafter {medusa}",
        "hidden_size 32, but {wide} has 48",
    ),
    "drafter of another vocabulary": ("generate x --target {other_vocabulary} --drafter {medusa}", "vocab_size"),
    "draft model of another vocabulary": (
        "generate x --target {other_vocabulary} --drafter {draft_model}",
        "vocabulary",
    ),
    "no chains to schedule": (
        "load-test --target {target} --drafter lookahead --prompts {good} --concurrency 1 --out {out}",
        "drafts no chains",
    ),
    "no server": ("watch", "--help|URL|url"),
    "no trace": ("bench http://localhost:9 --trace nowhere.log --out {out}", "nowhere.log: there is no such file"),
    "no prompts file": (EVALUATE + "nowhere.txt", "no prompts file"),
    "empty prompts file": (EVALUATE + "{empty}", "holds no prompts"),
    "malformed line": (EVALUATE + "{malformed}", "line 2 is not JSON"),
    "prompt beyond the context": (EVALUATE + "{long}", "(line|prompt) 2"),
    "the same when preparing": (PREPARE + "{long}", "(line|prompt) 2"),
    "empty file when preparing": (PREPARE + "{empty}", "holds no prompts"),
    "prompt beyond the context, generating": ("generate {x200} --target {target} --drafter none", "context of 128"),
    "folder below a file": (EVALUATE.replace("{out}", "{regular_file}/out") + "{good}", "cannot write to"),
    "folder below a file, preparing": (PREPARE.replace("{out}", "{regular_file}/out") + "{good}", "cannot write to"),
    "folder below a file, exporting": (
        "export {medusa} --engine vllm --target {target} --out {regular_file}/out",
        "cannot write to",
    ),
    "engine without that kind": ("export {medusa} --engine sglang --target {target} --out {out}", "medusa"),
    "no checkpoint to export": (
        "export lookahead --engine vllm --target {target} --out {out}",
        "no trained drafter, and no engine has one like it: give a checkpoint",
    ),
    "drafter that the engine lacks": ("export suffix --engine sglang --target {target} --out {out}", "engine vllm"),
    "no measured checkpoint": (GENERATE + "{run}/best", "was: give {run}/checkpoints/step-000002"),
    "a run for a checkpoint": (GENERATE + "{run}", "such as {run}/checkpoints/step-000002"),
    "unknown engine": ("export {medusa} --engine llama --target {target} --out {out}", "invalid choice"),
    "unknown recipe": ("train eagle4 target={target}", "unknown recipe 'eagle4'; nearest: eagle"),
    "unknown key": (TRAIN + "optimizer.lr=1", "unknown key 'optimizer.lr'"),
    "wrong type": (TRAIN + "run.steps=many", "run.steps"),
    "not key=value": (TRAIN + "run.steps", "not key=value"),
    "unknown option": (TRAIN + "--steps 3", "--steps 3; settings of a run are given as .* run.steps=3"),
    "no samples": (TRAIN, "holds no prepared samples"),
    "prompts for samples": (TRAIN + "data.samples={good}", "is a file: .*prepare --prompts {good} --out"),
    "no config file": (TRAIN + "--config nowhere.yaml", "nowhere.yaml"),
    "missing argument": ("evaluate --target {target} --drafter ngram --out {out}", "--prompts"),
    "unknown command": ("serve", "serve"),
    "no command": ("", "COMMAND"),
    "not a number": (EVALUATE + "{good} --repeats x", "--repeats"),
    "time and repeats": (EVALUATE + "{good} --minutes 1", "--minutes chooses the repeats"),
    "no time": (EVALUATE + "{good} --minutes 0", "--minutes"),
    "the same prompts twice": (EVALUATE + "{good} {good}", "cannot be told apart"),
    "unknown baseline": (EVALUATE + "{good} --baseline assist", "give 'generate', 'assisted' or 'prompt_lookup'"),
    "nothing that could assist": (EVALUATE + "{good} --baseline assisted", "needs a draft model"),
    "no single prompts": (EVALUATE + "{good} --baseline generate --batch-size 4", "add --batch-size 1"),
    "not a device": (GENERATE + "none --device gpu", "is not a device"),
    "nothing to report on": ("report {out}", "no folder"),
    "unknown drafter of the quickstart": ("quickstart --out {out} --drafters ngram", "choose from"),
    # settings that only decoding would find wrong, after the folder was made
    "negative temperature": (EVALUATE + "{good} --temperature -1", "temperature"),
    "negative temperature, preparing": (PREPARE + "{good} --temperature 0 -1", "temperature"),
    "batch size 0": (EVALUATE + "{good} --batch-size 0", "atch.size"),
    "batch size 0, preparing": (PREPARE + "{good} --batch-size 0", "atch.size"),
    "no new tokens": (EVALUATE + "{good} --max-new-tokens 0", "max.new.tokens"),
    "settings of answers that are given": (PREPARE + "{good} --as-given --max-new-tokens 8", "--as-given"),
    "all held out": (PREPARE + "{good} --held-out-share 1", "give less than 1"),
    "no new tokens, preparing": (PREPARE + "{good} --max-new-tokens 0", "max.new.tokens"),
    "no port of a server": (PREPARE + "{good} --endpoint http://h:70000", "h:70000: there is no port"),
    "a password in an address": ("watch http://me:secret@h", "watch: the URL holds a name or password"),
    "negative draft length": (EVALUATE + "{good} --draft-length -1", "--draft-length: '-1': give at least 1"),
    "negative draft length, preparing": (PREPARE + "{good} --drafter ngram --draft-length -3", "give at least 1"),
    "no draft length, preparing": (PREPARE + "{good} --drafter ngram --draft-length 0", "give at least 1"),
    "repeats 0": (EVALUATE + "{good} --repeats 0", "repeats"),
    "fewer than no prompts": (EVALUATE + "{good} --num-prompts -1", "num.prompts"),
    "longer drafts than heads": (
        "evaluate --target {target} --out {out} --drafter {medusa} --prompts {good} --draft-length 5",
        "draft.length",
    ),
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_costs_one_line(
    command: str,
    message: str,
    files: dict[str, str],
    wide_dir: Path,
    other_vocabulary_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, one line on stderr that says what is wrong, no traceback, and nothing written."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    out = work / "out"
    names = {**files, "wide": wide_dir, "other_vocabulary": other_vocabulary_dir, "out": out, "x200": "x" * 200}
    assert run_cli(*(word.format(**names) for word in command.split())) == 2
    errors = capsys.readouterr().err.splitlines()
    lines = [line for line in errors if "Loading weights" not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert re.search(message.format(**names), lines[0]), lines[0]
    assert list(work.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_gpu(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("generate", "x", "--target", files["target"], "--drafter", "none", "--device", "cuda") == 2
    assert capsys.readouterr().err.startswith("error: device 'cuda' was asked for and there is no GPU")


@pytest.mark.parametrize("arguments", [["nonsense"], ["medusa", "--steps", "3"]])
def test_torchs_launcher_ends_with_the_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its summary of failed processes comes after all that they print themselves."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert run_cli("train", *arguments) == 2
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    (line,) = capsys.readouterr().err.splitlines()
    assert line in str(ChildFailedError("draftsmith.train", {0: failure}))


class Interrupts:
    """A module during whose import the user presses Ctrl-C."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("train medusa target={target} data.samples={samples} run.dir=r", "give the same command again to go on"),
        ("train medusa target={target} data.samples={samples} run.dir=r --overfit 4", "starts anew"),
        ("evaluate --target {target} --drafter ngram --prompts {good} --out o", "starts anew"),
    ],
)
@pytest.mark.parametrize("importing", [True, False])
def test_an_interruption_costs_one_line(
    command: str,
    told: str,
    importing: bool,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also in the seconds in which torch is imported; what does not go on says so."""
    module = f"draftsmith.recipes.cli.{command.split()[0]}"
    if importing:
        monkeypatch.setitem(sys.modules, module, cast(Any, Interrupts()))
    else:
        monkeypatch.setattr(f"{module}.run", lambda *call: Interrupts().stop)
    assert run_cli(*command.format(**files).split()) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("interrupted: ")
    assert told in line


def test_help_of_train_names_recipes_and_keys() -> None:
    page = str(getdoc(command_settings.TrainSettings))
    keys = re.findall(r"^  ([a-z_.]+)=", page, re.MULTILINE)
    assert len(keys) > 5
    assert set(keys) <= flatten(contents(RECIPES["eagle3"]())).keys()
    recipes = {name.removeprefix("quickstart_") for name in RECIPES.keys() - TARGET_RECIPES.keys()}
    assert recipes <= set(re.findall(r"\w+", page.partition("example:")[0]))


def test_a_run_that_was_not_measured_ends_with_its_checkpoint(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path that `evaluate` and `export` ask for next: the newest, or the best that held-out samples have chosen."""
    run = tmp_path / "run"
    shutil.copytree(files["run"], run)
    (run / "checkpoints/step-000001").mkdir()
    monkeypatch.setattr("draftsmith.recipes.cli.train.train", lambda config: run)
    words = ("train", "medusa", f"target={files['target']}", f"data.samples={files['samples']}", "run.dir=r")
    assert run_cli(*words) == 0
    assert capsys.readouterr().out == f"checkpoint: {run}/checkpoints/step-000002\n"
    with open(run / "metrics.jsonl", "a") as metrics:
        for step, length in ((1, 1.5), (2, 1.4)):
            line = {"step": step, "held_out_loss": 1.0, "held_out_acceptance_length": length}
            metrics.write(json.dumps(line) + "\n")
    assert run_cli(*words) == 0
    assert capsys.readouterr().out == f"best checkpoint: {run}/best, which is step-000001\n"


def test_debug_shows_the_traceback(files: dict[str, str]) -> None:
    with pytest.raises(UserError):
        run_cli("generate", "x", "--target", files["target"], "--drafter", "eagle3", "--debug")


@pytest.mark.parametrize(
    ("fault", "exit_code", "line"),
    [
        ("[][3]", 1, "error: unexpected IndexError at draftsmith.faulty:3: list index out of range; .*--debug"),
        ("f(f)", 1, "error: unexpected RecursionError at draftsmith.faulty:4: maximum recursion depth"),
        ("bytearray(1 << 60)", 2, "error: out of memory.*: give fewer --max-new-tokens"),
        ("raise RuntimeError('CUDA out of memory.\\nTried to allocate')", 2, "error: out of memory .*--max-new-tokens"),
        (
            "raise NotADirectoryError(20, 'Not a directory', '/file/cache')",  # as Triton of TRITON_CACHE_DIR
            2,
            r"error: a file cannot be written \(/file/cache\): Not a directory: mend that",
        ),
        ("raise OSError(40, 'Too many levels of symbolic links', '/a/b')", 2, "error: /a/b: Too many levels.*: mend"),
        ("raise BrokenPipeError", 141, None),
        ("raise UserError('a\\nb')", 2, r"error: a\\nb$"),
    ],
)
def test_whatever_is_raised_costs_one_line(
    fault: str,
    exit_code: int,
    line: str | None,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The last resort names the place in draftsmith; memory and a reader that has gone are no faults of it."""
    module = ModuleType("draftsmith.faulty")
    code = f"from draftsmith.models.errors import UserError\ndef run(*call):\n  {fault}\ndef f(f): f(f)"
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "draftsmith.recipes.cli.generate", module)
    assert run_cli("generate", "x", "--target", files["target"], "--drafter", "none") == exit_code
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == (line is not None)
    assert line is None or re.match(line, lines[0]), lines


@pytest.mark.parametrize(
    "block",
    ["time.sleep(60)", "queue.Queue().get()", "threading.Thread(target=time.sleep, args=(0,)).start()", "retry()"],
)
def test_a_fault_of_a_thread_ends_the_command(
    block: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A thread that fails never leaves the command waiting for it, nor behind exit code 0."""
    module = ModuleType("draftsmith.faulty")
    code = f"""
import queue, threading, time

def fail():
    time.sleep(0.05)
    [][3]

def retry():
    try:
        time.sleep(60)
    except Exception:  # as of work that may be tried again
        pass

def run(*call):
    thread = threading.Thread(target=fail)
    thread.start()
    {block}
    thread.join()
"""
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, "draftsmith.recipes.cli.generate", module)
    before = signal.getsignal(signal.SIGURG), threading.excepthook
    assert run_cli("generate", "x", "--target", files["target"], "--drafter", "none") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: unexpected IndexError at draftsmith.faulty:6: list index out of range; ")
    assert (signal.getsignal(signal.SIGURG), threading.excepthook) == before


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    """What C libraries print to stdout or stderr would be written into it."""
    code = """
import os
from draftsmith.recipes.cli.main import main
code = main(["report", "nowhere"])
number = os.open("file", os.O_CREAT | os.O_WRONLY)
os.write(number, f"{code} {number}".encode())
"""
    subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], cwd=tmp_path, check=True)
    exit_code, number = map(int, (tmp_path / "file").read_text().split())
    assert (exit_code, number > 2) == (2, True)


def test_a_bar_ends_at_its_end() -> None:
    """Also where less was to do than planned; not where the work failed."""
    with progress_bar(visible=False) as bar:
        bar.update(bar.add_task("measuring", total=5.0, detail=""), completed=2)
    assert bar.finished
    bar.add_task("failing", total=5.0, detail="")
    bar.__exit__(KeyError, KeyError(), None)
    assert not bar.finished


NOWHERE = "evaluate --target {target} --drafter ngram --prompts nöwhere.txt --out o"


@pytest.mark.parametrize(
    ("shell", "exit_code"),
    [
        ("env -u PYTHONUNBUFFERED {draftsmith} evaluate --help | true; exit ${{PIPESTATUS[0]}}", 141),
        ("PYTHONIOENCODING=ascii {draftsmith} " + NOWHERE, 2),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {draftsmith} " + NOWHERE, 2),
        ("{draftsmith} --help >&- 2>&-", 0),
        ("env -u PYTHONUNBUFFERED {draftsmith} --help >/dev/full", 2),
    ],
)
def test_odd_streams_are_no_faults(shell: str, exit_code: int, files: dict[str, str], tmp_path: Path) -> None:
    """A reader that goes away ends a command with a shell's code, a full place with a line.

    Characters that a locale lacks are escaped.
    """
    draftsmith = f"{sys.executable} -m draftsmith.recipes.cli.main"
    command = shell.format(draftsmith=draftsmith, **files)
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == exit_code, result.stderr
    assert len(result.stderr.splitlines()) == (exit_code == 2), result.stderr


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("HF_HUB_DOWNLOAD_TIMEOUT", "abc", "HF_HUB_DOWNLOAD_TIMEOUT='abc': give whole seconds, or unset it"),
        ("HF_HUB_ETAG_TIMEOUT", "10.0", "HF_HUB_ETAG_TIMEOUT='10.0': give whole seconds, or unset it"),
        ("HOME", None, "HOME is not set, and the system knows no home of this user"),
    ],
)
def test_variables_with_which_libraries_fail_are_named(
    name: str, value: str | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's client cannot be imported with them; without a home, caches would go into a folder named `~`."""
    if value is None:
        monkeypatch.delenv(name)
        monkeypatch.setattr(os, "getuid", lambda: 2**31)
    else:
        monkeypatch.setenv(name, value)
    assert run_cli("report", "nowhere") == 2
    assert told in capsys.readouterr().err


def test_python_without_docstrings_is_refused(tmp_path: Path) -> None:
    """Since transformers, which reads its own, cannot be imported."""
    command = [sys.executable, "-OO", "-m", "draftsmith.recipes.cli.main", "report", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: Python was started with -OO")


BAD_NUMBERS = ("nan", "inf", "-inf", "-1", "1e400", "9" * 5000, "", "x", "0x10")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_and_path_is_checked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each flag of each command refuses what is no number in its range, and no name of a file, in one line."""
    monkeypatch.chdir(tmp_path)
    settings = COMMANDS[name][1]
    metadata = {setting.name: setting.metadata for setting in fields(settings)}
    for setting, hint in get_type_hints(settings, include_extras=True).items():
        numeric = re.search(r"\b(int|float)\b", str(hint))
        values = BAD_NUMBERS if numeric else ("", "x" * 256, "x/" * 3000, "a\0b", "\ud800")
        if "Literal" in str(hint) or hint is bool or hint is str or "tuple[str" in str(hint):  # flags, choices, texts
            continue
        for value in values:
            flag = () if metadata[setting]["positional"] else (f"--{setting.replace('_', '-')}",)
            with pytest.raises(SystemExit) as caught:
                main([name, *("=".join((*flag, value)),)])
            assert caught.value.code == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert flag == () or flag[0] in line, (setting, value, line)
    assert list(tmp_path.iterdir()) == []


def test_options_may_stand_before_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train RECIPE --config FILE key=value` is the documented order; argparse ends the overrides at the option."""
    (tmp_path / "config.yaml").write_text("run: {steps: 3}\n")
    assert run_cli("train", "medusa", "run.seed=1", "--config", tmp_path / "config.yaml", "no.such_key=1") == 2
    assert "unknown key 'no.such_key'" in capsys.readouterr().err


SLOW = ("torch", "transformers", "accelerate", "datasets", "matplotlib")


# Each with the exit code, and a part of what is said.
QUICK = """
--help | 0 | usage
train eagle4 | 2 | eagle4
train eagle3 target={target} data.samples={samples} run.dir=r run.stepz=3 | 2 | run.steps
train medusa target={target} data.samples={samples} run.dir=r evaluation.prompts={malformed} | 2 | jsonl line 2
prepare --target no/target --prompts {good} --out o | 2 | no target at 'no/target'
prepare --target {target} --prompts {malformed} --out o | 2 | malformed.jsonl line 2
prepare --target {target} --prompts {mixture} --out o | 2 | malformed.jsonl line 2
convert --samples nowhere --out o | 2 | holds no prepared samples
evaluate --target {target} --drafter no/drafter --prompts {good} --out o | 2 | no drafter at 'no/drafter'
evaluate --target {target} --drafter ngram --prompts {malformed} --out o | 2 | malformed.jsonl line 2
evaluate --target {target} --drafter ngram --prompts {pipe} --out o | 2 | a pipe or a device, which is read only once
train medusa target={target} data.samples={samples} run.dir=r evaluation.prompts={pipe} | 2 | a pipe or a device
train medusa target={target} data.samples={samples} run.dir=r --config {pipe} | 2 | there is no such file
evaluate --target {target} --drafter ngram --prompts {good} --tree {cut} --out o | 2 | cut.json is not JSON
tune --target {target} --drafter ngram+no/drafter --prompts {good} --out o | 2 | no drafter at 'no/drafter'
load-test --target {target} --drafter ngram --prompts {good} --rate 1 --schedule {cut} --out o | 2 | cut.json holds no
replay --target {target} --drafter ngram --prompts {good} --tree {cut} --out o | 2 | cut.json is not JSON
plan --target {good} --drafter eagle3 --out o | 2 | good.txt is a file
bench ftp://host --prompts {good} --rate 1 --out o | 2 | is no URL
export {run} --engine vllm --target {target} --out o | 2 | holds no config.json
generate x --target {run} --drafter ngram | 2 | no target at
generate x --target {target} --drafter ngram --schedule {cut} | 2 | cut.json holds no schedule
quickstart --target no/target | 2 | no target at 'no/target'
auto --target {target} --traffic {malformed} --out o | 2 | malformed.jsonl line 2
tune-server nowhere --target {target} --drafter ngram --prompts {good} --out o | 2 | no bin/python there
refresh --target {target} --traffic nowhere.jsonl --out o | 2 | no prompts file nowhere.jsonl
watch localhost | 2 | is no URL
report nowhere | 2 | no folder nowhere
"""


def test_help_and_mistakes_do_not_wait_for_torch(files: dict[str, str], tmp_path: Path) -> None:
    """Parsing, and checking names and what small files hold, takes no library that takes seconds."""
    (tmp_path / "cut.json").write_text('{"draft_lengths": [[1, ')
    (tmp_path / "mixture.yaml").write_text(f"sources: [{{source: {files['malformed']}}}]")
    os.mkfifo(tmp_path / "pipe")  # as `<(command)` is
    found = {
        **files,
        "cut": str(tmp_path / "cut.json"),
        "pipe": str(tmp_path / "pipe"),
        "mixture": str(tmp_path / "mixture.yaml"),
    }
    cases = [line.format(**found).split(" | ") for line in QUICK.strip().splitlines()]
    assert {command.split()[0] for command, *_ in cases} == {"--help", *COMMANDS}
    code = f"""
import contextlib, io, json, sys
from draftsmith.recipes.cli.main import main
for command in {[command for command, *_ in cases]}:
    with contextlib.redirect_stderr(io.StringIO()) as told, contextlib.redirect_stdout(told):
        try:
            code = main(command.split())
        except SystemExit as exit:
            code = exit.code or 0
    print(json.dumps([code, told.getvalue(), [name for name in {SLOW} if name in sys.modules]]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    for (command, exit_code, told), line in zip(cases, result.stdout.splitlines(), strict=True):
        code, text, slow = json.loads(line)
        assert not slow, command
        assert (code, told in text) == (int(exit_code), True), (command, text)


@pytest.mark.parametrize("setting", ["target", "drafter", "prompts", "data.samples", "schedule", "config", "run"])
def test_a_file_that_may_not_be_read_is_told_as_such(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below a folder of somebody else; root, as which tests may run, would read all."""

    def refuse(path: Path, **_: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(UserError, match="^/theirs/file.jsonl cannot be read: Permission denied"):
        check_names({setting: "/theirs/file.jsonl"})


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_on_a_screen(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 lines of 100 columns, no flag without words on it, and an example at the end."""
    monkeypatch.setenv("COLUMNS", "100")
    assert run_cli(*command.split(), "--help") == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: draftsmith {command}".rstrip())
    assert page.count("\n") <= 40
    assert max(map(len, page.splitlines())) <= 100
    assert re.search(rf"\nexample:\n  draftsmith {command}.*(\n   .*|\n  draftsmith .*)*\n$", page)
    for setting in fields(COMMANDS[command][1]) if command else ():
        assert re.match(r"[\w,-]+ ", setting.metadata["help"]), setting.name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_takes_its_own_settings(name: str) -> None:
    """The table of commands names a module; its `run` takes the dataclass that the flags are made of."""
    module, settings = COMMANDS[name]
    hints = get_type_hints(import_module(f"draftsmith.recipes.{module}").run)
    assert hints == {"settings": settings, "console": Console, "return": type(None)}


def test_verification_modes_are_those_of_the_decoder() -> None:
    """The command line spells them out, so that `--help` needs no torch; synthetic has a flag of its own."""
    assert {*get_args(command_settings.VerificationMode), "synthetic"} == set(get_args(VerificationMode))


@pytest.mark.parametrize("flag", MOVED)
def test_a_flag_that_moved_says_where(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*["evaluate", "--target", "t", "--drafter", "d", "--prompts", "p", "--out", "o"], f"{flag}=1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"error: {flag} is now a .*command: draftsmith (load-test|tune|replay)", line)


def acceptance(path: Path) -> list[dict[str, Any]]:
    rows = json.loads(path.read_text())["results"]
    return [
        {name: row[name] for name in (*ACCEPTANCE.split(), "temperature", "batch_size", "draft_length")} for row in rows
    ]


def test_a_flag_that_is_given_twice_has_the_values_of_both() -> None:
    words = "evaluate --target t --drafter a --drafter b --prompts p q --prompts r --temperature 0 --temperature 1"
    settings = parse([*words.split(), "--out", "o"]).settings
    assert (settings.drafter, settings.prompts, settings.temperature) == (("a", "b"), ("p", "q", "r"), (0.0, 1.0))


def test_trees_that_would_not_be_seen_are_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lookups draft chains, and two trees of as many nodes and levels would have one column."""
    for name, tree in (("a.json", [[0], [0, 0], [0, 1]]), ("b.json", [[0], [1], [0, 0]])):
        (tmp_path / name).write_text(json.dumps(tree))
    words = "replay --target {target} --prompts {good} --device cpu --max-new-tokens 4".format(**files).split()
    words += ["--out", str(tmp_path / "out"), "--tree", str(tmp_path / "a.json")]
    assert main([*words, "--drafter", "ngram"]) == 2
    assert "--tree: ngram drafts chains only: leave it out" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "b.json"), "--drafter", files["medusa"]]) == 2
    assert "trees of as many nodes and levels cannot be told apart" in capsys.readouterr().err


def test_evaluating_twice_gives_the_same_acceptance(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise is keyed by seed and place, so acceptance is a number of the drafter, not of the day."""
    for name in ("one", "two"):
        command = ["evaluate", "--target", files["target"], "--drafter", files["medusa"], "--drafter", "ngram"]
        settings = ["--temperature", 0, 1, "--batch-size", 1, 2, "--draft-length", 2, "--max-new-tokens", 8]
        more = ["--prompts", files["good"], "--repeats", 1, "--device", "cpu"]
        assert run_cli(*command, *settings, *more, "--out", tmp_path / name) == 0
        assert "overwritten" not in capsys.readouterr().err
    assert run_cli(*command, *settings, *more, "--out", tmp_path / "two", "--tree", "0") == 2
    assert f"{tmp_path}/two/evaluation.md is of an earlier evaluation" in capsys.readouterr().err
    page = (tmp_path / "one/evaluation.md").read_text()
    assert re.match(r"# Evaluation\n\n\*\*.*\d\.\d\d×.*\*\*\n", page)
    settings = {line for line in page.splitlines() if line.startswith("**Temperature")}
    assert len(settings) == 4
    for folder in ("1-medusa", "2-ngram"):
        assert (tmp_path / "one" / folder / "evaluation.md").is_file()
        rows = acceptance(tmp_path / "one" / folder / "evaluation.json")
        assert [(row["temperature"], row["batch_size"]) for row in rows] == [(0, 1), (0, 2), (1, 1), (1, 2)]
        assert rows == acceptance(tmp_path / "two" / folder / "evaluation.json")


def test_evaluate_reproduces_what_training_measured(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint's own evaluation.json holds what `evaluate` finds, to the digit, after prepare and train."""
    prepared = ["--out", tmp_path / "samples", "--max-new-tokens", 16, "--batch-size", 4, "--device", "cpu"]
    for told in (": 3 samples of 3 prompts, ", " holds all answers already"):  # the second time there is nothing to do
        assert run_cli("prepare", "--target", files["target"], "--prompts", files["good"], *prepared) == 0
        out = capsys.readouterr().out
        assert f"{tmp_path}/samples{told}" in out
        assert f"next: draftsmith train eagle3 target={files['target']} data.samples={tmp_path}/samples" in out
    settings = {
        "target": files["target"],
        "data.samples": tmp_path / "samples",
        "data.batch_size": 3,
        "evaluation.prompts": files["good"],
        "evaluation.num_prompts": 2,
        "evaluation.max_new_tokens": 12,
        "evaluation.temperatures": "[0,1]",
        "evaluation.repeats": 1,
        "run.dir": tmp_path / "run",
        "run.steps": 3,
        "run.device": "cpu",
    }
    assert run_cli("train", "medusa", *(f"{key}={value}" for key, value in settings.items())) == 0
    assert (tmp_path / "run/report.html").is_file()
    assert f"best checkpoint: {tmp_path}/run/best, which is step-000003" in capsys.readouterr().out
    report = (tmp_path / "run/report.json").read_text()
    command = ["evaluate", "--target", files["target"], "--drafter", tmp_path / "run/best", "--prompts", files["good"]]
    same = ["--num-prompts", 2, "--max-new-tokens", 12, "--temperature", 0, 1, "--repeats", 1, "--device", "cpu"]
    assert run_cli(*command, *same, "--out", tmp_path / "again") == 0
    assert f"evaluation: {tmp_path}/again/evaluation.md" in capsys.readouterr().out
    assert (tmp_path / "run/report.json").read_text() == report
    assert run_cli(*command, *same, "--baseline", "generate", "--out", tmp_path / "run/final") == 0
    assert f"report: {tmp_path}/run/report.html" in capsys.readouterr().out
    assert (tmp_path / "run/report.json").read_text() != report
    texts = json.loads((tmp_path / "again/samples.json").read_text())
    assert {text["drafter"] for text in texts} == {str(tmp_path / "run/best")}
    found = acceptance(tmp_path / "again/evaluation.json")
    assert found == acceptance(tmp_path / "run/best/evaluation.json")
    assert all(row["num_drafts"] > 0 for row in found)


def test_the_readmes_walk_works_as_written(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For thirty prompts and a tiny target, with less time for training and measuring."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prompt": f"heat the iron {number} times"}) for number in range(30)]
    Path("prompts.jsonl").write_text("\n".join(rows))
    page = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    section = page.partition("## Your own model")[2].partition("MODEL is a Hub name")[0]
    commands = re.findall(r"^    draftsmith (.*?)(?:   #.*)?$", section, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["prepare", "train", "evaluate", "export"]
    less = {"run.steps=300": "run.steps=2 evaluation.repeats=1", "--temperature 0 1": "--repeats 1"}
    for command in commands:
        for words, others in {**less, "MODEL": files["target"]}.items():
            command = command.replace(words, others)
        assert run_cli(*command.split()) == 0, capsys.readouterr().err
    assert Path("export/my/serve_vllm.sh").is_file()


@pytest.mark.parametrize("temperature", [0, 1])
def test_generated_text_does_not_depend_on_the_drafter(
    temperature: int, files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lossless to the character, also at temperature 1, where n-grams are verified on the noise of plain sampling."""
    texts = []
    (tmp_path / "schedule.json").write_text('{"draft_lengths": [[1, 2], [4, 0]]}')
    for draft in (["none"], ["ngram"], ["ngram", "--schedule", tmp_path / "schedule.json"]):
        command = ["generate", "the iron, the iron,", "--target", files["target"], "--drafter", *draft]
        assert run_cli(*command, "--temperature", temperature, "--max-new-tokens", 60, "--device", "cpu") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > len("the iron, the iron,") + 20


def test_generate_prints_the_text_as_it_is(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks at the width of the terminal, or tabs turned to blanks, would make code that does not run."""
    prompt = "def f():\n\treturn " + "iron + " * 12 + "1"
    command = ["generate", prompt, "--target", files["target"], "--drafter", "none", "--max-new-tokens", 4]
    assert run_cli(*command, "--device", "cpu") == 0
    assert capsys.readouterr().out.startswith(prompt)


def test_every_recipe_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each one asks for what it leaves to the user, which shows that it was found and read."""
    for recipe in RECIPES:
        assert run_cli("train", recipe) == 2
        missing = "data.samples" if recipe in TARGET_RECIPES else "target"
        assert capsys.readouterr().err.startswith(f"error: {missing} is not set")
