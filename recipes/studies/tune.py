"""`draftsmith tune`: draft length, tree and schedule fitted on one set of prompts, measured on another."""

from dataclasses import replace

from rich.console import Console

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.schedule import Confident
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Result
from draftsmith.inference.planning.costs import GOAL
from draftsmith.inference.planning.tuning import Tuning, tune
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.storage.files import whole_folder, write_json
from draftsmith.recipes.configs.command_settings import TuneSettings
from draftsmith.recipes.evaluation.comparison import (
    EvaluationOptions,
    evaluate_side_by_side,
    evaluation_paths,
    refuse_others,
)
from draftsmith.recipes.evaluation.inputs import DRAFT_LENGTH, load_target, read_prompt_sets
from draftsmith.recipes.pages.tables import draft_text
from draftsmith.recipes.reports.terminal import print_evaluations
from draftsmith.train.evaluation.pooling import subset


def run(settings: TuneSettings, console: Console) -> None:
    """Fit on some prompts, and measure what was chosen beside chains of 4 on others.

    Writes choice.json, costs.json and evaluation.json of each drafter, all of them at the end. Raises `UserError` where
    both sets of prompts share some, and for a drafter that drafts nothing.
    """
    target = load_target(settings.target, settings.device, settings.chat_template_kwargs)
    prompt_sets = read_prompt_sets(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    fit_prompts, prompt_sets = prompts_to_fit(settings, prompt_sets, target)
    at = MeasureSettings(
        settings.temperature,
        settings.top_p,
        max_new_tokens=settings.max_new_tokens,
        repeats=settings.repeats,
        seed=settings.seed,
        verification_mode=settings.verification_mode,
    )
    batches, names = sorted(set(settings.batch_size)), list(settings.drafter)
    refuse_others(settings.out, names, "evaluation.json", "an evaluation")
    with whole_folder(settings.out) as out:
        for name, path in zip(names, evaluation_paths(out, names), strict=True):
            drafter, folder = load_drafter(name, target), path.parent
            if drafter.max_draft_length == 0:
                raise UserError(f"--drafter {name} drafts nothing, so there is nothing to tune")
            with cpu_threads(settings.num_threads):
                tuning, costs = tune(target, drafter, name, fit_prompts, at, batches)
            drafts = drafts_to_measure(tuning, drafter)
            grid = [replace(at, batch_size=batch, draft=draft) for batch in batches for draft in drafts]
            options = EvaluationOptions(settings.num_threads, sample_texts=True, known_costs={name: costs})
            evaluation = evaluate_side_by_side(target, [name], prompt_sets, grid, folder, options)[0]
            sources = {"fitted_on": fit_prompts.name, "reported_on": [prompts.name for prompts in prompt_sets]}
            write_json(folder / "choice.json", {"drafter": name, **tuning.to_json(), **sources})
            print_evaluations([evaluation], console)
            print_tuning(name, tuning, evaluation.results, console)


def prompts_to_fit(
    settings: TuneSettings, prompt_sets: list[PromptSet], target: Target
) -> tuple[PromptSet, list[PromptSet]]:
    """Return the prompts to fit on and those to measure on; `UserError` where they share some.

    Without --fit-prompts every second prompt of the only set is fitted on.
    """
    if settings.fit_prompts is None:
        if len(prompt_sets) > 1 or len(prompt_sets[0].token_ids) < 2:
            raise UserError("--prompts: give one set of two prompts or more to divide, or --fit-prompts")
        indices = list(range(len(prompt_sets[0].token_ids)))
        fit_prompts, prompt_sets = subset(prompt_sets[0], indices[1::2]), [subset(prompt_sets[0], indices[::2])]
    else:
        fit_prompts = read_prompt_set(settings.fit_prompts, target, settings.num_prompts, settings.max_new_tokens)
    measured = {tuple(ids) for prompts in prompt_sets for ids in prompts.token_ids}
    if shared := sum(tuple(ids) in measured for ids in fit_prompts.token_ids):
        raise UserError(f"{shared} prompts to fit on are measured, too: fit on other prompts than you report on")
    return fit_prompts, prompt_sets


def drafts_to_measure(tuning: Tuning, drafter: Drafter) -> list[int | StaticTree | Confident]:
    """Return chains of the default length and of every chosen one, the tree, and chains that end by confidence."""
    default = min(DRAFT_LENGTH, drafter.max_draft_length or DRAFT_LENGTH)
    lengths = {default, *(length for _, length in tuning.schedule.draft_lengths if length)}
    by_confidence = [tuning.confidence.rule] if tuning.confidence and tuning.confidence.pays else []
    return [*sorted(lengths), *([tuning.tree] if tuning.tree else []), *by_confidence]


def print_tuning(name: str, tuning: Tuning, results: list[Result], console: Console) -> None:
    """Print what was chosen, what is predicted of it, and what was measured, all without reading the prompts."""
    for draft in tuning.predicted:
        what = draft_text(draft) if draft.draft_length else "speculation off, as no chain is shown to gain"
        ends = f" ({draft.speedup_ci95[0]:.2f} to {draft.speedup_ci95[1]:.2f})" if draft.speedup_ci95 else ""
        text = (
            f"{name}: best at batch {draft.batch_size}: {what}, predicted {draft.speedup:.2f}x{ends} in decoding alone"
        )
        if draft.batch_size > 1:
            text += " where finished requests make room for others"
            text += f", {draft.fixed_batch_speedup:.2f}x in fixed batches" if draft.fixed_batch_speedup else ""
        speedups = [row.speed.decode_speedup for row in results if draft.is_of(row.setting)]
        measured = ", ".join(f"{speedup:.2f}x" for speedup in speedups if speedup)
        console.print(f"{text}; measured {measured}" if measured else text)
    confidence = tuning.confidence
    if confidence and not confidence.pays:
        rule = confidence.rule
        console.print(
            f"{name}: ending chains by confidence does not pay: at best {confidence.speedup:.2f}x is predicted (up to "
            f"{rule.longest} tokens, at {rule.least:g}) and {confidence.chain_speedup:.2f}x of chains of "
            f"{confidence.chain_length}, where gains up to {GOAL:.0%} are within the error of predictions",
        )
