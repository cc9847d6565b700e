"""Every way in which an engine silently serves something else than what was trained: export refuses or repairs it."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SERVED, target_and_plain_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models import DRAFTERS, Checkpoint, Target, checkpoint_of
from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.errors import UserError
from draftsmith.recipes.engine_rules.layout_check import check_files, engines_that_serve, sglang_layers, vllm_layers
from draftsmith.recipes.engine_rules.loader_rules import check_name, guessed_method
from draftsmith.recipes.serving.export import adapt

Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]


def files_for(engine: str, kind: str, target: Target, **fields: Any) -> Checkpoint:
    drafter_class = DRAFTERS[kind]
    drafter = drafter_class.from_target(drafter_class.config_class(kind=kind, **fields), target)
    return adapt(checkpoint_of(drafter, torch.float32), engine, target)


def new_key(name: str, value: Any) -> Change:
    return lambda config, tensors: config.update({name: value})


def new_tensor(name: str, shape: tuple[int, ...] = (4,)) -> Change:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def without(name: str) -> Change:
    return lambda config, tensors: (config.pop(name, None), tensors.pop(name, None))


def nested_ids(*layer_ids: int) -> Change:
    return lambda config, tensors: config["eagle_config"].update(eagle_aux_hidden_state_layer_ids=list(layer_ids))


def halved(name: str) -> Change:
    return lambda config, tensors: tensors.update({name: tensors[name].half()})


def reads(*layer_ids: int) -> Change:
    """Both lists and `fc` say that it reads the states after these layers."""

    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.update(eagle_aux_hidden_state_layer_ids=list(layer_ids), num_aux_hidden_states=len(layer_ids))
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [layer_id - 1 for layer_id in layer_ids]
        tensors["fc.weight"] = torch.zeros(len(tensors["fc.weight"]), config["target_hidden_size"] * len(layer_ids))

    return change


def added(name: str, value: float) -> Change:
    return lambda config, tensors: tensors[name].add_(value)


# What happens to each on the engine without this refusal is said in the message.
EAGLE3_TRAPS: dict[str, tuple[Change, str]] = {
    "layer missing": (without("fc.weight"), "fc.weight is missing and would stay random, without a word"),
    "head missing": (without("lm_head.weight"), "lm_head.weight is missing"),
    "table missing": (without("d2t"), "d2t is missing"),
    "bias of attention": (new_tensor("layers.0.self_attn.q_proj.bias"), "dropped without a word"),
    "prefix": (new_tensor("model.fc.weight"), "model.fc.weight is unknown"),
    "norm of the verifier": (new_tensor("verifier_norm.weight"), "verifier_norm.weight is unknown"),
    "norm without its flag": (new_tensor("input_norm.weight"), "input_norm.weight is unknown"),
    "mask state": (new_tensor("mask_hidden"), "mask_hidden is unknown"),
    "shape": (lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"].T}), "fc.weight has the shape"),
    "offsets as floats": (lambda config, tensors: tensors.update(d2t=tensors["d2t"].float()), "d2t is of type"),
    "two types": (halved("fc.weight"), "one floating-point type was due"),
    "null": (new_key("use_cache", None), "use_cache null"),
    "tied": (new_key("tie_word_embeddings", True), "tie_word_embeddings True, not False"),
    "flag left out": (without("norm_before_residual"), "norm_before_residual None, "),
    "attention bias": (new_key("attention_bias", True), "attention_bias True"),
    "quantised as the target": (new_key("quantization_config", {"quant_method": "fp8"}), "quantization_config"),
    "older RoPE alone": (without("rope_parameters"), "rope_parameters None"),
    "newer RoPE alone": (without("rope_theta"), "rope_theta None"),
    "two RoPEs": (new_key("rope_theta", 5.0), "rope_theta 5.0 is not that of rope_parameters"),
    "short context": (new_key("max_position_embeddings", 64), "max_position_embeddings is below the target's 128"),
    "no draft vocabulary": (without("draft_vocab_size"), "draft_vocab_size None"),
    "number of layers": (without("num_aux_hidden_states"), "num_aux_hidden_states None"),
    "one layer": (reads(2), "layers [2] are not 1 distinct ones, two or more"),  # SGLang would skip fc
    "one layer twice": (reads(2, 2, 3), "layers [2, 2, 3] are not 3 distinct ones"),  # as the default of six layers
    "last layer": (reads(1, 2, 4), "after layers [1, 2, 4], SGLang after [1, 2]"),
    "features of one layer": (
        lambda config, tensors: config["eagle_config"].update(use_aux_hidden_state=False),
        "no use_aux_hidden_state true",
    ),
    "norm before fc": (new_key("norm_before_fc", True), "input_norm.weight is missing and would stay random"),
    "norm before fc, nested": (
        lambda config, tensors: config["eagle_config"].update(norm_before_fc=True),
        "eagle_config has norm_before_fc True, which engines take, beside False",
    ),
    "older name of those norms": (new_key("use_aux_norm", True), "use_aux_norm True"),
    "bias of fc": (new_key("bias", True), "bias True"),
    "norms of the features": (new_key("fc_norm", True), "fc_norm.0.weight is missing and would stay random"),
    "norm of the output left out": (without("norm_output"), "norm_output None"),
    "sliding window": (new_key("sliding_window", 64), "sliding_window 64"),
    "width of another target": (new_key("target_hidden_size", 64), "target_hidden_size 64 is not the target's 32"),
    "type of the weights": (new_key("torch_dtype", "float16"), "calls the weights torch.float16"),
    "older RoPE scaled alone": (
        new_key("rope_scaling", {"rope_type": "linear", "factor": 9.0}),
        "rope_scaling {'rope_type': 'linear', 'factor': 9.0} is not that of rope_parameters {'rope_type': 'default'}",
    ),
    "ids in place of offsets": (
        lambda config, tensors: tensors["d2t"].add_(torch.arange(len(tensors["d2t"]))),
        "d2t and t2d tell of different tokens",
    ),
    "offsets out of range": (added("d2t", 10_000), "d2t and t2d tell"),
    "table inverted": (lambda config, tensors: tensors["t2d"].logical_not_(), "d2t and t2d tell"),
    "broken weight": (added("norm.weight", float("nan")), "norm.weight holds NaN"),
    "one list for both engines": (nested_ids(1, 2, 3), "vLLM would capture the states after layers [1, 2, 3], SGLang"),
    "nested list only": (without("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids None"),
    "top list only": (without("eagle_config"), "eagle_config None"),
    "architecture": (new_key("architectures", ["LlamaForCausalLM"]), "not LlamaForCausalLMEagle3"),
    "other vocabulary": (new_key("vocab_size", 7), "vocab_size 7 is not the target's"),
}
MEDUSA_TRAPS: dict[str, tuple[Change, str]] = {
    "bias flag left out": (without("medusa_fc_bias"), "medusa_fc_bias None, not True"),
    "bias missing": (without("blocks.0.layers.0.bias"), "blocks.0.layers.0.bias is missing"),
    "unknown": (new_tensor("blocks.9.layers.0.bias"), "unknown and would be dropped without a word"),
    "another key with num and heads": (new_key("num_attention_heads", 4), "vLLM would take for num_heads"),
    "reduced vocabulary": (new_key("truncated_vocab_size", 6), "token_map vLLM 0.32.0 fails to load"),
}

EAGLE_TRAPS: dict[str, tuple[Change, str]] = {
    "bias missing": (without("fc.bias"), "fc.bias is missing and would stay random, without a word"),
    "sliding window": (new_key("layer_types", ["sliding_attention"]), "layer_types ['sliding_attention']"),
    "first norm": (new_tensor("layers.0.input_layernorm.weight"), "layers.0.input_layernorm.weight is unknown"),
    "head": (new_tensor("lm_head.weight"), "lm_head.weight is unknown"),
    "EAGLE-3's width": (
        lambda config, tensors: tensors.update({"fc.weight": tensors["fc.weight"].repeat(1, 2)}),
        "fc.weight has the shape",
    ),
    "two layers": (new_key("num_hidden_layers", 2), "num_hidden_layers 2, not 1"),
    "older RoPE alone": (without("rope_parameters"), "rope_parameters None"),
    "EAGLE-3's architecture": (new_key("architectures", ["LlamaForCausalLMEagle3"]), "not LlamaForCausalLM"),
}
DRAFT_MODEL_TRAPS: dict[str, tuple[Change, str]] = {
    "layer missing": (without("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing and"),
    "a layer too many": (new_key("num_hidden_layers", 1), "model.layers.1.input_layernorm.weight is unknown and would"),
    "head of a tied model": (new_key("tie_word_embeddings", True), "lm_head.weight is unknown"),
    "wider": (new_key("intermediate_size", 128), "has the shape [32, 64], not [32, 128]"),
    "broken weight": (added("model.norm.weight", float("inf")), "model.norm.weight holds NaN or infinity"),
}
P_EAGLE_TRAPS: dict[str, tuple[Change, str]] = {
    "mask state missing": (without("mask_hidden"), "mask_hidden is missing"),
    "mask token missing": (without("pard_token"), "pard_token None, which must be of type int"),
    "another mask token": (new_key("mask_token_id", 5), "mask_token_id 5, not None"),
    "deeper layer missing": (without("layers.2.mlp.up_proj.weight"), "layers.2.mlp.up_proj.weight is missing"),
    "a layer too many": (new_key("num_hidden_layers", 2), "layers.2.input_layernorm.weight is unknown"),
    "first norm of a deeper layer": (
        new_tensor("layers.1.hidden_norm.weight"),
        "layers.1.hidden_norm.weight is unknown",
    ),
    "nested list only": (without("eagle_aux_hidden_state_layer_ids"), "eagle_aux_hidden_state_layer_ids None"),
}

DFLASH_TRAPS: dict[str, tuple[Change, str]] = {
    "attention by default": (without("is_causal"), "is_causal None, which must be of type bool"),
    "one attention for layers that differ": (
        new_key("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        "is_causal False, which engines read for all layers",
    ),
    "the other layout": (new_key("sample_from_anchor", True), "sample_from_anchor True, not False"),
    "norm of queries missing": (
        without("layers.1.self_attn.q_norm.weight"),
        "layers.1.self_attn.q_norm.weight is miss",
    ),
    "a layer too many": (new_key("num_hidden_layers", 2), "layers.2.input_layernorm.weight is unknown"),
    "a layer id too few": (new_key("dflash_config", {"target_layer_ids": [0]}), "fc.weight has the shape"),
    "a head of its own": (new_tensor("lm_head.weight"), "lm_head.weight is unknown"),
}

DSPARK_TRAPS: dict[str, tuple[Change, str]] = {
    "attention by default": DFLASH_TRAPS["attention by default"],
    "the other layout": (new_key("sample_from_anchor", False), "sample_from_anchor False, not True"),
    "another corrector": (new_key("markov_head_type", "rnn"), "markov_head_type 'rnn', not 'vanilla'"),
    "no corrector": (without("markov_head.markov_w2.weight"), "markov_head.markov_w2.weight is missing"),
    "another rank": (new_key("markov_rank", 5), "confidence_head.proj.weight has the shape"),
    "no confidence": (without("enable_confidence_head"), "enable_confidence_head None, not True"),
}
DOMINO_TRAPS: dict[str, tuple[Change, str]] = {
    "no recurrent unit": (without("prefix_gru.weight_hh_l0"), "prefix_gru.weight_hh_l0 is missing"),
    "another rank": (
        lambda config, tensors: config["dflash_config"].update(emb_dim=5),
        "embed_proj.0.weight has the shape",
    ),
}
DFLASH2_TRAPS: dict[str, tuple[Change, str]] = {
    "no selector": (
        without("candidate_selector.successor_codebook"),
        "candidate_selector.successor_codebook is missing",
    ),
    "no convolution": (without("layers.1.mlp_conv.base_kernel"), "layers.1.mlp_conv.base_kernel is missing"),
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("trap", EAGLE3_TRAPS)
def test_eagle3_trap_is_refused(trap: str, engine: str, tiny_target: Target) -> None:
    files = files_for(engine, "eagle3", tiny_target, draft_vocab_size=6, layer_ids=[1, 2, 3])
    change, message = EAGLE3_TRAPS[trap]
    check_files(engine, files, tiny_target)
    change(files.config, files.tensors)
    with pytest.raises(UserError) as caught:
        check_files(engine, files, tiny_target)
    assert message in str(caught.value)


ONLY_VLLM: dict[str, tuple[Change, str]] = {
    "norm before the residual": (new_key("norm_before_residual", True), "norm_before_residual True, not False"),
    "own embedding": (
        lambda config, tensors: tensors.update({OWN_EMBEDDING: torch.zeros(config["vocab_size"], 32)}),
        "embed_tokens.weight is unknown and would be dropped without a word",
    ),
}


@pytest.mark.parametrize("variant", ONLY_VLLM)
def test_what_vllm_alone_reads(variant: str, tiny_target: Target) -> None:
    """Of the EAGLE-3 variants that are out there."""
    files = files_for("vllm", "eagle3", tiny_target, draft_vocab_size=6, layer_ids=[1, 2, 3])
    assert engines_that_serve(files, tiny_target) == ("vllm", "sglang")
    change, message = ONLY_VLLM[variant]
    change(files.config, files.tensors)
    assert engines_that_serve(files, tiny_target) == ("vllm",)
    with pytest.raises(UserError) as caught:
        check_files("sglang", files, tiny_target)
    assert message in str(caught.value)


def test_vllm_alone_reads_several_layers_of_eagle3(tiny_target: Target) -> None:
    files = files_for("vllm", "eagle3", tiny_target, num_layers=2, layer_ids=[1, 2, 3])
    assert engines_that_serve(files, tiny_target) == ("vllm",)
    with pytest.raises(UserError, match="num_hidden_layers 2, not 1"):
        check_files("sglang", files, tiny_target)
    del files.tensors["layers.1.input_layernorm.weight"]
    with pytest.raises(UserError, match=r"layers.1.input_layernorm.weight is missing"):
        check_files("vllm", files, tiny_target)


OTHER_TRAPS = [
    (engine, kind, trap)
    for engine, kind, traps in (
        ("vllm", "medusa", MEDUSA_TRAPS),
        ("vllm", "eagle", EAGLE_TRAPS),
        ("sglang", "eagle", EAGLE_TRAPS),
        ("vllm", "p_eagle", P_EAGLE_TRAPS),
        ("vllm", "dflash", DFLASH_TRAPS),
        ("sglang", "dflash", DFLASH_TRAPS),
        ("vllm", "dflash2", DFLASH2_TRAPS),
        ("vllm", "dspark", DSPARK_TRAPS),
        ("sglang", "dspark", DSPARK_TRAPS),
        ("sglang", "domino", DOMINO_TRAPS),
        ("vllm", "draft_model", DRAFT_MODEL_TRAPS),
        ("sglang", "draft_model", DRAFT_MODEL_TRAPS),
    )
    for trap in traps.values()
]


@pytest.mark.parametrize(("engine", "kind", "trap"), OTHER_TRAPS)
def test_trap_of_another_kind_is_refused(engine: str, kind: str, trap: tuple[Change, str], tiny_target: Target) -> None:
    fields = (
        {"num_layers": 3, "layer_ids": [1, 2, 3]}
        if kind in ("p_eagle", "dflash", "dflash2", "dspark", "domino")
        else {}
    )
    files = files_for(engine, kind, tiny_target, **fields)
    change, message = trap
    check_files(engine, files, tiny_target)
    change(files.config, files.tensors)
    with pytest.raises(UserError) as caught:
        check_files(engine, files, tiny_target)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_only_vllm_reads_a_reduced_vocabulary_of_block_drafters(kind: str, tiny_target: Target) -> None:
    files = files_for("vllm", kind, tiny_target, draft_vocab_size=6, num_layers=2)
    assert engines_that_serve(files, tiny_target) == ("vllm",)
    for name in ("d2t", "lm_head.weight"):
        less = replace(files, tensors={other: tensor for other, tensor in files.tensors.items() if other != name})
        with pytest.raises(UserError, match=f"{name} is missing"):
            check_files("vllm", less, tiny_target)


def test_whole_vocabulary_with_a_table(tiny_target: Target) -> None:
    """vLLM has no place for d2t then and refuses it; SGLang would take it."""
    files = files_for("vllm", "eagle3", tiny_target)
    files.tensors["d2t"] = torch.zeros(tiny_target.vocab_size, dtype=torch.int64)
    with pytest.raises(UserError, match="d2t is unknown and would be refused"):
        check_files("vllm", files, tiny_target)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v2"])
@pytest.mark.parametrize("ids", [[2, 4, 6], [3, 4, 6]])
def test_what_each_engine_captures(ids: list[int], model_type: str) -> None:
    """Both rules written out: vLLM after layer N, SGLang before the layer named plus one, but not for every family."""
    nested = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]}
    files = Checkpoint("eagle3", {"eagle_aux_hidden_state_layer_ids": ids, "eagle_config": nested}, {})
    assert vllm_layers(files, 8) == ids
    shifted = model_type == "llama" or ids[0] == 2
    assert sglang_layers(files, 8, model_type) == (ids if shifted else [i - 1 for i in ids])


def test_the_last_layer_is_never_captured_by_sglang() -> None:
    files = Checkpoint("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, {})
    assert sglang_layers(files, 8, "llama") == [2, 4]


def test_without_ids_both_take_the_same_default() -> None:
    files = Checkpoint("eagle3", {}, {})
    assert vllm_layers(files, 8) == sglang_layers(files, 8, "llama") == [2, 4, 5]


@pytest.mark.parametrize(("layer_ids", "refused"), [([2, 3], False), ([1, 2, 3], True)])
def test_families_whose_ids_sglang_shifts_only_from_1(
    layer_ids: list[int], refused: bool, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these targets SGLang takes a nested list that starts at 0 for ids of another count."""
    files = files_for("sglang", "eagle3", tiny_target, layer_ids=layer_ids)
    monkeypatch.setattr(tiny_target.text_config, "model_type", "deepseek_v3")
    message = "vLLM would capture the states after layers [1, 2, 3], SGLang after [0, 1, 2]"
    with pytest.raises(UserError, match=re.escape(message)) if refused else nullcontext():
        check_files("sglang", files, tiny_target)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/runs/eagle-ckpts/my_eagle3", "eagle"),
        ("/runs/EAGLE3-Llama", "eagle3"),
        ("dflash8", "dflash"),
        ("/runs/mine", None),
    ],
)
def test_vllm_guesses_from_the_path(path: str, method: str | None) -> None:
    """In this order: "eagle-" before "eagle3"."""
    assert guessed_method(path) == method


