"""Every family of drafter on the quickstart target with equal training time; longer drafts; text by other writers.

    python benchmarks/families.py samples RUNS              # text that the target wrote, and given text
    python benchmarks/families.py train RUNS --minutes 3 [NAME ...]
    python benchmarks/families.py compare RUNS families     # or blocks, lengths, text

A drafter takes as many steps as so many minutes of CPU time on one thread allow, by some timed ones in which the target
computes its features beside it. Training then reads features that were stored once (in bf16), which takes less time for
the same steps; those of the draft model are computed anew. A second folder takes the text of the first by `ln -s
RUNS/samples RUNS/held_out.jsonl OTHER`.

`compare` decodes the held-out prompts in one process with the drafters of a group, as far as they were trained.
`lengths` does so with drafters that were trained for drafts of 8 tokens, with chains of 4 and 8 and with trees of
DFlash's. Runs of several names may be started side by side, one a core.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_functions
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import PREPARED, read_prepared, read_samples
from draftsmith.data.samples.folder import write_samples as write_columns
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Evaluation, Result
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.models.devices import training_precision
from draftsmith.models.sampling.trees import DDTree
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.comparison import EvaluationOptions, evaluate_side_by_side
from draftsmith.recipes.pages.tables import interval_text
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, write_jsonl
from draftsmith.train import TrainConfig, train
from draftsmith.train.optimizer import optimizer_of, set_learning_rate
from draftsmith.train.run_folder.checkpoint import checkpoint_step

NUM_HELD_OUT, MAX_NEW_TOKENS = 32, 96
COST = "cost.json"  # the CPU time of a training step
STORED_LAYERS = [2, 6, 9, 10, 12]  # of the target, that all but draft models read
LENGTH = 256  # tokens of a row
BLOCKS = ["dflash", "dflash2", "dspark", "domino"]
FAMILIES = ["eagle3", "eagle", "mtp", "p_eagle", "medusa", "hydra", "mlp_speculator", "draft_model", *BLOCKS]
# name -> fields of a drafter that drafts 8 tokens; EAGLE-3 has no longest draft
LENGTHS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "hydra-8": {"num_heads": 8},
    "dflash-8": {"block_size": 9},
    "dspark-8": {"block_size": 8},
}
BLOCK_VARIANTS = {f"{kind}-d_pace": {"position_weights": "d_pace"} for kind in BLOCKS}
LOOKUPS = ["ngram", "suffix", "lookahead", "suffix+hydra"]
GROUPS = {
    "families": [*FAMILIES, "untrained", *LOOKUPS],
    "blocks": ["eagle3", "hydra", "mtp", *BLOCKS, *BLOCK_VARIANTS],
    "text": ["eagle3", "text-given", "draft_model", "text-given-draft_model", "text-own-draft_model"],
}


def config_of(name: str, runs: Path) -> TrainConfig:
    given = name.startswith("text-given")
    kind = "draft_model" if name.endswith("-draft_model") else name.partition("-")[0]
    config = RECIPES[f"quickstart_{kind if kind in FAMILIES else 'eagle3'}"]()
    config.drafter = replace(config.drafter, **{**BLOCK_VARIANTS, **LENGTHS}.get(name, {}))
    config.target = str(EMBEDDED_TARGET)
    config.data.samples = str(runs / ("given" if given else "samples"))
    config.data.max_length = LENGTH
    config.data.held_out_prompts = 0
    if not config.drafter.starts_from_layers and "text" not in name:
        config.data.features, config.data.features_layers = "stored", STORED_LAYERS
    config.data.on_policy_share = 0.5 if name.startswith("text-own") else 0.0  # which the draft model writes itself
    config.run.dir = str(runs / name)
    config.run.device = "cpu"
    config.evaluation.untrained = False
    return config


# --- text


def write_samples(runs: Path, num_prompts: int) -> None:
    """Write the target's answers to beginnings of functions, and the same functions as people wrote them, no longer."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    chance = random.Random(0)
    functions = [f for f in stdlib_functions(held_out=False) if len(target.encode(function_prompt(f))) <= 128]
    chosen = chance.sample(functions, num_prompts)
    runs.mkdir(parents=True, exist_ok=True)
    write_jsonl(runs / "prompts.jsonl", [Prompt(text=function_prompt(function)) for function in chosen])
    held_out = [function_prompt(function) for function in stdlib_functions(held_out=True)]
    short = [prompt for prompt in held_out if len(target.encode(prompt)) <= 128]
    write_jsonl(runs / "held_out.jsonl", [Prompt(text=prompt) for prompt in chance.sample(short, NUM_HELD_OUT)])
    prepare(target, str(runs / "prompts.jsonl"), runs / "samples", PrepareSettings(MAX_NEW_TOKENS, batch_size=64))

    given = runs / "given"
    given.mkdir(exist_ok=True)
    samples = []
    for answered in read_samples(runs / "samples"):
        start, function = answered.spans[0].start, chosen[answered.prompt_index]
        ids = (target.encode(function) + target.eos_token_ids)[: len(answered.token_ids)]
        if len(ids) > start:
            samples.append(Sample(ids, [Span(start, len(ids))], "given"))
    write_columns(given, [samples], iter)
    prepared = {**read_prepared(runs / "samples"), "written_by": "given"}
    (given / PREPARED).write_text(json.dumps(prepared))


