"""Cascades: the right drafter in each row, the target's text whatever they draft."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import admit, build

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.decoding.schedule import Confident, Schedule
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.training_free.cascade import Cascade, CascadeConfig
from draftsmith.models.training_free.ngram import Ngram, NgramConfig
from draftsmith.models.training_free.suffix import Suffix

PROMPTS = ["The smith heats the iron", "def strike(iron):", "A draft is cheap, a draft is cheap, a", "x"]
PARTS = [("suffix", "medusa"), ("ngram", "eagle3"), ("suffix", "draft_model"), ("suffix", "p_eagle")]
WITH_CACHES = ["eagle3", "eagle", "mtp", "p_eagle", "dflash", "dspark"]
every_pair = pytest.mark.parametrize(("first", "second"), PARTS)


@pytest.fixture
def cascade(first: str, second: str, tiny_target: Target, tmp_path: Path) -> Cascade:
    save_drafter(build(second, tiny_target), tmp_path)
    loaded = load_drafter(f"{first}+{tmp_path}", tiny_target)
    assert isinstance(loaded, Cascade)
    assert (loaded.lookup.kind, loaded.trained.kind) == (first, second)
    return loaded


@every_pair
def test_the_text_is_the_targets(cascade: Cascade, tiny_target: Target) -> None:
    """In a batch and alone, greedy and sampled."""
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    decoder = SpeculativeDecoder(tiny_target, cascade)
    for settings in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
        for prompts in (PROMPTS, PROMPTS[:1]):
            expected = plain.generate(prompts, max_new_tokens=24, **settings).token_ids
            assert decoder.generate(prompts, max_new_tokens=24, **settings).token_ids == expected


@pytest.mark.parametrize(("first", "second"), PARTS[:2])
def test_each_row_gets_the_right_draft(cascade: Cascade, tiny_target: Target) -> None:
    """A row whose last three tokens stood before looks its draft up, the others are drafted for."""
    prompts = [[9, 5, 6, 7, 8, 4, 5, 6, 7], [9, 5, 6, 7, 8, 4, 3, 6, 7], [1, 2, 3]]
    engine = BatchEngine(tiny_target, cascade, GenerationSettings(shape=Chain(3)), 3, 128)
    admit(engine, [0, 1, 2], prompts)
    state = engine.state
    state.token_ids[torch.arange(3), state.lengths - 1] = torch.tensor([8, 8, 8])
    found = cascade.propose(state, Chain(3)).tokens
    looked_up, _ = cascade.lookup.look_up(state, 3)
    drafted = cascade.trained.propose(state, Chain(3)).tokens
    assert looked_up[0].tolist() == [4, 5, 6]
    assert looked_up[1].tolist() == [4, 3, 6]  # three tokens match here, too
    assert found[:2].tolist() == looked_up[:2].tolist()
    assert torch.equal(found[2], drafted[2])
    assert NO_TOKEN not in found[2]
    cascade.config.shortest = 4
    found = cascade.propose(state, Chain(3)).tokens
    assert found[0].tolist() == looked_up[0].tolist()
    assert torch.equal(found[1:], drafted[1:])


@pytest.mark.parametrize(("first", "second"), [("suffix", "draft_model")])
def test_a_draft_model_reads_what_others_drafted(cascade: Cascade, tiny_target: Target) -> None:
    """After rounds whose drafts were looked up it drafts as on fresh rows that have only read the text."""
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    answers = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target)).generate(prompts, 40).token_ids
    for prompt, answer in zip(prompts, answers, strict=True):
        cascade.remember(prompt + answer)
    settings = GenerationSettings(shape=Chain(4), stop_at_eos=False)
    engine = BatchEngine(tiny_target, cascade, settings, len(prompts), 128)
    admit(engine, [0, 1, 2, 3], prompts)
    for _ in range(3):
        engine.verify(engine.draft())
    texts = [ids[:length].tolist() for ids, length in zip(engine.state.token_ids, engine.state.lengths, strict=True)]
    assert max(len(text) - len(prompt) for text, prompt in zip(texts, prompts, strict=True)) > 10  # drafts were right
    fresh = BatchEngine(tiny_target, cascade.trained, settings, len(prompts), 128)
    admit(fresh, [0, 1, 2, 3], [text[:-1] for text in texts])
    for row, text in enumerate(texts):
        fresh.state.token_ids[row, len(text) - 1] = text[-1]
    engine.state.own_drafts = False
    found = cascade.trained.propose(engine.state, Chain(4)).tokens
    assert found.tolist() == cascade.trained.propose(fresh.state, Chain(4)).tokens.tolist()


@pytest.mark.parametrize(("first", "second"), PARTS[:2])
def test_a_trained_drafter_is_asked_where_needed(
    cascade: Cascade, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BatchEngine(tiny_target, cascade, GenerationSettings(shape=Chain(3)), 1, 128)
    admit(engine, [0], [[9, 5, 6, 7, 8, 4, 5, 6, 7]])
    engine.state.token_ids[0, 9] = 8
    monkeypatch.setattr(type(cascade.trained), "propose", None)
    assert cascade.propose(engine.state, Chain(3)).tokens.tolist() == [[4, 5, 6]]
    engine.state.token_ids[0, 9] = 1
    with pytest.raises(TypeError):
        cascade.propose(engine.state, Chain(3))


@pytest.mark.parametrize(("first", "second"), [("suffix", kind) for kind in WITH_CACHES])
def test_rounds_without_it_change_nothing_of_its_drafts(
    cascade: Cascade, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted in each round is the same whether it drafts in all of them or only reads in some."""
    (plain,) = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target)).generate(PROMPTS[:1], 40).token_ids
    prompt = tiny_target.encode(PROMPTS[0])
    settings = GenerationSettings(shape=Chain(3), stop_at_eos=False)
    asked: list[int] = []
    propose = type(cascade.trained).propose
    monkeypatch.setattr(type(cascade.trained), "propose", lambda *args: (asked.append(0), propose(*args))[1])

    def drafts(in_all_rounds: bool) -> list[list[int]]:
        cascade.forget()
        cascade.remember(prompt + plain[:10] + plain[20:30])
        engine = BatchEngine(tiny_target, cascade, settings, 1, 128)
        admit(engine, [0], [prompt])
        found = []
        for _ in range(12):
            if in_all_rounds:
                cascade.trained.propose(replace(engine.state, own_drafts=False), settings.shape)
            draft = engine.draft()
            found.append(draft.tokens[0].tolist())
            engine.verify(draft)
        return found

    expected = drafts(in_all_rounds=True)
    asked.clear()
    assert drafts(in_all_rounds=False) == expected
    assert 0 < len(asked) < len(expected)


