"""What each command of the command line does. Bad input raises `UserError` before anything is written."""

import argparse
import difflib
import itertools
import json
import logging
import os
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import PartialState
from huggingface_hub import HfApi
from rich.console import Console

from draftsmith.data.answers.as_given import store_given
from draftsmith.data.answers.estimate import estimate
from draftsmith.data.answers.prepare import PrepareSettings, Work
from draftsmith.data.answers.prepare import prepare as prepare_samples
from draftsmith.data.progress import notice
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.data.prompts.splits import HELD_OUT
from draftsmith.data.ranks import rank_and_num_ranks
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.decoder import check_sampling
from draftsmith.inference.decoding.schedule import read_schedule
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError, first_line, require_at_least
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import DynamicTree, StaticTree
from draftsmith.recipes.configs.public_targets import TARGET_RECIPES
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.comparison import Options, compare
from draftsmith.recipes.reports.printing import print_evaluations
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.summary import certificate_text
from draftsmith.recipes.serving.deliver import DeliverySettings, deliver
from draftsmith.recipes.serving.watch import watch as watch_server
from draftsmith.recipes.studies.load_test import evaluate_under_load, refuse_load_settings
from draftsmith.recipes.studies.plan import PlanSettings
from draftsmith.recipes.studies.plan import plan as make_plan
from draftsmith.recipes.studies.quickstart import run_quickstart
from draftsmith.recipes.studies.replay import replay_drafters, replay_settings
from draftsmith.recipes.studies.tune import choose_and_evaluate, refuse_choose_settings
from draftsmith.train import train as train_drafter
from draftsmith.train.config import resolve
from draftsmith.train.folder.checkpoint import checkpoints
from draftsmith.train.folder.run_folder import best_checkpoint, measured_checkpoints
from draftsmith.train.overfit import overfit

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
logging.getLogger("accelerate").setLevel(logging.ERROR)  # it tells of tied weights at every checkpoint

console = Console()
AS_IS: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}  # to be copied: paths and commands

DEFAULT_REPEATS, DEFAULT_MINUTES = 5, 4.0  # of evaluate: so many repeats, or as many as fit
MOST_REPEATS = 25  # where a time is given


def quickstart(args: argparse.Namespace) -> None:
    kinds = [kind.strip() for kind in args.drafters.split(",") if kind.strip()]
    run_quickstart(args.out, kinds, args.minutes, args.target, args.device, console)


def prepare(args: argparse.Namespace) -> None:
    settings = PrepareSettings(
        args.max_new_tokens,
        samplings_in_turn(args.temperature, args.top_p, args.top_k),
        args.batch_size,
        args.seed,
        args.drafter or "none",
        4 if args.draft_length is None else args.draft_length,
        args.endpoint,
        args.skip_long,
        args.held_out_share,
    )
    if args.as_given:
        if args.dry_run or settings != PrepareSettings(held_out_share=args.held_out_share):
            raise UserError("--as-given asks the target for no answers: leave out the settings of answers")
        target = Target.from_pretrained(args.target, args.device or device_of_process())
        store_given(target, args.prompts, args.out, args.held_out_share)
        print_next_of_prepare(args)
        return
    if args.endpoint and (args.drafter or args.draft_length is not None or args.device):
        raise UserError("--drafter, --draft-length and --device have no effect behind an --endpoint: leave them out")
    if args.draft_length is not None and settings.drafter == "none":
        raise UserError("--draft-length has no effect without a --drafter: leave it out, or give --drafter ngram")
    if args.endpoint:
        target = Target.without_weights(args.target)
    else:
        target = Target.from_pretrained(args.target, args.device or device_of_process())
    if args.dry_run:
        console.print(estimate(Work(target, args.prompts, settings)).table(), highlight=False)
    else:
        prepare_samples(target, args.prompts, args.out, settings)
        print_next_of_prepare(args)


def print_next_of_prepare(args: argparse.Namespace) -> None:
    """The command that trains on what was prepared; from the first process alone."""
    if rank_and_num_ranks()[0] == 0:
        words = ["train eagle3", f"target={args.target}", f"data.samples={args.out}", "run.dir=runs/NAME"]
        if args.held_out_share:
            words.append(f"evaluation.prompts={args.out / HELD_OUT}")
        console.print(f"next: draftsmith {' '.join(words)}", **AS_IS)


def samplings_in_turn(temperatures: list[float], top_p: list[float], top_k: list[int]) -> tuple[Sampling, ...]:
    """One sampling a temperature; a single top-p or top-k is that of all temperatures above 0."""
    columns: list[Any] = [temperatures]
    for name, values, off in (("--top-p", top_p, 1.0), ("--top-k", cast(list[float], top_k), 0)):
        if len(values) == 1:
            values = [values[0] if temperature or not any(temperatures) else off for temperature in temperatures]
        if len(values) != len(temperatures):
            raise UserError(
                f"{name} has {len(values)} values for {len(temperatures)} temperatures: give one, or as many"
            )
        columns.append(values)
    return tuple(check_sampling(*values) for values in zip(*columns, strict=True))


