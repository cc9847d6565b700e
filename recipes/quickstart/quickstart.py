"""`draftsmith quickstart`: from nothing to measured drafters, in a given time.

The target writes training text, each drafter is trained on it and measured briefly after every checkpoint. Then the
best checkpoints are compared in one process, alone and behind n-grams, on prompts that did not choose them, and the
fastest that an engine serves is exported.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
import yaml
from rich.console import Console

from draftsmith.data.answers.prepare import prepare
from draftsmith.data.processes import locked
from draftsmith.data.prompts.code_dialogues import code_dialogues
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompt_set, tokenise
from draftsmith.data.prompts.standard_library import function_prompt, stdlib_groups
from draftsmith.inference.measuring.results import Evaluation, read_evaluation
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole
from draftsmith.models.target.chat_template import has_template
from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.configs.training_settings import QuickstartSettings
from draftsmith.recipes.engine_rules.loader_rules import TRAINING_FREE, is_served
from draftsmith.recipes.evaluation.comparison import EvaluationOptions, evaluate_side_by_side, evaluation_paths
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.quickstart.budget import (
    ANSWERS,
    CHECKPOINTS,
    COMPARISON,
    NUM_HELD_OUT,
    Budget,
    load_budget,
    measure_budget,
)
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.terminal import print_summary
from draftsmith.recipes.serving.export_command import export
from draftsmith.recipes.serving.model_card import served_result
from draftsmith.train import TrainConfig, train
from draftsmith.train.run_folder.checkpoint import checkpoint_name, remove
from draftsmith.train.run_folder.run_folder import best_checkpoint

FEATURES = "features"  # folder of what the target's one pass stores while drafters are trained
TOKENS_IN_CACHE = 1024  # of a pass: of more, a CPU's caches do not hold what the layers make of them
TURN = 128  # most tokens of a prompt, for each of its turns
EMBEDDED_TARGET = Path(__file__).parents[1] / "tiny_python"


def run(settings: QuickstartSettings, console: Console) -> None:
    """Do everything, or what an earlier call left to do, and print the result. Writes only below `settings.out`."""
    with locked(settings.out):
        quickstart(settings, console)


def quickstart(settings: QuickstartSettings, console: Console) -> None:
    """Do what is left to do in the folder of a quickstart."""
    kinds = settings.kinds
    out, minutes = settings.out, settings.minutes
    name = settings.target or str(EMBEDDED_TARGET)
    budget = load_budget(out / "plan.yaml", name, minutes, kinds, settings.seed)
    target = load_target(name, settings.device)
    train_prompts, held_out = (traffic_for(target, is_held_out, settings.seed) for is_held_out in (False, True))
    if budget is None:
        console.print(f"measuring what {minutes:g} minutes allow on this machine ...")
        budget = replace(measure_budget(target, train_prompts, kinds, minutes), seed=settings.seed)
        write_whole(out / "plan.yaml", yaml.safe_dump(asdict(budget), sort_keys=False))

    prompts = out / "prompts"
    write_jsonl(prompts / "training.jsonl", train_prompts[: budget.num_prompts])
    write_jsonl(prompts / "comparison.jsonl", held_out[:NUM_HELD_OUT])
    write_jsonl(prompts / "checkpoints.jsonl", held_out[NUM_HELD_OUT : 2 * NUM_HELD_OUT])
    prepare(target, str(prompts / "training.jsonl"), out / "samples", ANSWERS)
    features = out / FEATURES
    for kind in kinds:
        # A kill may have left notes of a trained run to write. That is cheap while no features are stored anew for it.
        if budget.stored_layers is None or features.is_dir() or not is_trained(out / kind, budget.steps[kind]):
            train(quickstart_config(kind, budget, out, settings.device))
    remove(features)

    fastest = ranked([best_checkpoint(out / kind) for kind in kinds], target, budget, out)
    console.print(f"\nreport: {build_report(out)}")
    print_summary(out, console)
    console.print(f"best drafter: {fastest[0].drafter}")
    served = fastest_served(fastest)
    if served is None:
        console.print(f"nothing is exported: vLLM serves none of {', '.join(kinds)}, and n-grams do not pay")
        return
    if served != fastest[0]:
        note = "" if served_result(served).pays else ", though it is not shown to pay here"
        reason = "vLLM does not serve it, or another one faster, or it does not pay"
        console.print(f"{reason}: {served.drafter} is exported in its place{note}")
    if (out / "export").is_dir():
        console.print(f"exported: {out / 'export'}", soft_wrap=True)
        return
    exported = ExportSettings(target=target.name, checkpoint=served.drafter, engine="vllm", out=out / "export")
    export(exported, target, console, served)


def is_trained(run: Path, num_steps: int) -> bool:
    """Return whether a run has taken all its steps and has measured what it reached."""
    return (run / "checkpoints" / checkpoint_name(num_steps) / "evaluation.json").is_file()


def ranked(checkpoints: list[Path], target: Target, budget: Budget, out: Path) -> list[Evaluation]:
    """Return the comparison of the checkpoints, of each behind n-grams, and of n-grams alone, the fastest first."""
    names = [*map(str, checkpoints), *(f"ngram+{checkpoint}" for checkpoint in checkpoints), "ngram"]
    source = str(out / "prompts" / "comparison.jsonl")
    paths = evaluation_paths(out / "comparison", names)
    if not all(path.is_file() for path in paths):
        prompts = read_prompt_set(source, target, budget.num_comparison_prompts, COMPARISON.max_new_tokens)
        options = EvaluationOptions(budget.num_threads, sample_texts=True, costs=True)
        evaluate_side_by_side(target, names, [prompts], [COMPARISON], out / "comparison", options)
    evaluations = [read_evaluation(path) for path in paths]
    return sorted(evaluations, key=lambda evaluation: evaluation.best.rank_key, reverse=True)


def fastest_served(evaluations: list[Evaluation]) -> Evaluation | None:
    """Return the drafter that vLLM serves fastest, with chains of one length; None where it serves none of them.

    N-grams are served only where they pay: what costs no training has to bring something.
    """

    def may_be_served(evaluation: Evaluation) -> bool:
        kind = evaluation.drafter_kind
        return is_served(kind, "vllm") and (kind not in TRAINING_FREE or served_result(evaluation).pays)

    served = filter(may_be_served, evaluations)
    return max(served, key=lambda evaluation: served_result(evaluation).rank_key, default=None)


def quickstart_config(kind: str, budget: Budget, out: Path, device: str | None) -> TrainConfig:
    """Return the quickstart recipe of a drafter, cut to the budget."""
    config = RECIPES[f"quickstart_{kind}"]()
    config.target = budget.target
    config.data.samples = str(out / "samples")
    config.data.max_length = 512
    if budget.num_threads is not None:  # on a CPU
        config.data.tokens_per_micro_batch = TOKENS_IN_CACHE
    if budget.stored_layers is not None and not config.drafter.starts_from_layers:
        config.data.features, config.data.features_layers = "stored", budget.stored_layers
        config.data.features_dir = str(out / FEATURES)
    config.evaluation.prompts = str(out / "prompts" / "checkpoints.jsonl")
    config.evaluation.num_prompts = budget.num_checkpoint_prompts
    config.evaluation.num_threads = budget.num_threads
    config.run.dir = str(out / kind)
    config.run.seed = budget.seed
    config.run.steps = budget.steps[kind]
    config.run.checkpoint_every = -(-budget.steps[kind] // CHECKPOINTS)
    config.run.log_every = max(1, budget.steps[kind] // 40)
    config.run.device = device
    return config


# --- prompts


def traffic_for(target: Target, held_out: bool, seed: int = 0) -> list[Prompt]:
    """Return the prompts of a quickstart: dialogues for a target with a chat template, else functions that were begun.

    Raises `UserError` where too few fit.
    """
    prompts = prompts_for(target, held_out, seed)
    if has_template(target.tokenizer):
        prompts = [prompt for prompt in prompts if prompt.messages is not None]
    if len(prompts) < 2 * NUM_HELD_OUT:
        raise UserError(
            f"--target {target.name} has a context of {target.context} tokens, and beside answers of "
            f"{ANSWERS.max_new_tokens} tokens only {len(prompts)} prompts fit into it: give a target with a longer "
            "context, or prepare, train and evaluate with your own prompts and a lower --max-new-tokens"
        )
    return prompts


def prompts_for(target: Target, held_out: bool, seed: int = 0) -> list[Prompt]:
    """Return all prompts, in random order, that fit the target's context and have at most 128 tokens a turn.

    They are functions that were begun and, for a target with a chat template, dialogues about functions.
    """
    groups = stdlib_groups(held_out)
    prompts = [Prompt(text=function_prompt(function), domain="code") for group in groups for function in group]
    if has_template(target.tokenizer):
        prompts += [Prompt(messages=list(messages[:-1]), domain="chat") for messages in code_dialogues(groups)]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    longest = [min(target.context - ANSWERS.max_new_tokens, TURN * num_turns(prompt)) for prompt in prompts]
    return [prompts[i] for i in order if len(tokenise(prompts[i], target)) <= longest[i]]


def num_turns(prompt: Prompt) -> int:
    """Return how many answers a prompt asks for."""
    return 1 if prompt.messages is None else sum(message["role"] == "user" for message in prompt.messages)


def write_jsonl(path: Path, prompts: list[Prompt]) -> None:
    """Write prompts, one a line, as `read_prompts` reads them."""
    rows = [
        {"prompt": prompt.text if prompt.messages is None else prompt.messages, "domain": prompt.domain}
        for prompt in prompts
    ]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