@pytest.mark.parametrize(
    ("method", "path", "refused"),
    [
        ("medusa", "eagle-runs/out", True),  # the guess wins over the method that the command names
        ("draft_model", "my-eagle3/out", True),
        ("eagle3", "eagle-runs/out", False),  # the command's method counts
        ("eagle3", "runs/eagle-3", True),  # but the directory may be given without one
        ("eagle3", "runs/eagle3", False),
        ("medusa", "runs/out", False),
    ],
)
def test_directory_names(method: str, path: str, refused: bool) -> None:
    with pytest.raises(UserError, match="by this name: give another one") if refused else nullcontext():
        check_name(method, "--out", f"/{path}")


def test_repairs(tiny_target: Target) -> None:
    """What export mends by itself: nulls, and a quantisation that the weights do not have."""
    files = files_for("vllm", "eagle3", tiny_target)
    broken = Checkpoint(files.kind, {**files.config, "rope_scaling": None, "pad_token_id": None}, files.tensors)
    broken.config["quantization_config"] = {"quant_method": "fp8"}
    mended = adapt(broken, "vllm", tiny_target)
    assert mended.config == files.config
    check_files("vllm", mended, tiny_target)


def test_scaled_rope_stands_in_both_schemas(make_target_dir: Any) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    target = Target.from_pretrained(make_target_dir(rope_parameters=rope), "cpu")
    files = files_for("vllm", "eagle3", target)
    check_files("vllm", files, target)
    assert files.config["rope_scaling"]["factor"] == files.config["rope_parameters"]["factor"] == 2.0
    scaling = {**files.config["rope_scaling"], "factor": 9.0}
    other = replace(files, config={**files.config, "rope_scaling": scaling})
    with pytest.raises(UserError, match="'factor': 9.0} is not that of rope_parameters"):
        check_files("vllm", other, target)
    del files.config["rope_scaling"]
    with pytest.raises(UserError, match="rope_scaling is missing beside rope_parameters of type linear"):
        check_files("vllm", files, target)


