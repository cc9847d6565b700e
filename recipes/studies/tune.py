"""`draftsmith tune`: draft length, tree and schedule fitted on one set of prompts, measured on another."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.decoder import Output
from draftsmith.inference.decoding.schedule import Confident, Schedule, for_sglang, for_vllm
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Result
from draftsmith.inference.planning.choice import (
    acceptance_length,
    best_draft_length,
    fit_schedule,
    fit_tree,
    rank_accuracies,
    rates_of_rounds,
    tree_acceptance_length,
)
from draftsmith.inference.planning.confidence import ConfidenceChoice, choose_confidence, draft_everywhere
from draftsmith.inference.planning.cost_measurement import CostRange, measure_costs
from draftsmith.inference.planning.costs import GOAL, Costs
from draftsmith.inference.planning.costs_beside import typical_context
from draftsmith.inference.planning.fixed_batches import DecodedRequest, fixed_batch_speedup
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.files import require_writable, write_json
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.typed_json import from_json
from draftsmith.recipes.configs.command_settings import TuneSettings
from draftsmith.recipes.evaluation.comparison import Options, compare, evaluation_paths
from draftsmith.recipes.evaluation.inputs import notice_overwriting, read_prompt_sets
from draftsmith.recipes.reports.report_data import PredictedDraft
from draftsmith.recipes.reports.tables import draft_text
from draftsmith.recipes.reports.terminal import print_evaluations
from draftsmith.train.evaluation.pooling import subset

DEFAULT, LONGEST = 4, 8  # draft length that the chosen one is measured beside; the longest that is tried
RANKS, TREE_NODES = 8, 32  # of a tree, at most
ANSWERS = 24  # that rank accuracies are counted on, at most


@dataclass(frozen=True)
class Choice:
    """What is best for one drafter by acceptance on the prompts of the fit and by measured costs."""

    draft_length: int  # at the smallest batch size; 0: plain decoding is faster
    tree: StaticTree | None  # at the smallest batch size, where it is predicted to beat the chain
    weighed: ConfidenceChoice | None  # ending chains by confidence, likewise; None where that was not tried
    schedule: Schedule
    rates: list[float | None]  # conditional ones, the first of all rounds
    accuracies: list[list[float]]  # by depth and rank; empty where no tree was fitted
    predicted: list[dict[str, Any]]
    """By batch size: `speedup` where the batch stays full, as a server's does, and `fixed_batch_speedup`."""

    def to_json(self) -> dict[str, Any]:
        """The fields of choice.json that the fit gives."""
        return {
            "draft_length": self.draft_length,
            "tree": None if self.tree is None else [list(path) for path in self.tree.choices],
            "schedule": self.schedule.to_json(),
            "confident": self.weighed and {**asdict(self.weighed), "pays": self.weighed.pays},
            "acceptance_rates_of_rounds": self.rates,
            "rank_accuracies": self.accuracies,
            "predicted": self.predicted,
            "vllm": {"num_speculative_tokens_per_batch_size": for_vllm(self.schedule)},
            "sglang": for_sglang(self.schedule),
        }


