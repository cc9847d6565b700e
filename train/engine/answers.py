"""The answers of a running server to all prompts of a set: their texts, their times, and the server's own counters."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.judged import ComparedTexts, JudgedSpeed, TextDifference
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.speed import bootstrap_ratio
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.train.engine.vllm_counters import Counters, read_counters


@dataclass(frozen=True)
class Load:
    """The requests of one measurement."""

    sampling: Sampling
    batch_size: int  # requests that are sent together; the next ones follow when all of them are answered
    repeats: int  # times that all are sent again for their times


@dataclass(frozen=True)
class ServerRun:
    """All answers of one server under one load."""

    texts: list[list[int]]  # token ids of each answer, sent the first time
    counters: list[Counters]  # of each batch, sent the first time; empty for a server without a drafter
    tokens: list[int]  # of each batch, over all repeats
    seconds: list[float]  # of each batch, over all repeats

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def run_on_server(
    endpoint: Endpoint, prompts: PromptSet, load: Load, drafts: bool, on_batch: Callable[[], None]
) -> ServerRun:
    """Send all prompts once for texts and counters, then `load.repeats` times for times.

    So prompts lie in the prefix cache of every server alike when times are taken. `drafts`: the server has a drafter,
    whose counters are read. Raises `UserError` where the server fails.
    """
    count = len(prompts.token_ids)
    batches = [range(start, min(start + load.batch_size, count)) for start in range(0, count, load.batch_size)]

    def answer(number: int) -> list[int]:
        return endpoint.complete(prompts.token_ids[number], load.sampling, number, prompts.images_of(number))

    def answers(batch: range) -> list[list[int]]:
        with ThreadPoolExecutor(len(batch)) as pool:
            return list(pool.map(answer, batch))

    texts: list[list[int]] = []
    readings = [read_counters(endpoint.server)] if drafts else []
    for batch in batches:
        texts += answers(batch)
        if drafts:
            readings.append(read_counters(endpoint.server))
        on_batch()
    tokens, seconds = [0] * len(batches), [0.0] * len(batches)
    for _ in range(load.repeats):
        for place, batch in enumerate(batches):
            start = time.perf_counter()
            new_texts = answers(batch)
            seconds[place] += time.perf_counter() - start
            tokens[place] += sum(map(len, new_texts))
            on_batch()
    return ServerRun(texts, [now - then for then, now in pairwise(readings)], tokens, seconds)


def stats_by_batch(run: ServerRun, batch_size: int) -> list[Stats]:
    """Return what the server counted in each batch. Raises `UserError` for counters that contradict each other."""
    lengths = list(map(len, run.texts))
    stats = []
    for place, counters in enumerate(run.counters):
        at_least = [counters.num_drafts, *counters.accepted_per_position, 0]
        histogram = [now - deeper for now, deeper in pairwise(at_least)]
        if min(histogram) < 0 or sum(counters.accepted_per_position) != counters.num_accepted_tokens:
            raise UserError(
                "the server's counters of accepted tokens contradict each other: give a vLLM that answers nobody else"
            )
        emitted = sum(lengths[place * batch_size : (place + 1) * batch_size])
        stats.append(
            Stats(
                draft_length=len(counters.accepted_per_position),
                num_drafts=counters.num_drafts,
                num_draft_tokens=counters.num_draft_tokens,
                num_accepted_tokens=counters.num_accepted_tokens,
                num_emitted_tokens=emitted,
                num_rounds=counters.num_drafts,
                acceptance_histogram=list(histogram),
            )
        )
    return stats


def speed_beside(run: ServerRun, plain: ServerRun | None, repeats: int) -> JudgedSpeed:
    """Return the speed of a server beside that of the plain one, if there is one."""
    if plain is None:
        return JudgedSpeed(
            tokens_per_second=run.tokens_per_second,
            baseline_tokens_per_second=None,
            speedup=None,
            speedup_ci95=None,
            repeats=repeats,
        )
    return JudgedSpeed(
        tokens_per_second=run.tokens_per_second,
        baseline_tokens_per_second=plain.tokens_per_second,
        speedup=run.tokens_per_second / plain.tokens_per_second,
        speedup_ci95=bootstrap_ratio(run.tokens, run.seconds, plain.tokens, plain.seconds),
        repeats=repeats,
    )


def compare_texts(
    prompts: PromptSet, texts: list[list[int]], plain: Endpoint, plain_texts: list[list[int]]
) -> ComparedTexts:
    """Compare greedy answers with the plain server's, which is asked how near the two tokens are where they part."""
    differences = []
    for request, (prompt, text, plain_text) in enumerate(zip(prompts.token_ids, texts, plain_texts, strict=True)):
        if text == plain_text:
            continue
        same = [a == b for a, b in zip(text, plain_text, strict=False)]
        position = same.index(False) if False in same else len(same)
        own, expected = (answer[position] if position < len(answer) else None for answer in (text, plain_text))
        gap = plain.top_two_gap(prompt + plain_text[:position], prompts.images_of(request))
        differences.append(TextDifference(request, position, expected, own, gap))
    return ComparedTexts(len(texts), len(texts) - len(differences), differences)
