"""The sizes of a target from its config alone: those of the books for known models, and of every kind of layer."""

import pytest
from families import RECURRENT, SERVED, family_config, target_and_plain_model
from transformers import AutoConfig

from draftsmith.models.errors import UserError
from draftsmith.models.target.loading import model_without_memory
from draftsmith.models.target.shape import (
    CachedLayers,
    RoutedExperts,
    TargetShape,
    shape_of,
    target_shape,
    target_weights,
)


def test_llama_by_hand() -> None:
    """Llama-3.1-8B has 32 layers of width 4096 with 8 key-value heads of 128; its embedding is not its head."""
    config = AutoConfig.for_model(
        "llama", vocab_size=128256, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=8192
    )
    shape = target_shape(config, "llama")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096  # attention, MLP, two norms
    assert (shape.layer_weights, shape.head_weights) == (32 * layer + 4096, 128256 * 4096)
    assert shape.other_weights == shape.head_weights
    assert shape.num_weights == 8_030_261_248  # as its model card counts
    assert (shape.layers, shape.state_bytes, shape.experts) == (32, 0, [])
    assert shape.caches == [CachedLayers(32, 2 * 8 * 128, None)]


# By family of the tiny configs: layers with equal caches, and running states in bytes.
CACHES = {
    "gpt_oss": ([CachedLayers(2, 32, 5), CachedLayers(1, 32, None)], 0),
    "mistral": ([CachedLayers(3, 32, 5)], 0),
    "llama4_text": ([CachedLayers(2, 32, 4), CachedLayers(1, 32, None)], 0),
    "minicpm3": ([CachedLayers(3, 16 + 4, None)], 0),  # a latent, and the rotated part of a key
    "deepseek_v32": ([CachedLayers(3, 8, None), CachedLayers(3, 16 + 4, 4)], 0),  # keys of the indexer, and 4 chosen
    # Two layers of 4 heads of 8 x 8, and the 3 newest inputs of a convolution over 2 x 2 x 8 + 4 x 8 channels; in fp32.
    "qwen3_next": ([CachedLayers(1, 32, None)], 4 * 2 * (4 * 8 * 8 + 3 * 64)),
}


@pytest.mark.parametrize("family", CACHES)
def test_what_a_text_keeps(family: str) -> None:
    changes = {**SERVED, **RECURRENT}[family]
    shape = target_shape(family_config(family, changes), family)
    caches, state_bytes = CACHES[family]
    assert sorted(shape.caches, key=str) == sorted(caches, key=str)
    assert shape.state_bytes == state_bytes
    loaded, _ = target_and_plain_model(family, changes)
    assert shape_of(loaded) == shape


def test_bytes_of_a_text() -> None:
    """A window holds at most its tokens; states are as large for any text."""
    shape = TargetShape(0, 0, 0, [], "windows", 3, [CachedLayers(2, 32, 5), CachedLayers(1, 8, None)], 100)
    assert shape.kept_bytes(4, 2) == 2 * (2 * 32 * 4 + 8 * 4) + 100
    assert shape.kept_bytes(7, 2) == 2 * (2 * 32 * 5 + 8 * 7) + 100


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        ("mixtral", RoutedExperts(3, 4, 2, 3 * 32 * 32)),
        ("deepseek_v3", RoutedExperts(2, 4, 2, 3 * 32 * 32)),  # the first layer is dense
        ("ernie4_5_moe", RoutedExperts(3, 4, 2, 3 * 32 * 32)),  # names its numbers in a way of its own
    ],
)
def test_experts(family: str, experts: RoutedExperts) -> None:
    """A token reads two of four; what all tokens share is with the layers."""
    config = family_config(family, SERVED[family])
    shape = target_shape(config, family)
    assert shape.experts == [experts]
    held = sum(parameter.numel() for parameter in model_without_memory(config, family).parameters())
    assert shape.num_weights == held
    assert held - shape.active_weights == shape.other_weights + experts.layers * 2 * experts.weights


def test_deepseek_v3_as_published() -> None:
    """671 B parameters, 37 B of them activated for a token (arXiv 2412.19437, section 4.2)."""
    weights = target_weights(AutoConfig.for_model("deepseek_v3"), "deepseek_v3")
    assert weights.num_weights == pytest.approx(671e9, rel=1e-3)
    assert weights.active_weights == pytest.approx(37e9, rel=0.02)


def test_a_target_that_the_decoder_cannot_read_without_values() -> None:
    with pytest.raises(UserError, match="cannot be planned for"):
        target_shape(family_config("jetmoe", SERVED["jetmoe"]), "jetmoe")
