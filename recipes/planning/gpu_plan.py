"""`draftsmith plan --gpu`: what a target and its drafters would do on a GPU that is not here, from config.json alone.

Nothing is loaded and nothing measured. Sizes of the target come from its config, the GPU's from its data sheet; the
roofline and its assumptions are those of inference/planning/gpu_roofline.py.
"""

import math

from rich.console import Console
from rich.table import Table

from draftsmith.inference.planning.gpu_roofline import (
    BYTES,
    Machine,
    RooflineCosts,
    TargetTimes,
    WeightType,
    dollars_per_million,
    reply_seconds,
)
from draftsmith.inference.planning.gpus import gpu_named
from draftsmith.inference.planning.plans import Acceptance, DrafterPlan, GpuPlan, Outcome, StepTimes
from draftsmith.models.errors import UserError
from draftsmith.models.slots.forward import context_of
from draftsmith.models.storage.files import whole_folder, write_json, write_whole
from draftsmith.models.storage.typed_json import to_json
from draftsmith.models.target.shape import target_shape
from draftsmith.models.target.support import check_decoded
from draftsmith.models.target.target_files import read_quantisation
from draftsmith.recipes.configs.command_settings import PlanSettings
from draftsmith.recipes.configs.public_targets import public_target, target_config
from draftsmith.recipes.pages.tables import for_terminal
from draftsmith.recipes.planning.drafter_shapes import drafter_shape
from draftsmith.recipes.planning.expectations import (
    batch_costs,
    expectations,
    known_acceptance,
    planned_lengths,
    verdicts,
)
from draftsmith.recipes.planning.gpu_plan_page import (
    assumption_lines,
    machine_text,
    memory_lines,
    outcomes_table,
    plan_page,
)
from draftsmith.recipes.planning.plan_tables import print_break_even, print_expected
from draftsmith.recipes.planning.training_plan import print_training, training_plans

CONTEXT, REPLY = 2048, 300  # tokens, where nothing else is asked for
CONTEXTS = (1024, 4096, 16_384, 65_536)  # that steps are shown at, as far as the target goes
ASSUMED_RATE = 0.7  # of acceptance at each depth, where none is known
QUANTISED: dict[str, WeightType] = {  # by the format, algorithm or method that config.json names
    **dict.fromkeys(("fp8", "fbgemm_fp8", "mxfp8", "float-quantized", "FP8"), "fp8"),
    **dict.fromkeys(("mxfp4", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "NVFP4"), "fp4"),
    **dict.fromkeys(("awq", "gptq", "pack-quantized"), "int4"),  # of 8 bits: int8
    "int-quantized": "int8",
}


def plan_for_gpu(settings: PlanSettings, console: Console) -> None:
    """Predict, print and write gpu_plan.json and plan.html. Raises `UserError`."""
    plan = gpu_plan(settings)
    with whole_folder(settings.out) as out:
        write_json(out / "gpu_plan.json", to_json(plan))
        write_whole(out / "plan.html", plan_page(plan))
    console.print(f"page: {settings.out / 'plan.html'}")
    print_gpu_plan(plan, console)


def gpu_plan(settings: PlanSettings) -> GpuPlan:
    """Return the whole plan. Raises `UserError` for a target, a drafter or a context that it cannot be made for."""
    assert settings.gpu is not None
    config, name = target_config(settings.target)
    check_decoded(config, name)
    longest_text = context_of(config.get_text_config())
    context = settings.context or min(CONTEXT, longest_text)
    if context > longest_text:
        raise UserError(f"--context {context}: {name} reads {longest_text} tokens at most")
    weights = settings.weights or stored_weights(settings.target)
    machine = Machine(gpu_named(settings.gpu), settings.num_gpus or 1, weights)
    times = TargetTimes(target_shape(config, name), machine)
    check_memory(times, context)
    batches, shapes, drafters = sorted(set(settings.batch_size)), [], []
    for drafter_name in dict.fromkeys(settings.drafter):
        shape, kind = drafter_shape(drafter_name, config, name)
        shapes.append(shape)
        drafters.append(planned_drafter(RooflineCosts(times, shape), kind, batches, context, settings))
    contexts = sorted({context, *(length for length in CONTEXTS if length <= longest_text)})
    return GpuPlan(
        times.shape,
        machine,
        context,
        settings.reply or REPLY,
        times.free_tokens(),
        shapes,
        [step_times(times, batches, length) for length in contexts],
        drafters,
        [
            outcome
            for batch in batches
            if batch <= times.rows_that_fit(context)
            for outcome in outcomes(times, batch, context, drafters, settings)
        ],
        settings.price,
        training_plans(settings, config, times.shape, machine),
    )


