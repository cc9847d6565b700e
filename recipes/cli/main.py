"""The command line: it parses, runs one command, and turns a user's mistake into one line and exit code 2."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from draftsmith.recipes.cli.flags import add_flags, settings_from
from draftsmith.recipes.configs import command_settings

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
RESUMED = ("quickstart", "prepare", "train")  # commands that go on where they were interrupted


# By name: the module below draftsmith.recipes whose `run(settings, console)` is the command, and its settings.
COMMANDS: dict[str, tuple[str, type]] = {
    "quickstart": ("studies.quickstart", command_settings.QuickstartSettings),
    "prepare": ("cli.prepare", command_settings.PrepareCommandSettings),
    "train": ("cli.train", command_settings.TrainSettings),
    "evaluate": ("cli.evaluate", command_settings.EvaluateSettings),
    "tune": ("studies.tune", command_settings.TuneSettings),
    "load-test": ("studies.load_test", command_settings.LoadTestSettings),
    "replay": ("studies.replay", command_settings.ReplaySettings),
    "plan": ("studies.plan", command_settings.PlanSettings),
    "export": ("cli.export", command_settings.ExportSettings),
    "watch": ("cli.watch", command_settings.WatchSettings),
    "generate": ("cli.generate", command_settings.GenerateSettings),
    "report": ("cli.report", command_settings.ReportSettings),
}
LOAD_TEST_FLAGS = (
    *("--rate", "--concurrency", "--requests", "--max-batch", "--prompt-lengths", "--output-lengths"),
    *("--sla-ttft-ms", "--sla-tpot-ms"),
)
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
        super().__init__(prog, max_help_position=34)


class OneLineParser(argparse.ArgumentParser):
    """argparse, saying what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(fail(f"{message} (see {self.prog} --help)"))


def fail(message: str) -> int:
    """Say what is wrong and return the exit code. torch's launcher ends with a summary that repeats its file's line."""
    from draftsmith.data.console import printable  # `--help` does not wait for rich

    line = printable(f"error: {message}", kept="")
    print(line, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    return EXIT_USER_ERROR


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("draftsmith", description="Train drafters for speculative decoding, and measure them.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, settings_class) in COMMANDS.items():
        text, _, epilog = str(getdoc(settings_class)).partition("\n\n")
        subparser = subparsers.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=OneLineHelp)
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_flags(subparser, settings_class)
    return parser


def parse(argv: Sequence[str]) -> Call:
    """Return the command that was given; `key=value` overrides may stand before and after options."""
    parser = build_parser()
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
    """Run one command; returns the exit code."""
    call = parse(sys.argv[1:] if argv is None else argv)
    try:
        return run(call)
    except KeyboardInterrupt:
        print(f"interrupted: {after_interruption(call)}", file=sys.stderr)
        return EXIT_INTERRUPTED


def after_interruption(call: Call) -> str:
    """Return what the same command does when it is given again."""
    writes_nothing = getattr(call.settings, "dry_run", False) or getattr(call.settings, "overfit", None) is not None
    if call.name in RESUMED and not writes_nothing:
        return f"give the same command again to go on ({call.name})"
    return f"the same command starts anew ({call.name})"


def run(call: Call) -> int:
    """Run one command and return its exit code. torch is imported here: `--help` does not wait for it."""
    from draftsmith.data.console import shared_console
    from draftsmith.models.errors import UserError
    from draftsmith.train.process.signals import Stopped

    try:
        quiet_libraries()
        module = import_module(f"draftsmith.recipes.{COMMANDS[call.name][0]}")
        module.run(call.settings, shared_console())
    except UserError as error:
        if call.debug:
            raise
        return fail(str(error))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    return 0


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars and warnings out of the output."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it warns of tied weights at every checkpoint


if __name__ == "__main__":
    sys.exit(main())
