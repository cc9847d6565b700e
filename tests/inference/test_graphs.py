"""Which models' passes CUDA graphs can hold."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from draftsmith.inference.decoding.graphs import RecordedCall, can_be_recorded

ROTARY = {"rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
LONG = {**ROTARY, "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("llama", {}, True),
        ("gemma3_text", {}, True),
        ("mixtral", {}, True),
        ("jetmoe", {"kv_channels": 8}, False),  # the experts' counts go to the host
        ("llama", {"rope_parameters": {**ROTARY, "rope_type": "dynamic"}}, False),
        ("phi3", {"rope_parameters": LONG}, False),
    ],
)
def test_models_that_wait_for_the_device_cannot_be_recorded(
    model_type: str, changes: dict[str, Any], expected: bool
) -> None:
    fields = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0}
    config = CONFIG_MAPPING[model_type](**{**fields, **heads, "max_position_embeddings": 64, **changes})
    assert can_be_recorded(AutoModelForCausalLM.from_config(config)) == expected


def test_what_is_not_recorded_is_called_each_time() -> None:
    calls: list[int] = []
    replay = RecordedCall(lambda: calls.append(1), records=False)
    for _ in range(5):
        replay()
    assert len(calls) == 5
