"""The distribution of whole texts: 20 000 of them from the full loop against the exact chance of every text.

A random transformer of 16 tokens; draft, verification, cache, noise and commits all take part. Seeds are fixed. So many
texts are enough to find each of the wrong rules below, most by half of them; `pytest -m long` tries 100 000.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exact_distributions import RuleInputs, siblings
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding import batch_engine
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.measuring.certify import (
    ALPHA,
    RESCORED,
    CertifySettings,
    certify,
    chi_square,
    sampled_check,
)
from draftsmith.inference.measuring.results import LosslessCheck
from draftsmith.inference.verification import acceptance_rules
from draftsmith.inference.verification.acceptance_rules import VerificationMode, Verified
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_configs import MedusaConfig
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream, probabilities
from draftsmith.models.sampling.trees import DynamicTree, StaticTree
from draftsmith.models.training_free.draft_model_cascade import DraftModelCascade

V, LENGTH, BATCH = 16, 3, 10_000
PROMPT = [3, 1, 4]
SAMPLING = Sampling(0.9)
SIBLINGS = StaticTree(((0,), (1,), (2,)))
STATIC = StaticTree((*SIBLINGS.choices, (0, 0), (0, 1), (1, 0), (1, 1)))
DYNAMIC = DynamicTree(num_nodes=7, depth=2, width=3)


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=1,
        max_position_embeddings=32,
        initializer_range=0.4,
    )
    return Target(
        LlamaForCausalLM(config).eval().requires_grad_(False), None, str(Path(tmp_path_factory.mktemp("target")))
    )


@pytest.fixture(scope="module")
def drafter(small_target: Target) -> Drafter:
    """The first of the target's two layers: right now and then."""
    return DraftModel.from_target(DraftModelConfig(num_layers=1), small_target).eval()


