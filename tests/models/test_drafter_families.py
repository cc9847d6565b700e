"""What some families must get right by themselves, against formulae and modelling that are not ours."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import build, loss_of, random_batch
from families import target_and_plain_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter, save_drafter
from draftsmith.models.drafters.eagle import Eagle
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.drafters.mlp_speculator import MLPSpeculator
from draftsmith.models.drafters.p_eagle import PEagle
from draftsmith.models.layers import rotary_table

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {"intermediate_size": 48, "unroll_steps": 1, "divergence_weight": 1.0, "bias": True}),
    ("hydra", {"num_layers": 3}),
    ("mlp_speculator", {"tie_weights": True, "scale_input": True, "inner_size": 24}),
    (
        "dspark",
        {"num_layers": 1, "block_size": 3, "draft_vocab_size": 40, "sliding_window": 5, "position_weights": "d_pace"},
    ),
    ("p_eagle", {"num_layers": 1, "num_depths": 3, "draft_vocab_size": 40}),
]


def variant(kind: str, target: Target, **settings: Any) -> Drafter:
    torch.manual_seed(1)
    return DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind, **settings), target).eval()


@pytest.mark.parametrize(("kind", "settings"), VARIANTS)
def test_variants_come_back_and_draft(kind: str, settings: dict, tiny_target: Target, tmp_path: Path) -> None:
    drafter = variant(kind, tiny_target, **settings)
    drafter.fit_vocabulary(torch.arange(tiny_target.vocab_size))
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, tiny_target)
    assert loaded.config == drafter.config
    batch = random_batch(tiny_target)
    assert torch.equal(loss_of(loaded, batch, tiny_target)["loss"][0], loss_of(drafter, batch, tiny_target)["loss"][0])
    prompts = ["The smith heats the iron", "x"]
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target)).generate(prompts, max_new_tokens=12)
    found = SpeculativeDecoder(tiny_target, loaded).generate(prompts, max_new_tokens=12, draft_length=3)
    assert found.token_ids == plain.token_ids


def test_eagles_layer_is_llamas_without_its_first_norm(tiny_target: Target) -> None:
    """Tensors and config.json as engines read them, in transformers' own layer behind `fc`."""
    drafter = build("eagle", tiny_target, bias=True)
    assert isinstance(drafter, Eagle)
    batch = random_batch(tiny_target)
    features = tiny_target.features(batch).last_hidden
    tensors, keys = drafter.engine_tensors(), drafter.engine_config()
    config = LlamaConfig(**{key: value for key, value in keys.items() if key != "architectures"})
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict({name[len("layers.0.") :]: t for name, t in tensors.items() if name.startswith("layers.0.")})
    next_ids = torch.cat([batch.token_ids[:, 1:], torch.zeros(3, 1, dtype=torch.int64)], 1)
    x = F.linear(torch.cat([tiny_target.embedding(next_ids), features], -1), tensors["fc.weight"], tensors["fc.bias"])
    positions = torch.arange(x.shape[1])[None]
    future = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(
            x,
            attention_mask=future,
            position_ids=positions,
            position_embeddings=LlamaRotaryEmbedding(config)(x, positions),
        )
        p, q = (tiny_target.logits(hidden).softmax(-1) for hidden in (features, expected))
        found = loss_of(drafter, batch, tiny_target)["sampled_acceptance_0"][0]
    counted = batch.loss_mask[:, 1:-1] & batch.loss_mask[:, 2:]  # slot t: x_{t+1} and x_{t+2} are the target's
    acceptance = torch.minimum(p[:, 1:-1], q[:, :-2]).sum(-1)[counted].sum()
    torch.testing.assert_close(found, acceptance, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"tie_weights": True, "scale_input": True, "inner_size": 24}])
