"""Public checkpoints of other projects, on synthetic ones of exactly their layouts: the same drafts, or a refusal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import assert_same_drafter, first_round, noisy
from public_checkpoints import PUBLIC, llama_config, safeailab_eagle, speculators_eagle3, write
from torch import Tensor

from draftsmith.models import Drafter, Target, checkpoint_of, load_drafter, read_checkpoint, save_drafter
from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.drafter_parts.layouts import medusa_name
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain
from draftsmith.recipes.serving.export import export_checkpoint


@pytest.fixture(scope="module")
def deep_target(make_target_dir: Any) -> Target:
    """Eight layers, so that 2, L // 2, L - 3 are three distinct ones."""
    return Target.from_pretrained(make_target_dir(num_hidden_layers=8), "cpu", torch.float32)


@pytest.mark.parametrize("layout", PUBLIC)
def test_public_checkpoints(layout: str, deep_target: Target, tmp_path: Path) -> None:
    drafter = PUBLIC[layout](deep_target, tmp_path / "head")
    assert_same_drafter(load_drafter(tmp_path / "head", deep_target), drafter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "mtp"}, "'mtp': those that are read are eagle3, dflash, dflash2, dspark"),
        ({"transformer_layer_config": None}, "no transformer_layer_config"),
        ({"norm_before_residual": None}, "lacks norm_before_residual, which vLLM takes for true"),
    ],
)
def test_speculators_refused(changes: dict[str, Any], message: str, deep_target: Target, tmp_path: Path) -> None:
    speculators_eagle3(deep_target, tmp_path / "head", **changes)
    with pytest.raises(UserError, match=message):
        load_drafter(tmp_path / "head", deep_target)


def test_vllm_would_drop_a_bias_of_eagle1(deep_target: Target, tmp_path: Path) -> None:
    safeailab_eagle(deep_target, tmp_path / "head")
    export_checkpoint(tmp_path / "head", "sglang", deep_target, tmp_path / "sglang")
    with pytest.raises(UserError, match=r"fc.bias is not zero and would be dropped"):
        export_checkpoint(tmp_path / "head", "vllm", deep_target, tmp_path / "vllm")


def test_own_embedding_of_eagle1_is_refused(deep_target: Target, tmp_path: Path) -> None:
    """Ours is the target's: another one would be dropped, and the drafter be another."""
    tensors = {**noisy("eagle", deep_target).engine_tensors(), **own_embedding(deep_target)}
    config = llama_config(deep_target, architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match="is not the target's embedding"):
        load_drafter(write(tmp_path / "head", config, tensors, "model.safetensors"), deep_target)


def test_two_norms_of_the_states_are_refused(deep_target: Target, tmp_path: Path) -> None:
    speculators_eagle3(deep_target, tmp_path / "head", norm_before_fc=True, fc_norm=True)
    with pytest.raises(UserError, match="has norm_before_fc and fc_norm"):
        load_drafter(tmp_path / "head", deep_target)


# --- variants of public EAGLE-3 heads


def own_embedding(target: Target) -> dict[str, Tensor]:
    return {OWN_EMBEDDING: torch.randn(target.vocab_size, target.hidden_size)}


