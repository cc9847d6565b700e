"""Decodes requests that arrive over time; a request waits while no row is free."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.inference.decoding.counters import Stats, total_of
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.traffic.requests import Load, Sent


@dataclass(frozen=True)
class Clock:
    """A clock that tells the time and waits; tests have one of their own."""

    now: Callable[[], float] = time.perf_counter
    wait: Callable[[float], None] = time.sleep


WALL_CLOCK = Clock()


@dataclass(frozen=True)
class Answer:
    """A request from its arrival to its end, in seconds since the start of the run."""

    arrived: float
    admitted: float
    first_token: float
    finished: float
    token_ids: list[int]
    num_prompt_tokens: int
    longest_pause: float = 0.0  # between two times at which it got tokens

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        after_first = len(self.token_ids) - 1
        return (self.finished - self.first_token) / after_first if after_first else None


@dataclass(frozen=True)
class Step:
    """A step of the decoder, in seconds since the start of the run."""

    began: float
    ended: float
    num_tokens: int  # that it emitted
    num_running: int  # requests in rows


@dataclass(frozen=True)
class ServedRun:
    """The answers and steps of one contender on the requests of one stage."""

    answers: list[Answer]  # in the order of the plan
    steps: list[Step]
    stats: Stats  # of all requests


def serve(generation: Generation, plan: list[Sent], prompts: list[list[int]], load: Load, clock: Clock) -> ServedRun:
    """Send the requests as they are due and decode until the last has ended. `generation` must tell time by `clock`."""
    start = clock.now()
    waiting = deque(enumerate(plan))
    arrived: list[float] = []
    steps: list[Step] = []

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
        num_tokens = sum(len(emission.token_ids) for emission in generation.step())
        steps.append(Step(began, clock.now() - start, num_tokens, max(num_running, generation.num_running)))
    answers = [
        Answer(
            arrival,
            request.admitted - start,
            request.first_token - start,
            request.finished - start,
            request.token_ids,
            len(prompts[sent.prompt]),
            request.longest_pause,
        )
        for arrival, sent, request in zip(arrived, plan, generation.requests, strict=True)
    ]
    return ServedRun(answers, steps, total_of([request.stats for request in generation.requests]))
