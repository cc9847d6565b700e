"""The rule that every case is held to, and the place in which it is tried.

Exit 0, or exit 2 with one line (of a function: `UserError` with one line); nothing written outside of the folders that
were named, nothing that runs from data, no control characters on the terminal, and limits to time and memory.
"""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import ClassVar
from unittest import mock

import torch
import yaml
from markdown_it import MarkdownIt
from safetensors import SafetensorError, safe_open

from draftsmith.inference.planning import cost_measurement
from draftsmith.inference.traffic import load_test
from draftsmith.models.errors import UserError, first_line, printable
from draftsmith.models.storage.files import write_whole
from draftsmith.recipes.pages import figures
from draftsmith.recipes.studies import load_test as load_test_command

REPOSITORY = Path(__file__).resolve().parents[2]
QUICK = (  # of what only takes longer where there is more of it
    *((cost_measurement, "LEAST_VISITS", 1), (cost_measurement, "MOST_VISITS", 1)),
    *((load_test, "TIMED_ROUNDS", 1), (figures, "DOTS_PER_INCH", 20)),
)
CPU_SECONDS, SECONDS = 20, 45  # of a case
MEMORY = 1 << 30  # bytes that a case may add to those of the process
ADDRESS_SPACE = 6 << 30  # that it may add: what asks for more is refused by the system
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
LONGEST_LINE = 4000  # characters of a message
MARKUP = ("<script>hostile", "<img src=x onerror")  # what damage.TEXTS would put into a page


@dataclass
class Attempt:
    """What a case tries."""

    told: str  # the command or the code, for people
    call: Callable[[], object]
    may_write: tuple[Path, ...] = ()  # folders and files; nothing else may change
    must_refuse: bool = False  # where success would be a wrong result without a word


@dataclass
class Place:
    """The folder of one case. `given` is for what it reads, `out` for what it is told to write."""

    folder: Path
    material: Path  # healthy files, which no case may change
    random: Random

    @property
    def given(self) -> Path:
        return self.folder / "given"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def copy(self, name: str) -> Path:
        """Return a copy of a healthy file or folder, to be damaged."""
        source, path = self.material / name, self.given / Path(name).name
        while path.exists():  # a command may be given the same thing twice
            path = path.with_name(f"other-{path.name}")
        shutil.copytree(source, path, symlinks=True) if source.is_dir() else shutil.copy(source, path)
        return path


@dataclass
class Fault:
    """A case in which the rule was broken."""

    case: str
    rule: str  # which was broken, and how
    where: str  # innermost place of ours
    told: str
    detail: str = field(repr=False)

    @property
    def key(self) -> str:
        """What is equal for faults of one cause."""
        return f"{self.rule.partition(':')[0]} at {self.where}"


class TimeUp(KeyboardInterrupt):
    """The time of a case is over. Where it was is kept, because a command turns interruptions into an exit code."""

    places: ClassVar[list[str]] = []


def judged(case: str, place: Place, make: Callable[[Place], Attempt]) -> Fault | None:
    """Try a case in its place. Returns what is wrong, or None."""
    for folder in (place.given, place.folder / "cwd"):
        folder.mkdir(parents=True)
    attempt = make(place)
    before = state_of(place.folder), STATES.get(place.material) or state_of(place.material)
    encoding = "ascii" if place.random.random() < 0.05 else "utf-8"
    out = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace", write_through=True)
    told, problem = "", ""
    with surroundings(place), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with limited():
                code = attempt.call()
        except SystemExit as exit:
            code = exit.code
        except UserError as error:
            told, code = printable(f"error: {error}", kept=""), 2  # as the command line prints it
        except MemoryError as error:
            problem, told = "memory", trace(error)
        except BaseException as error:
            problem, told = f"{type(error).__name__}: {error}"[:200], trace(error)
    told = told or text_of(err)
    if TimeUp.places:
        problem, told = "time", TimeUp.places.pop()
        TimeUp.places.clear()

    def fault(rule: str) -> Fault:
        return Fault(case, rule, where(told), attempt.told[:600], (told + text_of(out))[-3000:])

    if problem:
        return fault(problem)
    rule = broken_rule(0 if code is None else code, told, text_of(out), attempt) or changes(before, place, attempt)
    if not rule and (grown := memory_peak() - MEMORY_AT_REST[0]) > MEMORY:
        rule = f"memory: {grown >> 20} MB more"
    return fault(rule or "") if rule else None


def broken_rule(code: object, told: str, out: str, attempt: Attempt) -> str | None:
    """Return what is wrong with an exit code and with what was printed."""
    if isinstance(code, int) and code not in (0, 2) or isinstance(code, str):
        return f"exit code {code}: {told.strip()[-200:]}"
    if code == 2:
        lines = [line for line in told.strip().split("\n") if "is asked again" not in line]
        if not told.strip() or sum("error:" in line for line in lines) > 1 or len(lines) > 3:
            return f"lines: {len(lines)}"
        if max(map(len, lines)) > LONGEST_LINE:
            return f"lines: one of {max(map(len, lines))} characters"
    if CONTROL.search(told + out):
        return "control characters"
    if attempt.must_refuse and code != 2:
        return "silent: damaged, and taken"
    return None


State = dict[str, tuple[int, int]]
STATES: dict[Path, State] = {}  # of healthy files, after the latest case


