"""`draftsmith plan`: whether speculation can pay on this device, before anything is trained.

Untrained drafters of the right shape cost what trained ones do. Measured costs give the acceptance length at which each
draft length breaks even; published or own acceptance gives the speedup to expect from it.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rich.console import Console

from draftsmith.data.progress import progress_bar
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.environment import device_name, environment
from draftsmith.inference.planning.cost_measurement import CostRange, longest_context, measure_costs, usual_tree
from draftsmith.inference.planning.plans import Plan, TrainingNeeds
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError, printable
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.storage.files import whole_folder, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.configs.command_settings import PlanSettings
from draftsmith.recipes.configs.public_targets import TOKENS_PER_SAMPLE
from draftsmith.recipes.evaluation.comparison import evaluation_paths, refuse_others
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.planning.drafter_shapes import drafter_of_shape
from draftsmith.recipes.planning.expectations import drafter_plan, known_acceptance, listed, planned_lengths
from draftsmith.recipes.planning.gpu_plan import plan_for_gpu
from draftsmith.recipes.planning.plan_tables import print_break_even, print_expected
from draftsmith.recipes.reports.report import build_report
from draftsmith.train import TrainConfig
from draftsmith.train.hardware.estimates import H100, estimate

CONTEXT = 256  # tokens of each request, where nothing else is asked for


# --- the command


@dataclass(frozen=True)
class Candidate:
    """A drafter to plan for, untrained with its recipe or loaded, and the drafts to plan with."""

    name: str
    drafter: Drafter
    recipe: TrainConfig | None
    draft_lengths: list[int]
    trees: list[StaticTree]

    @property
    def most_nodes(self) -> int:
        return max((tree.num_nodes for tree in self.trees), default=0)

    def longest_context(self, target: Target) -> int:
        """Return the longest context that its costs can be measured at."""
        return longest_context(target, max(self.draft_lengths), self.most_nodes)

    def cost_range(self, batches: Sequence[int], context: int) -> CostRange:
        """Return the range in which costs are needed."""
        return CostRange(max(batches), context, max(self.draft_lengths), self.most_nodes)


def run(settings: PlanSettings, console: Console) -> None:
    """Measure, print and write plan.json and a costs.json for each drafter; for another GPU see `plan_for_gpu`.

    The drafters are kinds or recipes, untrained, or checkpoints. Raises `UserError` before anything is measured.
    """
    if settings.gpu is not None:
        plan_for_gpu(settings, console)
        return
    target = load_target(settings.target, settings.device)
    known_acceptance(settings.acceptance, "", 1)  # mistakes are told before anything is measured
    batches = sorted(set(settings.batch_size))
    candidates = [read_candidate(name, target, settings) for name in dict.fromkeys(settings.drafter)]
    room = min(candidate.longest_context(target) for candidate in candidates)
    context = settings.context or min(CONTEXT, target.context // 2, max(1, room))
    names = [candidate.name for candidate in candidates]
    if settings.tree_nodes and not any(candidate.trees for candidate in candidates):
        raise UserError(f"--tree-nodes: {listed(names)} drafts chains only: leave it out")
    refuse_others(settings.out, names, "costs.json", "costs")
    plans = []
    with whole_folder(settings.out) as out, progress_bar() as progress, cpu_threads(settings.num_threads):
        for candidate, path in zip(candidates, evaluation_paths(out, names), strict=True):
            task = progress.add_task(printable(f"measuring {candidate.name}"), total=1.0, detail="")
            show: Callable[[float], None] = partial(lambda task, share: progress.update(task, completed=share), task)
            reach = candidate.cost_range(batches, context)
            costs = measure_costs(target, candidate.drafter, reach, candidate.name, show)
            write_json(path.parent / "costs.json", to_json(costs))
            acceptances = known_acceptance(settings.acceptance, candidate.drafter.kind, max(candidate.draft_lengths))
            plan = drafter_plan(costs, batches, context, candidate.draft_lengths, acceptances, candidate.trees)
            plans.append(replace(plan, training=training_needs(candidate, target)))
        content = Plan(target.name, context, environment(target), plans)
        write_json(out / "plan.json", to_json(content))
    console.print(f"report: {build_report(settings.out)}")
    print_plan(content, device_name(target), target.device.type == "cuda", console)


def read_candidate(name: str, target: Target, settings: PlanSettings) -> Candidate:
    """Return a drafter and the drafts that it makes. Raises `UserError` for drafts that it cannot make."""
    drafter, recipe = drafter_of_shape(name, target)
    if drafter.max_draft_length == 0:
        raise UserError(f"drafter {name}: it drafts nothing, so there is nothing to plan: give a kind such as eagle3")
    lengths = planned_lengths(name, settings.draft_length, drafter.max_draft_length)
    sizes = sorted(set(settings.tree_nodes)) if drafter.can_branch else []
    return Candidate(name, drafter, recipe, lengths, [usual_tree(size, lengths[-1]) for size in sizes])


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
        print_break_even(row, plan.context, console)
        print_expected(row, console)
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
