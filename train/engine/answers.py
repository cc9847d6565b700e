"""The answers of a running server to all prompts of a set: their texts, their times, and the server's own counters."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from draftsmith.data.answers.endpoint import Answer, Endpoint
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.judged import ComparedTexts, Judge, JudgedSpeed, TextDifference
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.speed import bootstrap_ratio
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.train.engine.sglang_counters import counters_of, read_info
from draftsmith.train.engine.vllm_counters import Counters, has_drafter, read_counters, read_version


@dataclass(frozen=True)
class MeasuredServer:
    """A running server, and what it says of itself."""

    endpoint: Endpoint
    judge: Judge
    drafts: bool  # it has a drafter
    draft_length: int

    @property
    def name(self) -> str:
        return self.endpoint.server.name

    def counters(self, before: Counters, answers: list[Answer]) -> Counters:
        """Return the counters as they stand after some answers; `before` are those from before them.

        A vLLM tells those of all that it ever answered, an SGLang tells those of each answer.
        """
        if not self.endpoint.is_sglang:
            return read_counters(self.endpoint.server)
        return sum((counters_of(answer.told, self.draft_length) for answer in answers if answer.told), before)


def measured_server(endpoint: Endpoint, drafts: bool) -> MeasuredServer:
    """Return a server with what it says of itself. `drafts`: it must have a drafter; else it must have none.

    Raises `UserError` where it is not so.
    """
    server = endpoint.server
    if endpoint.is_sglang:
        info, option = read_info(server), "--speculative-algorithm"
        engine, draft_length = info.text, info.draft_length
        if drafts and not draft_length:
            raise UserError(f"{server.name} drafts nothing: start it with {option}")
        has_one = draft_length > 0
    else:
        engine, option, has_one = f"vLLM {read_version(server)}", "--speculative-config", has_drafter(server)
        draft_length = len(read_counters(server).accepted_per_position) if drafts else 0
    if has_one and not drafts:
        raise UserError(f"{server.name} has a drafter: start it without {option}")
    return MeasuredServer(endpoint, Judge(engine, server.url), drafts, draft_length)


@dataclass(frozen=True)
class RequestSettings:
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
    server: MeasuredServer, prompts: PromptSet, load: RequestSettings, on_batch: Callable[[], None]
) -> ServerRun:
    """Send all prompts once for texts and counters, then `load.repeats` times for times.

    So prompts lie in the prefix cache of every server alike when times are taken. Raises `UserError` where the server
    fails.
    """
    count = len(prompts.token_ids)
    batches = [range(start, min(start + load.batch_size, count)) for start in range(0, count, load.batch_size)]

    def answer(number: int) -> Answer:
        images = prompts.images_of(number)
        return server.endpoint.complete(prompts.token_ids[number], load.sampling, number, images)

    def answers(batch: range) -> list[Answer]:
        with ThreadPoolExecutor(len(batch)) as pool:
            return list(pool.map(answer, batch))

    texts: list[list[int]] = []
    readings = [server.counters(Counters(), [])] if server.drafts else []
    for batch in batches:
        counted = answers(batch)
        texts += [answer.new_ids for answer in counted]
        if server.drafts:
            readings.append(server.counters(readings[-1], counted))
        on_batch()
    tokens, seconds = [0] * len(batches), [0.0] * len(batches)
    for _ in range(load.repeats):
        for place, batch in enumerate(batches):
            start = time.perf_counter()
            timed = answers(batch)
            seconds[place] += time.perf_counter() - start
            tokens[place] += sum(len(answer.new_ids) for answer in timed)
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
