"""Attempts by command: hostile values for every flag, hostile names, commands that are cut short or given twice."""

import contextlib
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from damage import NUMBERS, TEXTS, hostile_text
from disturbances import STARTS, disk_full, interrupted
from judge import Attempt, Place, figures_undrawn

from draftsmith.recipes.cli.main import COMMANDS, main

# Settings whose large values rightly take as long as they say.
OTHER_SECONDS = 30  # of a second process
LASTING = ("repeats", "requests", "minutes", "readings", "interval", "num_threads")


FILES = """target drafters drafters/eagle3 foreign/9 export samples run grid prompts prompts/p.txt prompts/chats.jsonl
tree.json schedule.json adaptive.json metrics.txt"""
WORDS = """cpu cuda cuda:9 meta mps 0,0,0 2,2,2 4,2,1 1,2,3,4 -1,2,2 9999999999,2,2 ngram suffix lookahead none eagle3
medusa,hydra ngram+ngram generate"""


def command_attempt(place: Place, argv: list[str], *may_write: Path) -> Attempt:
    """Return an attempt at a command, which may write its `out` and what else is named."""
    told = " ".join(f"'{word}'" if " " in word else word for word in argv)
    return Attempt(f"draftsmith {told}", lambda: main(argv), (place.out, *may_write))


def healthy_flags(place: Place) -> dict[str, dict[str, list[str]]]:
    """Return arguments with which each command works in a moment, by flag; those of no flag are positional."""
    made, out = place.material, ["--out", str(place.out)]
    target, prompts = ["--target", str(made / "target")], ["--prompts", str(made / "prompts" / "p.txt")]
    short = ["--max-new-tokens", "3"]
    medusa = ["--drafter", str(made / "drafters" / "medusa")]
    few = [*target, *prompts, "--num-prompts", "2", *short, *out]
    words = {
        "prepare": [*target, *prompts, *short, *out],
        "train": ["medusa", f"target={made / 'target'}", f"data.samples={made / 'samples'}", f"run.dir={place.out}",
                  "run.steps=1", "run.device=cpu", "data.batch_size=2"],
        "convert": ["--samples", str(made / "samples"), *out],
        "evaluate": [*few, *medusa, "--repeats", "1"],
        "tune": [*few, "--drafter", "ngram", "--repeats", "1"],  # costs of longer drafts need more context
        "load-test": [*few, *medusa, "--repeats", "1", "--concurrency", "1", "--requests", "10"],
        "replay": [*few, *medusa, "--draft-length", "2"],
        "plan": [*target, "--drafter", "medusa", "--batch-size", "1", "--draft-length", "1", *out],
        "export": [str(made / "drafters" / "medusa"), "--engine", "vllm", *target, *out],
        "generate": ["heat", *target, "--drafter", "ngram", *short],
        "report": [str(made / "nowhere")],
        "tune-server": [str(made / "nowhere"), *target, "--drafter", "ngram", *prompts, *out],
        "watch": ["http://127.0.0.1:9", "--readings", "1"],
        "quickstart": ["--target", str(made / "nowhere"), *out],
        "refresh": ["--target", str(made / "nowhere"), "--traffic", str(made / "prompts" / "p.txt"), *out],
        "auto": ["--target", str(made / "nowhere"), "--traffic", str(made / "prompts" / "p.txt"), *out],
    }  # fmt: skip
    found: dict[str, dict[str, list[str]]] = {}
    for name, values in words.items():
        flag = ""
        found[name] = {"": []}
        for word in values:
            if word.startswith("--"):
                flag = word
                found[name][flag] = []
            else:
                found[name][flag].append(word)
    return found


def argv_of(name: str, flags: dict[str, list[str]]) -> list[str]:
    return [name, *flags[""], *(word for flag, values in flags.items() if flag for word in (flag, *values))]


def commanded(place: Place) -> Attempt:
    """A command that works, with some of its arguments replaced, left out, or given twice."""
    random = place.random
    healthy = healthy_flags(place)
    name = random.choice([*healthy, "evaluate", "prepare", "generate"])
    flags, hints = healthy[name], get_type_hints(COMMANDS[name][1])
    left_out = ("target",) if name in ("quickstart", "auto", "refresh") else ("certify",)  # with which they last
    settings = {setting.name: setting for setting in fields(COMMANDS[name][1]) if setting.name not in left_out}
    for _ in range(random.choice((1, 1, 1, 1, 2))):
        setting = settings[random.choice(list(settings))]
        flag = "" if setting.metadata["positional"] else f"--{setting.name.replace('_', '-')}"
        values = values_for(place, setting.name, hints[setting.name])
        if not flag and flags[""]:
            flags[""][random.randrange(len(flags[""]))] = values[0] if values else ""
        elif random.random() < 0.04:
            flags.pop(flag, None)
        else:
            flags[flag] = values
    if name == "export" and "--prompts" in flags:
        flags.setdefault("--num-prompts", ["1"])  # else all are measured, for minutes
    if name == "train" and not any("run.steps" in word for word in flags[""]):
        flags[""].append("run.steps=1")  # else the recipe's own thousands are trained
    argv = argv_of(name, flags)
    written = [word for flag, word in zip(argv, argv[1:], strict=False) if flag in ("--out", "--history", "--page")]
    written += [word.removeprefix("run.dir=") for word in argv if word.startswith("run.dir=")]
    written += ["runs"] if name == "quickstart" else []
    # The first folder of a path is made, too, where ".." leads out of it again; that first folder may be ".." itself.
    tops = {word.partition("/")[0] for word in written} - {"."}  # which no path but "." itself writes to
    tops |= {os.path.normpath(word).partition("/")[0] for word in written if word}
    written_to = [Path(os.path.normpath(place.folder / "cwd" / top)) for top in tops - {""}]
    return command_attempt(place, argv, place.given, *written_to)


