"""`draftsmith bench`: a running server under the user's own traffic, or two of them in turns."""

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console

from draftsmith.data.progress import notice, progress_bar
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import whole_folder, write_json
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.bench.arrivals import Mix, read_mix
from draftsmith.recipes.bench.results import BenchLoad, BenchStage, BenchTest, Latencies, Limits, Percentile
from draftsmith.recipes.bench.runner import Bench, rival_at
from draftsmith.recipes.bench.verdict import difference, search_rate, search_text, verdict
from draftsmith.recipes.configs.server_settings import BenchSettings
from draftsmith.recipes.pages.tables import Cell, Table, for_terminal, percent

FIRST_RATE = 1.0  # requests a second that a search begins with
LATE_MS = 100.0  # by which a request may leave late before the user is told that this machine is too busy


def run(settings: BenchSettings, console: Console) -> None:
    """Send the requests, and write bench.json. Raises `UserError` for a server that refuses, and for bad traces."""
    mix = read_mix(settings.prompts, settings.trace, settings.max_new_tokens, settings.temperature)
    urls = [(settings.url, "bench"), *([(settings.beside, "--beside")] if settings.beside else [])]
    rivals = [rival_at(url, setting, settings.model, settings.timeout) for url, setting in urls]
    limits = Limits(settings.sla_ttft_ms, settings.sla_tpot_ms, settings.sla_e2e_ms)
    bench = Bench(rivals, mix, limits, settings.requests, settings.repeats, settings.seed)
    with progress_bar() as progress:
        task = progress.add_task("bench", total=None, detail="")

        def on_run() -> None:
            progress.advance(task)

        if settings.find_rate:
            stages, sentences = searched(bench, on_run)
        else:
            stages, sentences = compared(bench, loads_of(settings, mix), on_run)
    late = max(stage.largest_delay_ms for stage in stages)
    if late > LATE_MS:
        notice(
            f"a request left {late:.0f} ms late: this machine is too busy to send so many, and its times are too long"
        )
    test = BenchTest(
        models=[rival.model for rival in rivals],
        num_requests_known=len(mix.requests),
        requests_a_run=settings.requests,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        limits=limits,
        stages=stages,
        verdict=sentences,
    )
    with whole_folder(settings.out) as folder:
        write_json(folder / "bench.json", to_json(test))
    console.print(for_terminal(stage_table(stages, limits)))
    for sentence in sentences:
        console.print(sentence, style="bold")
    console.print(f"wrote {settings.out / 'bench.json'}")


def loads_of(settings: BenchSettings, mix: Mix) -> list[BenchLoad]:
    """Return the loads that were asked for. Raises `UserError` for the trace's own times where it has none."""
    if settings.rate:
        return [BenchLoad("rate", rate, settings.burstiness) for rate in sorted(settings.rate)]
    if settings.concurrency:
        return [BenchLoad("concurrency", float(number)) for number in sorted(settings.concurrency)]
    if mix.requests[0].seconds is None:
        raise UserError("the trace has no times: give --rate, --concurrency or --find-rate")
    return [BenchLoad("trace", settings.speed)]


def compared(bench: Bench, loads: list[BenchLoad], on_run: Callable[[], None]) -> tuple[list[BenchStage], list[str]]:
    """Return the stages of all loads, and what the second server gains over the first."""
    by_load = [bench.stages(load, on_run) for load in loads]
    stages = [stage for at_load in by_load for stage in at_load]
    if len(bench.rivals) == 1:
        return stages, []
    first, second = (rival.name for rival in bench.rivals)
    return stages, [verdict([difference(*at_load) for at_load in by_load], first, second)]


def searched(bench: Bench, on_run: Callable[[], None]) -> tuple[list[BenchStage], list[str]]:
    """Return all stages that the search for the highest rate tried on each server, and what it found."""
    stages, sentences = [], []
    for rival in bench.rivals:
        alone = replace(bench, rivals=[rival])

        def measure(rate: float, bench: Bench = alone) -> BenchStage:
            return bench.stages(BenchLoad("rate", rate), on_run)[0]

        best, tried = search_rate(measure, FIRST_RATE)
        stages += tried
        sentences.append(search_text(best, tried))
    return stages, sentences


# --- what a person reads


def stage_table(stages: list[BenchStage], limits: Limits) -> Table:
    """Return a table with a row for each stage."""
    headings = ["load", "server", "requests", "failed", "tokens/s", "first token ms", "a token ms", "whole ms"]
    headings += (["within limits", "goodput/s"] if limits.any else []) + ["acceptance length"]
    rows = [[Cell(text) for text in texts_of(stage, limits)] for stage in stages]
    note = "Latencies are p50/p95/p99 over requests; a dash where too few were sent to bound a percentile."
    return Table("", headings, rows, note, words=("load", "server"))


def texts_of(stage: BenchStage, limits: Limits) -> list[str]:
    kept = [percent(stage.sla_share), f"{stage.mean(lambda run: run.goodput):.3g}"] if limits.any else []
    return [
        stage.load.text,
        stage.server,
        str(stage.num_requests),
        str(stage.num_failed),
        f"{stage.mean(lambda run: run.output_tokens_per_second):.1f}",
        *(latency_text(latency) for latency in (stage.ttft_ms, stage.tpot_ms, stage.e2e_ms)),
        *kept,
        f"{stage.acceptance.mean_acceptance_length:.2f}" if stage.acceptance else "-",
    ]


def latency_text(latency: Latencies) -> str:
    """Return p50/p95/p99; a dash for one that too few requests bound."""

    def text(percentile: Percentile | None) -> str:
        if percentile is None or percentile.interval is None:
            return "-"
        return f"{percentile.value:.{percentile.value < 10:d}f}"

    return "/".join(map(text, (latency.p50, latency.p95, latency.p99)))