def plain_drafts(
    tensors: dict[str, Tensor],
    embedding: Tensor,
    config: dict[str, Any],
    features: Tensor,
    token_ids: list[int],
    count: int,
) -> list[int]:
    """What an EAGLE-3 head drafts behind a text, by vLLM's model written out: no cache, all is computed each time.

    features [T, 3 * H] are the target's of all tokens but the newest; slot t reads those and the token behind it.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = tensors["norm.weight"].shape[0]
    head_dim = tensors["layers.0.self_attn.o_proj.weight"].shape[1] // heads

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * tensors[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ tensors[f"{name}.weight"].T

    def rotated(x: Tensor) -> Tensor:  # [T, heads, D]
        frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = (torch.arange(len(x))[:, None] * frequencies).repeat(1, 2)[:, None]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def run_layer(layer: str, x: Tensor, residual: Tensor) -> Tensor:
        """What a layer makes of what its attention reads [T, W] and of its residual [T, H]."""
        q, k, v = (linear(x, f"{layer}.self_attn.{name}_proj").unflatten(1, (-1, head_dim)) for name in "qkv")
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (rotated(k), v))
        scores = torch.einsum("thd,shd->hts", rotated(q), k) / head_dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        attended = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
        residual = residual + linear(attended, f"{layer}.self_attn.o_proj")
        y = norm(residual, f"{layer}.post_attention_layernorm")
        gated = torch.nn.functional.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
        return residual + linear(gated, f"{layer}.mlp.down_proj")

    if config.get("norm_before_fc"):
        features = norm(features, "input_norm")
    if config.get("fc_norm"):
        features = torch.cat([norm(chunk, f"fc_norm.{i}") for i, chunk in enumerate(features.chunk(3, -1))], -1)
    hidden, fed, drafts = linear(features, "fc"), list(token_ids[1:]), []
    for _ in range(count):
        normed = norm(hidden, "layers.0.hidden_norm")
        x = torch.cat([norm(embedding[fed], "layers.0.input_layernorm"), normed], -1)
        output = run_layer("layers.0", x, normed if config.get("norm_before_residual") else hidden)
        for number in range(1, config["num_hidden_layers"]):  # ordinary layers of Llama
            output = run_layer(f"layers.{number}", norm(output, f"layers.{number}.input_layernorm"), output)
        output = output[-1:]
        newest = norm(output, "norm") if config.get("norm_output") else output
        drafted = int(linear(norm(output, "norm"), "lm_head").argmax())
        token = drafted + int(tensors["d2t"][drafted])
        drafts.append(token)
        fed.append(token)
        hidden = torch.cat([hidden, newest])
    assert hidden.shape[1] == width
    return drafts


@pytest.mark.parametrize(
    ("flags", "own", "num_layers"),
    [
        ((), False, 1),
        ((), True, 1),
        (("norm_before_residual",), False, 1),
        (("norm_before_residual",), True, 1),
        (("norm_before_fc",), False, 1),
        (("fc_norm",), False, 1),
        (("fc_norm", "norm_output"), False, 1),
        ((), False, 3),
        (("norm_before_residual", "norm_output"), False, 2),
    ],
)
def test_variants_of_eagle3(
    flags: tuple[str, ...], own: bool, num_layers: int, deep_target: Target, tmp_path: Path
) -> None:
    """An embedding of its own, norms by their flags, several layers: the drafts of the plain forward, exported too."""
    torch.manual_seed(1)
    feature_norm = "all" if "norm_before_fc" in flags else "each" if "fc_norm" in flags else "none"
    drafter = noisy("eagle3", deep_target, draft_vocab_size=40, feature_norm=feature_norm, num_layers=num_layers)
    tensors = {
        name: tensor * (6 if "layers." in name else 3) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.engine_tensors().items()
    }
    tensors["d2t"] = torch.arange(40) * 3  # draft id i is target id 4 i
    tensors["t2d"] = torch.arange(deep_target.vocab_size) % 4 == 0
    tensors["t2d"][160:] = False
    tensors |= own_embedding(deep_target) if own else {}
    config = llama_config(deep_target, draft_vocab_size=40, num_hidden_layers=num_layers, **dict.fromkeys(flags, True))
    head = write(tmp_path / "head", config, tensors, "model.safetensors")

    export_checkpoint(head, "vllm", deep_target, tmp_path / "out")
    if own or "norm_before_residual" in flags or num_layers > 1:
        with pytest.raises(UserError, match=r"SGLang .* would not serve what was trained"):
            export_checkpoint(head, "sglang", deep_target, tmp_path / "sglang")
    text = deep_target.encode("heat the iron and strike it")
    with torch.no_grad():
        states = deep_target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in (2, 4, 5)], -1)[0]
    table = tensors[OWN_EMBEDDING] if own else deep_target.embedding.weight
    expected = plain_drafts(tensors, table, config, features, text, 4)
    assert len(set(expected)) > 1
    for directory in (head, tmp_path / "out"):
        drafter = load_drafter(directory, deep_target)
        assert drafter.propose(first_round(drafter, deep_target, torch.tensor([text])), Chain(4)).tokens.tolist() == [
            expected
        ]


def test_vllm_medusa_without_biases(tiny_target: Target, tmp_path: Path) -> None:
    """vLLM's default has none; ours are zero then."""
    drafter = noisy("medusa", tiny_target, num_heads=2)
    files = checkpoint_of(drafter, torch.float32)
    tensors = {name: tensor for name, tensor in files.tensors.items() if not name.endswith("bias")}
    config = {key: value for key, value in files.config.items() if key not in ("draftsmith", "medusa_fc_bias")}
    found = load_drafter(write(tmp_path / "heads", config, tensors, "model.safetensors"), tiny_target)
    for name, tensor in found.engine_tensors().items():
        assert torch.equal(tensor, tensors[name]) if name in tensors else not tensor.any()


