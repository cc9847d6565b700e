"""Cascades of two draft models: the beginning of the larger model's own draft, in one of its passes."""

from pathlib import Path

import pytest
import torch
from drafters import admit, build

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.training_free.draft_model_cascade import DraftModelCascade

PROMPTS = ["The smith heats the iron", "def strike(iron):", "A draft is cheap, a draft is cheap, a", "x"]
SETTINGS = ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3})


@pytest.fixture
def cascade(tiny_target: Target, tmp_path: Path) -> DraftModelCascade:
    """The larger model is the target with some noise, and the smaller one has a layer less: both are right at times."""
    torch.manual_seed(0)
    larger = DraftModel.from_target(DraftModelConfig(num_layers=tiny_target.num_layers - 1), tiny_target)
    save_drafter(larger, tmp_path / "larger")
    save_drafter(DraftModel.from_target(DraftModelConfig(num_layers=1), tiny_target), tmp_path / "smaller")
    loaded = load_drafter(f"{tmp_path / 'smaller'}+{tmp_path / 'larger'}", tiny_target)
    assert isinstance(loaded, DraftModelCascade)
    return loaded


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_text_is_the_targets(settings: dict[str, float], cascade: DraftModelCascade, tiny_target: Target) -> None:
    """In a batch and alone; drafts drawn by chance have the target's text where they are verified one-hot."""
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    decoder = SpeculativeDecoder(tiny_target, cascade)
    mode = "one_hot" if settings else "greedy"
    for prompts in (PROMPTS, PROMPTS[:1]):
        expected = plain.generate(prompts, max_new_tokens=24, **settings).token_ids
        output = decoder.generate(prompts, max_new_tokens=24, verification_mode=mode, **settings)
        assert output.token_ids == expected
        assert output.stats.total.mean_acceptance_length > 1


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.8)])
def test_a_draft_begins_as_that_of_the_larger_model(
    sampling: Sampling, cascade: DraftModelCascade, tiny_target: Target
) -> None:
    """After some rounds each row has what the larger model drafts on fresh rows that have read the text.

    Up to the first token that the smaller model proposed otherwise, with the probabilities that it was drawn from.
    """
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    mode = "greedy" if sampling.greedy else "probabilistic"
    settings = GenerationSettings(sampling=sampling, verification_mode=mode, shape=Chain(4), stop_at_eos=False)
    rows = list(range(len(prompts)))
    engine = BatchEngine(tiny_target, cascade, settings, len(prompts), 128)
    admit(engine, rows, prompts)
    lengths_seen = set()
    for _ in range(6):
        draft = engine.draft()
        texts = [
            ids[:length].tolist() for ids, length in zip(engine.state.token_ids, engine.state.lengths, strict=True)
        ]
        fresh = BatchEngine(tiny_target, cascade.large, settings, len(prompts), 128)
        admit(fresh, rows, [text[:-1] for text in texts])
        for row, text in enumerate(texts):
            fresh.state.token_ids[row, len(text) - 1] = text[-1]
        alone = fresh.draft()
        for row in rows:
            kept = int((draft.tokens[row] != NO_TOKEN).sum())
            lengths_seen.add(kept)
            assert draft.tokens[row, :kept].tolist() == alone.tokens[row, :kept].tolist()
            assert (draft.tokens[row, kept:] == NO_TOKEN).all()
            if not sampling.greedy:
                torch.testing.assert_close(draft.logits[row, :kept], alone.logits[row, :kept], atol=1e-5, rtol=1e-5)
        engine.verify(draft)
    assert min(lengths_seen) >= 1
    assert len(lengths_seen) > 1


def test_the_small_model_reads_what_drafts_of_one_token_committed(
    cascade: DraftModelCascade, tiny_target: Target
) -> None:
    """Nothing is asked of it then. Later it proposes what it proposes on rows that have read the text."""
    prompts, rows = [tiny_target.encode(prompt) for prompt in PROMPTS], list(range(len(PROMPTS)))
    settings = GenerationSettings(shape=Chain(4), schedule=Schedule(((1, 4), (2, 1))), stop_at_eos=False)
    engine = BatchEngine(tiny_target, cascade, settings, len(prompts), 128)
    admit(engine, rows, prompts)
    for _ in range(6):
        engine.verify(engine.draft(1))
    texts = [ids[:length].tolist() for ids, length in zip(engine.state.token_ids, engine.state.lengths, strict=True)]
    fresh = BatchEngine(tiny_target, cascade.small, settings, len(prompts), 128)
    admit(fresh, rows, [text[:-1] for text in texts])
    for row, text in enumerate(texts):
        fresh.state.token_ids[row, len(text) - 1] = text[-1]
    engine.state.own_drafts = False
    assert cascade.proposed(engine.state, 3).tolist() == fresh.draft(3).tokens.tolist()


def test_a_smaller_model_that_is_the_larger_one_drafts_all(tiny_target: Target) -> None:
    model = DraftModel.from_target(DraftModelConfig(num_layers=1), tiny_target).eval()
    stats = [
        SpeculativeDecoder(tiny_target, drafter).generate(PROMPTS, 24, draft_length=3).stats.total
        for drafter in (model, DraftModelCascade(model, model))
    ]
    assert stats[0] == stats[1]


def test_other_pairs_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    save_drafter(build("medusa", tiny_target), tmp_path / "medusa")
    save_drafter(build("draft_model", tiny_target), tmp_path / "draft_model")
    with pytest.raises(UserError, match="medusa before draft_model is no cascade"):
        load_drafter(f"{tmp_path / 'medusa'}+{tmp_path / 'draft_model'}", tiny_target)
    for name in (1e308, f"ngram+{'x' * 5000}", "+", "a+\0"):
        with pytest.raises(UserError):
            load_drafter(name, tiny_target)  # type: ignore[arg-type]