@pytest.fixture(scope="module")
def distribution(small_target: Target) -> Tensor:
    """Chance of every text of LENGTH tokens after the prompt, [V ** LENGTH]."""
    texts = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
    rows = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
    with torch.no_grad():
        logits = small_target.model(rows, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    return probabilities(logits, SAMPLING).double().gather(2, texts[..., None])[..., 0].prod(1)


def p_value(
    decoder: SpeculativeDecoder,
    mode: VerificationMode,
    distribution: Tensor,
    num_texts: int = BATCH,
    draft: int | StaticTree | DynamicTree = LENGTH - 1,
) -> float:
    """Chi-square of the texts against their distribution; rare ones share a bin."""
    how = resolve_settings(decoder.drafter, SAMPLING, LENGTH, draft, mode, seed=7, stop_at_eos=False)
    places = torch.tensor([V ** (LENGTH - 1 - i) for i in range(LENGTH)])
    counts = torch.zeros(V**LENGTH, dtype=torch.float64)
    for start in range(0, num_texts, BATCH):
        output = decoder.decode([PROMPT] * BATCH, how, request_ids=list(range(start, start + BATCH)))
        counts += torch.bincount((torch.tensor(output.token_ids) * places).sum(1), minlength=V**LENGTH)
    assert output.stats.total.mean_acceptance_length > 1.1
    expected = distribution * num_texts
    rare = expected < 10
    counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    return chi_square(counts, expected)[1]


@pytest.mark.parametrize("num_texts", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mode", "draft"),
    [
        ("one_hot", LENGTH - 1),
        ("probabilistic", LENGTH - 1),
        ("block", LENGTH - 1),
        ("without_replacement", STATIC),
        ("one_hot", DYNAMIC),
    ],
)
def test_texts_have_the_distribution_of_the_target(
    mode: VerificationMode,
    draft: int | StaticTree | DynamicTree,
    num_texts: int,
    small_target: Target,
    drafter: Drafter,
    distribution: Tensor,
) -> None:
    assert p_value(SpeculativeDecoder(small_target, drafter), mode, distribution, num_texts, draft) > ALPHA


@pytest.mark.parametrize("mode", [pytest.param("probabilistic", marks=pytest.mark.long), "block"])
def test_so_have_texts_of_two_draft_models(
    mode: VerificationMode, small_target: Target, drafter: Drafter, distribution: Tensor
) -> None:
    """Whose drafts end where the larger model picks another token than the smaller one proposed."""
    smaller = DraftModel.from_target(DraftModelConfig(num_layers=1), small_target).eval()
    torch.manual_seed(1)
    for weight in smaller.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    assert isinstance(drafter, DraftModel)
    decoder = SpeculativeDecoder(small_target, DraftModelCascade(smaller, drafter))
    assert p_value(decoder, mode, distribution) > ALPHA


def test_lossy_output_is_found(small_target: Target, drafter: Drafter, distribution: Tensor) -> None:
    assert p_value(SpeculativeDecoder(small_target, drafter), "typical", distribution) < ALPHA


def test_a_wrong_rule_is_found(
    small_target: Target, drafter: Drafter, distribution: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection the next token comes from p in place of (p - q)+."""
    right = acceptance_rules.probabilistic

    def no_residual(logits: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, draw: Tensor) -> Verified:
        found = right(logits, q, drafts, accept, draw)
        again = right(logits, q, torch.full_like(drafts, -1), accept, draw)  # nothing drafted: plain sampling
        rejected = found.num_accepted == 0
        return Verified(found.num_accepted, found.path, torch.where(rejected, again.next_token, found.next_token))

    monkeypatch.setattr(batch_engine.acceptance_rules, "probabilistic", no_residual)
    assert p_value(SpeculativeDecoder(small_target, drafter), "probabilistic", distribution) < ALPHA


def test_siblings_tested_against_a_wrong_q_are_found(
    small_target: Target, drafter: Drafter, distribution: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rejection the drafter's distribution loses the token, and is not normalised again."""

    def rule(
        logits: Tensor, q: Tensor, tokens: Tensor, parents: Tensor, depth: int, accept: Tensor, draw: Tensor
    ) -> Verified:
        return siblings(RuleInputs(logits, q, tokens, parents, depth, accept, draw), remove=True)

    monkeypatch.setattr(batch_engine.acceptance_rules, "without_replacement", rule)
    decoder = SpeculativeDecoder(small_target, drafter)
    assert p_value(decoder, "without_replacement", distribution, 20_000, SIBLINGS) < ALPHA


def test_shared_noise_is_found(
    small_target: Target, drafter: Drafter, distribution: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residuals drawn with the coins of the drafts."""
    right = Noise.uniforms

    def shared(self: Noise, positions: Tensor, stream: Stream, branch: Tensor | int = 0, **rows: Tensor) -> Tensor:
        if stream == Stream.TARGET:
            return right(self, positions[:, :1], Stream.DRAFT, torch.arange(positions.shape[1]), **rows)
        return right(self, positions, stream, branch, **rows)

    monkeypatch.setattr(Noise, "uniforms", shared)
    assert p_value(SpeculativeDecoder(small_target, drafter), "probabilistic", distribution) < ALPHA


@pytest.fixture
def medusa(tiny_target: Target) -> Drafter:
    return DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), tiny_target).eval()


def test_the_certificate(tiny_target: Target, medusa: Drafter) -> None:
    """Passes on a drafter of ours, and its control finds the lossy mode."""
    settings = CertifySettings(max_new_tokens=24, num_texts=64)
    prompts = [tiny_target.encode(prompt) for prompt in ("def f(", "The smith", "x", "iron")]
    certificate = certify(tiny_target, medusa, prompts, settings)
    assert certificate.passed
    assert certificate.control_found
    assert certificate.greedy["batch_size_8"] == LosslessCheck(checked=4, identical=4)
    short = DRAFTERS["medusa"].from_target(MedusaConfig(num_heads=2), tiny_target).eval()  # drafts less than asked for
    assert certify(tiny_target, short, prompts[:1], settings).passed


def test_a_sure_target_is_certified(make_target_dir: Callable[..., Path]) -> None:
    """Where nearly every token has a probability of 1, all that a test judges are the random shares of that."""
    target = Target.from_pretrained(make_target_dir(), "cpu", torch.float32)
    target.head_module.weight.data *= 100
    settings = CertifySettings(max_new_tokens=8, num_texts=4 * RESCORED)
    none = SpeculativeDecoder(target, load_drafter("none", target))
    assert sampled_check(none, "one_hot", [target.encode("The smith")], settings).p_value >= ALPHA


def test_no_certificate_for_a_wrong_rule(tiny_target: Target, medusa: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """One-hot verification that keeps every draft."""

    def keep_all(logits: Tensor, tokens: Tensor, parents: Tensor, depth: int, uniforms: Tensor) -> Verified:
        path = torch.arange(1, depth + 1).expand_as(tokens)
        return Verified(torch.full((len(tokens),), depth), path, logits[:, -1].argmax(-1))

    monkeypatch.setattr(batch_engine.acceptance_rules, "one_hot", keep_all)
    settings = CertifySettings(max_new_tokens=24, num_texts=64)
    certificate = certify(tiny_target, medusa, [tiny_target.encode("def f(")], settings)
    assert not certificate.passed