def state_of(folder: Path) -> State:
    """Return size and time of change of everything below a folder."""
    found: State = {}
    folders = [str(folder)]
    for path in folders:  # which grows meanwhile
        found[f"{path}/"] = (0, 0)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    status = entry.stat(follow_symlinks=False)
                    found[entry.path] = (status.st_size, status.st_mtime_ns)
    return found


def changes(before: tuple[State, State], place: Place, attempt: Attempt) -> str | None:
    """Return what changed outside of what may be written, and what was left in half."""
    after = state_of(place.folder), state_of(place.material)
    STATES[place.material] = after[1]
    changed = [
        path
        for old, new in zip(before, after, strict=True)
        for path in old.keys() | new
        if old.get(path) != new.get(path)
    ]
    allowed = tuple(map(str, attempt.may_write))
    if outside := [path for path in changed if not any(path == own or path.startswith(f"{own}/") for own in allowed)]:
        return f"written outside: {', '.join(sorted(outside)[:3])}"
    moved = {value for state in before for value in state.values()}  # what keeps size and time was not written
    states = {path: value for state in after for path, value in state.items()}
    written = [Path(path) for path in changed if os.path.isfile(path) and states.get(path) not in moved]
    return next(filter(None, map(wrong_with, written)), None)


def wrong_with(path: Path) -> str | None:
    """Return what is wrong with a file that was written: cut in half, or with foreign markup in it."""
    text = path.read_text("utf-8", "replace") if path.suffix in (".md", ".html", ".json", ".yaml", ".jsonl") else ""
    if path.suffix in (".md", ".html") and any(markup in text for markup in MARKUP):
        page = MarkdownIt("gfm-like").render(text) if path.suffix == ".md" else text  # what is fenced stays text
        if any(markup in page for markup in MARKUP):
            return f"markup: in {path.name}"
    try:
        if path.suffix == ".json":
            json.loads(text)
        elif path.suffix == ".jsonl":
            [json.loads(line) for line in text.splitlines()]
        elif path.suffix == ".yaml":
            yaml.load(text, yaml.CSafeLoader)
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
    except (ValueError, yaml.YAMLError, SafetensorError) as error:
        return f"half: {path.name} was written, and cannot be read: {first_line(error)}"
    return None


# --- limits


MEMORY_AT_REST = [0]


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise `TimeUp` after a time, have the system refuse too much memory, and note the peak."""

    start = unhindered_time()

    def end(number: int, frame: FrameType | None) -> None:
        left = SECONDS - (unhindered_time() - start)
        if number == signal.SIGALRM and left > 0.1:  # other programs had the processor
            signal.setitimer(signal.ITIMER_REAL, left)
            return
        TimeUp.places.append("".join(traceback.format_stack(frame)))
        raise TimeUp(f"{CPU_SECONDS} s of the processor or {SECONDS} s are over")

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    status = status_of_process()
    MEMORY_AT_REST[0] = status["VmRSS"]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handlers = [(number, signal.signal(number, end)) for number in (signal.SIGALRM, signal.SIGVTALRM)]
    resource.setrlimit(resource.RLIMIT_AS, (status["VmSize"] + ADDRESS_SPACE, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for number, handler in handlers:
            signal.signal(number, handler)


def unhindered_time() -> float:
    """Return the time in seconds, without that in which this thread could run and other programs had the processor."""
    waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
    return time.monotonic() - int(waited) / 1e9


def status_of_process() -> dict[str, int]:
    """Return the sizes of this process in bytes, as Linux tells them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[-1] == "kB"}


def memory_peak() -> int:
    return status_of_process()["VmHWM"]


@contextlib.contextmanager
def surroundings(place: Place) -> Iterator[None]:
    """Give a case its working directory, and put back what it may change of the process."""
    directory, environment, threads = os.getcwd(), dict(os.environ), torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    os.chdir(place.folder / "cwd")
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes longer than many a case
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            for module, name, value in QUICK:
                stack.enter_context(mock.patch.object(module, name, value))
            yield
    finally:
        os.chdir(directory)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def figures_undrawn() -> Iterator[None]:
    """Write something in the place of figures, which take longer than all else: for commands that draw healthy data."""

    def save(path: Path, draw: object, height: float = 0.0) -> str:
        write_whole(path, bytes(1000))
        return '<svg viewBox="0 0 1 1"></svg>'

    with mock.patch.object(figures, "save_plot", save), mock.patch.object(load_test_command, "save_plot", save):
        yield


# --- text


def text_of(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def trace(error: BaseException) -> str:
    """Return the traceback, without the repeated frames of a recursion."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) < 20_000 else text[:10_000] + "\n...\n" + text[-10_000:]


def where(text: str) -> str:
    """Return file and function of the innermost frame of ours in a traceback."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    ours = [
        f"{file}:{line} {name}"
        for path, line, name in frames
        if (file := own_file(path)) and not file.startswith("tests")
    ]
    named = re.findall(r"unexpected \S+ at \S+", text)  # by the last resort of the command line
    return (ours or named or ["no frame of ours"])[-1]


def own_file(path: str) -> str:
    """Return the path of a file of ours from the top of the repository, else nothing."""
    resolved = Path(path).resolve()
    if path.startswith("<"):  # frozen modules of Python
        return ""
    return str(resolved.relative_to(REPOSITORY)) if resolved.is_relative_to(REPOSITORY) else ""
