"""`draftsmith load-test`: a drafter under traffic, with speculation on, off and scheduled."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts.checks import notice_other_target
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.decoder import check_sampling, resolve_settings
from draftsmith.inference.decoding.schedule import Adaptive, AnySchedule, read_schedule
from draftsmith.inference.load.load_test import (
    LoadSettings,
    Sla,
    latency_text,
    measure_round_costs,
    operating_points,
    run_load_test,
    verdict,
)
from draftsmith.inference.load.traffic import Lengths, Load, check_output_lengths, check_prompt_lengths
from draftsmith.inference.measuring.environment import environment
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.files import require_writable, write_json
from draftsmith.models.typed_json import to_json
from draftsmith.recipes.configs.command_settings import LoadTestSettings
from draftsmith.recipes.evaluation.inputs import notice_overwriting
from draftsmith.recipes.reports.figures import save_plot
from draftsmith.recipes.reports.load_test import draw_load

MAX_BATCH = 16
REQUESTS, REQUESTS_A_CLIENT = 50, 8  # of a run; with 3 repeats 120 are counted, enough for a p99


def run(settings: LoadTestSettings, console: Console) -> None:
    """Send requests over time, and write load.json and load.png.

    Raises `UserError`, before anything is measured or written, for settings that do not go together.
    """
    traffic = load_settings(settings)
    notice_overwriting(settings.out / "load.json")
    target = Target.from_pretrained(settings.target, settings.device)
    prompts = read_prompt_set(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    if traffic.prompt_lengths:
        check_prompt_lengths(traffic.prompt_lengths, prompts.token_ids)
    (name,) = settings.drafter
    drafter, plain = load_drafter(name, target), load_drafter("none", target)
    notice_other_target(drafter, target)
    sampling = check_sampling(settings.temperature, settings.top_p, 0)

    def resolve(drafter: Drafter, draft: int | AnySchedule) -> GenerationSettings:
        mode = settings.verification_mode
        return resolve_settings(drafter, sampling, settings.max_new_tokens, draft, mode, settings.seed)

    decoding = {"off": resolve(plain, 0), "on": resolve(drafter, settings.draft_length)}
    decoders = {"off": SpeculativeDecoder(target, plain), "on": SpeculativeDecoder(target, drafter)}
    require_writable(settings.out)
    with progress_bar() as progress, cpu_threads(settings.num_threads):
        task = progress.add_task("load test", total=len(traffic.loads) * traffic.repeats * 3, detail="")
        if settings.schedule:
            schedule: AnySchedule = read_schedule(settings.schedule)
        else:
            schedule = measured_schedule(
                decoders["on"], decoding["on"], prompts.token_ids, traffic, settings.draft_length
            )
        decoding["scheduled"] = resolve(drafter, schedule)
        decoders["scheduled"] = SpeculativeDecoder(target, drafter)
        rows, texts = run_load_test(
            decoders, decoding, prompts.token_ids, traffic, on_progress=lambda: progress.advance(task)
        )
        env = to_json(environment(target))
    content = {
        "target": target.name,
        "drafter": name,
        "drafter_kind": drafter.kind,
        "environment": env,
        "traffic": {**asdict(traffic), "prompt_set": prompts.name, "num_prompts": len(prompts.token_ids)},
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "draft_length": settings.draft_length,
        "schedule": schedule.to_json(),
        "stages": rows,
        "operating_points": operating_points(rows),
        "identical": identical(texts) if decoding["on"].verification_mode in ("greedy", "one_hot") else None,
        "verdict": verdict(rows),
    }
    write_json(settings.out / "load.json", content)
    draw(content, settings.out / "load.png")
    print_load(content, console)
    console.print(f"wrote {settings.out / 'load.json'} and load.png", soft_wrap=True, highlight=False)


def measured_schedule(
    decoder: SpeculativeDecoder,
    decoding: GenerationSettings,
    prompts: list[list[int]],
    traffic: LoadSettings,
    draft_length: int,
) -> Adaptive:
    """Return a schedule from costs that are measured up to the number of requests that will run at once."""
    most = traffic.max_batch if traffic.loads[0].mode == "rate" else max(load.value for load in traffic.loads)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most]
    lengths = sorted({0, 1, draft_length // 2, draft_length})
    return measure_round_costs(decoder, decoding, prompts, lengths, sizes)


def load_settings(settings: LoadTestSettings) -> LoadSettings:
    """Return the traffic that was asked for; `UserError` for what does not go together or would be ignored."""
    if len(settings.drafter) > 1 or settings.drafter == ("none",):
        raise UserError("--drafter: give one; plain decoding is measured beside it")
    if bool(settings.rate) == bool(settings.concurrency):
        raise UserError("give either --rate (requests a second) or --concurrency (requests at once)")
    if settings.concurrency and settings.max_batch is not None:
        raise UserError("--max-batch has no effect with --concurrency, which sets the batch: leave it out")
    most = max(settings.concurrency, default=0)
    num_requests = max(REQUESTS, REQUESTS_A_CLIENT * most) if settings.requests is None else settings.requests
    if num_requests < 2 * most:
        raise UserError(f"--requests {num_requests}: give at least {2 * most}, the first of each client is not counted")
    output_lengths = lognormal("--output-lengths", settings.output_lengths)
    if output_lengths:
        check_output_lengths(output_lengths, settings.max_new_tokens)
    mode: Literal["rate", "concurrency"] = "rate" if settings.rate else "concurrency"
    return LoadSettings(
        loads=tuple(Load(mode, value) for value in sorted(settings.rate or settings.concurrency)),
        num_requests=num_requests,
        repeats=settings.repeats,
        max_batch=MAX_BATCH if settings.max_batch is None else settings.max_batch,
        seed=settings.seed,
        sla=Sla(settings.sla_ttft_ms, settings.sla_tpot_ms),
        prompt_lengths=lognormal("--prompt-lengths", settings.prompt_lengths),
        output_lengths=output_lengths,
    )


def lognormal(name: str, values: tuple[float, float] | None) -> Lengths | None:
    """Return the distribution of lengths that a flag asks for."""
    if values is None:
        return None
    require_at_least(f"{name} MEDIAN", values[0])
    require_at_least(f"{name} SIGMA", values[1], 0)
    return Lengths(*values)


def identical(texts: dict[str, list[list[int]]]) -> dict[str, Any]:
    """Answers that are token for token those with speculation off.

    Requests meet other neighbours in the batch with each contender, which may turn a near tie around in low precision.
    """
    off = texts["off"]
    return {
        name: {"checked": len(off), "identical": sum(a == b for a, b in zip(off, own, strict=True))}
        for name, own in texts.items()
        if name != "off"
    }


# --- what a person reads


def print_load(content: dict[str, Any], console: Console) -> None:
    mode = content["stages"][0]["mode"]
    console.print(f"{content['drafter']} under load, draft length {content['draft_length']}", highlight=False)
    fewest, most = (find(row["num_counted"] for row in content["stages"]) for find in (min, max))
    counted = f"{fewest} to {most}" if fewest < most else str(most)
    caption = f"TTFT and TPOT: p50/p95/p99 over {counted} requests, – where those are too few to tell"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption)
    table.add_column("at once" if mode == "concurrency" else "a second", justify="right")
    table.add_column("speculation")
    for name in ("tokens/s", "drafted", "TTFT ms", "TPOT ms", "goodput/s"):
        table.add_column(name, justify="right")
    for row in content["stages"]:
        table.add_row(
            f"{row['load']:g}",
            row["contender"],
            f"{row['throughput_tokens_per_second']:.0f}",
            f"{row['mean_draft_length']:.1f}",
            latency_text(row, "ttft_ms"),
            latency_text(row, "tpot_ms"),
            f"{row['goodput_requests_per_second']:.2f}" + ("" if row["within_sla"] else " (SLA missed)"),
        )
    console.print(table)
    console.print(lengths_text(content), highlight=False)
    for name, point in content["operating_points"].items():
        found = "no load keeps the SLA"
        if point is not None:
            found = f"{point['throughput_tokens_per_second']:.0f} tokens/s at {point['load']:g}"
        console.print(f"operating point, {name}: {found}", highlight=False)
    for name, check in (content["identical"] or {}).items():
        console.print(f"{name}: {check['identical']} of {check['checked']} answers are those of off", highlight=False)
    console.print(content["verdict"], style="bold", highlight=False)


def lengths_text(content: dict[str, Any]) -> str:
    """How long prompts and answers were, beside what was asked for: an answer ends where the target ends it."""
    row = content["stages"][-1]
    parts = []
    for name, words in (("prompt", "prompts"), ("output", "answers")):
        found, asked = row[f"{name}_tokens"], content["traffic"][f"{name}_lengths"]
        wish = f", asked for {asked['median']:g}" if asked else ""
        parts.append(f"{words} of {found['p50']:.0f} tokens (p95 {found['p95']:.0f}{wish})")
    return f"at {row['load']:g}: {', '.join(parts)}"


def draw(content: dict[str, Any], path: Path) -> None:
    """Write load.png: what the report draws of a load test, under its verdict."""

    def draw_under_verdict(figure: Figure) -> None:
        draw_load(content, figure)
        figure.suptitle(content["verdict"], fontsize=10)

    save_plot(path, draw_under_verdict, (9.6, 4.4))
