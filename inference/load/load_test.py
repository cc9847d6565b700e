"""A load test: requests arrive over time, and wait where the rows are full. What do they get, and how fast?

Open: requests arrive by a Poisson process of some rate, whatever has become of those before. Closed: so many clients
send their next request when they have the answer to the last. Each load is a stage, and a stage is run by every
contender on the same requests. docs/load.md defines what is counted.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.decoder import SpeculativeDecoder
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.decoding.schedule import Adaptive, Schedule
from draftsmith.inference.load.traffic import Lengths, Load, Sent, plan_requests
from draftsmith.inference.measuring.speed import percentiles
from draftsmith.models.errors import UserError

WARM_UP_SHARE = 0.2  # of a run's requests, from the first on, that only bring it to a steady state
SLA_PERCENTILE = "p95"


# --- serving


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float] = time.perf_counter
    wait: Callable[[float], None] = time.sleep


@dataclass
class Answer:
    """One request from its arrival to its end, in seconds since the start of the run."""

    arrived: float
    admitted: float
    first_token: float
    finished: float
    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None of a single token."""
        after_first = len(self.token_ids) - 1
        return (self.finished - self.first_token) / after_first if after_first else None


@dataclass
class Run:
    """What one contender did with the requests of one stage."""

    answers: list[Answer]  # in the order of the plan
    steps: list[tuple[float, float, int, int]]  # when each began and ended, its new tokens, requests in rows
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    num_rounds: float


def serve(generation: Generation, plan: list[Sent], prompts: list[list[int]], load: Load, clock: Clock) -> Run:
    """Send the requests as they are due and decode until the last has ended. `generation` must tell time by `clock`."""
    start = clock.now()
    waiting = deque(enumerate(plan))
    arrived: list[float] = []
    steps: list[tuple[float, float, int, int]] = []

    def is_due() -> bool:
        if load.mode == "rate":
            return waiting[0][1].seconds <= clock.now() - start
        return len(arrived) - generation.num_finished < load.value

    while waiting or generation.running():
        while waiting and is_due():
            number, sent = waiting.popleft()
            arrived.append(sent.seconds if load.mode == "rate" else clock.now() - start)
            generation.add(prompts[sent.prompt], number, sent.max_new_tokens)
        if not generation.running():
            clock.wait(max(0.0, start + waiting[0][1].seconds - clock.now()))
            continue
        began, num_running = clock.now() - start, generation.num_running
        tokens = sum(len(emission.token_ids) for emission in generation.step())
        steps.append((began, clock.now() - start, tokens, max(num_running, generation.num_running)))
    answers = [
        Answer(
            at,
            request.admitted - start,
            request.first_token - start,
            request.finished - start,
            request.token_ids,
            len(prompts[sent.prompt]),
        )
        for at, sent, request in zip(arrived, plan, generation.requests, strict=True)
    ]
    stats = [request.stats for request in generation.requests]
    total = sum(stats[1:], stats[0])
    return Run(answers, steps, total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens, total.num_rounds)


# --- what a stage shows