def run(settings: TuneSettings, console: Console) -> None:
    """Fit on some prompts, and measure what was chosen beside chains of 4 on others.

    Writes choice.json, costs.json and evaluation.json of each drafter. Raises `UserError` where both sets of prompts
    share some, and for a drafter that drafts nothing.
    """
    notice_overwriting(settings.out / "evaluation.md")
    target = Target.from_pretrained(settings.target, settings.device)
    prompt_sets = read_prompt_sets(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    fit_prompts, prompt_sets = prompts_to_fit(settings, prompt_sets, target)
    require_writable(settings.out)
    at = MeasureSettings(
        settings.temperature,
        settings.top_p,
        max_new_tokens=settings.max_new_tokens,
        repeats=settings.repeats,
        seed=settings.seed,
        verification_mode=settings.verification_mode,
    )
    batches = sorted(set(settings.batch_size))
    for name, path in zip(settings.drafter, evaluation_paths(settings.out, list(settings.drafter)), strict=True):
        drafter = load_drafter(name, target)
        if drafter.max_draft_length == 0:
            raise UserError(f"--drafter {name} drafts nothing, so there is nothing to tune")
        with cpu_threads(settings.num_threads):
            choice, costs = choose(target, drafter, name, fit_prompts, at, batches)
        write_json(path.parent / "costs.json", costs.to_json())
        drafts = drafts_to_measure(choice, drafter)
        grid = [replace(at, batch_size=batch, draft=draft) for batch in batches for draft in drafts]
        options = Options(settings.num_threads, sample_texts=True)
        evaluation = compare(target, [name], prompt_sets, grid, path.parent, options)[0]
        sources = {"fitted_on": fit_prompts.name, "reported_on": [prompts.name for prompts in prompt_sets]}
        write_json(path.parent / "choice.json", {"drafter": name, **choice.to_json(), **sources})
        print_evaluations([evaluation], console)
        print_choice(name, choice, evaluation.results, console)


def prompts_to_fit(
    settings: TuneSettings, prompt_sets: list[PromptSet], target: Target
) -> tuple[PromptSet, list[PromptSet]]:
    """Return the prompts to fit on and those to measure on; `UserError` where they share some.

    Where no others are given to fit on, every second one of the only set is.
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


def choose(
    target: Target,
    drafter: Drafter,
    name: str,
    prompts: PromptSet,
    settings: MeasureSettings,
    batches: Sequence[int],
) -> tuple[Choice, Costs]:
    """Acceptance at the longest draft length and by confidence, rank accuracies for a tree, costs; the best of them.

    Raises `UserError` where no answer is longer than a token.
    """
    longest = min(LONGEST, drafter.max_draft_length or LONGEST)
    decoded = decode(target, drafter, prompts, replace(settings, draft=longest))
    total = decoded.stats.total
    if not total.num_rounds:
        raise UserError("every answer ends with its first token, which leaves nothing to fit: give other prompts")
    rates = rates_of_rounds(total.conditional_acceptance_rates, total.num_drafts, total.num_rounds)
    requests = [
        DecodedRequest(len(ids), stats) for ids, stats in zip(prompts.token_ids, decoded.stats.requests, strict=True)
    ]
    context = typical_context(prompts, settings.max_new_tokens)
    with_tree = drafter.can_branch and settings.temperature == 0
    reach = CostRange(max(batches), context, longest, TREE_NODES if with_tree else 0)
    costs = measure_costs(target, drafter, reach, name).drafting_in(total.num_drafts / total.num_rounds)
    schedule = fit_schedule(rates, costs, batches, context)
    length = best_draft_length(rates, costs, batches[0], context)
    predicted = []
    for batch in batches:
        chosen = schedule.draft_length(batch)
        fixed = fixed_batch_speedup(costs, chosen, requests, batch, target.device.type == "cpu")
        predicted.append(prediction(rates, costs, batch, context, chosen) | {"fixed_batch_speedup": fixed})

    texts = list(zip(prompts.token_ids, decoded.token_ids, strict=True))[:ANSWERS]
    weighed = None
    if drafter.can_sample and settings.temperature == 0 and longest > 1:
        weighed = choose_confidence(draft_everywhere(drafter, target, texts, longest), costs, batches[0], context)
        if weighed.pays:
            fields = {"acceptance_length": weighed.acceptance_length, "speedup": weighed.speedup}
            shape = {"draft_length": weighed.rule.longest, "tree_nodes": None, "schedule": weighed.rule.to_json()}
            predicted.append({"batch_size": batches[0], **shape, **fields, "fixed_batch_speedup": None})

    tree, accuracies = None, []
    if with_tree:
        accuracies = rank_accuracies(drafter, target, texts, longest, RANKS)
        tree = fit_tree(accuracies, costs, batches[0], context, TREE_NODES)
        emitted = tree_acceptance_length(tree, accuracies)
        speedup = costs.speedup(emitted, tree.depth, batches[0], context, tree.num_nodes)
        if speedup <= predicted[0]["speedup"]:
            tree = None
        else:
            nodes = {"tree_nodes": tree.num_nodes, "acceptance_length": emitted, "speedup": speedup}
            unknown = {"fixed_batch_speedup": None}  # rounds of single requests are known of chains only
            predicted.append({"batch_size": batches[0], "draft_length": tree.depth, **nodes, **unknown})
    return Choice(length, tree, weighed, schedule, rates, accuracies, predicted), costs


def prediction(rates: Sequence[float | None], costs: Costs, batch: int, context: int, length: int) -> dict[str, Any]:
    emitted = acceptance_length(rates, length)
    speedup = costs.speedup(emitted, length, batch, context)
    fields = {"draft_length": length, "tree_nodes": None, "acceptance_length": emitted, "speedup": speedup}
    return {"batch_size": batch, **fields}


def decode(target: Target, drafter: Drafter, prompts: PromptSet, settings: MeasureSettings) -> Output:
    """All prompts once, untimed."""
    drafter.forget()
    return SpeculativeDecoder(target, drafter).decode(prompts.token_ids, settings.resolve(drafter), batch_size=8)


def drafts_to_measure(choice: Choice, drafter: Drafter) -> list[int | StaticTree | Confident]:
    """Chains of the default length and of every chosen one, the tree, and chains that end by confidence."""
    default = min(DEFAULT, drafter.max_draft_length or DEFAULT)
    lengths = {default, *(length for _, length in choice.schedule.draft_lengths if length)}
    by_confidence = [choice.weighed.rule] if choice.weighed and choice.weighed.pays else []
    return [*sorted(lengths), *([choice.tree] if choice.tree else []), *by_confidence]


def print_choice(name: str, choice: Choice, results: list[Result], console: Console) -> None:
    """Print what was chosen, what is predicted of it, and what was measured, all without reading the prompts."""
    for draft in from_json(list[PredictedDraft], choice.predicted):
        what = draft_text(draft) if draft.draft_length else "speculation off"
        text = f"{name}: best at batch {draft.batch_size}: {what}, predicted {draft.speedup:.2f}x in decoding alone"
        if draft.batch_size > 1:
            text += " where finished requests make room for others"
            text += f", {draft.fixed_batch_speedup:.2f}x in fixed batches" if draft.fixed_batch_speedup else ""
        speedups = [row.speed.decode_speedup for row in results if draft.is_of(row.setting)]
        measured = ", ".join(f"{speedup:.2f}x" for speedup in speedups if speedup)
        console.print(f"{text}; measured {measured}" if measured else text, highlight=False, soft_wrap=True)
    if choice.weighed and not choice.weighed.pays:
        rule = choice.weighed.rule
        console.print(
            f"{name}: ending chains by confidence does not pay: at best {choice.weighed.speedup:.2f}x is predicted (up "
            f"to {rule.longest} tokens, at {rule.least:g}) and {choice.weighed.chain_speedup:.2f}x of chains of "
            f"{choice.weighed.chain_length}, where gains up to {GOAL:.0%} are within the error of predictions",
            highlight=False,
            soft_wrap=True,
        )
