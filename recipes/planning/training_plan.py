"""`draftsmith plan --gpu --samples`: what a training takes in each way of making features, and which is cheapest."""

import torch
from rich.console import Console
from transformers import PretrainedConfig

from draftsmith.data.progress import size_text
from draftsmith.inference.planning.gpu_roofline import Machine
from draftsmith.inference.planning.plans import DataFlow, GpuPlan, TrainingPlan, TrainingWay
from draftsmith.models.errors import UserError
from draftsmith.models.target.shape import TargetShape
from draftsmith.recipes.configs.command_settings import PlanSettings
from draftsmith.recipes.configs.public_targets import EPOCHS, TOKENS_PER_SAMPLE
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.pages.tables import Cell, Row, Section, Table, for_terminal, table_of
from draftsmith.recipes.planning.drafter_shapes import drafter_of_shape
from draftsmith.train.hardware.estimates import UTILISATION, meta_target
from draftsmith.train.hardware.ways import CARRIED, LINK_SHARE, Training, training_plan

BOUND_TEXT = {"products": "computing", "disk": "disk", "network": "network", "link": "link"}
ON_PAGE_ALONE = ("micro-batch", "sent, TB")  # of a table that is too wide for a terminal


def training_plans(
    settings: PlanSettings, config: PretrainedConfig, target: TargetShape, machine: Machine
) -> list[TrainingPlan] | None:
    """Return the plans of the drafters that a recipe trains; None where no samples were given.

    Raises `UserError` where no recipe trains any of the drafters.
    """
    if settings.samples is None:
        return None
    names = [name for name in dict.fromkeys(settings.drafter) if name in RECIPES]
    if not names:
        raise UserError("--samples: no recipe trains these drafters: give a kind such as eagle3, or leave it out")
    plans = []
    for name in names:
        with torch.device("meta"):
            drafter, recipe = drafter_of_shape(name, meta_target(config, target.name))
        assert recipe is not None
        tokens, epochs = settings.tokens_per_sample or TOKENS_PER_SAMPLE, settings.epochs or EPOCHS
        training = Training(name, recipe, drafter, config, target, machine, settings.samples, tokens, epochs)
        plans.append(training_plan(training, settings.price))
    return plans


# --- what is printed, and shown on the page


def print_training(plan: GpuPlan, console: Console) -> None:
    for training in plan.training or []:
        console.print(f"\n{heading(training)}", style="bold")
        table = ways_table(training)
        console.print(for_terminal(table, [name for name in table.headings if name not in ON_PAGE_ALONE]))
        console.print(cheapest_text(training))
        for command in commands(training, training.cheapest):
            console.print(f"  {command}", soft_wrap=True)
    if plan.training:
        console.print()
        for line in training_assumptions(plan):
            console.print(f" {line}")


def training_section(plan: GpuPlan) -> Section:
    """Show each way of training each drafter; without data where no samples were given."""
    trainings = plan.training or []
    return Section(
        "training",
        "Training",
        "What a training takes before anything is started, by the way in which the target's features are made.",
        [ways_table(training) for training in trainings],
        folded=[commands_table(training) for training in trainings],
        notes=[cheapest_text(training) for training in trainings],
    )


def heading(training: TrainingPlan) -> str:
    return (
        f"Training {training.drafter}: {training.samples:,} samples of {training.tokens_per_sample:,} tokens "
        f"({size_text(training.samples_bytes)} on disk), {training.epochs} times, in {training.steps:,} steps; "
        f"features of {size_text(training.features_bytes)}"
    )


def ways_table(training: TrainingPlan) -> Table:
    return table_of(
        heading(training), [way_row(way, training) for way in training.ways], words=("features", "bound by")
    )


