"""A load test: requests arrive over time, and their waiting times and the throughput are measured.

In an open test requests arrive by a Poisson process of some rate, whether those before are answered or not. In a closed
test some clients each send their next request when they have the answer to the last. Each load is a stage, and every
contender runs a stage on the same requests. docs/load.md defines what is counted.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import PlainValidator

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.decoder import SpeculativeDecoder
from draftsmith.inference.decoding.generation import Admission, Generation
from draftsmith.inference.decoding.schedule import Adaptive, AnySchedule, Schedule, schedule_from_json
from draftsmith.inference.measuring.results import Environment
from draftsmith.inference.traffic.requests import Lengths, Load, Sent, plan_requests
from draftsmith.inference.traffic.serving import WALL_CLOCK, Clock, ServedRun, serve
from draftsmith.inference.traffic.stages import OFF, Sla, StageResult, off_beside, stage_result
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import flat, with_flat_parts

WARM_UP_TOKENS = 8  # of each request before a stage; nothing of it counts
TIMED_ROUNDS = 8  # rounds that are timed for each cost of an adaptive schedule


@dataclass(frozen=True)
class LoadSettings:
    """The requests of a load test, and the limits that their latencies are compared with."""

    loads: tuple[Load, ...]  # of one mode, rising
    num_requests: int = 50  # of a run
    repeats: int = 3  # runs of each stage and contender
    max_batch: int = 16  # rows that an open stage decodes in
    seed: int = 0
    sla: Sla = Sla()
    prompt_lengths: Lengths | None = None
    output_lengths: Lengths | None = None
    prefill_chunk: int | None = None  # tokens that the contenders in chunks read between two rounds
    wait_ms: float = 0.0  # that a request waits, at most, for others to be read with it

    def num_rows(self, load: Load) -> int:
        """Return how many requests run at once, at most."""
        return int(load.value) if load.mode == "concurrency" else self.max_batch


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The settings of a load test, and the prompts that it sent."""

    settings: LoadSettings = flat()
    prompt_set: str
    num_prompts: int


@dataclass(frozen=True)
class IdenticalAnswers:
    """Number of answers of a contender that are token for token those with speculation off."""

    checked: int
    identical: int


@dataclass(frozen=True)
class LoadTest:
    """The content of load.json."""

    target: str
    drafter: str
    drafter_kind: str
    environment: Environment
    traffic: Annotated[Traffic, with_flat_parts(Traffic)]
    temperature: float
    max_new_tokens: int
    draft_length: int
    schedule: Annotated[AnySchedule, PlainValidator(schedule_from_json)]
    stages: list[StageResult]
    operating_points: dict[str, StageResult | None]
    identical: dict[str, IdenticalAnswers] | None  # None: answers are sampled in another way with speculation on
    verdict: str

    def __post_init__(self) -> None:
        """Refuse stages that cannot be compared: every contender needs all loads, and "off" is among them."""
        stages = {(stage.contender, stage.load): len(stage.repeats) for stage in self.stages}
        off = {(off_beside(name), load): count for (name, load), count in stages.items()}
        off |= {(OFF, load): count for (_, load), count in stages.items()}
        if not stages or off.items() - stages.items():
            raise ValueError("stages are missing with speculation off")
        if len(stages) != len({name for name, _ in stages}) * len({load for _, load in stages}):
            raise ValueError("stages are missing at some loads")


@dataclass(frozen=True)
class Contender:
    """A way of decoding the same requests: speculation off, on, or scheduled."""

    name: str
    decoder: SpeculativeDecoder
    settings: GenerationSettings
    admission: Admission = Admission()

    def start(self, num_rows: int, longest: int, now: Callable[[], float] = time.perf_counter) -> Generation:
        """Return a generation that waits for requests, with prompts of up to `longest` tokens."""
        engine = self.decoder.engine_for(self.settings, num_rows, longest)
        return Generation(engine, now=now, admission=self.admission)


def run_load_test(
    contenders: Sequence[Contender],
    prompts: list[list[int]],
    settings: LoadSettings,
    clock: Clock = WALL_CLOCK,
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[list[StageResult], dict[str, list[list[int]]]]:
    """Return all stages, and the answers of each contender by its name, in the order of all requests.

    Stage by stage, repeat by repeat, each contender serves the same requests, in an order that rotates.
    """
    stages: list[StageResult] = []
    answers: dict[str, list[list[int]]] = {contender.name: [] for contender in contenders}
    longest, max_new_tokens = max(map(len, prompts)), contenders[0].settings.max_new_tokens
    for load in settings.loads:
        num_rows = settings.num_rows(load)
        for contender in contenders:
            warm_up(contender, prompts, num_rows)
        runs: dict[str, list[ServedRun]] = {contender.name: [] for contender in contenders}
        for repeat in range(settings.repeats):
            plan = planned_requests(load, prompts, max_new_tokens, repeat, settings)
            first = repeat % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                contender.decoder.drafter.forget()
                generation = contender.start(num_rows, longest, clock.now)
                runs[contender.name].append(serve(generation, plan, prompts, load, clock))
                on_progress()
        for name, repeats in runs.items():
            stages.append(stage_result(load, name, repeats, settings.sla))
            answers[name] += [answer.token_ids for run in repeats for answer in run.answers]
    return stages, answers


def warm_up(contender: Contender, prompts: list[list[int]], num_rows: int) -> None:
    """Decode a few tokens in all rows, which are not counted."""
    generation = contender.start(num_rows, max(map(len, prompts)))
    for number in range(num_rows):
        limit = min(WARM_UP_TOKENS, contender.settings.max_new_tokens)
        generation.add(prompts[number % len(prompts)], number, limit)
    while generation.running():
        generation.step()


def planned_requests(
    load: Load, prompts: list[list[int]], max_new_tokens: int, repeat: int, settings: LoadSettings
) -> list[Sent]:
    """Return the requests of one repeat of a stage, which has a seed of its own."""
    seed, lengths = settings.seed + repeat, (settings.prompt_lengths, settings.output_lengths)
    return plan_requests(load, prompts, settings.num_requests, max_new_tokens, seed, *lengths)


def measure_round_costs(
    contender: Contender, prompts: list[list[int]], candidates: Sequence[int], sizes: Sequence[int]
) -> Adaptive:
    """Return an adaptive schedule whose costs are measured at each number of requests and draft length."""
    costs = [(size, tuple(round_ms(contender, prompts, size, length) for length in candidates)) for size in sizes]
    return Adaptive(tuple(candidates), tuple(costs))


def round_ms(contender: Contender, prompts: list[list[int]], size: int, draft_length: int) -> float:
    """Return the median milliseconds of a few rounds of `size` requests; `UserError` where no answer lasts a round."""
    constant = replace(contender.settings, schedule=Schedule(((1, draft_length),)))
    batch = [prompts[number % len(prompts)] for number in range(size)]
    engine = contender.decoder.engine_for(constant, size, max(map(len, prompts)))
    generation = Generation(engine, batch, list(range(size)))
    generation.step()
    seconds: list[float] = []
    while generation.running() and len(seconds) < TIMED_ROUNDS:
        if seconds and generation.num_running < size:
            break
        before = time.perf_counter()
        generation.step()
        seconds.append(time.perf_counter() - before)
    if not seconds:
        raise UserError("every answer ended with its first token, which leaves nothing to time: see --prompts")
    return float(np.median(seconds)) * 1000
