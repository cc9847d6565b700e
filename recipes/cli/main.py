"""The command line: it parses, runs one command, and turns a user's mistake into one line and exit code 2."""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from inspect import getdoc
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from draftsmith.models.errors import UserError, first_line, is_out_of_memory, one_line, own_place, shown
from draftsmith.models.storage.files import DISK_FAULTS
from draftsmith.recipes.cli.flags import add_flags, settings_from
from draftsmith.recipes.cli.output_folder import output_folder
from draftsmith.recipes.configs import command_settings, data_settings, server_settings, training_settings

EXIT_FAULT, EXIT_USER_ERROR = 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as a shell tells them
NUMBERS_OF_HUB = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")  # huggingface_hub fails to import with others
RESUMED = ("quickstart", "auto", "refresh", "prepare", "train")  # commands that go on where they were interrupted


# By name of the command: the module below draftsmith.recipes whose `run(settings, console)` it is, and its settings.
COMMANDS: dict[str, tuple[str, type]] = {
    "quickstart": ("quickstart.quickstart", training_settings.QuickstartSettings),
    "auto": ("auto.auto", training_settings.AutoSettings),
    "refresh": ("refreshing.refresh", training_settings.RefreshSettings),
    "prepare": ("cli.prepare", data_settings.PrepareCommandSettings),
    "convert": ("cli.convert", data_settings.ConvertSettings),
    "train": ("cli.train", command_settings.TrainSettings),
    "evaluate": ("cli.evaluate", command_settings.EvaluateSettings),
    "tune": ("studies.tune", command_settings.TuneSettings),
    "load-test": ("studies.load_test", command_settings.LoadTestSettings),
    "replay": ("studies.replay", command_settings.ReplaySettings),
    "plan": ("planning.plan", command_settings.PlanSettings),
    "export": ("cli.export", command_settings.ExportSettings),
    "bench": ("bench.bench", server_settings.BenchSettings),
    "tune-server": ("studies.tune_server", server_settings.TuneServerSettings),
    "watch": ("watching.watch", server_settings.WatchSettings),
    "generate": ("cli.generate", command_settings.GenerateSettings),
    "report": ("cli.report", command_settings.ReportSettings),
}
LOAD_TEST_FLAGS = (
    *("--rate", "--concurrency", "--requests", "--max-batch", "--prompt-lengths", "--output-lengths"),
    *("--sla-ttft-ms", "--sla-tpot-ms"),
)
# What helps where memory was short.
LESS_WORK = "give a smaller --batch-size or fewer --max-new-tokens"
LESS_MEMORY = {
    "train": "lower data.tokens_per_micro_batch (below the longest row, with data.max_length, it is another run)",
    "load-test": "give less --concurrency or --max-batch, or fewer --max-new-tokens",
    "replay": "give fewer --num-prompts or --max-new-tokens",
    "generate": "give fewer --max-new-tokens or a shorter prompt",
    "plan": "give a smaller --batch-size or --context",
    "quickstart": "give a smaller --target, or fewer --drafters",
    "auto": "give a smaller --target, or fewer --drafters",
    "refresh": LESS_WORK,
}
MOVED = {  # flags that `evaluate` had, and where they are now
    "--choose": "a command: draftsmith tune --fit-prompts",
    "--replay": "a command: draftsmith replay",
    "--load": "a command: draftsmith load-test",
    **dict.fromkeys(LOAD_TEST_FLAGS, "a flag of another command: draftsmith load-test"),
}


class Call(NamedTuple):
    """A command with what the user gave it."""

    name: str
    settings: Any  # of the type that the command declares
    debug: bool  # show the traceback of an error


class OneLineHelp(argparse.RawDescriptionHelpFormatter):
    """Help with room for most flags on a line of their own."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


class OneLineParser(argparse.ArgumentParser):
    """argparse, saying what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(fail(f"{message} (see {self.prog} --help)"))


def fail(message: str, exit_code: int = EXIT_USER_ERROR) -> int:
    """Say what is wrong and return the exit code.

    The message also goes to the file that torch's launcher reads it from, for the summary at its end.
    """
    line = one_line(f"error: {message}")
    with contextlib.suppress(OSError):  # whose place is full or gone: the exit code still tells
        print(line, file=sys.stderr)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    return exit_code


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of all commands; only those that are named have their flags, which take a moment to make."""
    parser = OneLineParser(
        "draftsmith",
        description="Train drafters for speculative decoding, and measure them.",
        epilog="example:\n  draftsmith quickstart\n  draftsmith train --help",
        formatter_class=OneLineHelp,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, settings_class) in COMMANDS.items():
        text, _, epilog = str(getdoc(settings_class)).partition("\n\n")
        subparser = subparsers.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=OneLineHelp, add_help=False
        )
        if name in argv:
            add_flags(subparser, settings_class)
    return parser


def parse(argv: Sequence[str]) -> Call:
    """Return the command that was given; `key=value` overrides may stand before and after options."""
    parser = build_parser(argv)
    if argv[:1] == ["evaluate"]:
        for flag in (word.partition("=")[0] for word in argv):
            if flag in MOVED:
                parser.exit(fail(f"{flag} is now {MOVED[flag]} ..."))
    parsed, rest = parser.parse_known_args(argv)
    if rest and (parsed.command != "train" or any(word.startswith("-") for word in rest)):
        mend = "; settings of a run are given as key=value, such as run.steps=3" if parsed.command == "train" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{mend}")
    if rest:
        parsed.overrides = [*getattr(parsed, "overrides", []), *rest]
    return Call(parsed.command, settings_from(COMMANDS[parsed.command][1], parsed), parsed.debug)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Whatever goes wrong is told in one line."""
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a text may hold characters that the locale's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            return run_arguments(sys.argv[1:] if argv is None else argv)
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):  # rich ends so
            raise
        discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # of the flush: a command tells its own
        discard_output()
        return fail(f"standard output takes no more ({error.strerror}): send it to where there is room")


