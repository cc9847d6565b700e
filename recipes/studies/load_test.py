"""`draftsmith load-test`: a drafter under traffic, with speculation on, off and scheduled."""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Literal

from matplotlib.figure import Figure
from rich.console import Console

from draftsmith.data.progress import progress_bar
from draftsmith.data.prompts.checks import notice_other_target
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.clock import cpu_threads
from draftsmith.inference.decoding.decoder import check_sampling, resolve_settings
from draftsmith.inference.decoding.generation import Admission
from draftsmith.inference.decoding.schedule import Adaptive, AnySchedule, read_schedule
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.traffic.load_test import (
    Contender,
    IdenticalAnswers,
    LoadSettings,
    LoadTest,
    Traffic,
    measure_round_costs,
    run_load_test,
)
from draftsmith.inference.traffic.requests import Lengths, Load, check_output_lengths, check_prompt_lengths
from draftsmith.inference.traffic.stages import IN_CHUNKS, OFF, ON, SCHEDULED, Sla, operating_points, verdict
from draftsmith.models import Drafter, load_drafter
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.storage.files import whole_folder, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.configs.command_settings import LoadTestSettings
from draftsmith.recipes.evaluation.inputs import load_target
from draftsmith.recipes.pages.figures import TWO_PANELS, save_plot
from draftsmith.recipes.pages.tables import for_terminal
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.reports.serving import GOODPUT, PAUSES, draw_load, stage_table

MAX_BATCH = 16
REQUESTS, REQUESTS_A_CLIENT = 50, 8  # of a run; with 3 repeats 120 are counted, enough for a p99


def run(settings: LoadTestSettings, console: Console) -> None:
    """Send requests over time, and write load.json and load.png.

    Raises `UserError`, before anything is measured or written, for settings that do not go together.
    """
    traffic = load_settings(settings)
    target = load_target(settings.target, settings.device, settings.chat_template_kwargs)
    prompts = read_prompt_set(settings.prompts, target, settings.num_prompts, settings.max_new_tokens)
    if traffic.prompt_lengths:
        check_prompt_lengths(traffic.prompt_lengths, prompts.token_ids)
    (name,) = settings.drafter
    drafter, plain = load_drafter(name, target), load_drafter("none", target)
    notice_other_target(drafter, target)
    sampling = check_sampling(settings.temperature, settings.top_p, 0)

    def contender(name: str, drafter: Drafter, draft: int | AnySchedule) -> Contender:
        mode = settings.verification_mode
        decoding = resolve_settings(drafter, sampling, settings.max_new_tokens, draft, mode, settings.seed)
        admission = Admission(most_wait=settings.wait_ms / 1000)
        return Contender(name, SpeculativeDecoder(target, drafter), decoding, admission)

    off, on = contender(OFF, plain, 0), contender(ON, drafter, settings.draft_length)
    if not isinstance(on.settings.shape, Chain):
        raise UserError(f"--drafter {name}: it drafts no chains, which the scheduled contender shortens: give another")
    with progress_bar() as progress, cpu_threads(settings.num_threads):
        num_contenders = 5 if traffic.prefill_chunk else 3
        num_runs = len(traffic.loads) * traffic.repeats * num_contenders
        task = progress.add_task("load test", total=num_runs, detail="")
        if settings.schedule:
            schedule = read_schedule(settings.schedule)
        else:
            schedule = measured_schedule(on, prompts.token_ids, traffic, settings.draft_length)
        contenders = [off, on, contender(SCHEDULED, drafter, schedule)]
        if traffic.prefill_chunk:
            contenders += [in_chunks(other, traffic.prefill_chunk) for other in (off, on)]
        stages, answers = run_load_test(
            contenders, prompts.token_ids, traffic, on_progress=lambda: progress.advance(task)
        )
        test = LoadTest(
            target=target.name,
            drafter=name,
            drafter_kind=drafter.kind,
            environment=environment(target),
            traffic=Traffic(settings=traffic, prompt_set=prompts.name, num_prompts=len(prompts.token_ids)),
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            draft_length=settings.draft_length,
            schedule=schedule,
            stages=stages,
            operating_points=operating_points(stages),
            identical=identical_answers(answers) if on.settings.verification_mode in ("greedy", "one_hot") else None,
            verdict=verdict(stages),
        )
    with whole_folder(settings.out) as folder:
        write_json(folder / "load.json", to_json(test))
        draw(test, folder / "load.png")
    print_load_test(test, console)
    console.print(f"wrote {settings.out / 'load.json'} and load.png")
    console.print(f"report: {build_report(settings.out)}")