def test_mlp_speculator_is_ibms(settings: dict, tiny_target: Target) -> None:
    """The states of arXiv 2404.19124 as IBM's code and vLLM's compute them from the tensors of the checkpoint."""
    drafter = variant("mlp_speculator", tiny_target, **settings)
    assert isinstance(drafter, MLPSpeculator)
    tensors, keys = drafter.engine_tensors(), drafter.engine_config()
    inner, count = keys["inner_dim"] or keys["emb_dim"], keys["n_predict"]
    state_weight = 0.5 ** (0.5 / count)
    embedding_weight = math.sqrt((1 - state_weight**2) * (inner / 2))

    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    hidden, token_ids = torch.randn(3, keys["emb_dim"]), torch.randint(tiny_target.vocab_size, (3, count))
    expected = norm(hidden) / 2**0.5 if keys["scale_input"] else hidden
    found = drafter.first_state(hidden)
    for i in range(count):
        mixed = F.linear(expected, tensors[f"proj.{i}.weight"]) * state_weight
        mixed = mixed + tensors[f"emb.{i}.weight"][token_ids[:, i]] * embedding_weight
        expected = F.gelu(norm(mixed) * tensors[f"ln.{i}.weight"] + tensors[f"ln.{i}.bias"])
        found = drafter.next_state(i, found, token_ids[:, i])
        torch.testing.assert_close(found, expected)
        assert torch.equal(drafter.head[i](found), F.linear(found, tensors[f"head.{i}.weight"]))


LONG = {"short_factor": [1.0] * 2, "long_factor": [4.0] * 2, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("phi3", {"rope_type": "longrope", "partial_rotary_factor": 0.5, **LONG}),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}),
    ],
)
def test_angles_do_not_depend_on_the_length_of_a_table(model_type: str, rope: dict[str, Any]) -> None:
    """Those of the target do, which may rotate a part of each head: a drafter's table is as long as its cache."""
    changes = {"rope_parameters": {**rope, "rope_theta": 500.0}, "max_position_embeddings": 64}
    target, _ = target_and_plain_model(model_type, changes)
    drafter = build("eagle3", target)
    assert isinstance(drafter, Eagle3)
    longer = rotary_table(drafter.rotary, 100, drafter.fc.weight)
    assert torch.equal(rotary_table(drafter.rotary, 10, drafter.fc.weight), longer[:10])
    assert drafter.engine_config()["rope_theta"] == 500.0


def test_sampled_depths_are_right_on_average(tiny_target: Target) -> None:
    """Training P-EAGLE on some slots of each depth: sums within five standard errors of those over all slots."""
    drafter = variant("p_eagle", tiny_target, num_layers=1, num_depths=4, keep_ratio=0.5)
    assert isinstance(drafter, PEagle)
    batch = random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)
    names = ("loss", "simulated_acceptance_length")
    with torch.no_grad():
        whole = drafter.loss(batch, features)
        drafter.train()
        draws = [drafter.loss(batch, features) for _ in range(200)]
    for name in names:
        values = torch.stack([draw[name][0].double() for draw in draws])
        assert (values.mean() - whole[name][0]).abs() <= 5 * values.std() / len(values) ** 0.5 + 1e-6
    assert draws[0]["accuracy_3"][1] < whole["accuracy_3"][1]


def test_eagle_reads_noisy_features_in_training_only(tiny_target: Target) -> None:
    drafter = build("eagle", tiny_target)
    assert isinstance(drafter, Eagle)
    features = torch.randn(2, 5, 32)
    assert torch.equal(drafter.with_noise(features), features)
    noise = drafter.train().with_noise(features) - features
    assert 0.05 < noise.abs().max() <= 0.1 + 1e-6


class Casts(TorchDispatchMode):
    """Keeps the shapes of what is cast to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._to_copy.default:
            self.shapes.append(args[0].shape)
        return op(*args, **(kwargs or {}))


def test_autocast_casts_the_weights_of_an_unrolled_layer_once(tiny_target: Target) -> None:
    """Those of EAGLE-3's attention enter in two parts, and autocast does not remember the casts of views."""
    drafter = build("eagle3", tiny_target, unroll_steps=4)
    whole = drafter.layer.self_attn.qkv_proj.weight.shape
    batch = random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        total, _ = drafter.loss(batch, features)["loss"]
    assert total.isfinite()
    assert [shape for shape in casts.shapes if shape[0] == whole[0]] == [whole]
