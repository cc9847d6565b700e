"""From the times of decoded batches to tokens per second, latencies, and the interval of a ratio.

A contender's outputs are [batch][repeat], with the same batches for every contender. Every figure counts the tokens
that `counted` leaves, whoever decoded them.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from draftsmith.inference.decoding.counters import Interval, interval
from draftsmith.inference.decoding.decoder import Output
from draftsmith.inference.measuring.results import FirstTokenParts, Percentiles, Phases, Speed
from draftsmith.models.errors import UserError

Outputs = list[list[Output]]  # [batch][repeat]
PHASES = ("draft", "verify", "host")


def counted(token_ids: list[int], eos_token_ids: Sequence[int], limit: int) -> list[int]:
    """Return what counts of an answer: nothing behind its first end-of-text token, nothing beyond the limit."""
    ends = (place for place, token in enumerate(token_ids[:limit], 1) if token in eos_token_ids)
    return token_ids[: next(ends, limit)]


# --- tokens per second


def batch_totals(outputs: Outputs) -> tuple[list[int], list[float]]:
    """Return emitted tokens of each batch, and its seconds from prompt to last token, median over repeats."""
    tokens = [sum(map(len, batch[0].token_ids)) for batch in outputs]
    return tokens, [statistics.median(run.timing.total for run in batch) for batch in outputs]


def decode_totals(outputs: Outputs) -> tuple[list[int], list[float]]:
    """Return the same without reading the prompts: tokens and seconds after the first token of each answer."""
    tokens = [sum(len(ids) - 1 for ids in batch[0].token_ids) for batch in outputs]
    seconds = [statistics.median(run.timing.total - run.timing.to_first_token for run in batch) for batch in outputs]
    return tokens, seconds


def throughput(outputs: Outputs) -> float:
    """Return tokens per second over everything that was timed, disturbances of the machine included."""
    runs = [run for batch in outputs for run in batch]
    return sum(len(ids) for run in runs for ids in run.token_ids) / sum(run.timing.total for run in runs)


def speed(totals: tuple[list[int], list[float]]) -> float:
    tokens, seconds = totals
    return sum(tokens) / sum(seconds)


def speedup_of(outputs: Outputs, plain: Outputs) -> float:
    """Return the ratio of the two speeds from prompt to last token."""
    return speed(batch_totals(outputs)) / speed(batch_totals(plain))


def decode_speed(outputs: Outputs) -> float | None:
    """Return tokens per second apart from reading the prompts; None where every answer ended with its first token."""
    tokens, seconds = decode_totals(outputs)
    return speed((tokens, seconds)) if sum(tokens) else None


def speed_beside(
    outputs: Outputs,
    plain: Outputs,
    acceptance_length: float,
    tokenise_seconds: Sequence[float],
    floor_share: float | None,
) -> Speed:
    """Return all times of a drafter beside plain decoding.

    `tokenise_seconds` are those of each prompt, empty where unknown; `floor_share` is `bandwidth_floor_share`.
    """
    speedup, decode, plain_decode = speedup_of(outputs, plain), decode_speed(outputs), decode_speed(plain)
    return Speed(
        baseline_tokens_per_second=speed(batch_totals(plain)),
        tokens_per_second=speed(batch_totals(outputs)),
        speedup=speedup,
        speedup_ci95=ratio_interval(outputs, plain),
        repeats=len(outputs[0]),
        decode_tokens_per_second=decode,
        baseline_decode_tokens_per_second=plain_decode,
        decode_speedup=decode / plain_decode if decode and plain_decode else None,
        throughput_tokens_per_second=throughput(outputs),
        ttft_ms=percentiles(time_to_first_token(outputs, tokenise_seconds)),
        ttft_parts_ms=first_token_parts(outputs, tokenise_seconds),
        tpot_ms=percentiles(time_per_token(outputs)),
        baseline_tpot_ms=percentiles(time_per_token(plain)),
        milliseconds_per_round=milliseconds_per_round(outputs),
        baseline_milliseconds_per_round=milliseconds_per_round(plain),
        bandwidth_floor_share=floor_share,
        step_cost_ratio=acceptance_length / speedup,
    )


# --- intervals


def ratio_interval(outputs: Outputs, plain: Outputs) -> Interval:
    """Return the interval of the speedup: over batches, or of a single batch over its repeats."""
    if len(outputs) == 1:
        outputs, plain = ([[run] for run in only] for (only,) in (outputs, plain))
    return bootstrap_ratio(*batch_totals(outputs), *batch_totals(plain))


def bootstrap_ratio(
    tokens: list[int], seconds: list[float], plain_tokens: list[int], plain_seconds: list[float]
) -> Interval:
    """Return the interval of the ratio of the two speeds, batches drawn with replacement, both sides together."""
    columns = [np.asarray(column) for column in (tokens, seconds, plain_tokens, plain_seconds)]

    def log_ratio(picks: np.ndarray) -> np.ndarray:
        own, own_seconds, beside, beside_seconds = (np.log(column[picks].sum(1)) for column in columns)
        return (own - own_seconds) - (beside - beside_seconds)

    logarithms = interval(log_ratio, len(tokens))
    if logarithms is None:
        return None
    low, high = np.exp(logarithms).tolist()
    return low, high


# --- latencies


def percentiles(values: Sequence[float]) -> Percentiles:
    return Percentiles(*(float(np.percentile(values, q)) for q in (50, 95, 99)))


def time_to_first_token(outputs: Outputs, tokenise: Sequence[float]) -> list[float]:
    """Return TTFT in ms of every request and repeat, from its text; `tokenise` are seconds of each prompt, if known."""
    seconds = iter(tokenise)
    times = []
    for batch in outputs:
        of_batch = [next(seconds, 0.0) for _ in batch[0].timing.requests]
        times += [
            (extra + request.first_token) * 1000
            for run in batch
            for extra, request in zip(of_batch, run.timing.requests, strict=True)
        ]
    return times


def first_token_parts(outputs: Outputs, tokenise: Sequence[float]) -> FirstTokenParts:
    """Return medians: tokenising a prompt, reading it (which gives the first token), and the first round after that."""
    requests = [request for batch in outputs for run in batch for request in run.timing.requests]
    ends = [(request.first_token, request.first_round) for request in requests]
    first_rounds = [first_round - first_token for first_token, first_round in ends if first_round is not None]
    prefills = [request.first_token for request in requests]
    return FirstTokenParts(
        *(statistics.median(part) * 1000 if part else None for part in (tokenise, prefills, first_rounds))
    )


def time_per_token(outputs: Outputs) -> list[float]:
    """Return TPOT in ms of every request and repeat as vLLM has it: time over tokens, both after the first token."""
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


def milliseconds_per_round(outputs: Outputs) -> Phases:
    """Return the mean times of a round, over the repeats whose time is their batch's median.

    The speedup is of those, too: what disturbs one repeat is in neither.
    """
    runs = [run for batch in outputs for run in middle_repeats(batch)]
    rounds = sum(num_passes(run) for run in runs)
    return Phases(*(sum(run.timing.phases[phase] for run in runs) / max(1, rounds) for phase in PHASES))


def middle_repeats(batch: list[Output]) -> list[Output]:
    """Return the repeat of median time; of an even number the two on either side of it."""
    ordered = sorted(batch, key=lambda run: run.timing.total)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def num_passes(run: Output) -> float:
    """Return the number of the target's passes over a batch after reading its prompts."""
    return max(request.num_rounds for request in run.stats.requests)
