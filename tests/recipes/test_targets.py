"""Recipes for public targets: their shapes add up to the published sizes, and what they take is as documented."""

from pathlib import Path

import pytest
import torch
from recipe_table import public_weights, table, table_of_kinds

from draftsmith.models.drafter_configs import Eagle3Config, with_random_layers
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.mtp_heads.mtp_layouts import LAYOUTS
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS, SIZES, TYPES_WITH_MTP
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train.config import resolve
from draftsmith.train.hardware.estimates import H100, estimate, meta_target

# Billions of parameters, all and active, as the model cards say; cards round, and differ in what they call active.
PUBLISHED = {
    "llama_3_1_8b": (8.03, 8.03),
    "llama_3_3_70b": (70.6, 70.6),
    "qwen3_0_6b": (0.6, 0.6),
    "qwen3_8b": (8.2, 8.2),
    "qwen3_32b": (32.8, 32.8),
    "qwen3_30b_a3b": (30.5, 3.3),
    "gemma_3_1b": (1.0, 1.0),
    "gpt_oss_20b": (20.9, 3.6),
    "qwen3_6_27b": (26.9, 25.6),  # text alone: cards count the tower for images, too
    "qwen3_6_35b_a3b": (34.7, 3.0),
    "gemma_4_31b": (30.7, 30.7),
    "nemotron_3_nano": (31.6, 3.2),
    "glm_4_7_flash": (30.0, 3.6),
}


@pytest.mark.parametrize("name", PUBLIC_TARGETS)
def test_shapes_add_up_to_the_published_size(name: str) -> None:
    weights = public_weights(name)
    total, active = PUBLISHED[name]
    assert weights.num_weights / 1e9 == pytest.approx(total, rel=0.01)
    assert weights.active_weights / 1e9 == pytest.approx(active, rel=0.1)


@pytest.mark.parametrize("name", PUBLIC_TARGETS)
def test_drafters_build_for_the_real_shape(name: str) -> None:
    """One layer of the target's width over three of its layers, with a head of 32000 tokens."""
    config = resolve(RECIPES[f"eagle3_{name}_usable"](), None, ["data.samples=s", "run.dir=r"])
    public = PUBLIC_TARGETS[name].config
    shape = with_random_layers(config.drafter)
    assert isinstance(shape, Eagle3Config)
    with torch.device("meta"):
        drafter = Eagle3.from_target(shape, meta_target(public, config.target))
    shapes = {key: list(tensor.shape) for key, tensor in drafter.engine_tensors().items()}
    width = public.hidden_size
    assert shapes["fc.weight"] == [width, 3 * width]
    assert shapes["lm_head.weight"] == [32000, width]
    assert shapes["layers.0.self_attn.q_proj.weight"][1] == 2 * width
    assert width % drafter.layer_config.num_attention_heads == 0  # of 24 and of 20 heads some targets' are not
    assert drafter.layer_ids == (2, public.num_hidden_layers // 2, public.num_hidden_layers - 3)


def test_operations_are_those_of_the_books() -> None:
    """2 operations a weight and token through the target, 6 through what is trained (arXiv 2001.08361, section 2.1)."""
    config, public = RECIPES["eagle3_llama_3_1_8b_smoke"](), PUBLIC_TARGETS["llama_3_1_8b"].config
    config.drafter.unroll_steps = 1
    config.optimizer.matrices = "adamw"
    found = estimate(config, public, 100)
    tokens = config.run.steps * config.data.batch_size * 100
    layer = 2 * 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336 + 3 * 4096
    drafter = 3 * 4096 * 4096 + layer + 4096 + 32000 * 4096
    target = 8.03e9 - 2 * 128256 * 4096 + 32000 * 4096  # without the embedding, and of the head what drafts
    assert found.operations == pytest.approx(tokens * (2 * target + 6 * drafter), rel=2e-3)
    assert found.hours(H100, 8) == pytest.approx(found.hours(H100) / 8)
    assert found.drafter_bytes == pytest.approx(16 * drafter, rel=1e-3)


def test_sizes_set_the_steps() -> None:
    for size, (samples, epochs) in SIZES.items():
        config = RECIPES[f"eagle3_qwen3_8b_{size}"]()
        assert config.run.steps * config.data.batch_size == pytest.approx(samples * epochs, rel=0.01)


def test_the_documented_tables_are_what_the_formulae_give() -> None:
    """For which a drafter of every kind is built for the real shapes."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    assert table() in page
    assert table_of_kinds() in page


def test_targets_get_new_heads_where_engines_know_them() -> None:
    types = [each for types in TYPES_WITH_MTP.values() for each in types]
    assert sorted(types) == sorted({public.model_type for public in PUBLIC_TARGETS.values()} & LAYOUTS.keys())
