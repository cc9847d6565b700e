"""Every family of drafter on the quickstart target, with equal training time, and what single choices change.

    python benchmarks/families.py samples RUNS              # text that the target wrote, and given text
    python benchmarks/families.py train RUNS --minutes 3 [NAME ...]
    python benchmarks/families.py compare RUNS families     # or blocks, loss, unroll, text, vocabulary

A drafter trains for so many minutes of CPU time on one thread, which neighbours on the machine do not change much;
steps are set from a few timed ones. With `--steps` all drafters take so many instead. `compare` decodes the held-out
prompts with all drafters of a group in one process. Runs of several names may be started side by side, one a core.
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
from draftsmith.inference.measuring.results import Result
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.comparison import EvaluationOptions, evaluate_side_by_side
from draftsmith.recipes.pages.tables import interval_text
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, write_jsonl
from draftsmith.train import TrainConfig, train
from draftsmith.train.run_folder.checkpoint import checkpoint_step

NUM_HELD_OUT, MAX_NEW_TOKENS = 24, 96
COST = "cost.json"  # CPU time of a training run
LENGTH = 256  # tokens of a row
FAMILIES = ["eagle3", "eagle", "p_eagle", "medusa", "hydra", "mlp_speculator", "draft_model"]
# name -> fields of the drafter that differ from quickstart_eagle3's, whose loss is forward_kl and whose unroll is 3
EAGLE3_VARIANTS: dict[str, dict[str, Any]] = {
    "loss-cross_entropy": {"divergence": "cross_entropy"},
    "loss-total_variation": {"divergence": "total_variation"},
    "loss-lk_hybrid": {"divergence": "lk_hybrid"},
    "unroll-1": {"unroll_steps": 1},
    "unroll-5": {"unroll_steps": 5},
    "unroll-7": {"unroll_steps": 7},
    "vocabulary-256": {"draft_vocab_size": 256},
    "vocabulary-512": {"draft_vocab_size": 512},
    "vocabulary-1024": {"draft_vocab_size": 1024},
}
BLOCKS = ["dflash", "dflash2", "dspark", "domino"]
BLOCK_VARIANTS = {f"{kind}-d_pace": {"position_weights": "d_pace"} for kind in BLOCKS}
LOOKUPS = ["ngram", "suffix", "lookahead", "suffix+hydra"]
GROUPS = {
    "families": [*FAMILIES, "untrained", *LOOKUPS],
    "blocks": ["eagle3", "hydra", "mtp", *BLOCKS, *BLOCK_VARIANTS],
    "loss": ["eagle3", *(name for name in EAGLE3_VARIANTS if name.startswith("loss"))],
    "unroll": ["unroll-1", "eagle3", "unroll-5", "unroll-7"],
    "text": ["eagle3", "text-given", "draft_model", "text-given-draft_model", "text-own-draft_model"],
    "vocabulary": [*(name for name in EAGLE3_VARIANTS if name.startswith("vocabulary")), "eagle3"],
}


def config_of(name: str, runs: Path) -> TrainConfig:
    given = name.startswith("text-given")
    kind = "draft_model" if name.endswith("-draft_model") else name.partition("-")[0]
    config = RECIPES[f"quickstart_{kind if kind in (*FAMILIES, *BLOCKS, 'mtp') else 'eagle3'}"]()
    config.drafter = replace(config.drafter, **EAGLE3_VARIANTS.get(name, {}), **BLOCK_VARIANTS.get(name, {}))
    config.target = str(EMBEDDED_TARGET)
    config.data.samples = str(runs / ("given" if given else "samples"))
    config.data.max_length = LENGTH
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


def steps_for(config: TrainConfig, minutes: float, target: Target) -> int:
    """Return the optimiser steps that take so many minutes of CPU time."""
    samples = read_samples(Path(config.data.samples))
    plan = BatchPlan(
        samples.select(np.arange(len(samples)) < 256),
        config.data.batch_size,
        LENGTH,
        config.data.tokens_per_micro_batch,
        0,
    )
    drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=0)
    num_timed = 12
    for step in range(num_timed + 2):
        if step == 2:
            start = time.process_time()
        for rows in plan.micro_batches(step, 0, 1):
            batch = plan.collate(rows)
            total, count = drafter(batch, target.features(batch, drafter.layer_ids))["loss"]
            (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(8, round(minutes * 60 * num_timed / (time.process_time() - start)))


def train_one(name: str, runs: Path, minutes: float, steps: int | None) -> None:
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    if name == "untrained":
        config = config_of("draft_model", runs)
        save_drafter(
            DRAFTERS["draft_model"].from_target(config.drafter, target), runs / name / "checkpoints" / "step-0"
        )
        return
    config = config_of(name, runs)
    config.run.steps = config.run.checkpoint_every = steps or steps_for(config, minutes, target)
    config.run.log_every = max(1, config.run.steps // 20)
    start = time.process_time()
    train(config)
    (runs / name / COST).write_text(json.dumps({"cpu_seconds": time.process_time() - start}))


def trained_tokens(config: TrainConfig, steps: int) -> int:
    """Return the tokens that so many steps train on."""
    data = config.data
    samples = read_samples(Path(data.samples))
    plan = BatchPlan(samples, data.batch_size, LENGTH, data.tokens_per_micro_batch, config.run.seed)
    return sum(len(plan.written(index)) for step in range(steps) for index in plan.indices(step))


# --- comparison


def compare_group(group: str, runs: Path) -> None:
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    lines = (runs / "held_out.jsonl").read_text().splitlines()
    prompts = PromptSet("held_out", [target.encode(json.loads(line)["prompt"]) for line in lines])
    names = [drafter_of(name, runs) for name in GROUPS[group]]
    repeats = 3 if group == "families" else 1
    grid = [MeasureSettings(temperature, max_new_tokens=64, repeats=repeats) for temperature in (0.0, 1.0)]
    options = EvaluationOptions(num_threads=1)
    evaluations = evaluate_side_by_side(target, names, [prompts], grid, runs / "comparison" / group, options)
    env = environment(target)
    print(f"{env.device}, 1 thread, torch {env.versions['torch']}, commit {env.git_commit}")
    print(f"{len(lines)} held-out prompts, up to 64 new tokens, draft length 4, {repeats} repeats\n")
    columns = ["drafter", "parameters trained", "MB a draft step", "steps", "tokens/CPU s in training"]
    columns += ["acceptance length T=0", "T=1", "accepted given those before, T=0", "speedup T=0", "T=1"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, evaluation in zip(GROUPS[group], evaluations, strict=True):
        print("| " + " | ".join([name, *facts(name, runs, target), *figures(evaluation.results)]) + " |")


def drafter_of(name: str, runs: Path) -> str:
    """Return a drafter's name as `evaluate` takes it."""
    lookup, plus, trained = name.partition("+")
    if plus:
        return f"{lookup}+{drafter_of(trained, runs)}"
    return name if name in LOOKUPS else str(next((runs / name / "checkpoints").glob("step-*")))


