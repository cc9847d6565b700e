"""Tiny configs of every family of targets that is served: of language models, and of multimodal ones."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.models import Target
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.target.loading import LanguageModel, is_multimodal

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
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
LATENT_EXPERTS = {**LATENT, **ROUTED_EXPERTS, "first_k_dense_replace": 1}
SPARSE = {**LATENT_EXPERTS, "index_topk": 4, "index_n_heads": 16, "index_head_dim": 8}
CHUNKED = {
    **LOCAL_EXPERTS,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "attention_chunk_size": 4,
    "intermediate_size_mlp": 32,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [1],
}
SERVED: dict[str, dict[str, Any]] = {
    "afmoe": {**ALTERNATES, **EXPERTS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "axk1": {**LATENT_EXPERTS, "head_dim": 4},
    "axk2": SPARSE,
    "biogpt": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**ALTERNATES, "logit_scale": 0.25},
    "cohere2_moe": {**ALTERNATES, **EXPERTS, "logit_scale": 0.25},
    "ctrl": {},
    "cwm": ALTERNATES,
    "deepseek_v2": LATENT_EXPERTS,
    "deepseek_v3": {**LATENT_EXPERTS, "head_dim": 4},
    "deepseek_v32": SPARSE,
    "diffllama": {},
    "dots1": {**ALTERNATES, **ROUTED_EXPERTS, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    "exaone4": ALTERNATES,
    "exaone_moe": {**ALTERNATES, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
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
    "gemma4_unified_text": {**ALTERNATES, "global_head_dim": 16, "final_logit_softcapping": 2.0},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**ROUTED_EXPERTS, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT_EXPERTS,
    "glm_moe_dsa": SPARSE,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_oss": {**ALTERNATES, **LOCAL_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "granite_swa": {**ALTERNATES, "logits_scaling": 4.0},
    "granitemoe": {**LOCAL_EXPERTS, "logits_scaling": 4.0},
    "granitemoe_swa": {**ALTERNATES, **LOCAL_EXPERTS, "logits_scaling": 4.0},
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        "layer_types": ["full_attention"] * 3,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "granitemoeshared": {**LOCAL_EXPERTS, "logits_scaling": 4.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": EXPERTS,
    "hy_v4": {**SPARSE, "indexer_types": ["full", "shared", "full"]},
    "hyperclovax": {"logits_scaling": 0.25},
    "jais2": {},
    "jetmoe": {"num_experts_per_tok": 2, "num_local_experts": 4, "kv_channels": 8},
    "laguna": {**ALTERNATES, **EXPERTS},
    "llama": {},
    "llama4_text": CHUNKED,
    "longcat_flash": {
        **LATENT,
        "num_layers": 3,
        "num_hidden_layers": 6,  # attentions
        "head_dim": 4,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mellum": {**ALTERNATES, **LOCAL_EXPERTS, "moe_intermediate_size": 32},
    "minicpm3": {**LATENT, "head_dim": 4},
    "minimax_m2": LOCAL_EXPERTS,
    "ministral": ALTERNATES,
    "mimo_v2_flash": {**ROUTED_EXPERTS, **SLIDES, "v_head_dim": 16},
    "ministral3": {},
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
    "solar_open": ROUTED_EXPERTS,
    "stablelm": {},
    "starcoder2": SLIDES,
    "vaultgemma": {**GEMMA, "final_logit_softcapping": 2.0},
    "youtu": {**LATENT, "head_dim": 4},
}
# Decoders with layers that carry a running state.
LINEAR_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LINEAR = {**LINEAR_SIZES, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LINEAR_EXPERTS = {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 4}
RECURRENT: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.25},
    "kimi_linear": {**LATENT_EXPERTS, **LINEAR, "linear_num_heads": 4, "linear_head_dim": 8},
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 4,
    },
    "olmo_hybrid": LINEAR,
    "qwen3_next": LINEAR_EXPERTS,
    "zamba2": {
        "mamba_d_state": 8,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_mem_blocks": 1,
        "chunk_size": 4,
        "num_key_value_heads": 4,
    },
}

# A tower has as many layers as the decoder, whose layers must not be sought in it.
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CLIP, SIGLIP = ({"model_type": kind, **TOWER} for kind in ("clip_vision_model", "siglip_vision_model"))
PIXTRAL = {"model_type": "pixtral", **TOWER}
QWEN_TOWER = {**TOWER, "depth": 3, "num_heads": 2, "out_hidden_size": 32}
QWEN3_TOWER = {**QWEN_TOWER, "num_position_embeddings": 4, "deepstack_visual_indexes": [1]}
LLAMA, QWEN2, QWEN3 = ({"model_type": kind} for kind in ("llama", "qwen2", "qwen3"))
THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
ROTARY_3D = {"rope_parameters": THREE_AXES}
GLM_ROTARY = {"rope_parameters": {**THREE_AXES, "partial_rotary_factor": 1.0}}
SMALL_SOUND = {**TOWER, "model_type": "voxtral_encoder", "num_mel_bins": 4, "max_source_positions": 8}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "exaone4_5": {
        "text_config": {"model_type": "exaone4", **ALTERNATES},
        "vision_config": {**QWEN_TOWER, "num_key_value_heads": 2},
    },
    "gemma3": {"text_config": GEMMA, "vision_config": TOWER, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": {**SERVED["gemma4_text"], "final_logit_softcapping": 2.0, "global_head_dim": 16},
        "vision_config": {**TOWER, "head_dim": 8, "position_embedding_size": 16},
    },
    "gemma4_unified": {
        "text_config": {**ALTERNATES, "final_logit_softcapping": 2.0, "global_head_dim": 16},
        "vision_config": {**TOWER, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
    },
    "glm4v": {"text_config": GLM_ROTARY, "vision_config": QWEN_TOWER},
    "glm4v_moe": {"text_config": {**ROUTED_EXPERTS, **GLM_ROTARY}, "vision_config": QWEN_TOWER},
    "glm_ocr": {"text_config": GLM_ROTARY, "vision_config": QWEN_TOWER},
    "idefics3": {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 1},
    "internvl": {
        "text_config": QWEN3,
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        "tie_word_embeddings": False,
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", **LATENT_EXPERTS, "head_dim": 4},
        "vision_config": {**TOWER, "projector_hidden_size": 16},
    },
    "lfm2_vl": {"text_config": {"model_type": "lfm2", **CONVOLUTIONS}, "vision_config": TOWER},
    "lighton_ocr": {"text_config": QWEN3, "vision_config": PIXTRAL},
    "llama4": {
        "text_config": CHUNKED,
        "vision_config": {
            **TOWER,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "llava": {"text_config": LLAMA, "vision_config": CLIP},
    "llava_next": {"text_config": {"model_type": "mistral"}, "vision_config": CLIP},
    "llava_onevision": {"text_config": QWEN2, "vision_config": SIGLIP},
    "mistral3": {
        "text_config": {"model_type": "ministral3"},
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "mistral4": {  # the text of Mistral Small 4, in the wrapper of Mistral 3
        "model_type": "mistral3",
        "text_config": {"model_type": "mistral4", **LATENT_EXPERTS},
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "mistral_large4": {
        "text_config": {
            **{key: value for key, value in SPARSE.items() if key != "q_lora_rank"},
            "indexer_types": ["full", "shared", "full"],
            "no_rope_layers": [1, 1, 0],
            "kv_source_layers": [0, 0, 2],
        },
        "vision_config": PIXTRAL,
        "tie_word_embeddings": False,
    },
    "muse_glimmer": {
        "text_config": ALTERNATES,
        "vision_config": TOWER,
        "projector_hidden_size": 16,
        "out_hidden_size": 64,
    },
    "paddleocr_vl": {"text_config": ROTARY_3D, "vision_config": TOWER},
    "qwen2_vl": {"text_config": ROTARY_3D, "vision_config": {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 32}},
    "qwen2_5_vl": {"text_config": ROTARY_3D, "vision_config": QWEN_TOWER},
    "qwen3_vl": {"text_config": ROTARY_3D, "vision_config": QWEN3_TOWER},
    "qwen3_vl_moe": {"text_config": {**EXPERTS, **ROTARY_3D}, "vision_config": QWEN3_TOWER},
    "qwen3_5": {"text_config": LINEAR, "vision_config": QWEN3_TOWER},
    "qwen3_5_moe": {"text_config": LINEAR_EXPERTS, "vision_config": QWEN3_TOWER},
    "smolvlm": {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 1},
    "video_llama_3": {"text_config": QWEN2, "vision_config": TOWER},
    "vipllava": {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layers": [-1]},
    "voxtral": {"text_config": LLAMA, "audio_config": SMALL_SOUND},
}

# Targets that an engine has to run: here their ends are read, and their first layers.
RUN_BY_ENGINES: dict[str, dict[str, Any]] = {
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_expand": 1},
    "minimax": {**LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}

# A target of each kind of layers, for whole texts.
LONG = {"max_position_embeddings": 128}
DENSE = {**LONG, "first_k_dense_replace": 3}  # no experts, which transformers does not compute in fp64
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated DeltaNet": ("qwen3_next", {**RECURRENT["qwen3_next"], **LONG, "mlp_only_layers": [0, 1, 2]}),
    "gated DeltaNet in a multimodal model": (
        "qwen3_5",
        {**MULTIMODAL["qwen3_5"], "text_config": {**MULTIMODAL["qwen3_5"]["text_config"], **LONG}},
    ),
    "Kimi delta attention": ("kimi_linear", {**RECURRENT["kimi_linear"], **DENSE}),
    "Mamba-2": ("nemotron_h", {**RECURRENT["nemotron_h"], **LONG}),
    "Mamba-2 beside attention": ("falcon_h1", {**RECURRENT["falcon_h1"], **LONG}),
    "short convolutions": ("lfm2", {**RECURRENT["lfm2"], **LONG}),
    "latent attention": ("deepseek_v3", {**SERVED["deepseek_v3"], **DENSE}),
    "sparse attention": ("deepseek_v32", {**SERVED["deepseek_v32"], **DENSE}),
    "chunks": ("llama4_text", {**SERVED["llama4_text"], **LONG, "moe_layers": []}),
}
ALIKE = {"gated DeltaNet in a multimodal model", "Mamba-2 beside attention"}  # another kind has these layers, too


def family_config(model_type: str, changes: dict[str, Any]) -> PretrainedConfig:
    """Return the config of a family, or of the `model_type` in its changes."""
    changes = deepcopy(changes)  # Gemma 4 writes into the list of its layers' kinds
    model_type = changes.pop("model_type", model_type)
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"{model_type} is not in this version of transformers")
    if "text_config" in changes:
        text_config = {**SIZES, **changes["text_config"]}
        return CONFIG_MAPPING[model_type](**{**changes, "text_config": text_config})
    return CONFIG_MAPPING[model_type](**{**SIZES, **changes})


def plain_model(config: PretrainedConfig) -> PreTrainedModel:
    """Random weights in eager attention; norms and biases are away from one and zero, so that none goes unnoticed.

    Running states last for several tokens.
    """
    is_whole = config.get_text_config() is config
    auto_class = AutoModelForCausalLM if is_whole else AutoModelForMultimodalLM
    model = auto_class.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            nn.init.uniform_(parameter, -2.0, 0.5)
        elif name.endswith("dt_bias"):
            nn.init.normal_(parameter, 0.0, 0.5)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    return model


def target_and_plain_model(
    model_type: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Target, PreTrainedModel]:
    """Return a target on a device, and transformers' own model of the same weights on the CPU."""
    torch.manual_seed(5)
    plain = plain_model(family_config(model_type, changes)).to(dtype)
    padding = plain.get_input_embeddings().weight.data[0]
    padding.copy_(0.02 * torch.randn_like(padding))  # of zeros all scores would be alike by which slots are chosen
    config = family_config(model_type, changes)
    auto_class = AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation=ATTENTION, dtype=dtype)
    model.load_state_dict(plain.state_dict())
    model = LanguageModel(model) if is_multimodal(config) else model
    return Target(model.eval().requires_grad_(False).to(device), None, model_type), plain
