"""plan.html of `draftsmith plan --gpu`: the plan's tables, and a panel that computes it for other GPUs and loads."""

from dataclasses import dataclass
from typing import Any

from draftsmith.inference.planning.gpu_roofline import BYTES, Machine
from draftsmith.inference.planning.gpus import GPUS
from draftsmith.inference.planning.plans import GpuPlan, Outcome, StepTimes
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.pages.rendering import SCRIPTS, rendered
from draftsmith.recipes.pages.tables import Cell, Row, Section, Table, table_of
from draftsmith.recipes.planning.training_plan import training_assumptions, training_section
from draftsmith.recipes.reports.studies import break_even_table, expected_table
from draftsmith.recipes.reports.verdict import Fact

START_LENGTH, START_RATE = 4, 70.0  # of the panel, where the plan has nothing better


@dataclass(frozen=True)
class PanelStart:
    """The values that the panel's sliders have at first."""

    rate: float  # percent
    draft_length: int
    batch_power: int


def plan_page(plan: GpuPlan) -> str:
    """Return one page that needs no other file and no network."""
    content: Any = to_json(plan)
    data = {key: content[key] for key in ("target", "machine", "shapes", "context", "reply_tokens")}
    return rendered(
        "plan_page.html.j2",
        (*SCRIPTS, "plan_panel.js"),
        name=plan.target.name,
        title=title_of(plan),
        facts=facts_of(plan),
        notes=[CAVEAT, *memory_lines(plan)],
        sections=[section for section in sections_of(plan) if section.has_data],
        plan={**data, "price": plan.price, "gpus": to_json(list(GPUS.values())), "bytes": BYTES},
        start=to_json(panel_start(plan)),
    )


def sections_of(plan: GpuPlan) -> list[Section]:
    return [decoding(plan), training_section(plan), steps(plan), break_even(plan), assumptions(plan)]


CAVEAT = (
    "Nothing was measured here: every time is predicted from data sheets and from the target's config.json. How far "
    "such predictions were off for published figures, one by one: docs/roofline.md."
)


def machine_text(machine: Machine) -> str:
    number = f"{machine.num_gpus} " if machine.num_gpus > 1 else "one "
    return f"{number}{machine.gpu.name} in {machine.weights}"


def memory_lines(plan: GpuPlan) -> list[str]:
    """Return which of the planned batches do not fit in memory, in a sentence, if any."""
    row = own_steps(plan)
    too_large = [batch for batch in row.milliseconds if int(batch) > row.rows_that_fit]
    if not too_large:
        return []
    return [
        f"Only {row.rows_that_fit} texts of {plan.context} tokens fit beside the weights, so not batch "
        f"{', '.join(too_large)}."
    ]


def own_steps(plan: GpuPlan) -> StepTimes:
    """Return the plain steps at the plan's own context."""
    return next(row for row in plan.steps if row.context == plan.context)


def title_of(plan: GpuPlan) -> str:
    """Return from where on the first drafter pays at the smallest batch size."""
    drafter = plan.drafters[0]
    row, best = drafter.by_batch_size[0], panel_start(plan).draft_length
    length = min(row.break_even_acceptance_length, key=lambda planned: abs(int(planned) - best))
    needed = row.break_even_acceptance_length[length]
    return (
        f"{plan.target.name} on {machine_text(plan.machine)}: {drafter.drafter} pays from {needed:.2f} tokens a round, "
        f"with draft length {length} at batch size {row.batch_size}"
    )


def facts_of(plan: GpuPlan) -> list[Fact]:
    """Return the figures of plain decoding at the plan's context, and what the first drafter makes of it."""
    row = own_steps(plan)
    batch, milliseconds = next(iter(row.milliseconds.items()))
    first = plan.drafters[0].expected[0]
    best = first.by_batch_size[0]
    return [
        Fact("plain step", f"{milliseconds:.2f} ms", f"batch size {batch}, {plan.context} tokens of context"),
        Fact("predicted speedup", f"{best.speedup:.2f}×", f"{plan.drafters[0].drafter}, {first.acceptance.where}"),
        Fact("bound by memory", f"to {plan.free_tokens} tokens", "of a pass, by its weights alone"),
        Fact("texts that fit", str(row.rows_that_fit), f"of {plan.context} tokens, beside the weights"),
    ]


def panel_start(plan: GpuPlan) -> PanelStart:
    """Return the first drafter's best draft at the smallest batch size, and its mean rate."""
    expectation = plan.drafters[0].expected[0]
    draft, rates = expectation.by_batch_size[0], [rate for rate in expectation.acceptance.rates if rate is not None]
    rate = round(100 * sum(rates) / len(rates), 1) if rates else START_RATE
    return PanelStart(min(99, max(1, rate)), draft.draft_length or START_LENGTH, draft.batch_size.bit_length() - 1)


# --- sections


def decoding(plan: GpuPlan) -> Section:
    """Show speed, the time of a reply and its price, with and without speculation."""
    lead = (
        f"With {plan.context} tokens of context a text: each drafter's best draft by the first acceptance known of it."
    )
    return Section("decoding", "Speed and price", lead, [outcomes_table(plan)])


