"""From the times of decoded batches to tokens per second, latencies, and the interval of a ratio.

A contender's outputs are [batch][repeat], with the same batches for every contender. Every figure counts the tokens
that `counted` leaves, whoever decoded them.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.inference.decoding.counters import interval
from draftsmith.inference.decoding.decoder import Output
from draftsmith.models.errors import UserError

Outputs = list[list[Output]]  # [batch][repeat]
PHASES = ("draft", "verify", "host")


def counted(token_ids: list[int], eos_token_ids: Sequence[int], limit: int) -> list[int]:
    """What counts of an answer: nothing behind its first end-of-text token, nothing beyond the limit."""
    ends = (place for place, token in enumerate(token_ids[:limit], 1) if token in eos_token_ids)
    return token_ids[: next(ends, limit)]


# --- tokens per second


def batch_totals(outputs: Outputs) -> tuple[list[int], list[float]]:
    """Emitted tokens of each batch, and its seconds from prompt to last token, median over repeats."""
    tokens = [sum(map(len, batch[0].token_ids)) for batch in outputs]
    return tokens, [statistics.median(run.timing.total for run in batch) for batch in outputs]


def decode_totals(outputs: Outputs) -> tuple[list[int], list[float]]:
    """The same without reading the prompts: tokens after the first of each answer, and the seconds after those."""
    tokens = [sum(len(ids) - 1 for ids in batch[0].token_ids) for batch in outputs]
    seconds = [statistics.median(run.timing.total - run.timing.to_first_token for run in batch) for batch in outputs]
    return tokens, seconds


def throughput(outputs: Outputs) -> float:
    """Tokens per second over everything that was timed, disturbances of the machine included."""
    runs = [run for batch in outputs for run in batch]
    return sum(len(ids) for run in runs for ids in run.token_ids) / sum(run.timing.total for run in runs)


def speed(totals: tuple[list[int], list[float]]) -> float:
    tokens, seconds = totals
    return sum(tokens) / sum(seconds)


def speedup_fields(outputs: Outputs, plain: Outputs) -> dict[str, Any]:
    """Ratio of the two speeds from prompt to last token, and its interval."""
    totals, plain_totals = batch_totals(outputs), batch_totals(plain)
    return {
        "speedup": speed(totals) / speed(plain_totals),
        "speedup_ci95": ratio_interval(outputs, plain),
    }


def decode_fields(outputs: Outputs, plain: Outputs) -> dict[str, Any]:
    """Decoding apart from reading the prompts; null where every answer ended with its first token."""
    totals, plain_totals = decode_totals(outputs), decode_totals(plain)
    own, beside = (speed(each) if sum(each[0]) else None for each in (totals, plain_totals))
    return {
        "decode_tokens_per_second": own,
        "baseline_decode_tokens_per_second": beside,
        "decode_speedup": own / beside if own and beside else None,
    }


# --- intervals


def ratio_interval(outputs: Outputs, plain: Outputs) -> list[float] | None:
    """95 % interval of the speedup: over batches, or of a single batch over its repeats."""
    if len(outputs) == 1:
        outputs, plain = ([[run] for run in only] for (only,) in (outputs, plain))
    return bootstrap_ratio(*batch_totals(outputs), *batch_totals(plain))


def bootstrap_ratio(
    tokens: list[int], seconds: list[float], plain_tokens: list[int], plain_seconds: list[float]
) -> list[float] | None:
    """95 % interval of the ratio of the two speeds, batches drawn with replacement, both sides together."""
    values = [np.asarray(each) for each in (tokens, seconds, plain_tokens, plain_seconds)]

    def log_ratio(picks: np.ndarray) -> np.ndarray:
        own, own_seconds, beside, beside_seconds = (np.log(each[picks].sum(1)) for each in values)
        return (own - own_seconds) - (beside - beside_seconds)

    found = interval(log_ratio, len(tokens))
    return found and np.exp(found).tolist()


# --- latencies


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)}


def time_to_first_token(outputs: Outputs, tokenise: Sequence[float]) -> list[float]:
    """TTFT in ms of every request and repeat, from its text; `tokenise`: seconds of each prompt, empty if unknown."""
    seconds = iter(tokenise)
    times = []
    for batch in outputs:
        own = [next(seconds, 0.0) for _ in batch[0].timing.requests]
        times += [
            (extra + request.first_token) * 1000
            for run in batch
            for extra, request in zip(own, run.timing.requests, strict=True)
        ]
    return times


def first_token_parts(outputs: Outputs, tokenise: Sequence[float]) -> dict[str, float | None]:
    """Medians in ms: tokenising a prompt, reading it (which gives the first token), and the first round after that."""
    requests = [request for batch in outputs for run in batch for request in run.timing.requests]
    rounds = [one.first_round - one.first_token for one in requests if one.first_round is not None]
    seconds = {"tokenise": tokenise, "prefill": [one.first_token for one in requests], "first_decode": rounds}
    return {part: statistics.median(found) * 1000 if found else None for part, found in seconds.items()}


def time_per_token(outputs: Outputs) -> list[float]:
    """TPOT in ms of every request and repeat as vLLM has it: time after the first token over the tokens after it."""
    times = [
        (request.finished - request.first_token) * 1000 / (len(ids) - 1)
        for batch in outputs
        for run in batch
        for ids, request in zip(run.token_ids, run.timing.requests, strict=True)
        if len(ids) > 1
    ]
    if not times:
        raise UserError("every output ended with its first token, which leaves nothing to measure: give other prompts")
    return times


def milliseconds_per_round(outputs: Outputs) -> dict[str, float]:
    """Mean time of a round in drafting, in the target's pass with its verification, and in everything else.

    Of the repeats whose time is their batch's median, as the speedup is: what disturbs one repeat is in neither.
    """
    runs = [run for batch in outputs for run in middle_repeats(batch)]
    rounds = sum(num_passes(run) for run in runs)
    return {phase: sum(run.timing.phases[phase] for run in runs) / max(1, rounds) for phase in PHASES}


def middle_repeats(batch: list[Output]) -> list[Output]:
    """The repeat of median time; of an even number the two on either side of it."""
    ordered = sorted(batch, key=lambda run: run.timing.total)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def num_passes(run: Output) -> float:
    """The target's passes over a batch after reading its prompts."""
    return max(request.num_rounds for request in run.stats.requests)