@dataclass(frozen=True)
class Sla:
    """Milliseconds that 95 of 100 requests must keep; None asks for nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def kept_by(self, answer: Answer) -> bool:
        slow_start = self.ttft_ms is not None and answer.ttft * 1000 > self.ttft_ms
        slow_tokens = self.tpot_ms is not None and answer.tpot is not None and answer.tpot * 1000 > self.tpot_ms
        return not (slow_start or slow_tokens)

    def kept_at(self, row: dict[str, Any]) -> bool:
        """By the 95th percentiles of a stage."""
        limits = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms}
        return all(limit is None or row[name][SLA_PERCENTILE] <= limit for name, limit in limits.items())


def stage_row(load: Load, contender: str, runs: list[Run], sla: Sla) -> dict[str, Any]:
    """One entry of `stages` in load.json (docs/load.md), pooled over the repeats.

    The first fifth of a run's requests is left out, of closed clients at least the first of each. Times are counted
    from the arrival of the first request behind them until the load falls: at the last arrival, or when a client is
    answered that has no request left. The rate is of arrivals in that time: of n requests of an open test, which lie
    n - 1 gaps apart, the last arrives at its end.
    """
    counted, arrivals, tokens, seconds, busy = [], 0, 0, 0.0, 0.0
    repeats = []
    for run in runs:
        num_clients = int(load.value) if load.mode == "concurrency" else 0
        kept = run.answers[max(num_clients, int(len(run.answers) * WARM_UP_SHARE)) :]
        begin, end = kept[0].arrived, kept[-1].arrived
        if load.mode == "concurrency":
            end = min(answer.finished for answer in kept if answer.finished > end)
        counted += kept
        arrivals += sum(answer.arrived < end for answer in kept)
        seconds += end - begin
        own_tokens = sum(new for since, _, new, _ in run.steps if begin <= since < end)
        tokens += own_tokens
        own_tpots = [answer.tpot * 1000 for answer in kept if answer.tpot is not None]
        repeats.append(
            {
                "throughput_tokens_per_second": own_tokens / (end - begin),
                "tpot_ms": float(np.median(own_tpots)) if own_tpots else None,
            }
        )
        busy += time_running(run.steps, begin, end)
    tpots = [answer.tpot * 1000 for answer in counted if answer.tpot is not None]
    sla_share = sum(map(sla.kept_by, counted)) / len(counted)
    drafts, rounds = sum(run.num_drafts for run in runs), sum(run.num_rounds for run in runs)
    row = {
        "mode": load.mode,
        "load": load.value,
        "contender": contender,
        "num_counted": len(counted),
        "seconds": seconds,
        "throughput_tokens_per_second": tokens / seconds,
        "requests_per_second": arrivals / seconds,
        "mean_running": busy / seconds,
        "prompt_tokens": asdict(percentiles([answer.num_prompt_tokens for answer in counted])),
        "output_tokens": asdict(percentiles([len(answer.token_ids) for answer in counted])),
        "ttft_ms": asdict(percentiles([answer.ttft * 1000 for answer in counted])),
        "queue_ms": asdict(percentiles([(answer.admitted - answer.arrived) * 1000 for answer in counted])),
        "prefill_ms": asdict(percentiles([(answer.first_token - answer.admitted) * 1000 for answer in counted])),
        "tpot_ms": asdict(percentiles(tpots)),
        "sla_share": sla_share,
        "goodput_requests_per_second": sla_share * arrivals / seconds,
        "mean_acceptance_length": 1 + sum(run.num_accepted_tokens for run in runs) / drafts if drafts else 1.0,
        "mean_draft_length": sum(run.num_draft_tokens for run in runs) / max(1, rounds),
        "repeats": repeats,
    }
    return {**row, "within_sla": sla.kept_at(row)}


def time_running(steps: list[tuple[float, float, int, int]], begin: float, end: float) -> float:
    """Requests in rows, integrated over the time from `begin` to `end`; idle waits count as none."""
    return sum(count * max(0.0, min(to, end) - max(since, begin)) for since, to, _, count in steps)


def latency_text(row: dict[str, Any], field: str) -> str:
    """p50/p95/p99 of a stage's times in ms; a dash where not one request lies beyond, so below 20 and 100 of them."""
    told = {name: row["num_counted"] * (100 - int(name[1:])) >= 100 for name in row[field]}
    return "/".join(f"{value:.{value < 10:d}f}" if told[name] else "–" for name, value in row[field].items())