def discard_output() -> None:
    """Let what Python flushes at its end go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_closed_streams() -> None:
    """Give closed standard streams to no file: what libraries print by their numbers would be written into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # argparse of Python before 3.11.4 writes help to it all the same
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def run_arguments(argv: Sequence[str]) -> int:
    """Run the command that was given, and return its exit code."""
    call = None
    try:
        refuse_surroundings()
        call = parse(argv)
        with faults_of_threads():
            run(call)
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or f"interrupted: {after_interruption(call)}", file=sys.stderr)
        return getattr(interrupt, "exit_code", EXIT_INTERRUPTED)  # a run that has stopped in order says more
    except (BrokenPipeError, SystemExit):
        raise
    except BaseException as error:  # panics of the Rust libraries are no `Exception`
        if call and call.debug:
            raise
        return fail(*message_of(error, call))
    return 0


def refuse_surroundings() -> None:
    """Raise `UserError` where the process was started so that the libraries fail or write where nobody expects it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the folder in which this was started was removed: change to another one") from None
    if sys.flags.optimize > 1:
        raise UserError("Python was started with -OO, without docstrings, which transformers reads: use -O, or neither")
    if os.path.expanduser("~") == "~":
        raise UserError("HOME is not set, and the system knows no home of this user: set it, for instance HOME=/tmp")
    for name in NUMBERS_OF_HUB:
        if not (value := os.environ.get(name, "0")).isdecimal():
            raise UserError(f"the environment variable {name}={shown(value)}: give whole seconds, or unset it")


@contextlib.contextmanager
def faults_of_threads() -> Iterator[None]:
    """Raise in the main thread what other threads of draftsmith raise during the block, unwaited for."""
    faults: list[BaseException] = []
    default = threading.excepthook

    def note(thread: threading.ExceptHookArgs) -> None:
        frames = list(traceback.walk_tb(thread.exc_traceback))
        if thread.exc_value is None or own_place(frames) is None:  # of a library, which may go on without it
            default(thread)
            return
        faults.append(thread.exc_value)
        signal.pthread_kill(main_thread, signal.SIGURG)  # wakes it, wherever it waits

    def stop(number: int, frame: FrameType | None) -> None:
        if faults:
            raise faults[0]

    main_thread, handler = threading.get_ident(), signal.signal(signal.SIGURG, stop)
    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = default
        signal.signal(signal.SIGURG, handler)
    if faults:  # the block may have taken it for a fault of its own, and gone on
        raise faults[0]


def message_of(error: BaseException, call: Call | None) -> tuple[str, int]:
    """Return the message of an error, and the exit code."""
    if isinstance(error, UserError):
        return str(error), getattr(error, "exit_code", EXIT_USER_ERROR)
    name = call.name if call else ""
    if is_out_of_memory(error):
        return f"out of memory ({first_line(error)}): {LESS_MEMORY.get(name, LESS_WORK)}", EXIT_USER_ERROR
    if fault := next((text for text in DISK_FAULTS if text in str(error)), None):
        where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        return f"a file cannot be written{where}: {fault}: mend that; {after_interruption(call)}", EXIT_USER_ERROR
    if isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError):  # a link to itself
        return f"{error.filename}: {error.strerror}: mend or remove it; {after_interruption(call)}", EXIT_USER_ERROR
    frames = list(traceback.walk_tb(error.__traceback__))[::-1]
    place = own_place(frames) or f"{frames[0][0].f_code.co_filename}:{frames[0][1]}"
    return (
        f"unexpected {type(error).__name__} at {place}: {first_line(error)}; this is a fault of draftsmith's: please "
        f"report it with what `draftsmith {name} --debug ...` shows",
        EXIT_FAULT,
    )


def after_interruption(call: Call | None) -> str:
    """Return what the same command does when it is given again."""
    if call is None:
        return "nothing was begun"
    writes_nothing = getattr(call.settings, "dry_run", False) or getattr(call.settings, "overfit", None) is not None
    if call.name in RESUMED and not writes_nothing:
        return f"give the same command again to go on ({call.name})"
    return f"the same command starts anew ({call.name})"


def run(call: Call) -> None:
    """Run one command. Its mistakes are told before torch is imported, which takes seconds."""
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)  # it warns of every try to reach the Hub
    call.settings.refuse_mistakes()
    from draftsmith.data.console import shared_console
    from draftsmith.data.progress import waiting

    with output_folder(call.name, call.settings):
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns where it cannot keep its fonts at home
        with waiting("importing PyTorch ..."):
            module = import_module(f"draftsmith.recipes.{COMMANDS[call.name][0]}")
            quiet_libraries()
        module.run(call.settings, shared_console())


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and warnings out of the output."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of tied weights at every checkpoint


if __name__ == "__main__":
    sys.exit(main())
