"""Fused layers compute what stock modelling computes, on the model's own weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from draftsmith.models import Target
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.fused import layer_kernels as llama_kernels
from draftsmith.models.fused import layer_steps as llama_steps
from draftsmith.models.fused.fused_layers import fuse
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.forward import run_on_slots
from draftsmith.models.slots.window import Window, chain_window

NUM_SLOTS = 48
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where kernels run
PARENTS = torch.tensor([[-1, -1, 0, 0, 1, 2]])
LLAMA3_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN_ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def random_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Wide weights, norms and biases away from one and zero: a term left out shows."""
    fields = {
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**fields, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


def windows(device: torch.device | None = None) -> list[tuple[Tensor, Window]]:
    """Ragged prompts, a chain behind them, then a tree over the chain."""
    token_ids = torch.randint(101, (3, 32)).to(device)
    lengths = torch.tensor([20, 11, 15], device=device)
    prompts = chain_window(torch.zeros_like(lengths), 20)
    parents = PARENTS.to(device).expand(3, -1)
    tree = chain_window(lengths, 7)
    tree = Window(tree.slots, lengths[:, None] + node_depths(parents, 3), lengths, ancestor_words(parents, 3))
    return [(token_ids[:, :20], prompts), (token_ids[:, 20:25], chain_window(lengths, 5)), (token_ids[:, 25:], tree)]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3_ROTARY}),
        ("llama", {"rope_parameters": YARN_ROTARY}),
        ("llama", {"sliding_window": 8}),  # which transformers' Llama does not heed
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {}),
        ("cwm", ALTERNATING),
        ("ministral", ALTERNATING),
        ("seed_oss", {}),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1]}),  # a dense layer between two mixtures
        ("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": 8}),
    ],
)
def test_equals_stock_modelling(model_type: str, changes: dict) -> None:
    model = random_model(model_type, **changes)
    stock_cache, cache = SlotCache(3, NUM_SLOTS), SlotCache(3, NUM_SLOTS)
    passes = windows()
    with torch.no_grad():
        expected = [run_on_slots(model, token_ids, window, stock_cache) for token_ids, window in passes]
    decoder = fuse(model)
    assert decoder is not None
    for (token_ids, window), hidden in zip(passes, expected, strict=True):
        torch.testing.assert_close(decoder.run(token_ids, window, cache)[0], hidden, atol=1e-5, rtol=1e-5)
    for layer in range(3):
        for found, stock in zip(cache.keys_and_values(layer), stock_cache.keys_and_values(layer), strict=True):
            torch.testing.assert_close(found, stock, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "changes"), [("qwen3", {}), ("mistral", {"sliding_window": 3}), ("qwen3_moe", EXPERTS)]
)
def test_kernels_serve_a_pass_as_their_twins_do(model_type: str, changes: dict) -> None:
    """A chain and a tree over a text that the plain steps have read."""
    decoder = fuse(random_model(model_type, num_hidden_layers=2, **changes).to(DEVICE))
    assert decoder is not None
    caches = SlotCache(3, NUM_SLOTS), SlotCache(3, NUM_SLOTS)
    prompts, chain, tree = windows(DEVICE)
    decoder.steps = llama_steps
    for cache in caches:
        decoder.run(*prompts, cache)
    for token_ids, window in (chain, tree):
        decoder.steps = llama_steps
        expected, expected_layers = decoder.run(token_ids, window, caches[0], (1,))
        decoder.steps = llama_kernels
        found, found_layers = decoder.run(token_ids, window, caches[1], (1,))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found_layers, expected_layers, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_parameters_keep_names_and_values_and_share_memory(model_type: str) -> None:
    """What is merged is held once: all of a layer's q, k and v weights lie in one storage of just their size."""
    model = random_model(model_type)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(input_ids=torch.arange(9)[None]).logits
    assert fuse(model) is not None
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    torch.testing.assert_close(model(input_ids=torch.arange(9)[None]).logits, expected)
    layer = model.base_model.layers[0]
    for parts in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]):
        weights = [layer.get_submodule(part).weight for part in parts]
        assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(weight.nbytes for weight in weights)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("olmo2", {}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ],
)
def test_other_shapes_stay_with_stock_modelling(model_type: str, changes: dict) -> None:
    assert fuse(random_model(model_type, **changes)) is None


def test_target_says_which_path_it_takes(tiny_target: Target, tiny_target_dir: Path) -> None:
    """Both give the same features, those of layers asked for among them, and the same fingerprint."""
    stock = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32, fuse_layers=False)
    assert tiny_target.fused
    assert not stock.fused
    assert tiny_target.fingerprint() == stock.fingerprint()
    token_ids = torch.randint(1, 256, (2, 9))
    window = chain_window(torch.zeros(2, dtype=torch.int64), 9)
    for layer_ids in ((), (1, 3)):
        found, expected = (t.run(token_ids, window, SlotCache(2, 9), layer_ids) for t in (tiny_target, stock))
        torch.testing.assert_close(found.last_hidden, expected.last_hidden, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(found.layers, expected.layers, atol=1e-4, rtol=1e-5)
        assert not found.last_hidden.is_inference()  # training may go on from it


def test_draft_model_starts_from_a_fused_target(tiny_target: Target) -> None:
    """It copies the target's weights by name, and holds memory of its own."""
    drafter = DraftModel.from_target(DraftModelConfig(num_layers=2), tiny_target)
    own, frozen = drafter.model.base_model.layers[1].self_attn, tiny_target.model.base_model.layers[-1].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(own.get_submodule(name).weight, frozen.get_submodule(name).weight)
        assert own.get_submodule(name).weight.data_ptr() != frozen.get_submodule(name).weight.data_ptr()