def stored_weights(name: str) -> WeightType:
    """Return the type of a target's weights by its config.json. Raises `UserError` where that does not tell it."""
    quantisation = None if public_target(name) else read_quantisation(name)
    if quantisation is None:
        return "bf16"
    form = quantisation.format or quantisation.quant_algo or quantisation.quant_method
    if form not in QUANTISED:
        raise UserError(f"target {name!r} is quantised by {quantisation}: give --weights, one of {', '.join(BYTES)}")
    return "int8" if QUANTISED[form] == "int4" and quantisation.most_bits == 8 else QUANTISED[form]


def check_memory(times: TargetTimes, context: int) -> None:
    """Raise `UserError`, with the number of GPUs that it takes, where not even one text fits beside the weights."""
    if times.rows_that_fit(context):
        return
    machine = times.machine
    needed = times.stored_bytes() + times.kept_bytes(context)
    enough = math.ceil(needed / (machine.assumptions.memory_share * machine.gpu.memory))
    raise UserError(
        f"{times.shape.name} in {machine.weights} takes {needed / 1e9:.0f} GB with one text of {context} tokens, which "
        f"{machine.num_gpus} {machine.gpu.name} of {machine.gpu.memory / 1e9:.0f} GB do not hold: give --num-gpus "
        f"{enough}, or smaller --weights"
    )


def step_times(times: TargetTimes, batches: list[int], context: int) -> StepTimes:
    milliseconds = {str(batch): times.plain(batch, context) for batch in batches}
    return StepTimes(context, milliseconds, times.bound_from(context), times.rows_that_fit(context))


def planned_drafter(
    costs: RooflineCosts, kind: str, batches: list[int], context: int, settings: PlanSettings
) -> DrafterPlan:
    """Return what is planned for a drafter. Raises `UserError` for drafts that it cannot make."""
    shape = costs.drafter
    lengths = planned_lengths(shape.name, settings.draft_length, shape.longest)
    acceptances = known_acceptance(settings.acceptance, kind, max(lengths))
    acceptances = acceptances or [
        Acceptance(f"an assumed rate of {ASSUMED_RATE:g}", "assumed", [ASSUMED_RATE] * max(lengths))
    ]
    by_batch = [batch_costs(costs, batch, context, lengths) for batch in batches]
    expected = expectations(acceptances, costs, batches, context, max(lengths))
    return DrafterPlan(shape.name, kind, by_batch, {}, expected, {}, verdicts(shape.name, by_batch, expected))


def outcomes(
    times: TargetTimes, batch: int, context: int, drafters: list[DrafterPlan], settings: PlanSettings
) -> list[Outcome]:
    """Return the outcome of plain decoding at a batch size, then those of the drafters that pay.

    Of what is known of a drafter's acceptance the first counts.
    """
    plain_ms = times.plain(batch, context)

    def outcome(drafter: str, accepting: str, draft_length: int, speedup: float) -> Outcome:
        ms, price = plain_ms / speedup, settings.price  # of a token of each text
        dollars = None if price is None else dollars_per_million(price, times.machine.num_gpus, batch, ms)
        reply = reply_seconds(settings.reply or REPLY, ms)
        return Outcome(batch, drafter, accepting, draft_length, 1000 * batch / ms, reply, dollars)

    rows = [outcome("none", "", 0, 1.0)]
    for drafter in drafters:
        first = drafter.expected[0]
        draft = next(draft for draft in first.by_batch_size if draft.batch_size == batch)
        if draft.draft_length:
            rows.append(outcome(drafter.drafter, first.acceptance.where, draft.draft_length, draft.speedup))
    return rows


# --- what is printed


def print_gpu_plan(plan: GpuPlan, console: Console) -> None:
    console.print(f"{plan.target.name} on {machine_text(plan.machine)}: nothing was measured, all times are predicted.")
    for line in [*assumption_lines(plan.machine), *memory_lines(plan)]:
        console.print(f" {line}")
    console.print("\nplain steps, in milliseconds; in brackets what does not fit in memory", style="bold")
    console.print(steps_table(plan.steps))
    for drafter in plan.drafters:
        print_break_even(drafter, plan.context, console)
        print_expected(drafter, console)
    console.print(f"\ndecoding by the first acceptance of each, {plan.context} tokens of context", style="bold")
    console.print(for_terminal(outcomes_table(plan)))
    for drafter in plan.drafters:
        for line in drafter.verdicts:
            console.print(line)
    print_training(plan, console)


def steps_table(steps: list[StepTimes]) -> Table:
    heads = [f"batch {batch}" for batch in steps[0].milliseconds]
    table = Table("context", *heads, "computes from batch", "texts that fit", box=None)
    for row in steps:
        fits = [(ms, int(batch) <= row.rows_that_fit) for batch, ms in row.milliseconds.items()]
        times = [f"{ms:.2f}" if fit else f"({ms:.2f})" for ms, fit in fits]
        table.add_row(str(row.context), *times, str(row.bound_from or "never"), str(row.rows_that_fit))
    return table