def operating_points(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """Of each contender the stage of the largest throughput within the SLA; None where no stage kept it."""
    names = dict.fromkeys(row["contender"] for row in rows)
    kept = {name: [row for row in rows if row["contender"] == name and row["within_sla"]] for name in names}
    return {
        name: max(own, key=lambda row: row["throughput_tokens_per_second"]) if own else None
        for name, own in kept.items()
    }


@dataclass(frozen=True)
class Gain:
    """How much faster than with speculation off: over all repeats, and in the worst and the best of them."""

    ratio: float
    lowest: float
    highest: float

    @property
    def text(self) -> str:
        spread = f", {self.lowest:.2f}x to {self.highest:.2f}x over repeats" if self.lowest < self.highest else ""
        return f"{self.ratio:.2f}x{spread}"


def gains(rows: list[dict[str, Any]], contender: str) -> dict[float, Gain]:
    """At each load, rising.

    Closed clients take what they get: throughput over throughput. At a given rate of arrivals everybody is answered in
    the end, only later: the median time per token of off over that of the contender. A repeat of both is of the same
    requests.
    """
    by_load: dict[float, dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["load"]):
        by_load.setdefault(row["load"], {})[row["contender"]] = row
    found = {}
    for load, of_load in by_load.items():
        one, off = of_load[contender], of_load["off"]
        if one["mode"] == "concurrency":
            ratio = one["throughput_tokens_per_second"] / off["throughput_tokens_per_second"]
            name, power = "throughput_tokens_per_second", 1
        else:
            ratio = off["tpot_ms"]["p50"] / one["tpot_ms"]["p50"]
            name, power = "tpot_ms", -1
        pairs = zip(one["repeats"], off["repeats"], strict=True)
        own = [(a[name] / b[name]) ** power for a, b in pairs if a[name] and b[name]] or [ratio]
        found[load] = Gain(ratio, min(own), max(own))
    return found


def verdict(rows: list[dict[str, Any]]) -> str:
    """Up to which load speculation pays, in one line: it does where every repeat was faster with it."""
    unit = "requests at once" if rows[0]["mode"] == "concurrency" else "requests a second"
    found = list(gains(rows, "on").items())
    until = next((i for i, (_, gain) in enumerate(found) if gain.lowest <= 1), len(found))
    parts = []
    if until:
        load, gain = found[until - 1]
        parts.append(f"speculation pays up to {load:g} {unit} ({gain.text})")
    if until == len(found):
        return f"{parts[0]}, the highest load tried"
    load, gain = found[until]
    what = "no clear gain" if gain.highest >= 1 else "it does not pay" if parts else "speculation does not pay"
    return "; ".join([*parts, f"{what} at {load:g}{'' if parts else f' {unit}'} ({gain.text})"])


# --- the test


@dataclass(frozen=True)
class LoadSettings:
    loads: tuple[Load, ...]  # of one mode, rising
    num_requests: int = 50  # of a run
    repeats: int = 3  # runs of each stage and contender
    max_batch: int = 16  # rows that an open stage decodes in
    seed: int = 0
    sla: Sla = Sla()
    prompt_lengths: Lengths | None = None
    output_lengths: Lengths | None = None


def run_load_test(
    decoders: dict[str, SpeculativeDecoder],
    how: dict[str, GenerationSettings],
    prompts: list[list[int]],
    settings: LoadSettings,
    clock: Clock = Clock(),
    on_progress: Callable[[], None] = lambda: None,
) -> tuple[list[dict[str, Any]], dict[str, list[list[int]]]]:
    """Rows of `stages`, and the answers of each contender in the order of all requests.

    Stage by stage, repeat by repeat, each contender serves the same requests, in an order that rotates.
    """
    rows: list[dict[str, Any]] = []
    texts: dict[str, list[list[int]]] = {name: [] for name in decoders}
    longest, names = max(map(len, prompts)), list(decoders)
    for load in settings.loads:
        num_rows = int(load.value) if load.mode == "concurrency" else settings.max_batch
        for name, decoder in decoders.items():  # warm-up, not counted
            warm = [prompts[i % len(prompts)] for i in range(num_rows)]
            generation = Generation(decoder.engine_for(how[name], num_rows, longest))
            for number, prompt in enumerate(warm):
                generation.add(prompt, number, min(8, how[name].max_new_tokens))
            while generation.running():
                generation.step()
        runs: dict[str, list[Run]] = {name: [] for name in decoders}
        for repeat in range(settings.repeats):
            plan = plan_requests(
                load,
                prompts,
                settings.num_requests,
                how[names[0]].max_new_tokens,
                settings.seed + repeat,
                settings.prompt_lengths,
                settings.output_lengths,
            )
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                decoders[name].drafter.forget()
                generation = Generation(decoders[name].engine_for(how[name], num_rows, longest), now=clock.now)
                runs[name].append(serve(generation, plan, prompts, load, clock))
                on_progress()
        rows += [stage_row(load, name, runs[name], settings.sla) for name in names]
        for name in names:
            texts[name] += [answer.token_ids for run in runs[name] for answer in run.answers]
    return rows, texts


def measure_round_costs(
    decoder: SpeculativeDecoder,
    how: GenerationSettings,
    prompts: list[list[int]],
    candidates: Sequence[int],
    sizes: Sequence[int],
    num_rounds: int = 8,
) -> Adaptive:
    """An adaptive schedule whose costs are medians of a few rounds at each number of requests and draft length."""
    table = []
    for size in sizes:
        times = []
        for length in candidates:
            constant = replace(how, schedule=Schedule(((1, length),)))
            batch = [prompts[i % len(prompts)] for i in range(size)]
            generation = Generation(
                decoder.engine_for(constant, size, max(map(len, prompts))), batch, list(range(size))
            )
            generation.step()
            seconds: list[float] = []
            while generation.running() and len(seconds) < num_rounds:
                if seconds and generation.num_running < size:
                    break
                before = time.perf_counter()
                generation.step()
                seconds.append(time.perf_counter() - before)
            if not seconds:
                raise UserError("every answer ended with its first token, which leaves nothing to time: see --prompts")
            times.append(float(np.median(seconds)) * 1000)
        table.append((size, tuple(times)))
    return Adaptive(tuple(candidates), tuple(table))
