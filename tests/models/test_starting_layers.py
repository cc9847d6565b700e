"""New layers of a drafter that start as copies of the target's last ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import random_batch
from families import family_config
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.models import DRAFTERS, Target
from draftsmith.models.drafter_configs import Eagle3Config, EagleConfig, PEagleConfig
from draftsmith.models.drafter_parts.target_layers import layer_weights
from draftsmith.models.drafters.eagle import Eagle
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.drafters.p_eagle import PEagle
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots
from draftsmith.models.errors import UserError
from draftsmith.models.layers import checkpoint_tensors
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.recipes.configs.recipes import recipe_named
from draftsmith.train.starting_drafter import fit_starting_layers


def target_of(model_type: str, **changes: Any) -> Target:
    """A target of random weights whose norms are not ones, as those of trained ones."""
    torch.manual_seed(0)
    config = family_config(model_type, {"num_hidden_layers": 6, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Target(model, None, model_type)


def only_the_feature(drafter: Eagle3) -> None:
    """Let the first layer's attention not see the embedding, which the target's layer does not read."""
    width = drafter.layer_config.hidden_size
    drafter.layer.self_attn.qkv_proj.weight.data[:, :width] = 0


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_eagle3_starts_as_the_end_of_the_target(model_type: str) -> None:
    """Given the state before the last layer, its first prediction is the target's own of the token before."""
    changes: dict[str, Any] = {"sliding_window": None} if model_type == "mistral" else {}
    target = target_of(model_type, **changes)
    drafter = Eagle3.from_target(Eagle3Config(layer_ids=[1, 3, 5], starting_layers="target"), target)
    only_the_feature(drafter)
    batch = random_batch(target)
    features = target.features(batch, drafter.layer_ids)
    assert features.layers is not None
    slots = DraftingSlots.from_counted(batch.loss_mask, batch.positions)
    with torch.no_grad():
        hidden = next(drafter.unroll(batch, features.layers, slots, 1))
        found = drafter.lm_head(drafter.head_input(hidden))
        expected = target.logits(features.last_hidden).flatten(0, 1)[slots.index]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_p_eagle_starts_as_the_last_layers_in_their_order() -> None:
    target = target_of("llama")
    drafter = PEagle.from_target(PEagleConfig(layer_ids=[1, 2, 3], num_layers=3, starting_layers="target"), target)
    only_the_feature(drafter.eagle3)
    batch = random_batch(target)
    features = target.features(batch, drafter.layer_ids)
    chain_loss = drafter.new_chain_loss(batch)
    with torch.no_grad():
        first = next(drafter.eval().depths(chain_loss, batch, features, 1))
        found = drafter.eagle3.lm_head(first.hidden)
        expected = target.logits(features.last_hidden).flatten(0, 1)[first.teachers - 1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_eagle_reads_a_normed_feature_through_the_norms_weight() -> None:
    """EAGLE-1's layer has no norm of its input: what the target's attention makes of a normed state stays the same."""
    target = target_of("llama")
    drafter = Eagle.from_target(EagleConfig(starting_layers="target"), target)
    weights, own = layer_weights(target, 5), checkpoint_tensors(drafter.layer)
    normed = torch.randn(7, target.hidden_size)
    for part in "qkv":
        name = f"self_attn.{part}_proj.weight"
        expected = (normed * weights["input_layernorm.weight"]) @ weights[name].T
        torch.testing.assert_close(normed @ own[name].T, expected)
    assert torch.equal(own["mlp.down_proj.weight"], weights["mlp.down_proj.weight"])


def test_norms_of_heads_become_factors() -> None:
    """Over random inputs, heads of queries and keys are as large on average as behind Qwen3's norm."""
    target = target_of("qwen3")
    attention: Any = target.decoder_layers[5].self_attn  # type: ignore[union-attr]
    weights = layer_weights(target, 5)
    normed = torch.randn(20_000, target.hidden_size) * weights["input_layernorm.weight"]
    for part in "qk":
        projection, norm = getattr(attention, f"{part}_proj"), getattr(attention, f"{part}_norm")
        expected = norm(projection(normed).unflatten(1, (-1, attention.head_dim)))
        found = (normed @ weights[f"self_attn.{part}_proj.weight"].T).unflatten(1, (-1, attention.head_dim))
        sizes = [heads.square().sum(-1).mean(0) for heads in (found, expected)]
        torch.testing.assert_close(sizes[0], sizes[1], rtol=0.25, atol=0)


def tensors_of(kind: str, target: Target) -> dict[str, Tensor]:
    torch.manual_seed(3)
    config = DRAFTERS[kind].config_class(kind=kind, starting_layers="target")  # type: ignore[call-arg]
    return DRAFTERS[kind].from_target(config, target).engine_tensors()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "p_eagle"])
def test_a_target_without_its_layers_gives_them_from_its_files(kind: str, make_target_dir: Any) -> None:
    """So that training on stored features starts with the same drafter."""
    folder: Path = make_target_dir(num_hidden_layers=6)
    whole, ends = Target.from_pretrained(folder, "cpu"), Target.head_from_pretrained(folder, None, "cpu")
    expected, found = tensors_of(kind, whole), tensors_of(kind, ends)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_copied_layers_begin_with_the_highest_state_alone(tiny_target: Target) -> None:
    """Noise in `fc` would grow with the target's width, and outweigh that state in a target of today."""
    drafter = Eagle3.from_target(Eagle3Config(starting_layers="target"), tiny_target)
    states = torch.randn(5, 3, tiny_target.hidden_size)
    assert torch.equal(drafter.fuse(states.flatten(1)), states[:, -1])


@pytest.mark.parametrize(
    ("model_type", "changes", "settings", "reason"),
    [
        ("gemma2", {}, {}, "layers of gemma2 compute otherwise"),
        ("qwen3_moe", {}, {}, "layers of qwen3_moe compute otherwise"),
        ("llama", {"hidden_act": "gelu"}, {}, "layers of llama compute otherwise"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {}, "part of each head"),
        ("llama", {}, {"intermediate_size": 48}, "intermediate_size is 32, and the drafter's 48"),
        ("llama", {"num_hidden_layers": 3}, {"num_layers": 4}, "the target has 3 layers, and the drafter 4"),
    ],
)
def test_layers_that_cannot_be_copied(
    model_type: str, changes: dict[str, Any], settings: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who asks for a copy is refused; a recipe's copy gives way to random layers, with a notice."""
    config = recipe_named("p_eagle")
    config.drafter = PEagleConfig(**{"num_layers": 2, "starting_layers": "target", **settings})
    target = target_of(model_type, **changes)
    with pytest.raises(UserError, match=reason):
        PEagle.from_target(config.drafter, target)
    config.explicit_keys = frozenset({"drafter.starting_layers"})
    with pytest.raises(UserError, match=f"starting_layers=target: .*{reason}.*starting_layers=random"):
        fit_starting_layers(config, target)
    config.explicit_keys = frozenset()
    fit_starting_layers(config, target)
    assert config.drafter.starting_layers == "random"
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_drafter_that_is_trained_on_has_layers_already(tiny_target: Target) -> None:
    config = recipe_named("eagle3")
    config.drafter, config.init_from = Eagle3Config(starting_layers="target"), "somewhere"
    config.explicit_keys = frozenset({"drafter.starting_layers"})
    with pytest.raises(UserError, match="init_from brings the layers"):
        fit_starting_layers(config, tiny_target)
