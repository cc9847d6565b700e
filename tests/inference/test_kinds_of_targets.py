"""Whole texts of targets with layers of each kind: drafts change nothing, and greedy text is transformers' own."""

from typing import Any

import pytest
import torch
from families import MULTIMODAL, RECURRENT, SERVED, VOCABULARY, family_config, plain_model
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import DRAFTERS, Target, load_drafter
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.target.loading import LanguageModel, is_multimodal

LONG = {"max_position_embeddings": 128}
DENSE = {**LONG, "first_k_dense_replace": 3}  # no experts, which transformers does not compute in fp64
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated DeltaNet": ("qwen3_next", {**RECURRENT["qwen3_next"], **LONG, "mlp_only_layers": [0, 1, 2]}),
    "gated DeltaNet in a multimodal model": (
        "qwen3_5",
        {**MULTIMODAL["qwen3_5"], "text_config": {**MULTIMODAL["qwen3_5"]["text_config"], **LONG}},
    ),
    "Kimi delta attention": ("kimi_linear", {**RECURRENT["kimi_linear"], **DENSE}),
    "Mamba-2": ("nemotron_h", {**RECURRENT["nemotron_h"], **LONG}),
    "Mamba-2 beside attention": ("falcon_h1", {**RECURRENT["falcon_h1"], **LONG}),
    "short convolutions": ("lfm2", {**RECURRENT["lfm2"], **LONG}),
    "latent attention": ("deepseek_v3", {**SERVED["deepseek_v3"], **DENSE}),
    "sparse attention": ("deepseek_v32", {**SERVED["deepseek_v32"], **DENSE}),
    "chunks": ("llama4_text", {**SERVED["llama4_text"], **LONG, "moe_layers": []}),
}
LENGTHS = (2, 37, 5, 11)  # of the prompts
NEW_TOKENS = 40


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[Target, PreTrainedModel]:
    """A target, and transformers' own model of the same weights. In fp64, in which near ties do not part texts."""
    torch.manual_seed(5)
    model_type, changes = KINDS[request.param]
    plain = plain_model(family_config(model_type, changes)).double()
    padding = plain.get_input_embeddings().weight.data[0]
    padding.copy_(0.02 * torch.randn_like(padding))  # of zeros all scores would be alike by which slots are chosen
    config = family_config(model_type, changes)
    auto_class = AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation=ATTENTION, dtype=torch.float64)
    model.load_state_dict(plain.state_dict())
    model = LanguageModel(model) if is_multimodal(config) else model
    return Target(model.eval().requires_grad_(False), None, model_type), plain


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Text that repeats itself, so that lookups find drafts, of which some are right."""
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(3, VOCABULARY, (4,), generator=generator).tolist()
    return [(words * 10)[:length] for length in LENGTHS]


@torch.no_grad()
def test_greedy_text_is_transformers_whatever_is_drafted(
    both: tuple[Target, PreTrainedModel], prompts: list[list[int]]
) -> None:
    """By no drafts, chains of n-grams, trees of a lookahead and of Medusa, four ragged prompts in three rows."""
    target, plain = both
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = plain.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(output[0, len(prompt) :].tolist())
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "stop_at_eos": False, "batch_size": 3}
    medusa = DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), target).double().eval()
    num_accepted = 0
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
    for drafter, how in (("none", {}), ("ngram", {}), ("lookahead", {}), (medusa, {"tree": tree})):
        loaded = load_drafter(drafter, target) if isinstance(drafter, str) else drafter
        output = SpeculativeDecoder(target, loaded).generate(prompts, **settings, **how)
        assert output.token_ids == expected, drafter
        num_accepted += output.stats.total.num_accepted_tokens
    assert num_accepted > 0
