"""The requests of a run: which, when, and how long their answers may get."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from draftsmith.data.prompts.prompt_formats import Prompt, text_of
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.models.errors import UserError
from draftsmith.recipes.bench.client import ServerRequest, request_of
from draftsmith.recipes.bench.results import BenchLoad
from draftsmith.recipes.bench.trace import TraceRequest, read_trace

CHARACTERS_A_TOKEN = 4.0  # until the server has told how many tokens a prompt has


@dataclass(frozen=True)
class PlannedRequest:
    """A request, and the second after the start at which it is due, which closed clients do not look at."""

    request: ServerRequest
    seconds: float


@dataclass(frozen=True)
class Mix:
    """The requests that all runs draw from."""

    requests: list[TraceRequest]  # those of a trace without texts take theirs from `prompts`
    prompts: list[Prompt]
    max_new_tokens: int
    temperature: float


def read_mix(source: str | None, trace: Path | None, max_new_tokens: int, temperature: float) -> Mix:
    """Return what to send: the requests of a trace, or the prompts of a source.

    Raises `UserError` for a trace without texts and no prompts to take them from.
    """
    prompts = read_prompts(source) if source else []
    if trace is None:
        requests = [TraceRequest(prompt, None, None, False, None) for prompt in prompts]
        return Mix(requests, [], max_new_tokens, temperature)
    requests = read_trace(trace)
    texts_missing = any(request.prompt is None for request in requests)
    if texts_missing and not prompts:
        raise UserError(f"{trace} holds lengths and no texts: give --prompts to take texts from")
    if prompts and not texts_missing:
        raise UserError(f"{trace} holds its own texts: leave out --prompts")
    return Mix(requests, prompts, max_new_tokens, temperature)


def planned_requests(
    mix: Mix, load: BenchLoad, count: int, seed: int, characters_a_token: float = CHARACTERS_A_TOKEN
) -> list[PlannedRequest]:
    """Return `count` requests of one run, the same for the same seed.

    A load that replays the trace takes its first ones, in their order and at their times. Others draw them with
    replacement; the times between arrivals have the gamma distribution of the load's burstiness, and are exponential
    at 1.
    """
    rng = np.random.default_rng(seed)
    if load.mode == "trace":
        picks = np.arange(min(count, len(mix.requests)))
        seconds = np.array([mix.requests[pick].seconds or 0.0 for pick in picks]) / load.value
    else:
        picks = rng.integers(len(mix.requests), size=count)
        shape = load.burstiness**-2
        gaps = rng.gamma(shape, 1 / (load.value * shape), count)
        seconds = np.cumsum(gaps) - gaps[0]
    numbers = rng.integers(1 << 31, size=len(picks))
    lengths = np.array([_num_characters(prompt) for prompt in mix.prompts])
    planned = []
    for pick, at, number in zip(picks, seconds, numbers, strict=True):
        request = mix.requests[pick]
        prompt = request.prompt
        if prompt is None:
            wanted = (request.num_prompt_tokens or 1) * characters_a_token
            prompt = mix.prompts[nearest(lengths, wanted, rng)]
        limit = min(request.max_new_tokens or mix.max_new_tokens, mix.max_new_tokens)
        sent = request_of(prompt, limit, mix.temperature, request.is_exact, int(number))
        planned.append(PlannedRequest(sent, float(at)))
    return planned


def nearest(lengths: np.ndarray, wanted: float, rng: np.random.Generator) -> int:
    """Return the place of one of the lengths that are nearest to a wanted one, any of them alike."""
    away = np.abs(lengths - wanted)
    return int(rng.choice(np.flatnonzero(away == away.min())))


def _num_characters(prompt: Prompt) -> int:
    if prompt.messages is None:
        return len(prompt.text or "")
    return sum(len(text_of(message)) for message in prompt.messages)