def in_chunks(contender: Contender, num_tokens: int) -> Contender:
    """Return a contender that reads prompts so many tokens at a time, with rounds in between."""
    admission = replace(contender.admission, chunk=num_tokens)
    return replace(contender, name=contender.name + IN_CHUNKS, admission=admission)


def measured_schedule(on: Contender, prompts: list[list[int]], traffic: LoadSettings, draft_length: int) -> Adaptive:
    """Return a schedule from costs that are measured up to the number of requests that will run at once."""
    most = max(traffic.num_rows(load) for load in traffic.loads)
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most]
    return measure_round_costs(on, prompts, sorted({0, 1, draft_length // 2, draft_length}), sizes)


def load_settings(settings: LoadTestSettings) -> LoadSettings:
    """Return the traffic that was asked for; `UserError` for what does not go together or would be ignored."""
    most = max(settings.concurrency, default=0)
    num_requests = max(REQUESTS, REQUESTS_A_CLIENT * most) if settings.requests is None else settings.requests
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
        prefill_chunk=settings.prefill_chunk,
        wait_ms=settings.wait_ms,
    )


def lognormal(name: str, values: tuple[float, float] | None) -> Lengths | None:
    """Return the distribution of lengths that a flag asks for."""
    if values is None:
        return None
    require_at_least(f"{name} MEDIAN", values[0])
    require_at_least(f"{name} SIGMA", values[1], 0)
    return Lengths(*values)


def identical_answers(answers: dict[str, list[list[int]]]) -> dict[str, IdenticalAnswers]:
    """Count the answers that are token for token those with speculation off.

    Requests meet other neighbours in the batch with each contender, which may turn a near tie around in low precision.
    """
    off = answers.pop(OFF)
    return {
        name: IdenticalAnswers(len(off), sum(own == other for own, other in zip(answer, off, strict=True)))
        for name, answer in answers.items()
    }


# --- what a person reads


def print_load_test(test: LoadTest, console: Console) -> None:
    table = stage_table(test)
    has_sla = test.traffic.settings.sla != Sla()
    # 80 characters have no room for all
    left_out = ("over off", "drafted a round", "requests", PAUSES if has_sla else GOODPUT)
    console.print(for_terminal(table, [heading for heading in table.headings if heading not in left_out]))
    console.print(lengths_text(test))
    for name, point in test.operating_points.items():
        text = "no load is shown to keep the SLA"
        if point is not None:
            text = f"{point.throughput_tokens_per_second:.0f} tokens/s at {point.load:g}"
        console.print(f"operating point, {name}: {text}")
    for name, check in (test.identical or {}).items():
        console.print(f"{name}: {check.identical} of {check.checked} answers are those of off")
    console.print(test.verdict, style="bold")


def lengths_text(test: LoadTest) -> str:
    """Return how long prompts and answers were, beside what was asked for: an answer ends where the target ends it."""
    stage, traffic = test.stages[-1], test.traffic.settings
    parts = []
    for words, lengths, asked in (
        ("prompts", stage.prompt_tokens, traffic.prompt_lengths),
        ("answers", stage.output_tokens, traffic.output_lengths),
    ):
        wish = f", asked for {asked.median:g}" if asked else ""
        parts.append(f"{words} of {lengths.p50:.0f} tokens (p95 {lengths.p95:.0f}{wish})")
    return f"at {stage.load:g}: {', '.join(parts)}"


def draw(test: LoadTest, path: Path) -> None:
    """Write load.png: what the report draws of a load test, under its verdict."""

    def draw_under_verdict(figure: Figure) -> None:
        draw_load(test, figure)
        figure.suptitle(textwrap.fill(test.verdict, 60), fontsize=8)

    save_plot(path, draw_under_verdict, TWO_PANELS)
