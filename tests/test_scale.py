"""docs/scale.md says what the formulae give, and these are those that the start of a run prints."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models import Target
from draftsmith.recipes.quickstart import EMBEDDED_TARGET
from draftsmith.recipes.scale import TARGETS, bytes_on_each, features_bytes, table
from draftsmith.recipes.targets import PUBLIC_TARGETS
from draftsmith.train.estimates import target_size


def test_the_documented_table_is_what_the_formulae_give() -> None:
    assert table() in (Path(__file__).parent.parent / "docs" / "scale.md").read_text()


@pytest.mark.parametrize("name", TARGETS)
def test_pieces_add_up_to_the_whole(name: str) -> None:
    """Sharding on n devices spares each (n - 1) / n of the layers; stored features all of them."""
    layers = 2 * target_size(PUBLIC_TARGETS[name].config).layers
    whole = bytes_on_each(name, 8, "DDP", "replicated")
    assert whole - bytes_on_each(name, 8, "DDP", "sharded") == pytest.approx(layers * 7 / 8)
    assert whole - bytes_on_each(name, 8, "DDP", "stored") == pytest.approx(layers)


def test_features_of_a_sample() -> None:
    """Three layers and the last hidden state: 32,768 bytes a token of an 8B, as in docs/data.md."""
    assert features_bytes("llama_3_1_8b") == 800 * 32_768


def test_operations_of_a_target_are_those_counted() -> None:
    """2 a weight of the layers and token, norms in it; attention scores are left out on both sides."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32)
    tokens = torch.arange(32)[None]
    with FlopCounterMode(display=False) as counter:
        target.model.model(input_ids=tokens, use_cache=False)
    predicted = 2 * target_size(target.model.config).active_layers * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(predicted, rel=0.005)
