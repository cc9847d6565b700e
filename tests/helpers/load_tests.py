"""Stages and whole load tests with plain numbers."""

from collections.abc import Sequence
from dataclasses import replace

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import Environment, Percentiles
from draftsmith.inference.traffic.load_test import LoadSettings, LoadTest, Traffic
from draftsmith.inference.traffic.requests import Load
from draftsmith.inference.traffic.stages import RepeatResult, Sla, StageResult, operating_points

ENVIRONMENT = Environment({}, "cpu", 1, "float32", "f", None, "draftsmith")


def stage(
    load: float,
    contender: str,
    throughput: float,
    tpot: float,
    within_sla: bool | None = True,
    spread: Sequence[float] = (0.99, 1.0, 1.01),
    goodput: float = 1.0,
) -> StageResult:
    """Return a stage of closed clients; `spread` are the speeds of its repeats over that of all."""
    latency, lengths = Percentiles(tpot, 2 * tpot, 3 * tpot), Percentiles(8, 8, 8)
    return StageResult(
        mode="concurrency",
        load=load,
        contender=contender,
        num_counted=48,
        seconds=10.0,
        throughput_tokens_per_second=throughput,
        requests_per_second=1.0,
        mean_running=1.0,
        prompt_tokens=lengths,
        output_tokens=lengths,
        ttft_ms=latency,
        queue_ms=latency,
        prefill_ms=latency,
        tpot_ms=latency,
        sla_share=1.0,
        goodput_requests_per_second=goodput,
        mean_acceptance_length=2.0,
        mean_draft_length=2.0,
        repeats=[RepeatResult(throughput * factor, tpot / factor, goodput * factor) for factor in spread],
        within_sla=within_sla,
    )


def stage_at_rate(load: float, contender: str, throughput: float, tpot: float) -> StageResult:
    """Return a stage of an open test."""
    return replace(stage(load, contender, throughput, tpot), mode="rate")


def load_test(drafter: str, stages: list[StageResult], verdict: str, tpot_limit: float | None = None) -> LoadTest:
    """Return a load test of a drafter."""
    settings = LoadSettings((Load("concurrency", stages[0].load),), sla=Sla(tpot_ms=tpot_limit))
    traffic = Traffic(settings=settings, prompt_set="p", num_prompts=8)
    return LoadTest(
        target="t",
        drafter=drafter,
        drafter_kind="eagle3",
        environment=ENVIRONMENT,
        traffic=traffic,
        temperature=0.0,
        max_new_tokens=8,
        draft_length=2,
        schedule=Schedule(((1, 2),)),
        stages=stages,
        operating_points=operating_points(stages),
        identical=None,
        verdict=verdict,
    )