def values_for(place: Place, name: str, hint: Any) -> list[str]:
    """Return hostile values of a setting of this type, mostly such as argparse lets pass."""
    random = place.random
    kind = next(kind for kind in get_args(hint) if kind is not NoneType) if NoneType in get_args(hint) else hint
    if kind is bool:
        return []
    if get_origin(kind) is tuple:
        types = get_args(kind)
        number = random.choice((1, 1, 2, 3)) if ... in types else len(types)
        return [value_for(place, name, types[0]) for _ in range(number)]
    return [value_for(place, name, kind)]


def value_for(place: Place, name: str, kind: Any) -> str:
    random, made = place.random, place.material
    text = hostile_text(random).replace("\0", "\x01")  # no argument of a process can hold NUL
    if get_origin(kind) is Literal:
        return str(random.choice((*get_args(kind), text)))
    if name in LASTING:
        return str(random.choice((-1, 0, 1, 2, "nan", "inf", "x", "", "1e999", "0.1", "9" * 5000, -0.0, 5e-324)))
    if kind in (int, float) and random.random() < 0.85:
        numbers = [number for number in NUMBERS if kind is float or isinstance(number, int)]
        if name == "batch_size":  # of which `tune` measures each
            numbers = [number for number in numbers if not 4 < number < 5000]
        return str(random.choice(numbers))
    if random.random() < 0.3:
        file = random.choice(FILES.split())
        return str(place.copy(file) if name in ("out", "run") else made / file)  # these are written to
    if random.random() < 0.03:
        itself = place.given / "itself"
        with contextlib.suppress(FileExistsError):
            itself.symlink_to(itself)
        return str(itself)
    return random.choice(WORDS.split()) if random.random() < 0.3 else text


# --- names


def named(place: Place) -> Attempt:
    """A command that works, on files and folders with hostile names; what is written and printed stays harmless."""
    random = place.random
    name = random.choice([text for text in TEXTS if "\0" not in text and "/" not in text and text.strip(" .")])
    flags = healthy_flags(place)
    command = random.choice(("prepare", "evaluate", "export", "generate", "replay", "report", "train"))
    chosen, folder = flags[command], place.given
    if random.random() < 0.5:
        chosen["--out"] = [str(place.out / name)]
    replaced = {"--target": "target", "--prompts": "prompts/p.txt", "--drafter": "drafters/medusa"}
    try:
        for flag in replaced.keys() & chosen.keys():
            if random.random() < 0.5:
                suffix = ".txt" if flag == "--prompts" else ""
                (folder / f"{name}{suffix}").symlink_to(place.material / replaced[flag])
                chosen[flag] = [str(folder / f"{name}{suffix}")]
                folder = folder / "more"
                folder.mkdir()
        if command == "report":
            place.copy("grid").rename(folder / name)
            chosen[""] = [str(folder / name)]
    except (OSError, ValueError):  # no file can have this name
        chosen[random.choice(["--out", "--target"])] = [name]
    if command == "generate":
        chosen[""] = [name]
        chosen.pop("--out", None)
    if command == "report":
        chosen = {"": chosen[""]}
    if command == "train":
        chosen[""] = [f"run.dir={place.out / name}" if word.startswith("run.dir") else word for word in chosen[""]]
        chosen.pop("--out", None)
        chosen.pop("--target", None)
    argv = argv_of(command, chosen)
    attempt = command_attempt(place, argv, place.given, place.folder / "cwd" / name)
    run = attempt.call

    def call() -> object:
        code = run()
        for script in sorted(place.out.rglob("*.sh")):
            serve(script, place)
        return code

    attempt.call = call
    return attempt


def serve(script: Path, place: Place) -> None:
    """Run a script with an engine that only looks at its arguments."""
    engine = place.folder / "vllm"
    engine.write_text("#!/bin/sh\ntest $# -gt 2\n")
    engine.chmod(0o755)
    try:
        environment = {**os.environ, "PATH": f"{place.folder}:{os.environ['PATH']}"}
        subprocess.run(["sh", str(script)], env=environment, timeout=20, check=True, capture_output=True)
    finally:
        engine.unlink()


# --- cut short, and given again


