"""`draftsmith plan`: whether speculation can pay on this device, before anything is trained.

Untrained drafters of the right shape cost what trained ones do. Measured costs give the acceptance length at which each
draft length breaks even; published or own acceptance gives the speedup to expect from it.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from draftsmith.data.progress import progress_bar
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.measuring.environment import device_name, environment
from draftsmith.inference.planning.choice import acceptance_length, best_draft_length, rates_of_rounds
from draftsmith.inference.planning.cost_measurement import CostRange, measure_costs, usual_tree
from draftsmith.inference.planning.costs import Costs
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafting.vocabulary import ReducedVocabulary
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.files import require_writable, write_json
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.typed_json import to_json
from draftsmith.recipes.configs.command_settings import PlanSettings
from draftsmith.recipes.configs.public_targets import TOKENS_PER_SAMPLE
from draftsmith.recipes.configs.published import PUBLISHED
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.evaluation.comparison import evaluation_paths
from draftsmith.train import TrainConfig
from draftsmith.train.hardware.estimates import H100, estimate

CONTEXT = 256  # tokens of each request, where nothing else is asked for
LONGEST = 8  # draft length, likewise


@dataclass
class Expected:
    """Acceptance to plan with."""

    where: str
    source: str
    rates: list[float | None]


def run(settings: PlanSettings, console: Console) -> None:
    """Measure, print and write plan.json and a costs.json for each drafter.

    The drafters are kinds or recipes, untrained, or checkpoints. Raises `UserError` before anything is measured.
    """
    target = Target.from_pretrained(settings.target, settings.device)
    names, batches = list(settings.drafter), sorted(set(settings.batch_size))
    own = [read_acceptance(text) for text in settings.acceptance]
    drafters = {name: drafter_of_shape(name, target) for name in names}
    context = settings.context or min(CONTEXT, target.context // 2)
    lengths = {name: lengths_of(drafter, settings.draft_length, name) for name, (drafter, _) in drafters.items()}
    trees = {
        name: trees_of(drafter, settings.tree_nodes, max(lengths[name])) for name, (drafter, _) in drafters.items()
    }
    if settings.tree_nodes and not any(trees.values()):
        raise UserError(f"--tree-nodes: {listed(names)} drafts chains only: leave it out")
    require_writable(settings.out)

    planned = []
    with progress_bar() as progress, cpu_threads(settings.num_threads):
        for (name, (drafter, config)), path in zip(
            drafters.items(), evaluation_paths(settings.out, names), strict=True
        ):
            task = progress.add_task(f"measuring {name}", total=1.0, detail="")
            most_nodes = max((tree.num_nodes for tree in trees[name]), default=0)
            reach = CostRange(max(batches), context, max(lengths[name]), most_nodes)

            def show(share: float, task: TaskID = task) -> None:
                progress.update(task, completed=share)

            costs = measure_costs(target, drafter, reach, name, show)
            write_json(path.parent / "costs.json", costs.to_json())
            expected = own + [Expected(p.where, p.source, list(p.rates)) for p in PUBLISHED if p.kind == drafter.kind]
            row = plan_row(costs, batches, context, lengths[name], expected, trees[name])
            if config is not None:
                row["training"] = training(config, drafter, target)
            planned.append(row)
        env = to_json(environment(target))
    content = {"target": target.name, "context": context, "environment": env, "drafters": planned}
    write_json(settings.out / "plan.json", content)
    print_plan(content, device_name(target), target.device.type == "cuda", console)


def drafter_of_shape(name: str, target: Target) -> tuple[Drafter, TrainConfig | None]:
    """An untrained drafter by the name of a kind or recipe, with the recipe; else a loaded one."""
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
    for parameter in drafter.parameters():
        parameter.data = parameter.data.to(target.dtype)
    return drafter.to(target.device).eval(), config


def lengths_of(drafter: Drafter, asked: Sequence[int], name: str) -> list[int]:
    most = drafter.max_draft_length
    if most == 0:
        raise UserError(f"drafter {name}: it drafts nothing, so there is nothing to plan: give a kind such as eagle3")
    if most is not None and max(asked, default=1) > most:
        raise UserError(f"--draft-length {max(asked)}: {name} drafts up to {most} tokens in a row")
    return sorted(set(asked)) or list(range(1, min(LONGEST, most or LONGEST) + 1))


def trees_of(drafter: Drafter, sizes: Sequence[int], longest: int) -> list[StaticTree]:
    """Of usual shape and of these numbers of nodes; none for a drafter of chains."""
    return [usual_tree(size, longest) for size in sorted(set(sizes))] if drafter.can_branch else []


def read_acceptance(text: str) -> Expected:
    """From an evaluation.json, its chains of the longest draft length; or one rate for every depth."""
    try:
        rate = float(text)
    except ValueError:
        return read_measured(Path(text))
    if not 0 <= rate <= 1:
        raise UserError(f"--acceptance {text}: give a rate from 0 to 1, or the path of an evaluation.json")
    return Expected(f"rate {rate:g}", "assumed", [rate] * LONGEST)


def read_measured(path: Path) -> Expected:
    try:
        content = json.loads(path.read_text())
        chains = [
            row for row in content["results"] if row["tree_nodes"] is None and row["draft_length"] and row["num_rounds"]
        ]
        row = max(chains, key=lambda row: row["draft_length"])
        rates = rates_of_rounds(row["conditional_acceptance_rates"], row["num_drafts"], row["num_rounds"])
        return Expected(row["prompt_set"], str(path), rates)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--acceptance {path}: no evaluation.json with measured chains ({first_line(error)})") from None


def plan_row(
    costs: Costs,
    batches: Sequence[int],
    context: int,
    lengths: list[int],
    expected: list[Expected],
    trees: Sequence[StaticTree] = (),
) -> dict[str, Any]:
    """What plan.json says of one drafter."""
    by_batch = []
    for batch in sorted(set(batches)):
        break_even = {str(length): costs.break_even(length, batch, context) for length in lengths}
        by_batch.append(
            {
                "batch_size": batch,
                "plain_ms": costs.plain(batch, context),
                "round_ms": {str(length): costs.round(length, batch, context) for length in lengths},
                "break_even_acceptance_length": break_even,
                "tree_break_even_acceptance_length": {
                    str(tree.num_nodes): costs.break_even(tree.depth, batch, context, tree.num_nodes) for tree in trees
                },
                "highest_speedup": max((length + 1) / break_even[str(length)] for length in lengths),
            }
        )
    row = {
        "drafter": costs.drafter,
        "drafter_kind": costs.drafter_kind,
        "by_batch_size": by_batch,
        "tree_depths": {str(tree.num_nodes): tree.depth for tree in trees},
        "expected": [expectation(one, costs, batches, context, lengths) for one in expected],
        "held_out": {name: value for name, value in vars(costs.held_out).items() if name != "rows"},
    }
    return {**row, "verdicts": verdicts(row)}


def expectation(
    expected: Expected, costs: Costs, batches: Sequence[int], context: int, lengths: list[int]
) -> dict[str, Any]:
    """The best draft length at each batch size and its speedup, for an acceptance."""
    rates = expected.rates[: max(lengths)]
    found = []
    for batch in sorted(set(batches)):
        length = best_draft_length(rates, costs, batch, context)
        emitted = acceptance_length(rates, length)
        speedup = costs.speedup(emitted, length, batch, context)
        found.append({"batch_size": batch, "draft_length": length, "acceptance_length": emitted, "speedup": speedup})
    return {**asdict(expected), "by_batch_size": found}


def verdicts(row: dict[str, Any]) -> list[str]:
    """In words: from where on nothing pays, whatever is accepted; then what each acceptance leads to."""
    name, found = row["drafter"], []
    hopeless = [one["batch_size"] for one in row["by_batch_size"] if one["highest_speedup"] <= 1]
    if hopeless:
        found.append(
            f"{name}: at batch {listed(hopeless)} no draft length pays even if all is accepted: speculation off"
        )
    for one in row["expected"]:
        best = max(one["by_batch_size"], key=lambda at: at["speedup"])
        off = [at["batch_size"] for at in one["by_batch_size"] if at["draft_length"] == 0]
        if len(off) == len(one["by_batch_size"]):
            found.append(
                f"{name}, accepting as {one['where']}: no draft length pays at any batch size: speculation off"
            )
            continue
        text = f"{best['speedup']:.2f}x at batch {best['batch_size']} with draft length {best['draft_length']}"
        text += f"; speculation off at batch {listed(off)}" if off else ""
        found.append(f"{name}, accepting as {one['where']}: {text}")
    return found


def listed(values: Sequence[int | str]) -> str:
    return ", ".join(map(str, values))


def training(config: TrainConfig, drafter: Drafter, target: Target) -> dict[str, Any]:
    """What training by the recipe takes, by formulae, on one H100 and samples of 800 tokens."""
    taken = estimate(config, target.text_config, TOKENS_PER_SAMPLE, drafter)
    return {
        "device": H100.name,
        "steps": config.run.steps,
        "samples": config.run.steps * config.data.batch_size,
        "tokens_per_sample": TOKENS_PER_SAMPLE,
        "hours": taken.hours(H100),
        "gigabytes": taken.total_bytes / 1e9,
    }


# --- what is printed


def print_plan(content: dict[str, Any], device: str, on_gpu: bool, console: Console) -> None:
    note = "" if on_gpu else "; on a GPU they are others, so plan there"
    console.print(f"All times are of this device, {device}{note}.", highlight=False, soft_wrap=True)
    for row in content["drafters"]:
        print_break_even(row, content["context"], console)
        if row["expected"]:
            print_expected(row, console)
        if "training" in row:
            t = row["training"]
            text = f"training by the recipe, by formulae: {duration(t['hours'])} and {t['gigabytes']:.1f} GB"
            size = f"{t['samples']} samples of {t['tokens_per_sample']} tokens"
            console.print(f"{text} on one {t['device']}, {size}", highlight=False, soft_wrap=True)
        error = row["held_out"]
        console.print(
            f"predicted speedup, at {error['settings']} settings left out of the fit: median error "
            f"{error['median_error']:.1%}, within 5 % at {error['share_within_5_percent']:.0%}",
            highlight=False,
            soft_wrap=True,
        )
    console.print()
    for row in content["drafters"]:
        for text in row["verdicts"]:
            console.print(text, highlight=False, soft_wrap=True)


def duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def print_break_even(row: dict[str, Any], context: int, console: Console) -> None:
    lengths = list(row["by_batch_size"][0]["round_ms"])
    title = f"{row['drafter']}: acceptance length to break even, {context} tokens of context"
    console.print(f"\n{title}", style="bold", highlight=False, soft_wrap=True)
    heads = [f"K={length}" for length in lengths]
    heads += [f"{nodes} nodes, depth {depth}" for nodes, depth in row["tree_depths"].items()]
    table = Table("batch", "plain, ms", *heads, box=None)
    for one in row["by_batch_size"]:
        needed = one["break_even_acceptance_length"].values(), one["tree_break_even_acceptance_length"].values()
        cells = [f"{length:.2f}" for length in itertools.chain(*needed)]
        table.add_row(str(one["batch_size"]), f"{one['plain_ms']:.2f}", *cells)
    console.print(table)


def print_expected(row: dict[str, Any], console: Console) -> None:
    batches = [str(one["batch_size"]) for one in row["by_batch_size"]]
    heads = [f"batch {batch}" for batch in batches]
    title = f"{row['drafter']}: best K and its speedup, by acceptance that others published or that you gave"
    console.print(title, style="bold", highlight=False, soft_wrap=True)
    table = Table("", *heads, box=None)
    for number, one in enumerate(row["expected"], 1):
        cells = [
            f"K={at['draft_length']} {at['speedup']:.2f}x" if at["draft_length"] else "off"
            for at in one["by_batch_size"]
        ]
        table.add_row(str(number), *cells)
    console.print(table)
    for number, one in enumerate(row["expected"], 1):
        console.print(f" {number}: {one['where']} ({one['source']})", highlight=False, soft_wrap=True)