@every_pair
def test_what_is_drafted_ends_by_confidence_and_what_is_looked_up_does_not(
    cascade: Cascade, tiny_target: Target
) -> None:
    """No random drafter is sure of more than its first token."""
    prompts = [[9, 5, 6, 7, 8, 4, 5, 6, 7], [1, 2, 3]]
    settings = resolve_settings(cascade, Sampling(), 8, Confident(3, 0.9))
    engine = BatchEngine(tiny_target, cascade, settings, 2, 128)
    admit(engine, [0, 1], prompts)
    engine.state.token_ids[[0, 1], engine.state.lengths - 1] = torch.tensor([8, 8])
    looked_up, drafted = engine.draft().tokens.tolist()
    assert looked_up == [4, 5, 6]
    assert drafted[0] != NO_TOKEN
    assert drafted[1:] == [NO_TOKEN, NO_TOKEN]
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    decoder = SpeculativeDecoder(tiny_target, cascade)
    for temperature in (0.0, 0.8):
        expected = plain.generate(PROMPTS, 24, temperature, seed=3).token_ids
        assert decoder.generate(PROMPTS, 24, temperature, seed=3, schedule=Confident(3, 0.2)).token_ids == expected


def test_lookups_know_no_confidence(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="confident schedule: ngram has no probabilities"):
        resolve_settings(load_drafter("ngram", tiny_target), Sampling(), 8, Confident(3, 0.2))


@pytest.mark.parametrize(("first", "second"), PARTS[:1])
def test_it_remembers_and_forgets(cascade: Cascade) -> None:
    lookup = cascade.lookup
    assert isinstance(lookup, Suffix)
    cascade.remember([1, 2, 3])
    assert lookup.num_kept == 4
    cascade.forget()
    assert lookup.num_kept == 0


def test_what_is_no_cascade_is_refused(tiny_target: Target) -> None:
    for name, reason in (("suffix+ngram", "trained drafter"), ("ngram+/no/folder", "no drafter at '/no/folder'")):
        with pytest.raises(UserError, match=reason):
            load_drafter(name, tiny_target)
    with pytest.raises(UserError, match="looks up 4 tokens at most"):
        Cascade(CascadeConfig(shortest=5), Ngram(NgramConfig()), build("medusa", tiny_target))


@pytest.mark.parametrize(("first", "second"), [("suffix", "draft_model")])
def test_a_draft_model_reads_what_was_written_without_speculation(cascade: Cascade, tiny_target: Target) -> None:
    """Off while two requests run, on when the shorter one is done: then no slot of the longer one's text is empty."""
    schedule = Schedule(((1, 3), (2, 0)))
    settings = resolve_settings(cascade, Sampling(), 40, schedule, stop_at_eos=False)
    engine = BatchEngine(tiny_target, cascade, settings, 2, 128)
    generation = Generation(engine)
    generation.add([5, 77, 23, 9], 0, 40)
    generation.add([100, 3, 200], 1, 15)
    while generation.running():
        generation.step()
    keys, _ = engine.state.cache.kv.keys_and_values(0)  # [B, Hkv, M, D]
    num_before = int(engine.state.lengths[0]) - (settings.shape.depth + 2)  # the last round, with its newest token
    assert (keys[0, :, :num_before].abs().sum((0, 2)) > 0).all()
