"""`draftsmith plan`: whether speculation can pay on this device, before anything is trained.

Untrained drafters of the right shape cost what trained ones do. Measured costs give the acceptance length at which each
draft length breaks even; published or own acceptance gives the speedup to expect from it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftsmith.data.progress import progress_bar
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.environment import device_name, environment
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.inference.planning.best_draft import acceptance_length, best_draft_length, rates_of_rounds
from draftsmith.inference.planning.cost_measurement import CostRange, measure_costs, usual_tree
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.plans import (
    Acceptance,
    BatchCosts,
    BestDraft,
    DrafterPlan,
    Expectation,
    Plan,
    TrainingNeeds,
)
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_configs import ReducedVocabulary
from draftsmith.models.errors import UserError, printable
from draftsmith.models.files import whole_folder, write_json
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.typed_json import to_json
from draftsmith.recipes.configs.command_settings import PlanSettings
from draftsmith.recipes.configs.public_targets import TOKENS_PER_SAMPLE
from draftsmith.recipes.configs.published import PUBLISHED
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.comparison import evaluation_paths
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.reports.report import build_report
from draftsmith.train import TrainConfig
from draftsmith.train.hardware.estimates import H100, estimate

CONTEXT = 256  # tokens of each request, where nothing else is asked for
LONGEST = 8  # draft length, likewise


# --- the command


@dataclass(frozen=True)
class Candidate:
    """A drafter to plan for, untrained with its recipe or loaded, and the drafts to plan with."""

    name: str
    drafter: Drafter
    recipe: TrainConfig | None
    draft_lengths: list[int]
    trees: list[StaticTree]

    def cost_range(self, batches: Sequence[int], context: int) -> CostRange:
        """Return the range in which costs are needed."""
        most_nodes = max((tree.num_nodes for tree in self.trees), default=0)
        return CostRange(max(batches), context, max(self.draft_lengths), most_nodes)


def run(settings: PlanSettings, console: Console) -> None:
    """Measure, print and write plan.json and a costs.json for each drafter.

    The drafters are kinds or recipes, untrained, or checkpoints. Raises `UserError` before anything is measured.
    """
    target = load_target(settings.target, settings.device)
    own = [read_acceptance(text) for text in settings.acceptance]
    batches = sorted(set(settings.batch_size))
    context = settings.context or min(CONTEXT, target.context // 2)
    candidates = [read_candidate(name, target, settings) for name in dict.fromkeys(settings.drafter)]
    names = [candidate.name for candidate in candidates]
    if settings.tree_nodes and not any(candidate.trees for candidate in candidates):
        raise UserError(f"--tree-nodes: {listed(names)} drafts chains only: leave it out")
    plans = []
    with whole_folder(settings.out) as out, progress_bar() as progress, cpu_threads(settings.num_threads):
        for candidate, path in zip(candidates, evaluation_paths(out, names), strict=True):
            task = progress.add_task(printable(f"measuring {candidate.name}"), total=1.0, detail="")
            show: Callable[[float], None] = partial(lambda task, share: progress.update(task, completed=share), task)
            reach = candidate.cost_range(batches, context)
            costs = measure_costs(target, candidate.drafter, reach, candidate.name, show)
            write_json(path.parent / "costs.json", to_json(costs))
            published = [published for published in PUBLISHED if published.kind == candidate.drafter.kind]
            acceptances = own + [Acceptance(entry.where, entry.source, [*entry.rates]) for entry in published]
            plan = drafter_plan(costs, batches, context, candidate.draft_lengths, acceptances, candidate.trees)
            plans.append(replace(plan, training=training_needs(candidate, target)))
        content = Plan(target.name, context, environment(target), plans)
        write_json(out / "plan.json", to_json(content))
    console.print(f"report: {build_report(settings.out)}")
    print_plan(content, device_name(target), target.device.type == "cuda", console)


def read_candidate(name: str, target: Target, settings: PlanSettings) -> Candidate:
    """Return a drafter and the drafts that it makes. Raises `UserError` for drafts that it cannot make."""
    drafter, recipe = drafter_of_shape(name, target)
    most, asked = drafter.max_draft_length, sorted(set(settings.draft_length))
    if most == 0:
        raise UserError(f"drafter {name}: it drafts nothing, so there is nothing to plan: give a kind such as eagle3")
    if most is not None and max(asked, default=1) > most:
        raise UserError(f"--draft-length {asked[-1]}: {name} drafts up to {most} tokens in a row")
    lengths = asked or list(range(1, min(LONGEST, most or LONGEST) + 1))
    sizes = sorted(set(settings.tree_nodes)) if drafter.can_branch else []
    return Candidate(name, drafter, recipe, lengths, [usual_tree(size, lengths[-1]) for size in sizes])


def drafter_of_shape(name: str, target: Target) -> tuple[Drafter, TrainConfig | None]:
    """Return an untrained drafter by the name of a kind or recipe, with the recipe; else a loaded one."""
    if name not in RECIPES or Path(name).is_dir():
        if name not in DRAFTERS and "/" not in name and not Path(name).exists():
            known = ", ".join(sorted(RECIPES))
            raise UserError(f"drafter {name}: no such kind, recipe or directory: give one of {known}, or a checkpoint")
        return load_drafter(name, target), None
    config = RECIPES[name]()
    shape = config.drafter
    if isinstance(shape, ReducedVocabulary) and (shape.draft_vocab_size or 0) > target.vocab_size:
        config.drafter = replace(shape, draft_vocab_size=None)  # the target's vocabulary is smaller than that
    drafter = DRAFTERS[config.drafter.kind].from_target(config.drafter, target)
    for parameter in drafter.parameters():  # its buffers keep their precision
        parameter.data = parameter.data.to(target.dtype)
    return drafter.to(target.device).eval(), config


def read_acceptance(text: str) -> Acceptance:
    """Return the acceptance of an evaluation.json, by its longest chains; or one rate for every depth."""
    try:
        rate = float(text)
    except ValueError:
        return read_measured(Path(text))
    if not 0 <= rate <= 1:
        raise UserError(f"--acceptance {text}: give a rate from 0 to 1, or the path of an evaluation.json")
    return Acceptance(f"rate {rate:g}", "assumed", [rate] * LONGEST)


def read_measured(path: Path) -> Acceptance:
    chains = [
        result
        for result in read_evaluation(path).results
        if result.setting.tree_nodes is None and result.setting.draft_length and result.acceptance.num_rounds
    ]
    if not chains:
        raise UserError(f"--acceptance {path}: no chains were measured: give another evaluation.json, or a rate")
    result = max(chains, key=lambda result: result.setting.draft_length)
    stats = result.acceptance
    rates = rates_of_rounds(stats.conditional_acceptance_rates, stats.num_drafts, stats.num_rounds)
    return Acceptance(result.setting.prompt_set, str(path), rates)


# --- what costs and acceptance lead to


def drafter_plan(
    costs: Costs,
    batches: Sequence[int],
    context: int,
    lengths: list[int],
    acceptances: list[Acceptance],
    trees: Sequence[StaticTree] = (),
) -> DrafterPlan:
    """Return what is planned for one drafter, but for its training."""
    by_batch = [batch_costs(costs, batch, context, lengths, trees) for batch in batches]
    expected = []
    for acceptance in acceptances:
        rates = acceptance.rates[: max(lengths)]
        drafts = [best_draft(rates, costs, batch, context) for batch in batches]
        expected.append(Expectation(acceptance=acceptance, by_batch_size=drafts))
    return DrafterPlan(
        costs.drafter,
        costs.drafter_kind,
        by_batch,
        {str(tree.num_nodes): tree.depth for tree in trees},
        expected,
        {name: value for name, value in vars(costs.held_out).items() if name != "rows"},
        verdicts(costs.drafter, by_batch, expected),
    )


def batch_costs(costs: Costs, batch: int, context: int, lengths: list[int], trees: Sequence[StaticTree]) -> BatchCosts:
    break_even = {str(length): costs.break_even(length, batch, context) for length in lengths}
    return BatchCosts(
        batch,
        costs.plain(batch, context),
        {str(length): costs.round(length, batch, context) for length in lengths},
        break_even,
        {str(tree.num_nodes): costs.break_even(tree.depth, batch, context, tree.num_nodes) for tree in trees},
        max((length + 1) / break_even[str(length)] for length in lengths),
    )


def best_draft(rates: Sequence[float | None], costs: Costs, batch: int, context: int) -> BestDraft:
    length = best_draft_length(rates, costs, batch, context)
    emitted = acceptance_length(rates, length)
    return BestDraft(batch, length, emitted, costs.speedup(emitted, length, batch, context))


def verdicts(name: str, by_batch: list[BatchCosts], expected: list[Expectation]) -> list[str]:
    """Return from where on nothing pays, whatever is accepted, and then what each acceptance leads to, in words."""
    lines = []
    if hopeless := [row.batch_size for row in by_batch if row.highest_speedup <= 1]:
        lines.append(
            f"{name}: at batch {listed(hopeless)} no draft length pays even if all is accepted: speculation off"
        )
    for expectation in expected:
        drafts = expectation.by_batch_size
        best = max(drafts, key=lambda draft: draft.speedup)
        off = [draft.batch_size for draft in drafts if draft.draft_length == 0]
        text = f"{best.speedup:.2f}x at batch {best.batch_size} with draft length {best.draft_length}"
        text += f"; speculation off at batch {listed(off)}" if off else ""
        if len(off) == len(drafts):
            text = "no draft length pays at any batch size: speculation off"
        lines.append(f"{name}, accepting as {expectation.acceptance.where}: {text}")
    return lines


def listed(values: Sequence[int | str]) -> str:
    return ", ".join(map(str, values))


def training_needs(candidate: Candidate, target: Target) -> TrainingNeeds | None:
    """Return what training by the recipe takes on one H100 with samples of 800 tokens; None without a recipe."""
    if candidate.recipe is None:
        return None
    needs = estimate(candidate.recipe, target.text_config, TOKENS_PER_SAMPLE, candidate.drafter)
    steps, samples = candidate.recipe.run.steps, candidate.recipe.run.steps * candidate.recipe.data.batch_size
    return TrainingNeeds(H100.name, steps, samples, TOKENS_PER_SAMPLE, needs.hours(H100), needs.total_bytes / 1e9)


# --- what is printed


def print_plan(plan: Plan, device: str, on_gpu: bool, console: Console) -> None:
    elsewhere = "" if on_gpu else "; on a GPU they are others, so plan there"
    console.print(f"All times are of this device, {device}{elsewhere}.")
    for row in plan.drafters:
        title = f"\n{row.drafter}: acceptance length to break even, {plan.context} tokens of context"
        console.print(title, style="bold")
        console.print(break_even_table(row))
        if row.expected:
            title = f"{row.drafter}: best K and its speedup, by acceptance that others published or that you gave"
            console.print(title, style="bold")
            console.print(expected_table(row.expected))
            for number, expectation in enumerate(row.expected, 1):
                console.print(f" {number}: {expectation.acceptance.where} ({expectation.acceptance.source})")
        if needs := row.training:
            hours = f"{needs.hours:.1f} hours" if needs.hours >= 1 else f"{60 * needs.hours:.1f} minutes"
            console.print(
                f"training by the recipe, by formulae: {hours} and {needs.gigabytes:.1f} GB on one {needs.device}, "
                f"{needs.samples} samples of {needs.tokens_per_sample} tokens"
            )
        error = row.held_out
        console.print(
            f"predicted speedup, at {error['settings']} settings left out of the fit: median error "
            f"{error['median_error']:.1%}, within 5 % at {error['share_within_5_percent']:.0%}"
        )
    console.print()
    for line in itertools.chain(*(row.verdicts for row in plan.drafters)):
        console.print(line)


def break_even_table(plan: DrafterPlan) -> Table:
    heads = [f"K={length}" for length in plan.by_batch_size[0].round_ms]
    heads += [f"{nodes} nodes, depth {depth}" for nodes, depth in plan.tree_depths.items()]
    table = Table("batch", "plain, ms", *heads, box=None)
    for row in plan.by_batch_size:
        needed = row.break_even_acceptance_length.values(), row.tree_break_even_acceptance_length.values()
        cells = [f"{length:.2f}" for length in itertools.chain(*needed)]
        table.add_row(str(row.batch_size), f"{row.plain_ms:.2f}", *cells)
    return table


def expected_table(expected: list[Expectation]) -> Table:
    table = Table("", *(f"batch {draft.batch_size}" for draft in expected[0].by_batch_size), box=None)
    for number, expectation in enumerate(expected, 1):
        drafts = expectation.by_batch_size
        table.add_row(
            str(number), *(f"K={d.draft_length} {d.speedup:.2f}x" if d.draft_length else "off" for d in drafts)
        )
    return table