def device_of_process() -> str | None:
    """The GPU of this process where a launcher has started several; None leaves the choice to the target."""
    local_rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{local_rank}" if local_rank and torch.cuda.is_available() else None


def train(args: argparse.Namespace) -> None:
    if args.recipe not in RECIPES:
        near = difflib.get_close_matches(args.recipe, RECIPES, n=2, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}; " if near else ""
        general = ", ".join(name for name in RECIPES if name not in TARGET_RECIPES)
        raise UserError(f"unknown recipe {args.recipe!r}; {hint}there are {general}, and those of docs/recipes.md")
    config = resolve(RECIPES[args.recipe](), args.config, args.overrides)
    if args.overfit is not None:
        overfit(config, args.overfit)
        return
    run = train_drafter(config)
    if not PartialState().is_main_process:
        return
    if measured_checkpoints(run):
        console.print(f"report: {build_report(run)}")
        console.print(f"best checkpoint: {run / 'best'}, which is {best_checkpoint(run).name}", **AS_IS)
    else:
        console.print(f"checkpoint: {checkpoints(run)[-1]}", **AS_IS)


def evaluate(args: argparse.Namespace) -> None:
    """A function a mode, each from the target and its prompt sets on."""
    refuse_several_processes(args)
    written = args.out / ("load.json" if args.load else "replay.json" if args.replay else "evaluation.md")
    if written.is_file() and rank_and_num_ranks()[0] == 0:
        notice(f"{written} is of an earlier evaluation and will be overwritten")
    if args.load:
        return evaluate_under_load(args, console)
    refuse_load_settings(args)
    if args.choose and not args.replay:
        refuse_choose_settings(args)
    if args.num_threads is not None:
        require_at_least("--num-threads", args.num_threads)
    grid = settings_grid(args)
    target = Target.from_pretrained(args.target, args.device or device_of_process())
    if args.num_prompts is not None:
        require_at_least("--num-prompts", args.num_prompts)
    prompt_sets = [read_prompt_set(source, target, args.num_prompts, args.max_new_tokens) for source in args.prompts]
    names = [prompts.name for prompts in prompt_sets]
    if len(set(names)) < len(names):
        raise UserError(f"--prompts: the sets {', '.join(names)} cannot be told apart by name: rename one of the files")
    if args.replay:
        with cpu_threads(args.num_threads):
            replay_drafters(target, args.drafter, prompt_sets, replay_settings(args, grid), args.out, console)
    elif args.choose:
        where = args.out, args.num_threads, args.num_prompts, console
        choose_and_evaluate(target, args.drafter, args.choose, prompt_sets, grid, *where)
    else:
        evaluate_side_by_side(args, target, prompt_sets, grid)


def refuse_several_processes(args: argparse.Namespace) -> None:
    """Processes share the prompts of a comparison; what else `evaluate` does is the work of one."""
    num_processes = rank_and_num_ranks()[1]
    modes = {"--load": args.load, "--choose": args.choose, "--replay": args.replay, "--certify": args.certify}
    for name in (name for name, given in modes.items() if given and num_processes > 1):
        raise UserError(f"{name} cannot be shared by {num_processes} processes: start it as `draftsmith evaluate`")


def settings_grid(args: argparse.Namespace) -> list[MeasureSettings]:
    """Every temperature with every batch size and every draft."""
    if args.synthetic_acceptance and args.verification_mode:
        raise UserError("--synthetic-acceptance is a verification mode of its own: leave out --verification-mode")
    lengths = args.draft_length or ([] if args.tree or args.schedule else [4])
    schedules = [read_schedule(args.schedule)] if args.schedule else []
    if args.minutes is not None:
        require_at_least("--minutes", args.minutes, 0.01)
    most = DEFAULT_REPEATS if args.minutes is None else MOST_REPEATS
    repeats = most if args.repeats is None else args.repeats
    return [
        MeasureSettings(
            temperature,
            args.top_p,
            batch_size,
            draft,
            args.max_new_tokens,
            repeats,
            args.seed,
            "synthetic" if args.synthetic_acceptance else args.verification_mode,
            tuple(args.synthetic_acceptance),
        )
        for temperature in args.temperature
        for batch_size in args.batch_size
        for draft in [*lengths, *map(parse_tree, args.tree), *schedules]
    ]


