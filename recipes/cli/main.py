"""The command line: parses, calls `commands`, and turns mistakes of the user's into one line and exit code 2."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
RESUMED = ("quickstart", "prepare", "train")  # go on where they were interrupted
PROMPTS = "file, folder, Hub dataset as NAME:COLUMN[:SPLIT], or a .yaml mixture of them (docs/data.md)"
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


class OneLineParser(argparse.ArgumentParser):
    """argparse, saying what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(fail(f"{message} (see {self.prog} --help)"))


def fail(message: str) -> int:
    """Say what is wrong; the exit code. torch's launcher ends with a summary, which repeats what lies in its file."""
    line = f"error: {message}"
    print(line, file=sys.stderr)
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": line, "timestamp": int(time.time())}))
    return EXIT_USER_ERROR


def _quickstart(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder to write (%(default)s)")
    sub.add_argument("--drafters", default="eagle3,hydra,medusa,draft_model", help="comma-separated (%(default)s)")
    sub.add_argument("--minutes", type=float, default=10.0, help="time for everything (%(default)s)")
    sub.add_argument("--target", help="Hub name or directory; by default the target that draftsmith ships")
    _add_device(sub)


def _prepare(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--target", required=True, help="Hub name or directory")
    sub.add_argument("--prompts", required=True, help=PROMPTS)
    sub.add_argument("--out", type=Path, required=True, help="folder to write")
    sub.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (%(default)s)")
    sub.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="taken in turn (%(default)s)")
    sub.add_argument("--top-p", type=float, nargs="+", default=[1.0], help="one a temperature, or one for all above 0")
    sub.add_argument("--top-k", type=int, nargs="+", default=[0], help="likewise; 0 is off (%(default)s)")
    sub.add_argument("--batch-size", type=int, default=32, help="prompts answered at a time (%(default)s)")
    sub.add_argument(
        "--drafter", help="that speeds the target up: ngram, suffix, lookahead, a checkpoint, or none (the default)"
    )
    sub.add_argument("--draft-length", type=int, help="of its chains (4)")
    sub.add_argument("--endpoint", metavar="URL", help="a vLLM or SGLang server that runs the target and answers")
    sub.add_argument(
        "--held-out-share", type=float, default=0.0, help="of the prompts, left for evaluation in OUT/held_out.jsonl"
    )
    sub.add_argument("--as-given", action="store_true", help="store conversations as they are: off-policy")
    sub.add_argument("--skip-long", action="store_true", help="leave out prompts that exceed the target's context")
    sub.add_argument("--dry-run", action="store_true", help="measure on some prompts what all will take; write nothing")
    sub.add_argument("--seed", type=int, default=0)
    _add_device(sub)


def _train(sub: argparse.ArgumentParser) -> None:
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.epilog = TRAIN_EPILOG
    sub.add_argument("recipe", metavar="RECIPE", help="see below")
    sub.add_argument("--config", type=Path, help="YAML over the recipe, such as the config.yaml of a run")
    sub.add_argument(
        "--overfit",
        type=int,
        metavar="N",
        help="only learn N sequences by heart, to see that drafter and decoder agree",
    )
    sub.add_argument("overrides", nargs="*", metavar="key=value", help="over both, by dotted name")


def _evaluate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--target", required=True, help="Hub name or directory")
    sub.add_argument(
        "--drafter",
        required=True,
        action="append",
        help="checkpoint, Hub name, ngram, suffix, lookahead, none, or a cascade suffix+CHECKPOINT; repeatable",
    )
    sub.add_argument("--prompts", required=True, nargs="+", help=f"{PROMPTS}; several are told apart")
    sub.add_argument("--num-prompts", type=int, help="take so many of each (all)")
    sub.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--batch-size", type=int, nargs="+", default=[1])
    sub.add_argument("--draft-length", type=int, nargs="+", help="of chains (4, or none where there is a --tree)")
    sub.add_argument("--tree", nargs="+", default=[], help="NODES,DEPTH,WIDTH (EAGLE-2), or a .json list of choices")
    sub.add_argument("--schedule", type=Path, metavar="FILE", help="draft lengths by running requests (docs/load.md)")
    sub.add_argument("--verification-mode", help="by default greedy, else probabilistic or one_hot, by the drafter")
    sub.add_argument(
        "--synthetic-acceptance", type=float, nargs="+", default=[], metavar="RATE", help="accept at these chances"
    )
    sub.add_argument(
        "--choose", metavar="FIT_PROMPTS", help="fit draft length, tree and schedule on these, report on --prompts"
    )
    sub.add_argument("--certify", action="store_true", help="test that the output is the target's; takes a minute")
    sub.add_argument(
        "--replay", action="store_true", help="acceptance only, of all draft lengths and modes, from one recording"
    )
    sub.add_argument(
        "--baseline", nargs="+", default=[], metavar="NAME", help="of transformers: generate, assisted, prompt_lookup"
    )
    sub.add_argument("--max-new-tokens", type=int, default=32, help="of an answer (%(default)s)")
    sub.add_argument("--repeats", type=int, help="of every setting (up to 5, as fit into 4 minutes in all)")
    sub.add_argument("--minutes", type=float, help="time of all that chooses the repeats instead")
    sub.add_argument("--num-threads", type=int, help="CPU threads to compute with (torch's default)")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--out", type=Path, required=True, help="folder to write")
    _add_device(sub)
    _add_load(sub)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load test", "requests that arrive over time (docs/load.md)")
    load.add_argument("--load", action="store_true", help="speculation on, off and scheduled, under traffic")
    load.add_argument("--rate", type=float, nargs="+", help="stages of an open test: requests a second")
    load.add_argument("--concurrency", type=int, nargs="+", help="stages of a closed test: requests at once")
    load.add_argument("--requests", type=int, help="of each run (50, but 8 for each client)")
    load.add_argument("--max-batch", type=int, help="requests that an open test runs at once (16)")
    load.add_argument("--sla-ttft-ms", type=float, help="that p95 of the time to the first token must keep")
    load.add_argument("--sla-tpot-ms", type=float, help="that p95 of the time per later token must keep")
    for name, text in (("prompt", "the nearest prompts are taken"), ("output", "answers are cut there at the latest")):
        load.add_argument(
            f"--{name}-lengths", type=float, nargs=2, metavar=("MEDIAN", "SIGMA"), help=f"lognormal; {text}"
        )


def _plan(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--target", required=True, help="Hub name or directory")
    sub.add_argument(
        "--drafter", required=True, action="append", help="kind or recipe, untrained, or a checkpoint; repeatable"
    )
    sub.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="(%(default)s)")
    sub.add_argument("--context", type=int, help="tokens of each request (256, or half of the target's context)")
    sub.add_argument("--draft-length", type=int, nargs="+", default=[], help="(1 to 8, or as far as the drafter goes)")
    sub.add_argument("--tree-nodes", type=int, nargs="+", default=[], metavar="N", help="trees of so many nodes, too")
    sub.add_argument(
        "--acceptance",
        nargs="+",
        default=[],
        metavar="FILE_OR_RATE",
        help="evaluation.json of a similar drafter, or the chance of each drafted token to be accepted",
    )
    sub.add_argument("--num-threads", type=int, help="CPU threads to compute with (torch's default)")
    sub.add_argument("--out", type=Path, required=True, help="folder to write")
    _add_device(sub)


def _export(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="such as runs/NAME/best, or a name on the Hub")
    engines = ["vllm", "sglang", "speculators", "safeailab", "fasterdecoding"]
    sub.add_argument("--engine", required=True, choices=engines, help="an engine, or the layout of another project")
    sub.add_argument("--target", required=True, help="Hub name or directory")
    sub.add_argument("--out", type=Path, required=True, help="folder to write")
    sub.add_argument("--prompts", help="held-out prompts, to measure what was written and choose the draft length")
    sub.add_argument("--num-prompts", type=int, help="take so many of them (all)")
    sub.add_argument(
        "--draft-length", type=int, nargs="+", default=[], help="to serve with, or to choose from (1 to 5)"
    )
    sub.add_argument("--batch-size", type=int, nargs="+", default=[1], help="to measure; several give a schedule")
    sub.add_argument("--max-new-tokens", type=int, default=64)
    sub.add_argument("--repeats", type=int, default=3)
    sub.add_argument("--check", metavar="VENV_OR_URL", help="serve it with a real vLLM, and compare counters and texts")
    sub.add_argument("--push", metavar="NAME", help="upload it to the Hub")
    _add_device(sub)


def _watch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("url", metavar="URL", help="such as http://localhost:8000")
    sub.add_argument("--against", type=Path, metavar="DIR", help="exported folder with its evaluation.json")
    sub.add_argument("--interval", type=float, default=30.0, help="seconds between readings (%(default)s)")
    sub.add_argument("--readings", type=int, help="stop after so many (never)")


def _generate(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("prompt", metavar="PROMPT")
    sub.add_argument("--target", required=True, help="Hub name or directory")
    sub.add_argument(
        "--drafter", required=True, help="checkpoint, Hub name, ngram, suffix, lookahead, none, or suffix+CHECKPOINT"
    )
    sub.add_argument("--max-new-tokens", type=int, default=128)
    sub.add_argument("--temperature", type=float, default=0.0)
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--draft-length", type=int, help="of its chains (4)")
    sub.add_argument("--schedule", type=Path, help="of draft lengths, a .json file (docs/load.md)")
    sub.add_argument("--seed", type=int, default=0)
    _add_device(sub)


def _report(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run", type=Path, metavar="RUN")


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N; by default the GPU if there is one")


COMMANDS = {  # name: what --help says, and what adds its arguments
    "quickstart": ("train and measure drafters with nothing to download", _quickstart),
    "prepare": ("let the target answer prompts: the text to train on", _prepare),
    "train": ("train a drafter by a recipe; the same command resumes an interrupted run", _train),
    "evaluate": ("measure acceptance and speed of drafters beside plain decoding", _evaluate),
    "plan": ("say before training whether a drafter can pay, from what it costs on this device", _plan),
    "export": ("write a checkpoint as a serving engine loads it, with the command that serves it", _export),
    "watch": ("acceptance of a running vLLM, beside what was measured at export", _watch),
    "generate": ("stream text; tokens that were drafted and accepted are green", _generate),
    "report": ("rebuild report.html and figures/ of a run, of a folder of runs, or of an evaluation", _report),
}


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("draftsmith", description="Train drafters for speculative decoding, and measure them.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (text, add_arguments) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_arguments(sub)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; `key=value` ones may stand before and after options."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (args.command != "train" or any(word.startswith("-") for word in rest)):
        mend = "; settings of a run are given as key=value, such as run.steps=3" if args.command == "train" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{mend}")
    if rest:
        args.overrides += rest
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parse(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        print(f"interrupted: {what_the_same_command_does(args)}", file=sys.stderr)
        return EXIT_INTERRUPTED


def what_the_same_command_does(args: argparse.Namespace) -> str:
    """After an interruption."""
    tried = getattr(args, "dry_run", False) or getattr(args, "overfit", None) is not None  # these write nothing
    if args.command in RESUMED and not tried:
        return f"give the same command again to go on ({args.command})"
    return f"the same command starts anew ({args.command})"


def run(args: argparse.Namespace) -> int:
    """One command; its exit code."""
    from draftsmith.models.errors import UserError  # torch is slow to import and --help needs none of it
    from draftsmith.recipes.cli import commands
    from draftsmith.train.process.signals import Stopped

    try:
        getattr(commands, args.command)(args)
    except UserError as error:
        if args.debug:
            raise
        return fail(str(error))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return stopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