def way_row(way: TrainingWay, training: TrainingPlan) -> Row:
    row: Row = {
        "features": Cell(way.name, "the cheapest" if way.name == training.cheapest else ""),
        "micro-batch": f"{way.tokens_per_micro_batch:,}",
        "GB a GPU": memory_cell(way),
        "hours": number(way.hours),
        "GPU hours": number(way.gpu_hours),
        "disk, TB": amount(way.stored_bytes),
        "disk, GB/s": rate(way.disk),
        "sent, TB": amount(way.network.num_bytes),
        "sent, GB/s": rate(way.network),
        "link, GB/s": rate(way.link),
        "bound by": BOUND_TEXT[way.bound_by],
    }
    return row if way.dollars is None else {**row, "$": f"{way.dollars:,.0f}"}


def memory_cell(way: TrainingWay) -> Cell:
    return Cell(f"{way.memory_bytes / 1e9:.0f}") if way.fits else Cell(f"{way.memory_bytes / 1e9:.0f} (no)", tone="bad")


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def amount(num_bytes: float) -> str:
    return number(num_bytes / 1e12) if num_bytes else "–"


def rate(flow: DataFlow) -> str:
    return number(flow.rate / 1e9) if flow.rate else "–"


def cheapest_text(training: TrainingPlan) -> str:
    """Return which way is the cheapest, and what it would be without a disk for features."""
    if training.cheapest is None:
        return (
            f"No way of training {training.drafter} fits these GPUs: give more with --num-gpus, or "
            "larger ones with --gpu."
        )
    ways = {way.name: way for way in training.ways}
    way = ways[training.cheapest]
    disk = f" and {size_text(way.stored_bytes)} of disk" if way.stored_bytes else ""
    line = f"The cheapest way of making features for {training.drafter} is {way.name}: {cost_text(way)}{disk}"
    if not way.stored_bytes:
        return f"{line}."
    if training.cheapest_without_disk is None:
        return f"{line}; no way without that disk fits these GPUs."
    other = ways[training.cheapest_without_disk]
    return f"{line}; without that disk it is {other.name}: {cost_text(other)}."


def cost_text(way: TrainingWay) -> str:
    dollars = "" if way.dollars is None else f" (${way.dollars:,.0f})"
    return f"{number(way.gpu_hours)} GPU hours{dollars}"


def commands(training: TrainingPlan, name: str | None) -> list[str]:
    """Return the commands that start a way, the server's first."""
    way = next((way for way in training.ways if way.name == name), None)
    return [] if way is None else [command for command in (way.server_command, way.command) if command]


def commands_table(training: TrainingPlan) -> Table:
    rows: list[Row] = [
        {"features": way.name, "command": command} for way in training.ways for command in commands(training, way.name)
    ]
    return table_of(f"Commands that train {training.drafter}", rows, words=("features", "command"))


def training_assumptions(plan: GpuPlan) -> list[str]:
    """Return what was assumed of training, a sentence a line; nothing where none is planned."""
    if not plan.training:
        return []
    link = LINK_SHARE * plan.machine.gpu.link / 1e9
    return [
        f"Products of training, and of every pass that makes features, reach {UTILISATION:.0%} of the data sheet's "
        "operations; attention's scores, loading, evaluation and the writing of the samples' text are not counted.",
        f"Disk and network each carry {CARRIED / 1e9:g} GB/s, as 100 Gbit Ethernet and three NVMe SSDs do; a GPU gets "
        f"{link:.0f} GB/s from the others of its machine of eight, {LINK_SHARE:.0%} of its link.",
        "Gradients and weights in pieces are exchanged, and features read from the disk, while products go on; sums of "
        "tensor parallelism, a server's features and what is written are waited for. The rates are those at which no "
        "GPU waits.",
        f"Memory of a GPU may be filled to {plan.machine.assumptions.memory_share:.0%}; where a recipe's micro-batches "
        "do not fit, they are halved until they do; (no) marks a way that does not fit even so.",
        "A server shares the GPUs of the run, and each of its copies of the target takes as few of them as hold it.",
    ]