def facts(name: str, runs: Path, target: Target) -> list[str]:
    """Return parameters, bytes read a drafted token, steps, and trained tokens a second."""
    if name in LOOKUPS:
        return ["-"] * 4 if "+" in name else ["0", "0", "0", "-"]
    config = config_of("draft_model" if name == "untrained" else name, runs)
    drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    steps, speed = 0, "-"
    if name != "untrained":
        steps = checkpoint_step(next((runs / name / "checkpoints").glob("step-*")))
        seconds = json.loads((runs / name / COST).read_text())["cpu_seconds"]
        speed = f"{trained_tokens(config, steps) / seconds:.0f}"
    return [f"{trained / 1e6:.2f} M", f"{bytes_read(drafter) / 1e6:.2f}", str(steps), speed]


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
    greedy = results[0].acceptance.conditional_acceptance_rates
    rates = " ".join("-" if rate is None else f"{rate:.2f}" for rate in greedy)
    lengths = [f"{row.acceptance.mean_acceptance_length:.2f}" for row in results]
    return [*lengths, rates, *(f"{row.speed.speedup:.2f} {interval_text(row.speed.speedup_ci95)}" for row in results)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["samples", "train", "compare"])
    parser.add_argument("runs", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--steps", type=int, help="of each drafter, in place of minutes")
    parser.add_argument("--num-prompts", type=int, default=3000, help="that `samples` answers (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.action == "samples":
        write_samples(args.runs, args.num_prompts)
    for name in args.names:
        if args.action == "train" and not (args.runs / name / "checkpoints").is_dir():
            train_one(name, args.runs, args.minutes, args.steps)
        elif args.action == "compare":
            compare_group(name, args.runs)


if __name__ == "__main__":
    main()
