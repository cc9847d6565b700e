"""The command line: it parses, runs one command, and turns a user's mistake into one line and exit code 2."""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from draftsmith.recipes.cli.flags import add_flags, settings_from
from draftsmith.recipes.configs import command_settings

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
RESUMED = ("quickstart", "prepare", "train")  # commands that go on where they were interrupted
TRAIN_EPILOG = """\
recipes:
  eagle, eagle3, p_eagle, medusa, medusa_2, hydra, mlp_speculator, draft_model;
  quickstart_ before any of them but medusa_2: for the target that draftsmith ships;
  those for public targets: docs/recipes.md

example:
  draftsmith train eagle3 target=MODEL data.samples=data/my run.dir=runs/my evaluation.prompts=data/my/held_out.jsonl

the keys that are set most often; all, with their values, are in the config.yaml of any run:
  target=MODEL                     Hub name or directory
  data.samples=DIR                 what draftsmith prepare wrote
  run.dir=DIR                      folder to write, such as runs/my
  evaluation.prompts=FILE          measure every checkpoint on these
  run.steps=N                      of the optimiser
  run.checkpoint_every=N           steps
  optimizer.learning_rate=RATE     at its peak
  data.batch_size=N                samples a step, over all processes
  data.max_length=N                tokens of a row
  data.tokens_per_micro_batch=N    of a forward pass: less takes less memory
  init_from=CHECKPOINT             train on from it
"""


class Command(NamedTuple):
    """One command of the command line."""

    module: str  # below draftsmith.recipes; its `run(settings, console)` is the command
    settings: type  # the dataclass that its flags are made of
    text: str  # what it does, for --help
    epilog: str  # an example, for its own --help


COMMANDS = {
    "quickstart": Command(
        "studies.quickstart",
        command_settings.QuickstartSettings,
        "train and measure drafters with nothing to download",
        "example:\n  draftsmith quickstart --minutes 10",
    ),
    "prepare": Command(
        "cli.prepare",
        command_settings.PrepareCommandSettings,
        "let the target answer prompts: the text to train on",
        "example:\n  draftsmith prepare --target MODEL --prompts P.jsonl --held-out-share 0.05 --out data/my",
    ),
    "train": Command(
        "cli.train",
        command_settings.TrainSettings,
        "train a drafter by a recipe; the same command resumes an interrupted run",
        TRAIN_EPILOG,
    ),
    "evaluate": Command(
        "cli.evaluate",
        command_settings.EvaluateSettings,
        "measure acceptance and speed of drafters beside plain decoding",
        "example:\n  draftsmith evaluate --target MODEL --drafter runs/my/best --drafter ngram \\\n"
        "    --prompts held_out.jsonl --temperature 0 1 --batch-size 1 4 --out runs/my-evaluation",
    ),
    "tune": Command(
        "studies.tune",
        command_settings.TuneSettings,
        "fit draft length, tree and schedule on some prompts, and measure them on others",
        "example:\n  draftsmith tune --target MODEL --drafter runs/my/best --fit-prompts fit.jsonl \\\n"
        "    --prompts held_out.jsonl --batch-size 1 4 8 --out runs/my-choice",
    ),
    "load-test": Command(
        "studies.load_test",
        command_settings.LoadTestSettings,
        "put a drafter under traffic, with speculation on, off and scheduled",
        "example:\n  draftsmith load-test --target MODEL --drafter runs/my/best --prompts held_out.jsonl \\\n"
        "    --concurrency 1 2 4 8 --out runs/my-load",
    ),
    "replay": Command(
        "studies.replay",
        command_settings.ReplaySettings,
        "find the acceptance of all draft lengths and verification modes from one recording",
        "example:\n  draftsmith replay --target MODEL --drafter runs/my/best --drafter ngram \\\n"
        "    --prompts held_out.jsonl --temperature 0 1 --out runs/my-replay",
    ),
    "plan": Command(
        "studies.plan",
        command_settings.PlanSettings,
        "say before training whether a drafter can pay, from what it costs on this device",
        "example:\n  draftsmith plan --target MODEL --drafter eagle3 --drafter medusa --out runs/plan",
    ),
    "export": Command(
        "cli.export",
        command_settings.ExportSettings,
        "write a checkpoint as a serving engine loads it, with the command that serves it",
        "example:\n  draftsmith export runs/my/best --engine vllm --target MODEL --out exported",
    ),
    "watch": Command(
        "cli.watch",
        command_settings.WatchSettings,
        "show the acceptance of a running vLLM, beside what was measured at export",
        "example:\n  draftsmith watch http://localhost:8000 --against exported",
    ),
    "generate": Command(
        "cli.generate",
        command_settings.GenerateSettings,
        "stream text; tokens that were drafted and accepted are green",
        'example:\n  draftsmith generate "PROMPT" --target MODEL --drafter runs/my/best',
    ),
    "report": Command(
        "cli.report",
        command_settings.ReportSettings,
        "rebuild report.html and figures/ of a run, of a folder of runs, or of an evaluation",
        "example:\n  draftsmith report runs/my",
    ),
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
    line = f"error: {message}"
    print(line, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    return EXIT_USER_ERROR


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("draftsmith", description="Train drafters for speculative decoding, and measure them.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.text,
            description=command.text[0].upper() + command.text[1:] + ".",
            epilog=command.epilog,
            formatter_class=OneLineHelp,
        )
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_flags(subparser, command.settings)
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
    return Call(parsed.command, settings_from(COMMANDS[parsed.command].settings, parsed), parsed.debug)


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
    from rich.console import Console

    from draftsmith.models.errors import UserError
    from draftsmith.train.process.signals import Stopped

    try:
        quiet_libraries()
        module = import_module(f"draftsmith.recipes.{COMMANDS[call.name].module}")
        module.run(call.settings, Console())
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