def test_embeddings_that_the_target_scales() -> None:
    """vLLM gives a drafter the table of Gemma's embedding without the scale, and so does SGLang an EAGLE-1.

    Its block drafters call the module of Gemma 3 and 4, which scales; EAGLE-3 norms what it reads in any case.
    """
    target, _ = target_and_plain_model("gemma3_text", SERVED["gemma3_text"])
    refused = [("vllm", kind) for kind in ("eagle", "dflash", "dflash2", "dspark")] + [("sglang", "eagle")]
    taken = [("vllm", "eagle3"), ("vllm", "p_eagle"), ("sglang", "dflash"), ("sglang", "domino")]
    for engine, kind in refused + taken:
        files = files_for(engine, kind, target, intermediate_size=64)
        message = "embeddings of gemma3_text, which are scaled"
        with pytest.raises(UserError, match=message) if (engine, kind) in refused else nullcontext():
            check_files(engine, files, target)


@pytest.mark.parametrize(("engine", "kind"), [("sglang", "medusa"), ("sglang", "unknown"), ("vllm", "unknown")])
def test_reason_of_a_refusal(engine: str, kind: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=f"serves no {kind} drafters"):
        check_files(engine, Checkpoint(kind, {}, {}), tiny_target)


def test_files_are_what_was_checked(tmp_path: Path, tiny_target: Target) -> None:
    """The check of tensors in memory holds for those on disk: safetensors keeps names, types and shapes."""
    files = files_for("vllm", "eagle3", tiny_target, draft_vocab_size=6)
    save_file(files.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(files.config))
    config = json.loads((tmp_path / "config.json").read_text())
    check_files("vllm", Checkpoint("eagle3", config, load_file(tmp_path / "model.safetensors")), tiny_target)
