"""Whole texts of targets with layers of each kind: drafts change nothing, and greedy text is transformers' own."""

from typing import Any

import pytest
import torch
from families import ALIKE, KINDS, VOCABULARY, target_and_plain_model
from transformers import PreTrainedModel

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.certify import CertifySettings, certify
from draftsmith.inference.measuring.lossless import compare_outputs
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.sampling.trees import StaticTree

LENGTHS = (2, 37, 5, 11)  # of the prompts
NEW_TOKENS = 24  # more than any window, chunk or choice of slots holds


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[Target, PreTrainedModel]:
    """A target, and transformers' own model of the same weights. In fp64, in which near ties do not part texts."""
    return target_and_plain_model(*KINDS[request.param], torch.float64)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Text that repeats itself, so that lookups find drafts, of which some are right."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(3, VOCABULARY, (4,), generator=generator).tolist()
    return [(words * 10)[:length] for length in LENGTHS]


def medusa_of(target: Target) -> Drafter:
    return DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), target).eval()


@torch.no_grad()
def test_greedy_text_is_transformers_whatever_is_drafted(
    both: tuple[Target, PreTrainedModel], prompts: list[list[int]]
) -> None:
    """By no drafts, chains of n-grams and suffixes, trees of a lookahead and of Medusa, four ragged prompts in
    three rows.

    What a trained EAGLE-3 leaves unchanged is tested in train/test_kinds_of_targets_trained.py.
    """
    target, plain = both
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = plain.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(output[0, len(prompt) :].tolist())
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_at_eos": False, "batch_size": 3}
    num_accepted = 0
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    training_free: list[tuple[Any, dict]] = [(name, {}) for name in ("none", "ngram", "suffix", "lookahead")]
    for drafter, how in (*training_free, (medusa_of(target).double(), {"tree": tree})):
        loaded = load_drafter(drafter, target) if isinstance(drafter, str) else drafter
        output = SpeculativeDecoder(target, loaded).generate(prompts, **settings, **how)
        assert output.token_ids == expected, drafter
        num_accepted += output.stats.total.num_accepted_tokens
    assert num_accepted > 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ALIKE])
def test_the_certificate(kind: str, prompts: list[list[int]]) -> None:
    """Passes in fp32 for a target of each kind, by a chi-square test in each mode; its control finds the lossy mode."""
    target, _ = target_and_plain_model(*KINDS[kind])
    settings = CertifySettings(max_new_tokens=10, num_texts=48, batch_size=48)
    certificate = certify(target, medusa_of(target), prompts, settings)
    assert certificate.passed
    assert certificate.control_found


def test_a_tie_in_a_choice_is_a_near_tie() -> None:
    """Which of the slots that score exactly 0 are attended to depends on how many slots there are."""
    target, _ = target_and_plain_model(*KINDS["sparse attention"])
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in (2, 9, 5, 11)]
    decoders = [SpeculativeDecoder(target, drafter) for drafter in (load_drafter("none", target), medusa_of(target))]
    plain, drafted = [decoder.generate(prompts, 30, stop_at_eos=False).token_ids for decoder in decoders]
    wrong = [[*text[:-1], (text[-1] + 1) % VOCABULARY] for text in plain]
    assert compare_outputs(target, prompts, plain, drafted).identical == len(prompts)
    assert compare_outputs(target, prompts, plain, wrong).divergences == len(prompts)

    for layer in target.decoder_layers:
        layer.self_attn.indexer.wq_b.weight[16:] = 0  # two of its heads are left
    both = [decoder.generate(prompts, 30, stop_at_eos=False).token_ids for decoder in decoders]
    check = compare_outputs(target, prompts, *both)
    assert check.near_tie_divergences > 0
    assert check.divergences == 0