@pytest.mark.parametrize(
    ("kind", "fields", "changes"),
    [
        ("mlp_speculator", {"num_heads": 3}, dict.fromkeys(("n_predict", "inner_dim", "tie_weights", "scale_input"))),
        ("medusa", {"num_heads": 5}, {"num_heads": None, "num_hidden_layers": None}),
        ("p_eagle", {"num_layers": 2, "mask_token_id": 7}, {}),
        ("p_eagle", {"num_layers": 2, "mask_token_id": 7}, {"pard_token": None, "mask_token_id": 7}),
    ],
)
def test_keys_that_a_format_may_leave_out(
    kind: str, fields: dict[str, Any], changes: dict[str, Any], tiny_target: Target, tmp_path: Path
) -> None:
    """Its defaults stand in, and P-EAGLE's token has two names. Changes to None leave a key out."""
    drafter = noisy(kind, tiny_target, **fields)
    config = foreign_config(drafter, **changes)
    path = write(tmp_path / "head", config, checkpoint_of(drafter, torch.float32).tensors, "model.safetensors")
    found = load_drafter(path, tiny_target)
    assert_same_drafter(found, drafter)
    assert found.engine_config() == drafter.engine_config()


def test_hydra_of_its_authors_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    config = {"hydra_num_heads": 4, "hydra_num_layers": 4, "hydra_head_arch": "prefix-mlp"}
    with pytest.raises(UserError, match="Hydra heads in their authors' layout"):
        load_drafter(write(tmp_path / "head", config, {}, "hydra_lm_head.pt"), tiny_target)


@pytest.mark.parametrize("missing", ["pard_token", "num_hidden_layers"])
def test_a_p_eagle_must_say_what_it_is(missing: str, tiny_target: Target, tmp_path: Path) -> None:
    drafter = noisy("p_eagle", tiny_target, num_layers=2)
    config = foreign_config(drafter, **{missing: None})
    path = write(tmp_path / "head", config, checkpoint_of(drafter, torch.float32).tensors, "model.safetensors")
    with pytest.raises(UserError, match="lacks num_hidden_layers, or pard_token or mask_token_id"):
        load_drafter(path, tiny_target)


def test_a_whole_vocabulary_in_another_order_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """Engines read no table beside a whole vocabulary, so that every draft would be another token."""
    drafter = noisy("eagle3", tiny_target)
    ids = torch.arange(tiny_target.vocab_size)
    tensors = {**checkpoint_of(drafter, torch.float32).tensors, "d2t": ids.roll(1) - ids}
    path = write(tmp_path / "head", foreign_config(drafter), tensors, "model.safetensors")
    with pytest.raises(UserError, match="in another order"):
        load_drafter(path, tiny_target)