def evaluate_side_by_side(
    args: argparse.Namespace, target: Target, prompt_sets: list[PromptSet], grid: list[MeasureSettings]
) -> None:
    """The drafters beside plain decoding, at every setting and on every prompt set."""
    if args.repeats is not None and args.minutes is not None:
        raise UserError("--minutes chooses the repeats: leave out --repeats")
    minutes = args.minutes or (DEFAULT_MINUTES if args.repeats is None else None)
    options = Options(args.num_threads, args.certify, tuple(args.baseline), minutes, sample_texts=True, costs=True)
    contents = compare(target, args.drafter, prompt_sets, grid, args.out, options)
    if not contents:  # the first process prints
        return
    print_evaluations(contents, console)
    console.print(f"{repeats_text(contents, minutes)}; all took {contents[0]['seconds'] / 60:.1f} minutes")
    console.print(f"evaluation: {args.out / 'evaluation.md'}", **AS_IS)
    for content in contents if args.certify else []:
        console.print(certificate_text(content["drafter"], content.get("certificate")))


def repeats_text(contents: list[dict[str, Any]], minutes: float | None) -> str:
    """How often everything was decoded, and what chose that."""
    found = sorted({row["repeats"] for content in contents for row in content["results"]})
    text = f"{found[0]} to {found[-1]} repeats by setting" if len(found) > 1 else f"{found[0]} repeats of each setting"
    return text if minutes is None else f"{text}, as many as fit into {minutes:g} minutes"


def parse_tree(text: str) -> StaticTree | DynamicTree:
    """NODES,DEPTH,WIDTH, or the path of a JSON list of choices such as [[0], [1], [0, 0]]."""
    if text.endswith(".json"):
        try:
            return StaticTree(tuple(map(tuple, json.loads(Path(text).read_text()))))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"--tree {text}: {first_line(error)}") from None
    try:
        num_nodes, depth, width = map(int, text.split(","))
    except ValueError:
        raise UserError(f"--tree {text}: give NODES,DEPTH,WIDTH or the path of a .json list of choices") from None
    return DynamicTree(num_nodes, depth, width)


def plan(args: argparse.Namespace) -> None:
    if args.num_threads is not None:
        require_at_least("--num-threads", args.num_threads)
    if args.context is not None:
        require_at_least("--context", args.context)
    asked = args.batch_size, args.context, args.draft_length, args.acceptance, args.num_threads, args.tree_nodes
    settings = PlanSettings(*asked)
    make_plan(Target.from_pretrained(args.target, args.device), args.drafter, settings, args.out, console)


def export(args: argparse.Namespace) -> None:
    require_at_least("--max-new-tokens", args.max_new_tokens, 2)
    for name, values in (("--draft-length", args.draft_length), ("--batch-size", args.batch_size)):
        for value in values:
            require_at_least(name, value)
    settings = DeliverySettings(
        args.prompts,
        args.num_prompts,
        args.draft_length,
        args.batch_size,
        args.max_new_tokens,
        args.repeats,
        args.check,
        args.push,
    )
    if args.prompts:
        target = Target.from_pretrained(args.target, args.device)
    else:  # nothing is decoded
        target = Target.head_from_pretrained(args.target, None, args.device or "cpu")
    deliver(args.checkpoint, args.engine, target, args.out, settings, HfApi() if args.push else None, console)


def watch(args: argparse.Namespace) -> None:
    require_at_least("--interval", args.interval, 0.1)
    watch_server(args.url, args.against, args.interval, args.readings, console)


def generate(args: argparse.Namespace) -> None:
    sampling = check_sampling(args.temperature, args.top_p, 0)
    if args.schedule and args.draft_length is not None:
        raise UserError("--schedule sets the draft length: leave out --draft-length")
    draft = read_schedule(args.schedule) if args.schedule else 4 if args.draft_length is None else args.draft_length
    target = Target.from_pretrained(args.target, args.device)
    decoder = SpeculativeDecoder(target, load_drafter(args.drafter, target))
    rounds = decoder.stream(args.prompt, args.max_new_tokens, sampling, draft, args.seed)
    first = next(rounds)  # what is wrong with the settings shows before anything is printed
    write(args.prompt, "\x1b[2m")
    for round in itertools.chain([first], rounds):
        for piece in round.pieces:
            write(piece.text, "\x1b[32m" if piece.drafted else "")
    console.file.write("\n")


def write(text: str, style: str) -> None:
    """Text as it is, tabs and long lines included, which rich would change; styled on a terminal only."""
    styled = style and console.is_terminal and not console.no_color
    console.file.write(f"{style}{text}\x1b[0m" if styled else text)
    console.file.flush()


def report(args: argparse.Namespace) -> None:
    console.print(f"report: {build_report(args.run)}")
