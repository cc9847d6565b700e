"""Prompts that are read in parts, while other requests decode: what it leaves unchanged, and what it is for."""

import pytest
import torch
from drafters import TEXTS, trained
from families import KINDS, VOCABULARY, target_and_plain_model

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.decoding.generation import Admission, Generation
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.sampling.trees import Chain

LONG, SHORT = [5, 6, 7, 8, 9] * 12, [10, 11, 12]


def decoded(target: Target, drafter: Drafter, prompts: list[list[int]], admission: Admission) -> Generation:
    """All prompts through two rows. The first answer is short, so that the next prompts are read beside the second."""
    shape = Chain(min(3, drafter.max_draft_length or 3))
    settings = GenerationSettings(max_new_tokens=40, shape=shape, stop_at_eos=False)
    engine = SpeculativeDecoder(target, drafter).engine_for(settings, 2, max(map(len, prompts)))
    generation = Generation(engine, admission=admission)
    for number, prompt in enumerate(sorted(prompts, key=len)):
        generation.add(prompt, number, 40 if number == 1 else 3)
    while generation.running():
        generation.step()
    return generation


@pytest.mark.parametrize("kind", ["eagle3", "draft_model", "dflash"])
def test_reading_in_parts_changes_no_counter(kind: str, tiny_target: Target) -> None:
    """Rounds between the parts write nothing that a draft is made from later: caches of each kind are as they were."""
    texts = [tiny_target.encode(text * (1 + place % 3)) for place, text in enumerate(TEXTS)]
    drafter = trained(kind, tiny_target, texts, 20)
    whole, parts = (decoded(tiny_target, drafter, texts, admission) for admission in (Admission(), Admission(chunk=2)))
    assert sum(request.stats.num_accepted_tokens for request in whole.requests) > 0
    for request, other in zip(whole.requests, parts.requests, strict=True):
        assert (request.token_ids, request.stats) == (other.token_ids, other.stats)


@pytest.mark.parametrize("name", ["gated DeltaNet", "Mamba-2 beside attention", "latent attention"])
def test_reading_in_parts_changes_no_state(name: str) -> None:
    """Texts of targets whose layers carry a running state, compress what they keep, or see a window only."""
    target, _ = target_and_plain_model(*KINDS[name], torch.float64)
    words = torch.randint(3, VOCABULARY, (4,), generator=torch.Generator().manual_seed(6)).tolist()
    prompts = [(words * 10)[:length] for length in (2, 37, 5, 23, 11)]
    drafter = load_drafter("ngram", target)
    whole, parts = (decoded(target, drafter, prompts, admission) for admission in (Admission(), Admission(chunk=4)))
    for request, other in zip(whole.requests, parts.requests, strict=True):
        assert (request.token_ids, request.stats) == (other.token_ids, other.stats)


def tokens_meanwhile(target: Target, admission: Admission) -> int:
    """Tokens that a running request gets while a prompt of 60 tokens is read."""
    engine = SpeculativeDecoder(target, load_drafter("none", target)).engine_for(
        GenerationSettings(max_new_tokens=40, shape=Chain(0), stop_at_eos=False), 2, len(LONG)
    )
    generation = Generation(engine, [SHORT], admission=admission)
    generation.step()
    generation.add(LONG, 1, 40)
    told = 0
    while True:
        for emission in generation.step():
            if emission.request == 1:
                return told
            told += len(emission.token_ids)


def test_others_decode_while_a_prompt_is_read(tiny_target: Target) -> None:
    """A round behind each part but the last."""
    assert tokens_meanwhile(tiny_target, Admission()) == 0
    assert tokens_meanwhile(tiny_target, Admission(chunk=6)) == 60 / 6 - 1


def test_a_request_waits_for_others_no_longer_than_it_may(tiny_target: Target) -> None:
    """Alone it waits until its time is up, and with another one to fill the rows no time at all."""
    seconds = 0.0  # as the generation's clock tells
    settings = GenerationSettings(max_new_tokens=40, shape=Chain(0), stop_at_eos=False)
    engine = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target)).engine_for(settings, 3, len(LONG))
    generation = Generation(engine, [SHORT], now=lambda: seconds, admission=Admission(most_wait=2.0))
    generation.step()
    assert generation.num_running == 1, "nobody else runs: it need not wait"
    generation.add(SHORT, 1, 4)
    for later in (0.0, 1.0, 1.9):
        seconds = later
        generation.step()
        assert generation.num_running == 1
    seconds = 2.0
    generation.step()
    assert generation.num_running == 2
    generation.add(SHORT, 2, 4)
    generation.step()
    assert generation.num_running == 3, "no row stays free: there is nothing to wait for"
