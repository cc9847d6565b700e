"""Sends the requests of a run to a server as they are due, and follows all answers to their ends."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftsmith.data.http import Server, run_in_loop
from draftsmith.models.errors import UserError
from draftsmith.recipes.bench.arrivals import CHARACTERS_A_TOKEN, Mix, PlannedRequest, planned_requests
from draftsmith.recipes.bench.client import LARGEST_ANSWER, Reply, ask
from draftsmith.recipes.bench.results import BenchLoad, BenchStage, Limits, stage_of
from draftsmith.train.engine.vllm_counters import Counters, read_counters

MEND = "give the address of a running vLLM, SGLang, or another server with OpenAI's interface"
WARM_UP = 4  # requests before each stage, which do not count


@dataclass(frozen=True)
class Rival:
    """A server that is measured, with the model that it is asked for."""

    server: Server
    model: str

    @property
    def name(self) -> str:
        return self.server.url


def rival_at(url: str, setting: str, model: str | None, timeout: float) -> Rival:
    """Return the server at a URL. Raises `UserError` where none answers, or where it does not serve the model."""
    server = Server(url, setting, MEND, timeout, LARGEST_ANSWER)
    page = server.json("/v1/models")
    rows = page.get("data") if isinstance(page, dict) else None
    ids = [row.get("id") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = [name for name in ids if isinstance(name, str)]
    if not names:
        raise UserError(f"{server.name} serves no model: {MEND}")
    if model is not None and model not in names:
        raise UserError(f"--model {model}: {server.name} serves {', '.join(names)[:200]}")
    return Rival(server, model or names[0])


def send_all(rival: Rival, planned: Sequence[PlannedRequest], load: BenchLoad) -> list[Reply]:
    """Return the replies to all requests, in their order; closed clients send their next when they have their last."""
    return run_in_loop(_send_all(rival, planned, load))


async def _send_all(rival: Rival, planned: Sequence[PlannedRequest], load: BenchLoad) -> list[Reply]:
    start = time.perf_counter()
    replies: list[Reply | None] = [None] * len(planned)

    async def send(number: int, due: float) -> None:
        replies[number] = await ask(rival.server, rival.model, planned[number].request, due, start)

    async def client(waiting: deque[int]) -> None:
        while waiting:
            await send(waiting.popleft(), time.perf_counter() - start)

    async def arrival(number: int) -> None:
        due = planned[number].seconds
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        await send(number, due)

    if load.mode == "concurrency":
        waiting = deque(range(len(planned)))
        await asyncio.gather(*(client(waiting) for _ in range(int(load.value))))
    else:
        await asyncio.gather(*map(arrival, range(len(planned))))
    return [reply for reply in replies if reply is not None]


def counters_of(rival: Rival) -> Counters | None:
    """Return the server's counters of speculation; None where it has none."""
    try:
        return read_counters(rival.server)
    except UserError:
        return None


@dataclass(frozen=True)
class Bench:
    """The settings that all stages share, and the servers."""

    rivals: list[Rival]
    mix: Mix
    limits: Limits
    num_requests: int  # of a run
    num_runs: int  # of each stage and server
    seed: int

    def stages(self, load: BenchLoad, on_run: Callable[[], None] = lambda: None) -> list[BenchStage]:
        """Return the measures of one load on each server.

        The servers take turns, run by run, in an order that goes round, and get the same requests in each turn.
        Raises `UserError` where no request of a server succeeds.
        """
        runs: list[list[list[Reply]]] = [[] for _ in self.rivals]
        counted: list[Counters | None] = [None for _ in self.rivals]
        characters = [self.warm_up(rival) for rival in self.rivals][0]
        for number in range(self.num_runs):
            planned = planned_requests(self.mix, load, self.num_requests, self.seed + number, characters)
            places = list(range(len(self.rivals)))
            first = number % len(places)
            for place in places[first:] + places[:first]:
                rival = self.rivals[place]
                before = counters_of(rival)
                runs[place].append(send_all(rival, planned, load))
                counted[place] = _sum(counted[place], before, counters_of(rival))
                on_run()
        stages = [
            stage_of(rival.name, load, own, self.limits, counters)
            for rival, own, counters in zip(self.rivals, runs, counted, strict=True)
        ]
        for stage in stages:
            if stage.num_failed == stage.num_requests:
                raise UserError(f"{stage.server}: every request failed, the first with: {stage.failures[0]}")
        return stages

    def warm_up(self, rival: Rival) -> float:
        """Send a few requests that do not count, and return the mean number of characters of a prompt's token."""
        planned = planned_requests(self.mix, BenchLoad("concurrency", WARM_UP), WARM_UP, self.seed - 1 + (1 << 20))
        replies = send_all(rival, planned, BenchLoad("concurrency", WARM_UP))
        good = [(reply, request) for reply, request in zip(replies, planned, strict=True) if not reply.failure]
        if not good:
            raise UserError(f"{rival.server.name}: every request failed, the first with: {replies[0].failure}")
        tokens = sum(reply.num_prompt_tokens for reply, _ in good)
        return sum(request.request.num_characters for _, request in good) / tokens if tokens else CHARACTERS_A_TOKEN


def _sum(sum_so_far: Counters | None, before: Counters | None, after: Counters | None) -> Counters | None:
    """Return what was counted in those runs of which the server told; None where it told of none."""
    if before is None or after is None:
        return sum_so_far
    new = after - before
    return new if sum_so_far is None else sum_so_far + new