def foreign_config(drafter: Drafter, **changes: Any) -> dict[str, Any]:
    """config.json in the engines' layout as another project would write it; changes to None leave a key out."""
    config = {**checkpoint_of(drafter, torch.float32).config, "draftsmith": None, **changes}
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.0.linear.weight", "blocks.0.layers.0.weight"),
        ("medusa_heads.2.1.linear.bias", "blocks.2.layers.1.bias"),
        ("1.1.weight", "lm_heads.1.weight"),
        ("blocks.0.layers.0.weight", "blocks.0.layers.0.weight"),
    ],
)
def test_medusa_names(name: str, expected: str) -> None:
    assert medusa_name(name) == expected


def test_pickles_run_no_code(tiny_target: Target, tmp_path: Path) -> None:
    """A .bin of a stranger may hold anything; only tensors are read."""

    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = write(tmp_path / "head", llama_config(tiny_target), {"fc.weight": Payload()}, "pytorch_model.bin")  # type: ignore
    with pytest.raises(UserError, match="holds more than tensors, and no code of it is run"):
        read_checkpoint(path, tiny_target)
    assert not (tmp_path / "ran").exists()


ORIGINALS = [
    ("safeailab", "eagle", {}),
    ("safeailab", "eagle", {"bias": True}),
    ("safeailab", "eagle3", {"draft_vocab_size": 6}),
    ("fasterdecoding", "medusa", {}),
    ("speculators", "eagle3", {"draft_vocab_size": 6, "layer_ids": [1, 3, 7]}),
]


@pytest.mark.parametrize(("layout", "kind", "fields"), ORIGINALS)
def test_round_trip(layout: str, kind: str, fields: dict[str, Any], deep_target: Target, tmp_path: Path) -> None:
    """Exported into another project's layout and imported again: the same drafter, and nothing of ours left inside."""
    drafter = noisy(kind, deep_target, **fields)
    save_drafter(drafter, tmp_path / "checkpoint", torch.bfloat16)
    export_checkpoint(tmp_path / "checkpoint", layout, deep_target, tmp_path / "out")
    assert "draftsmith" not in json.loads((tmp_path / "out/config.json").read_text())
    expected = load_drafter(tmp_path / "checkpoint", deep_target)
    assert_same_drafter(load_drafter(tmp_path / "out", deep_target), expected)


def test_original_names(deep_target: Target, tmp_path: Path) -> None:
    """The files and names that those projects' own loaders ask for."""
    save_drafter(noisy("eagle3", deep_target), tmp_path / "e3")
    export_checkpoint(tmp_path / "e3", "safeailab", deep_target, tmp_path / "safeailab")
    names = torch.load(tmp_path / "safeailab/pytorch_model.bin", weights_only=True).keys()
    assert "midlayer.hidden_norm.weight" in names
    assert "target_hidden_size" not in json.loads((tmp_path / "safeailab/config.json").read_text())

    save_drafter(noisy("medusa", deep_target, num_heads=2), tmp_path / "heads")
    export_checkpoint(tmp_path / "heads", "fasterdecoding", deep_target, tmp_path / "fasterdecoding")
    names = torch.load(tmp_path / "fasterdecoding/medusa_lm_head.pt", weights_only=True).keys()
    assert set(names) == {f"{h}.{name}" for h in (0, 1) for name in ("0.linear.weight", "0.linear.bias", "1.weight")}


@pytest.mark.parametrize(
    ("layout", "kind", "fields", "message"),
    [
        ("safeailab", "eagle3", {"layer_ids": [1, 3, 7]}, "reads the layers"),
        ("safeailab", "medusa", {}, "has no medusa drafters"),
        ("fasterdecoding", "medusa", {"num_layers": 2}, "one block repeated"),
        ("fasterdecoding", "medusa", {"output": "shared"}, "whole output matrix for each head"),
        ("fasterdecoding", "eagle3", {}, "has no eagle3 drafters"),
    ],
)
def test_what_an_original_layout_cannot_hold(
    layout: str, kind: str, fields: dict[str, Any], message: str, deep_target: Target, tmp_path: Path
) -> None:
    save_drafter(noisy(kind, deep_target, **fields), tmp_path / "checkpoint")
    with pytest.raises(UserError, match=message):
        export_checkpoint(tmp_path / "checkpoint", layout, deep_target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
