"""A drafter for targets with layers of each kind: it learns their text, which stays as it is, and vLLM's folder holds
what was learnt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import LINEAR_SIZES, MULTIMODAL, RECURRENT, SERVED, family_config, plain_model
from runs import make_config
from safetensors.torch import load_file
from tiny_target import CONTEXT, tiny_tokenizer
from transformers import PreTrainedModel

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.inference import Output, SpeculativeDecoder
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.recipes.serving.export import export_checkpoint
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.starting_drafter import fit_starting_layers

ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
LIKE_GEMMA_4_31B = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,  # as it is tied a random model writes one token over and over
}
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**MULTIMODAL["qwen3_5"], "text_config": {**LINEAR_SIZES, **ALTERNATING}},
    "nemotron_h": {**RECURRENT["nemotron_h"], "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "deepseek_v3": {**SERVED["deepseek_v3"], "num_hidden_layers": 7},  # whose first layer SGLang cannot hand on
    "gemma4": {
        **MULTIMODAL["gemma4"],
        "text_config": {**MULTIMODAL["gemma4"]["text_config"], **LIKE_GEMMA_4_31B},
        "tie_word_embeddings": False,
    },
    "kimi_linear": {**RECURRENT["kimi_linear"], "layer_types": ALTERNATING["layer_types"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "deepseek_v32": SERVED["deepseek_v32"],
    "llama4_text": {
        **SERVED["llama4_text"],
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0] * 2,
    },
}
# What vLLM's LlamaForCausalLMEagle3 loads (vllm/model_executor/models/llama_eagle3.py).
KEYS = {*(f"fc_norm.{number}.weight" for number in range(3)), "fc.weight", "norm.weight", "lm_head.weight"}
KEYS |= {f"layers.0.{norm}.weight" for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
KEYS |= {f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"}
KEYS |= {f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


def save_target_of(model_type: str, directory: Path) -> PreTrainedModel:
    """Write a tiny random target of four layers with a tokenizer; return transformers' own model of it."""
    tokenizer, changes = tiny_tokenizer(), TARGETS[model_type]
    fields = {
        "num_hidden_layers": 4,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if "text_config" in changes:
        changes = {**changes, "text_config": {**changes["text_config"], **fields}}
    else:
        changes = {**fields, **changes}
    torch.manual_seed(0)
    plain = plain_model(family_config(model_type, changes))
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return plain


MORE = (
    "nemotron_h",
    "gemma4",
    "kimi_linear",
    "lfm2",
    "deepseek_v32",
    "llama4_text",
)  # trained in the long run only; greedy texts of these are compared by default, too


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.long) if name in MORE else name for name in TARGETS]
)
def test_eagle3_learns_and_is_exported(model_type: str, tmp_path: Path) -> None:
    """100 steps on the answers to four prompts, on which untrained and trained drafters are compared.

    With the trained one, the answers are those of transformers' `generate`.
    """
    folder = tmp_path / "target"
    plain = save_target_of(model_type, folder)
    target = Target.from_pretrained(folder, "cpu", torch.float32)
    prompts = [f"strike {'the iron ' * number}" for number in range(4)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    prepare(target, str(tmp_path / "prompts.txt"), tmp_path / "samples", PrepareSettings(max_new_tokens=24))
    base = {"target": folder, "data.samples": tmp_path / "samples", "data.batch_size": 4, "data.held_out_prompts": 0}
    config = make_config(
        "eagle3", base, tmp_path / "run", run={"steps": 100, "device": "cpu"}, optimizer={"learning_rate": 1e-2}
    )
    torch.manual_seed(0)
    fit_starting_layers(config, target)
    untrained = DRAFTERS["eagle3"].from_target(config.drafter, target)
    train(config)
    checkpoint = checkpoints(tmp_path / "run")[-1]

    export_checkpoint(checkpoint, "vllm", target, tmp_path / "export")
    weights = load_file(tmp_path / "export" / "model.safetensors")
    written = json.loads((tmp_path / "export" / "config.json").read_text())
    assert set(weights) == KEYS
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (written["vocab_size"], written["target_hidden_size"]) == (target.vocab_size, target.hidden_size)

    def generated(drafter: Drafter) -> Output:
        return SpeculativeDecoder(target, drafter.eval()).generate(prompts, max_new_tokens=24, draft_length=4)

    before, after = generated(untrained), generated(load_drafter(tmp_path / "export", target))
    assert after.stats.total.mean_acceptance_length > before.stats.total.mean_acceptance_length + 0.2
    for prompt, token_ids in zip(map(target.encode, prompts), after.token_ids, strict=True):
        expected = plain.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert token_ids == expected.tolist()


def test_samples_are_not_packed_where_a_state_would_go_from_one_into_the_next(tmp_path: Path) -> None:
    save_target_of("lfm2", tmp_path / "target")
    target = Target.from_pretrained(tmp_path / "target", "cpu", torch.float32)
    (tmp_path / "prompts.txt").write_text("strike the iron\nheat it\n")
    prepare(target, str(tmp_path / "prompts.txt"), tmp_path / "samples", PrepareSettings(max_new_tokens=8))
    base = {"target": tmp_path / "target", "data.samples": tmp_path / "samples", "data.packing": True}
    with pytest.raises(UserError, match=r"data\.packing: layers of .* carry a running state along a row"):
        train(make_config("eagle3", base, tmp_path / "run", run={"steps": 1, "device": "cpu"}))
