"""Calls from several threads: each text is the one that the same call gives alone."""

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from drafters import build

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling

NUM_THREADS, NUM_CALLS = 8, 140  # `call` repeats itself behind them


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


PROMPTS = ["The smith heats the iron", "iron iron iron iron", "def strike(iron):", "x"]


def drafter_of(kind: str, target: Target) -> Drafter:
    return load_drafter(kind, target) if kind in ("none", "ngram", "suffix", "lookahead") else build(kind, target)


def call(decoder: SpeculativeDecoder, number: int) -> list[str]:
    """Most calls fit one engine, some need another; every fourth is a stream."""
    prompts = [f"{PROMPTS[number % len(PROMPTS)]} {number % 7}"]
    temperature = 0.8 if number % 5 == 0 else 0.0
    if number % 4 == 0:
        rounds = decoder.stream(prompts[0], 4, Sampling(), draft=3, seed=0)
        return ["".join(piece.text for round in rounds for piece in round.pieces)]
    mode = "one_hot" if temperature else None  # in which a text does not depend on what was drafted
    return decoder.generate(prompts, 4, temperature, draft_length=3, verification_mode=mode).texts


@pytest.mark.parametrize(
    ("kinds", "fuse_layers"),
    [
        (("suffix",), True),
        (("ngram", "draft_model"), True),  # two decoders that share a target
        (("eagle3",), False),  # which keeps hidden states by hooks on the target's layers
    ],
)
def test_calls_of_many_threads_give_the_texts_of_single_calls(
    kinds: tuple[str, ...], fuse_layers: bool, tiny_target_dir: Path
) -> None:
    target = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32, fuse_layers)
    decoders = [SpeculativeDecoder(target, drafter_of(kind, target)) for kind in kinds]
    jobs = list(zip(itertools.cycle(decoders), range(NUM_CALLS), strict=False))
    expected = [call(*job) for job in jobs]
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert list(pool.map(lambda job: call(*job), jobs)) == expected


def test_a_stream_that_waits_holds_nobody_up(tiny_target: Target) -> None:
    """Neither another thread nor its own, and goes on as if there had been nobody else."""
    decoder = SpeculativeDecoder(tiny_target, load_drafter("ngram", tiny_target))
    expected = decoder.generate(PROMPTS[:1], 8, draft_length=3).texts[0]
    rounds = decoder.stream(PROMPTS[0], 8, Sampling(), draft=3, seed=0)
    text = "".join(piece.text for piece in next(rounds).pieces)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(decoder.generate, PROMPTS[1:2], 8, draft_length=3).result(timeout=30)
    for round in rounds:
        decoder.generate(PROMPTS[1:2], 8, draft_length=3)
        text += "".join(piece.text for piece in round.pieces)
    assert text == expected


def test_a_generation_whose_engine_another_has_taken_stops(tiny_target: Target) -> None:
    """It would read what happened to the other one's texts."""
    decoder = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    engine = decoder.engine_for(resolve_settings(decoder.drafter, Sampling(), 8), num_rows=1, longest_prompt=4)
    idle = Generation(engine)
    running = Generation(engine, [[1, 2, 3]])
    idle.add([1, 2, 3], request_id=0, max_new_tokens=4)
    with pytest.raises(AssertionError, match="another generation has taken the engine"):
        idle.step()
    running.step()
    with pytest.raises(AssertionError):
        Generation(engine)