def cut_short(place: Place) -> Attempt:
    """A command that is interrupted, or whose disk is full; given again, it ends as if nothing had been."""
    random = place.random
    command = random.choice(("prepare", "train", "export", "evaluate", "replay", "plan", "tune", "load-test"))
    flags = healthy_flags(place)[command]
    if command == "prepare":
        flags["--max-new-tokens"] = ["8"]
        flags["--device"] = ["cpu"]
    argv, log = argv_of(command, flags), place.folder / "cwd" / "log"
    seconds, size = random.uniform(0.001, 0.15), random.choice((0, 10, 300, 2000, 20_000))
    full = random.random() < 0.5

    def first_time() -> object:
        with disk_full(size) if full else interrupted(seconds):
            return run_quietly(argv)

    @figures_undrawn()
    def call() -> object:
        # An interrupt may leave a lock of a library's taken, which threads of this process would wait for forever.
        code = first_time() if full else exit_code(forked(first_time, log))
        assert code in (0, 2, 130), f"exit code {code} of the first time"
        exported = command == "export" and place.out.exists()  # whole, if interrupted behind it
        again = run_quietly(argv)
        expected_code = 2 if exported else 0  # an export is not written over
        assert again == expected_code, f"the same command again, after exit code {code}: exit code {again}"
        if command == "prepare":
            expected, found = place.material / "samples", place.out
            assert (found / "index.json").read_bytes() == (expected / "index.json").read_bytes(), "other samples"
        if command == "export":
            names = {path.name for path in place.out.iterdir()}
            assert names == {path.name for path in (place.material / "export").iterdir()}, f"other files: {names}"
        return 0

    told = f"a file may have {size} bytes" if full else f"interrupted after {seconds:.3f} s"
    return Attempt(f"{' '.join(argv)}  # twice; first {told}", call, (place.out, log))


def run_quietly(argv: list[str]) -> object:
    try:
        return main(argv)
    except SystemExit as exit:
        return exit.code


# --- two at once


def two_at_once(place: Place) -> Attempt:
    """The same command from two processes: each ends as one alone would, or says that the other is at work."""
    command = place.random.choice(("prepare", "train", "export"))
    argv = argv_of(command, healthy_flags(place)[command])

    def call() -> object:
        log = place.folder / "cwd" / "other.log"
        child = forked(lambda: run_quietly(argv), log)
        try:
            code = run_quietly(argv)
        finally:
            other = exit_code(child)
        assert other in (0, 2), f"exit code {other} of the other process: {log.read_text()[-1500:]}"
        assert 0 in (code, other), f"both processes were refused: {code}, {other}"
        return 0 if code in (0, 2) else code

    return Attempt(
        f"{' '.join(argv)}  # from two processes at once", call, (place.out, place.folder / "cwd" / "other.log")
    )


# --- started badly, or killed


def started_badly(place: Place) -> Attempt:
    """A command of a process whose streams, clocks, limits, folder or variables are hostile."""
    command = place.random.choice(("prepare", "train", "export", "evaluate", "generate", "plan"))
    start = place.random.choice(STARTS)
    argv, log = argv_of(command, healthy_flags(place)[command]), place.folder / "cwd" / "log"

    def call() -> object:
        def work() -> object:
            start(Random(place.folder.name))
            return run_quietly(argv)

        code = exit_code(forked(work, log))
        told = log.read_text(errors="replace")
        assert code in (0, 2), f"exit code {code}: {told[-1500:]}"
        assert "Traceback" not in told, told[-1500:]
        return 0

    return Attempt(f"{' '.join(argv)}  # {start.__name__}", call, (place.out, log))


def killed(place: Place) -> Attempt:
    """A command that is killed at some moment; given again, it ends as if nothing had been."""
    command = place.random.choice(("prepare", "train", "export", "evaluate"))
    argv, log = argv_of(command, healthy_flags(place)[command]), place.folder / "cwd" / "log"
    seconds = place.random.uniform(0.01, 1.0)

    @figures_undrawn()
    def call() -> object:
        child = forked(lambda: run_quietly(argv), log)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        code = exit_code(child)
        assert code in (0, -signal.SIGKILL), f"exit code {code}: {log.read_text()[-1500:]}"
        if command == "export" and place.out.exists():
            return 0  # its folder is written whole or not at all, and given again it is refused
        again = run_quietly(argv)
        assert again == 0, f"the same command again: exit code {again}"
        return again

    return Attempt(f"{' '.join(argv)}  # killed after {seconds:.3f} s, and again", call, (place.out, log))


def forked(work: Callable[[], object], log: Path) -> int:
    """Start work in a copy of this process, whose exit code it gives; return the process."""
    child = os.fork()
    if child:
        return child
    code: object = 1
    try:
        with log.open("w", 1) as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(OTHER_SECONDS)  # ends it
            try:
                code = work()
            except BaseException:
                traceback.print_exc()
    finally:
        os._exit(code if isinstance(code, int) else 1)


def exit_code(process: int) -> int:
    """Wait for a process that was started here, and return its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