# --- training


def seconds_a_step(config: TrainConfig, target: Target) -> float:
    """Return the CPU seconds of an optimiser step and of the target's passes for it, the mean of a whole training."""
    samples = read_samples(Path(config.data.samples))
    plan = BatchPlan(
        samples.select(np.arange(len(samples)) < 256),
        config.data.batch_size,
        LENGTH,
        config.data.tokens_per_micro_batch,
        0,
    )
    drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
    optimizer = optimizer_of(drafter, config.optimizer)
    set_learning_rate(optimizer, 0.0)
    num_timed = 24
    for step in range(num_timed + 2):
        if step == 2:
            start = time.process_time()
        drafter.progress = max(0, step - 2) / num_timed  # on which the length of an unroll may depend
        for rows in plan.micro_batches(step, 0, 1):
            batch = plan.collate(rows)
            features = target.features(batch, drafter.layer_ids)
            with training_precision(target.device, config.run.precision):
                total, count = drafter(batch, features)["loss"]
                (total / count).backward()
        with training_precision(target.device, config.run.precision):
            optimizer.step()
        optimizer.zero_grad()
    return (time.process_time() - start) / num_timed


def train_one(name: str, runs: Path, minutes: float) -> None:
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    if name == "untrained":
        config = config_of("draft_model", runs)
        save_drafter(
            DRAFTERS["draft_model"].from_target(config.drafter, target), runs / name / "checkpoints" / "step-0"
        )
        return
    config = config_of(name, runs)
    step_seconds = seconds_a_step(config, target)
    config.run.steps = config.run.checkpoint_every = round(minutes * 60 / step_seconds)
    config.run.log_every = max(1, config.run.steps // 20)
    train(config)
    (runs / name / COST).write_text(json.dumps({"seconds_a_step": step_seconds}))


def trained_tokens(config: TrainConfig, steps: int) -> int:
    """Return the tokens that so many steps train on."""
    data = config.data
    samples = read_samples(Path(data.samples))
    plan = BatchPlan(samples, data.batch_size, LENGTH, data.tokens_per_micro_batch, config.run.seed)
    return sum(len(plan.written(index)) for step in range(steps) for index in plan.indices(step))


# --- comparison


def compare_group(group: str, runs: Path) -> None:
    """Print a row for each drafter of a group, at draft length 4 and temperatures 0 and 1."""
    target, names = Target.from_pretrained(EMBEDDED_TARGET, "cpu"), trained_names(GROUPS[group], runs)
    grid = [MeasureSettings(temperature, max_new_tokens=64, repeats=1) for temperature in (0.0, 1.0)]
    evaluations = evaluated(names, grid, target, runs, group)
    columns = ["drafter", "parameters trained", "MB a draft step", "steps", "CPU s", "tokens/CPU s in training"]
    columns += ["acceptance length T=0", "T=1", "accepted given those before, T=0", "speedup T=0", "T=1"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, evaluation in zip(names, evaluations, strict=True):
        print("| " + " | ".join([name, *facts(name, runs, target), *figures(evaluation.results)]) + " |")


def compare_lengths(runs: Path) -> None:
    """Print a row for each draft of those that were trained for 8 tokens: chains of 4 and 8, and trees of DFlash's."""
    target, names = Target.from_pretrained(EMBEDDED_TARGET, "cpu"), trained_names([*LENGTHS], runs)
    chains, trees = [
        [MeasureSettings(0.0, draft=draft, max_new_tokens=64, repeats=1) for draft in drafts]
        for drafts in ((4, 8), (DDTree(16, 4), DDTree(16, 8), DDTree(32, 8)))
    ]
    with_trees = [name for name in names if name == "dflash-8"]
    evaluations = evaluated(names, chains, target, runs, "lengths")
    if with_trees:
        evaluations += evaluated(with_trees, trees, target, runs, "trees")
    columns = ["drafter", "draft", "steps", "CPU s", "acceptance length", "accepted given those before", "speedup"]
    print("| " + " | ".join([*columns, "ms a round: draft, verify, host", "of a plain step"]) + " |")
    print("|" + "---|" * (len(columns) + 2))
    for name, evaluation in zip([*names, *with_trees], evaluations, strict=True):
        for row in evaluation.results:
            _, _, steps, seconds, _ = facts(name, runs, target)
            phases = row.speed.milliseconds_per_round
            milliseconds = f"{phases.draft:.2f} {phases.verify:.2f} {phases.host:.2f}"
            nodes, depth = row.setting.tree_nodes, row.setting.draft_length
            cells = [name, f"tree of {nodes}, depth {depth}" if nodes else f"chain of {depth}", steps, seconds]
            cells += [length_text(row), rates_text(row), speedup_text(row)]
            cells += [milliseconds, f"{row.speed.baseline_milliseconds_per_round.total:.2f}"]
            print("| " + " | ".join(cells) + " |")


def evaluated(names: list[str], grid: list[MeasureSettings], target: Target, runs: Path, out: str) -> list[Evaluation]:
    """Return the evaluations of drafters on the held-out prompts, and print what was measured where."""
    lines = (runs / "held_out.jsonl").read_text().splitlines()
    prompts = PromptSet("held_out", [target.encode(json.loads(line)["prompt"]) for line in lines])
    drafters = [drafter_of(name, runs) for name in names]
    options = EvaluationOptions(num_threads=1)
    evaluations = evaluate_side_by_side(target, drafters, [prompts], grid, runs / "comparison" / out, options)
    env = environment(target)
    print(f"\n{env.device}, 1 thread, torch {env.versions['torch']}, commit {env.git_commit}")
    checks = [row.lossless for evaluation in evaluations for row in evaluation.results]
    identical, divergences = sum(check.identical for check in checks), sum(check.divergences for check in checks)
    print(f"{len(lines)} held-out prompts, up to {grid[0].max_new_tokens} new tokens; outputs: {identical} of", end=" ")
    print(f"{sum(check.checked for check in checks)} are those of plain decoding, {divergences} differ without a tie\n")
    return evaluations


def trained_names(names: list[str], runs: Path) -> list[str]:
    """Return those of the drafters that were trained or need no training."""
    return [name for name in names if name in LOOKUPS or (runs / name / "checkpoints").is_dir()]


def drafter_of(name: str, runs: Path) -> str:
    """Return a drafter's name as `evaluate` takes it."""
    lookup, plus, trained = name.partition("+")
    if plus:
        return f"{lookup}+{drafter_of(trained, runs)}"
    return name if name in LOOKUPS else str(next((runs / name / "checkpoints").glob("step-*")))


def facts(name: str, runs: Path, target: Target) -> list[str]:
    """Return parameters, bytes read a drafted token, steps, CPU seconds, and trained tokens a second."""
    if name in LOOKUPS:
        return ["-"] * 5 if "+" in name else ["0", "0", "0", "0", "-"]
    config = config_of("draft_model" if name == "untrained" else name, runs)
    drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    steps, seconds, speed = 0, 0.0, "-"
    if name != "untrained":
        steps = checkpoint_step(next((runs / name / "checkpoints").glob("step-*")))
        seconds = steps * json.loads((runs / name / COST).read_text())["seconds_a_step"]
        speed = f"{trained_tokens(config, steps) / seconds:.0f}"
    return [f"{trained / 1e6:.2f} M", f"{bytes_read(drafter) / 1e6:.2f}", str(steps), f"{seconds:.0f}", speed]


def bytes_read(drafter: Any) -> int:
    """Return the bytes of weights that one drafted token needs at K = 4, in the fp32 of this machine.

    Embeddings are looked up, but for one that is the head too; a head of the target's is read as one of its own.
    """
    modules = [module for module in drafter.modules() if not isinstance(module, nn.Embedding)]
    once = sum(p.numel() for p in {p for module in modules for p in module.parameters(recurse=False)})
    if drafter.drafts_by_target_head:
        once += drafter.target.head_weight().numel()
    once_a_round = ("medusa", "hydra", "mlp_speculator", "p_eagle", *BLOCKS)
    return 4 * (once // 4 if drafter.kind in once_a_round else once)


def figures(results: list[Result]) -> list[str]:
    return [*map(length_text, results), rates_text(results[0]), *map(speedup_text, results)]


def length_text(row: Result) -> str:
    return f"{row.acceptance.mean_acceptance_length:.2f} {interval_text(row.mean_acceptance_length_ci95)}"


def rates_text(row: Result) -> str:
    return " ".join("-" if rate is None else f"{rate:.2f}" for rate in row.acceptance.conditional_acceptance_rates)


def speedup_text(row: Result) -> str:
    return f"{row.speed.speedup:.2f} {interval_text(row.speed.speedup_ci95)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["samples", "train", "compare"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--num-prompts", type=int, default=3000, help="that `samples` answers (%(default)s)")
    args = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    if args.action == "samples":
        write_samples(args.runs, args.num_prompts)
    for name in args.names:
        if args.action == "train" and not (args.runs / name / "checkpoints").is_dir():
            train_one(name, args.runs, args.minutes)
        elif args.action == "compare":
            compare_lengths(args.runs) if name == "lengths" else compare_group(name, args.runs)


if __name__ == "__main__":
    main()