def outcomes_table(plan: GpuPlan) -> Table:
    return table_of("", [outcome_row(row, plan) for row in plan.outcomes], words=("decoding",))


def outcome_row(row: Outcome, plan: GpuPlan) -> Row:
    way = f"{row.drafter}, draft length {row.draft_length}" if row.draft_length else "plain"
    cells: Row = {
        "batch size": str(row.batch_size),
        "decoding": Cell(way, f"accepting as {row.accepting}" if row.accepting else ""),
        "tokens/s of all rows": f"{row.tokens_a_second:,.0f}",
        f"reply of {plan.reply_tokens} tokens": f"{row.reply_seconds:.2f} s",
    }
    if row.dollars_per_million is not None:
        cells["a million tokens"] = f"${row.dollars_per_million:.3f}"
    return cells


def steps(plan: GpuPlan) -> Section:
    rows: list[Row] = [
        {
            "context": f"{row.context:,}",
            **{f"batch size {batch}": step_cell(row, batch) for batch in row.milliseconds},
            "computes longer than it reads": f"from batch {row.bound_from}" if row.bound_from else "never",
            "texts that fit": str(row.rows_that_fit),
        }
        for row in plan.steps
    ]
    more = "though more tokens read more experts" if plan.target.experts else "and cost nothing"
    lead = (
        f"Up to {plan.free_tokens} tokens of a pass are multiplied while its weights are read, {more}; from some batch "
        "on a step computes longer than it reads weights and caches together."
    )
    return Section("steps", "Plain steps", lead, [table_of("", rows, words=())])


def step_cell(row: StepTimes, batch: str) -> Cell:
    return Cell(f"{row.milliseconds[batch]:.2f} ms", "" if int(batch) <= row.rows_that_fit else "does not fit")


def break_even(plan: GpuPlan) -> Section:
    tables = [table for row in plan.drafters for table in (break_even_table(row, plan.context), expected_table(row))]
    return Section(
        "break-even", "Break-even", "What a draft has to reach, and what known acceptance makes of it.", tables
    )


def assumptions(plan: GpuPlan) -> Section:
    """Show everything that went into the prediction: the assumptions, the sizes of the models, the data sheets."""
    gpus: list[Row] = [
        {
            "GPU": gpu.name,
            "TB/s": f"{gpu.bandwidth / 1e12:g}",
            "GB": f"{gpu.memory / 1e9:g}",
            "TFLOP/s bf16": f"{gpu.bf16 / 1e12:g}",
            "fp8": "–" if gpu.fp8 is None else f"{gpu.fp8 / 1e12:g}",
            "fp4": "–" if gpu.fp4 is None else f"{gpu.fp4 / 1e12:g}",
            "link, GB/s": f"{gpu.link / 1e9:g}",
            "data sheet": gpu.source,
        }
        for gpu in GPUS.values()
    ]
    return Section(
        "assumptions",
        "Assumptions",
        "Everything that went into these numbers.",
        [sizes_table(plan)],
        folded=[table_of("GPUs, by their data sheets: dense, without sparsity", gpus, words=("GPU", "data sheet"))],
        notes=[*assumption_lines(plan.machine), *training_assumptions(plan)],
    )


def sizes_table(plan: GpuPlan) -> Table:
    target = plan.target
    kept = sum(group.layers * group.values for group in target.caches)
    rows: list[Row] = [
        {
            "model": target.name,
            "weights": f"{target.num_weights / 1e9:.2f} billion",
            "read by a token": f"{target.active_weights / 1e9:.2f} billion",
            "layers": str(target.layers),
            "kept of a token": f"{kept:,} values",
        }
    ]
    for shape in plan.shapes:
        rows.append(
            {
                "model": shape.name,
                "weights": f"{shape.weights / 1e9:.2f} billion",
                "read by a token": PASSES_TEXT[shape.passes],
                "layers": str(shape.layers),
                "kept of a token": f"{shape.cache_values:,} values",
            }
        )
    return table_of("Sizes", rows, words=("model", "read by a token"))


PASSES_TEXT = {
    "token": "all, for each drafted token",
    "head": "a part of its own for each drafted token",
    "block": "all, once a round",
    "none": "nothing: drafts are looked up",
}


def assumption_lines(machine: Machine) -> list[str]:
    """Return what was assumed beside data sheet and config, a sentence a line."""
    taken, layer_us = machine.assumptions, 1000 * machine.assumptions.layer_ms
    several = f", and two exchanges of {1000 * taken.exchange_ms:g} µs among the GPUs" if machine.num_gpus > 1 else ""
    return [
        f"Reading reaches {taken.bandwidth_share:.0%} of the data sheet's bandwidth, products {taken.flops_share:.0%} "
        "of its operations; attention's own products are not counted.",
        f"A layer takes {layer_us:g} µs besides{several}; a round or plain step {taken.step_ms:g} ms; a pass of the "
        f"drafter {taken.draft_pass_ms:g} ms.",
        f"Layers are in {machine.weights} ({BYTES[machine.weights]:g} bytes a weight), head, embeddings and drafter in "
        f"bf16; a cached value takes {taken.cache_bytes:g} bytes; every token picks its experts for itself.",
        f"Weights and caches may fill {taken.memory_share:.0%} of the memory; the drafter's own are not counted there.",
    ]
