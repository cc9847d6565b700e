"""`draftsmith evaluate --load`: a drafter under traffic, with speculation on, off and scheduled."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts.checks import notice_other_target
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.decoder import check_sampling, resolve_settings
from draftsmith.inference.decoding.schedule import AnySchedule, read_schedule
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
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.files import require_writable, write_json
from draftsmith.recipes.reports.drawing import DOTS_PER_INCH, STYLE
from draftsmith.recipes.reports.load_figure import draw_load

REPEATS = 3
REQUESTS, REQUESTS_A_CLIENT = 50, 8  # of a run; with 3 repeats 120 are counted, enough for a p99


def evaluate_under_load(args: argparse.Namespace, console: Console) -> None:
    """The command. Raises `UserError`, before anything is measured or written, for settings that do not go together."""
    settings = load_settings(args)
    target = Target.from_pretrained(args.target, args.device)
    prompts = read_prompt_set(args.prompts[0], target, args.num_prompts, args.max_new_tokens)
    if settings.prompt_lengths:
        check_prompt_lengths(settings.prompt_lengths, prompts.token_ids)
    drafter, plain = load_drafter(args.drafter[0], target), load_drafter("none", target)
    notice_other_target(drafter, target)
    sampling = check_sampling(args.temperature[0], args.top_p, 0)
    draft_length = args.draft_length[0] if args.draft_length else 4
    common = sampling, args.max_new_tokens
    how = {
        "off": resolve_settings(plain, *common, seed=args.seed),
        "on": resolve_settings(drafter, *common, draft_length, args.verification_mode, args.seed),
    }
    decoders = {"off": SpeculativeDecoder(target, plain), "on": SpeculativeDecoder(target, drafter)}
    require_writable(args.out)
    with progress_bar() as progress, cpu_threads(args.num_threads):
        task = progress.add_task("load test", total=len(settings.loads) * settings.repeats * 3, detail="")
        if args.schedule:
            schedule: AnySchedule = read_schedule(args.schedule)
        else:
            most = max(load.value for load in settings.loads)
            most = most if settings.loads[0].mode == "concurrency" else settings.max_batch
            sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most]
            lengths = sorted({0, 1, draft_length // 2, draft_length})
            schedule = measure_round_costs(decoders["on"], how["on"], prompts.token_ids, lengths, sizes)
        how["scheduled"] = resolve_settings(drafter, *common, schedule, args.verification_mode, args.seed)
        decoders["scheduled"] = SpeculativeDecoder(target, drafter)
        rows, texts = run_load_test(
            decoders, how, prompts.token_ids, settings, on_progress=lambda: progress.advance(task)
        )
        env = environment(target)
    content = {
        "target": target.name,
        "drafter": args.drafter[0],
        "drafter_kind": drafter.kind,
        "environment": env,
        "traffic": {**asdict(settings), "prompt_set": prompts.name, "num_prompts": len(prompts.token_ids)},
        "temperature": args.temperature[0],
        "max_new_tokens": args.max_new_tokens,
        "draft_length": draft_length,
        "schedule": schedule.to_json(),
        "stages": rows,
        "operating_points": operating_points(rows),
        "identical": identical(texts) if how["on"].verification_mode in ("greedy", "one_hot") else None,
        "verdict": verdict(rows),
    }
    write_json(args.out / "load.json", content)
    draw(content, args.out / "load.png")
    print_load(content, console)
    console.print(f"wrote {args.out / 'load.json'} and load.png", soft_wrap=True, highlight=False)


def load_settings(args: argparse.Namespace) -> LoadSettings:
    """From the command line; `UserError` for what does not go together or would be ignored."""
    refuse_ignored(args)
    if bool(args.rate) == bool(args.concurrency):
        raise UserError("--load: give either --rate (requests a second) or --concurrency (requests at once)")
    values = sorted(args.rate or args.concurrency)
    for value in values:
        require_at_least("--rate" if args.rate else "--concurrency", value, 0.001 if args.rate else 1)
    most = max(values) if args.concurrency else 0
    num_requests = max(REQUESTS, REQUESTS_A_CLIENT * most) if args.requests is None else args.requests
    max_batch = 16 if args.max_batch is None else args.max_batch
    require_at_least("--requests", num_requests, 10)
    repeats = REPEATS if args.repeats is None else args.repeats
    require_at_least("--repeats", repeats)
    require_at_least("--max-batch", max_batch)
    if args.concurrency and args.max_batch is not None:
        raise UserError("--max-batch has no effect with --concurrency, which sets the batch: leave it out")
    if num_requests < 2 * most:
        raise UserError(f"--requests {num_requests}: give at least {2 * most}, the first of each client is not counted")
    prompt_lengths = lengths_of("--prompt-lengths", args.prompt_lengths)
    output_lengths = lengths_of("--output-lengths", args.output_lengths)
    if output_lengths:
        check_output_lengths(output_lengths, args.max_new_tokens)
    return LoadSettings(
        loads=tuple(Load("rate" if args.rate else "concurrency", value) for value in values),
        num_requests=num_requests,
        repeats=repeats,
        max_batch=max_batch,
        seed=args.seed,
        sla=Sla(args.sla_ttft_ms, args.sla_tpot_ms),
        prompt_lengths=prompt_lengths,
        output_lengths=output_lengths,
    )


def refuse_load_settings(args: argparse.Namespace) -> None:
    """Without --load those of a load test would do nothing."""
    names = ["rate", "concurrency", "requests", "max_batch", "prompt_lengths", "output_lengths"]
    names += ["sla_ttft_ms", "sla_tpot_ms"]
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        raise UserError(f"{', '.join(given)}: of a load test only; add --load")


def lengths_of(name: str, values: list[float] | None) -> Lengths | None:
    if values is None:
        return None
    require_at_least(f"{name} MEDIAN", values[0])
    require_at_least(f"{name} SIGMA", values[1], 0)
    return Lengths(*values)


def refuse_ignored(args: argparse.Namespace) -> None:
    """A load test is of one drafter and one setting."""
    if len(args.prompts) > 1 or args.minutes is not None or args.baseline:
        raise UserError("--load: give one set of --prompts, and leave out --minutes and --baseline")
    if len(args.drafter) > 1 or len(args.temperature) > 1 or len(args.draft_length or []) > 1:
        raise UserError("--load: give one --drafter, one --temperature and one --draft-length")
    if args.tree or args.certify or args.synthetic_acceptance or args.batch_size != [1]:
        raise UserError(
            "--load: --tree, --certify, --synthetic-acceptance and --batch-size have no effect: leave them out"
        )
    if args.drafter == ["none"]:
        raise UserError("--load: plain decoding is measured beside any drafter; give another --drafter")


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
    """load.png: what the report draws of a load test, under its verdict."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        draw_load(figure, content)
        figure.suptitle(content["verdict"], fontsize=10)
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
