"""Tiny configs of every family of targets that is served."""

from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 61
SLIDING = 5
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
SLIDES = {"sliding_window": SLIDING}
ALTERNATES = {**SLIDES, "layer_types": ALTERNATING}
GEMMA = {**ALTERNATES, "query_pre_attn_scalar": 8}
SERVED: dict[str, dict[str, Any]] = {
    "afmoe": {**ALTERNATES, **EXPERTS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**ALTERNATES, "logit_scale": 0.25},
    "ctrl": {},
    "cwm": ALTERNATES,
    "diffllama": {},
    "dots1": {**ALTERNATES, **ROUTED_EXPERTS, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    "exaone4": ALTERNATES,
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "gemma3_text": {**GEMMA, "final_logit_softcapping": 2.0},
    "gemma4_text": {
        **ALTERNATES,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": {**ROUTED_EXPERTS, "first_k_dense_replace": 1},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {**ALTERNATES, **LOCAL_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        "layer_types": ["full_attention"] * 3,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "granitemoe": {**LOCAL_EXPERTS, "logits_scaling": 4.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {"logits_scaling": 0.25},
    "jais2": {},
    "jetmoe": {"num_experts_per_tok": 2, "num_local_experts": 4, "kv_channels": 8},
    "llama": {},
    "minimax_m2": LOCAL_EXPERTS,
    "ministral": ALTERNATES,
    "mistral": SLIDES,
    "mixtral": {**LOCAL_EXPERTS, **SLIDES},
    "nanochat": {"final_logit_softcapping": 2.0},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATES,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "persimmon": {},
    "phi": {},
    "phi3": SLIDES,
    "qwen2": {**SLIDES, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {**SLIDES, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "stablelm": {},
    "starcoder2": SLIDES,
    "vaultgemma": {**GEMMA, "final_logit_softcapping": 2.0},
}


def family_config(model_type: str, changes: dict[str, Any]) -> PretrainedConfig:
    return CONFIG_MAPPING[model_type](**{**SIZES, **changes})


def plain_model(config: PretrainedConfig) -> PreTrainedModel:
    """Random weights in eager attention; norms and biases are away from one and zero, so that none goes unnoticed."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model
