"""Evaluation after a checkpoint: the drafter beside plain decoding and the training-free baselines."""

from pathlib import Path

import rich
from rich.markup import escape

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts import read_prompt_set
from draftsmith.inference.clock import cpu_threads
from draftsmith.inference.evaluation import environment, evaluation, write_evaluation
from draftsmith.inference.measure import MeasureSettings, PromptSet, check_settings, measure
from draftsmith.inference.teacher_forcing import gap_warning
from draftsmith.models import CHANGED_TARGET, Drafter, Target, load_drafter
from draftsmith.train.checkpoint import checkpoint_step, checkpoints
from draftsmith.train.config import EvaluationConfig
from draftsmith.train.run_folder import first_result, results, worth
from draftsmith.train.tracking import Tracker


def evaluation_prompts(config: EvaluationConfig, target: Target) -> PromptSet | None:
    """The prompts to evaluate on, encoded; `UserError` where one of them does not fit the target."""
    if config.prompts is None:
        return None
    return read_prompt_set(config.prompts, target, config.num_prompts, config.max_new_tokens)


def evaluation_settings(config: EvaluationConfig) -> list[MeasureSettings]:
    """One setting for each temperature."""
    return [
        MeasureSettings(
            temperature=temperature,
            batch_size=config.batch_size,
            draft=config.draft_length,
            max_new_tokens=config.max_new_tokens,
            repeats=config.repeats,
        )
        for temperature in config.temperatures
    ]


def check_evaluation(config: EvaluationConfig, drafter: Drafter, target: Target) -> None:
    """Refuse, before training, settings that the first checkpoint could not be measured with."""
    drafters = {drafter.kind: drafter, **{name: load_drafter(name, target) for name in config.baselines}}
    for settings in evaluation_settings(config):
        check_settings(settings, drafters)


def is_measured(checkpoint: Path, config: EvaluationConfig) -> bool:
    """Whether everything that an evaluation writes is there."""
    files = ["evaluation.json", *(f"evaluation.{name}.json" for name in config.baselines)]
    return all((checkpoint / file).is_file() for file in files)


def evaluate_checkpoint(checkpoint: Path, target: Target, prompts: PromptSet, config: EvaluationConfig) -> None:
    """Measure the checkpoint as it lies on disk and write evaluation.json into it.

    What the baselines did in the same process goes to evaluation.NAME.json beside it. A target that was trained along
    is measured as it is now, plainly and with all drafters.
    """
    if (checkpoint / CHANGED_TARGET).is_dir():
        target = Target.from_pretrained(checkpoint / CHANGED_TARGET, target.device, target.dtype)
    drafters: dict[str, Drafter] = {name: load_drafter(name, target) for name in [*config.baselines, str(checkpoint)]}
    rows: dict[str, list] = {name: [] for name in drafters}
    num_batches = -(-len(prompts.token_ids) // config.batch_size)
    with progress_bar() as progress, cpu_threads(config.num_threads):
        total = num_batches * config.repeats * len(config.temperatures)
        task = progress.add_task(f"evaluating {checkpoint.name}", total=total, detail="")
        for settings in evaluation_settings(config):
            measured = measure(target, drafters, prompts, settings, lambda: progress.advance(task))
            for name, row in measured.items():
                rows[name].append(row)
        env = environment(target)
    for name, drafter in drafters.items():
        file = "evaluation.json" if name == str(checkpoint) else f"evaluation.{name}.json"
        write_evaluation(checkpoint / file, evaluation(target, name, drafter.kind, rows[name], env))


def what_training_brought(run: Path) -> str:
    """The best trained checkpoint beside the drafter as it was before its first step, on the same prompts."""
    untrained, *trained = [first_result(checkpoint) for checkpoint in checkpoints(run)]
    best = max(trained, key=worth)
    before, after = untrained["mean_acceptance_length"], best["mean_acceptance_length"]
    change = (
        f"acceptance length {before:.2f} -> {after:.2f}, speedup {untrained['speedup']:.2f} -> {best['speedup']:.2f}"
    )
    if after <= before:
        return f"training brought nothing: {change}"
    return f"what training brought: {change}"


def log_evaluation(checkpoint: Path, tracker: Tracker) -> None:
    """Tell the tracker and the console what the checkpoint's first setting gave."""
    first = first_result(checkpoint)
    metrics = {"acceptance_length": first["mean_acceptance_length"], "speedup": first["speedup"]}
    tracker.log(checkpoint_step(checkpoint), {**metrics, "divergences": first["lossless"]["divergences"]})
    summary = "{}: acceptance length {:.2f}, speedup {:.2f} [{:.2f}, {:.2f}]"
    rich.print(escape(summary.format(checkpoint.name, *metrics.values(), *first["speedup_ci95"])))
    if first["lossless"]["divergences"]:
        rich.print("[bold red]speculative output differs from plain decoding: see evaluation.json, and report this")
    for row in results(checkpoint):
        if warning := gap_warning(row):
            rich.print(f"[bold red]{escape(warning)}")
