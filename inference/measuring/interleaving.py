"""Decoding in turns: every contender decodes the same batches in one process, interleaved.

Every repeat decodes every batch once with each contender, plain decoding among them, on the same target, kernels,
prompts and stop rules. A batch's time is later its median over the repeats, so that a disturbance of the machine
touches one repeat of one contender.
"""

import math
import time
from collections.abc import Callable

from draftsmith.inference.decoding.decoder import Output
from draftsmith.inference.measuring.speed import Outputs

DecodeBatch = Callable[[list[int]], Output]  # decodes a batch, given as places among the prompts
LEAST_REPEATS = 2  # with a time limit
MANY_BATCHES = 8  # so many say enough of noise that a single repeat will do where time is short


def decode_in_turns(
    decoders: dict[str, DecodeBatch],
    batches: list[list[int]],
    repeats: int,
    seconds: float | None = None,
    before_repeat: Callable[[], object] = lambda: None,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, Outputs]:
    """Return the outputs of each contender, after a warm-up that is not counted.

    Every contender decodes a batch before any decodes the next one, in an order that moves on by one with every batch
    and every repeat, so that each stands in each place equally often. With a limit of `seconds` there are as many
    repeats as fit, and `repeats` at most.
    """
    start = time.perf_counter()
    for decode in decoders.values():
        decode(batches[0])
    outputs: dict[str, Outputs] = {name: [[] for _ in batches] for name in decoders}
    names = list(decoders)
    num_repeats, repeat = repeats, 0
    begun = time.perf_counter()
    while repeat < num_repeats:
        before_repeat()  # drafters forget the warm-up, and what they decoded in the repeats before
        for number, batch in enumerate(batches):
            first = (repeat + number) % len(names)
            for name in names[first:] + names[:first]:
                outputs[name][number].append(decoders[name](batch))
            on_progress()
        repeat += 1
        if repeat == 1 and seconds is not None:
            now = time.perf_counter()
            num_repeats = repeats_within(seconds - (now - start), now - begun, repeats, len(batches))
    return outputs


def repeats_within(seconds: float, seconds_each: float, most: int, num_batches: int) -> int:
    """Return how many repeats in all, of which one is done, so many seconds allow for: at most `most`.

    The least is 1 with 8 batches or more, else 2. The interval is over batches: noise of the machine widens it just as
    well where each is timed once, and the mean of two times is no safer from a pause than one of them.
    """
    least = 1 if num_batches >= MANY_BATCHES else LEAST_REPEATS
    return min(most, max(least, 1 + math.floor(seconds / seconds_each)))
