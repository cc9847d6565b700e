"""The names under which engines load a drafter, tensors with their shapes and keys of config.json, and what a rule is.

loader_rules.py makes of them the rules of each engine.

Sizes in shapes: H width of the drafter, T of the target, A layers read, N query heads, K key-value heads, D head width,
I inner width, V target vocabulary, R draft vocabulary, M rank of DSpark's Markov head, C width that its confidence head
reads, P taps and G groups of DFlash2's convolutions, S rank of its selector, U width of
Domino's recurrent unit, E rank of its correction, W width that this reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

# --- tensors: name -> shape

LAYER = {
    "layers.0.post_attention_layernorm.weight": "H",
    "layers.0.self_attn.o_proj.weight": "H N*D",
    "layers.0.mlp.gate_proj.weight": "I H",
    "layers.0.mlp.up_proj.weight": "I H",
    "layers.0.mlp.down_proj.weight": "H I",
}
ATTENTION = {
    "layers.0.self_attn.q_proj.weight": "N*D H",
    "layers.0.self_attn.k_proj.weight": "K*D H",
    "layers.0.self_attn.v_proj.weight": "K*D H",
}
EAGLE = {**LAYER, **ATTENTION, "fc.weight": "H 2*T", "fc.bias": "H"}
EAGLE3 = {
    **LAYER,
    "fc.weight": "H A*T",
    "layers.0.input_layernorm.weight": "H",
    "layers.0.hidden_norm.weight": "H",
    "layers.0.self_attn.q_proj.weight": "N*D 2*H",
    "layers.0.self_attn.k_proj.weight": "K*D 2*H",
    "layers.0.self_attn.v_proj.weight": "K*D 2*H",
    "norm.weight": "H",
    "lm_head.weight": "R H",
}
P_EAGLE = {**EAGLE3, "mask_hidden": "1 1 A*T"}
EAGLE3_LATER_LAYER = {**LAYER, **ATTENTION, "layers.0.input_layernorm.weight": "H"}  # the first one is EAGLE-3's
DFLASH_LAYER = {
    **EAGLE3_LATER_LAYER,
    "layers.0.self_attn.q_norm.weight": "D",
    "layers.0.self_attn.k_norm.weight": "D",
}
DFLASH = {**DFLASH_LAYER, "fc.weight": "H A*T", "hidden_norm.weight": "H", "norm.weight": "H"}
DSPARK = {
    **DFLASH,
    "markov_head.markov_w1.weight": "V M",
    "markov_head.markov_w2.weight": "R M",
    "confidence_head.proj.weight": "1 C",
    "confidence_head.proj.bias": "1",
}
DFLASH2_LAYER = {
    **DFLASH_LAYER,
    "layers.0.attention_conv.base_kernel": "2 P H",
    "layers.0.attention_conv.kernel_projection.weight": "2*P*G H",
    "layers.0.mlp_conv.base_kernel": "2 P H",
    "layers.0.mlp_conv.kernel_projection.weight": "2*P*G H",
}
DFLASH2 = {
    **DFLASH,
    **DFLASH2_LAYER,
    "candidate_selector.predecessor_codebook": "V S",
    "candidate_selector.successor_codebook": "V S",
    "candidate_selector.hidden_projection.weight": "S H",
}
DOMINO = {
    **DFLASH,
    "prefix_gru.weight_ih_l0": "3*U H",
    "prefix_gru.weight_hh_l0": "3*U U",
    "embed_proj.0.weight": "E W",
    "embed_proj.2.weight": "V E",
}
TABLES = {"d2t": "R", "t2d": "V"}  # only where the draft vocabulary is a reduced one
DTYPES = {"d2t": torch.int64, "t2d": torch.bool, "token_map": torch.int64}

# --- keys of config.json: required ones with their types, and those with the one value that engine and training share

EAGLE_KEYS: dict[str, type] = {
    "hidden_size": int,  # LlamaConfig's defaults, those of Llama 7B, stand in for every size that is not there
    "intermediate_size": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "rms_norm_eps": float,
    "vocab_size": int,
    "max_position_embeddings": int,  # default 2048
    "rope_theta": float,  # the older of two schemas: default 10000
    "rope_parameters": dict,  # the newer one
}
EAGLE3_KEYS: dict[str, type] = {
    **EAGLE_KEYS,
    "target_hidden_size": int,  # default: hidden_size
    "draft_vocab_size": int,  # vLLM's default: vocab_size; SGLang: AttributeError, and for null the target's head
    "num_aux_hidden_states": int,  # default: as many as the nested list has, else 3
    "eagle_aux_hidden_state_layer_ids": list,  # vLLM; default 2, L // 2, L - 3
    "eagle_config": dict,  # SGLang reads its layer ids here, one lower; same default
    "norm_before_fc": bool,  # default of these three: false
    "fc_norm": bool,
    "norm_output": bool,
}
EAGLE_FIXED = {
    "model_type": "llama",
    "num_hidden_layers": 1,  # a second layer has another norm in vLLM than in SGLang
    "hidden_act": "silu",
    "tie_word_embeddings": False,  # true: SGLang takes the embedding for the head
    "attention_bias": False,  # SGLang has no bias there
    "mlp_bias": False,
}
FEATURE_NORMS = {  # by the key of config.json with which they are there; {i}: a number for each layer that is read
    "norm_before_fc": {"input_norm.weight": "A*T"},
    "fc_norm": {"fc_norm.{i}.weight": "T"},
}
EAGLE3_FIXED = {**EAGLE_FIXED, "norm_before_residual": False}  # what SGLang computes, whatever config.json says
VLLM_EAGLE3_KEYS: dict[str, type] = {
    **EAGLE3_KEYS,
    "num_hidden_layers": int,
    "norm_before_residual": bool,  # speculators' format: default true
}
VLLM_EAGLE3_FIXED = {key: value for key, value in EAGLE_FIXED.items() if key != "num_hidden_layers"}
P_EAGLE_KEYS: dict[str, type] = {**EAGLE3_KEYS, "num_hidden_layers": int, "pard_token": int}
P_EAGLE_FIXED = {
    **VLLM_EAGLE3_FIXED,
    "norm_before_residual": False,
    "mask_token_id": None,  # would win over pard_token
}
DFLASH_KEYS: dict[str, type] = {
    **EAGLE_KEYS,
    "num_hidden_layers": int,
    "num_target_layers": int,
    "block_size": int,
    "layer_types": list,
    "dflash_config": dict,  # layer ids, which count outputs from 0, and the mask token
}
DFLASH_FIXED = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "sample_from_anchor": False,  # no engine serves DFlash in the layout next_token
}
DSPARK_KEYS: dict[str, type] = {
    **DFLASH_KEYS,
    "target_layer_ids": list,  # as in dflash_config, which SGLang reads first
    "mask_token_id": int,
    "markov_rank": int,
}
DSPARK_FIXED = {
    **DFLASH_FIXED,
    "sample_from_anchor": True,  # SGLang knows no other layout
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,  # vLLM's default is false
    "confidence_head_with_markov": True,
}
EAGLE_OFF = ("sliding_window", "layer_types")  # a window that drafters are not trained with
EAGLE3_OFF = ("use_aux_norm", "bias", *EAGLE_OFF)  # the first is SGLang's other name of fc_norm
MEDUSA_KEYS: dict[str, type] = {
    "hidden_size": int,  # default 4096
    "vocab_size": int,  # default 32001
    "num_heads": int,  # default 5
    "num_hidden_layers": int,  # default 1
    "truncated_vocab_size": int,  # default vocab_size
    "original_lm_head": bool,  # one output matrix for all heads; default: one for each
}
MEDUSA_FIXED = {"model_type": "medusa", "medusa_fc_bias": True}  # default: no biases
DRAFT_MODEL_KEYS: dict[str, type] = {"vocab_size": int}

# --- rules

RANDOM = "would stay random, without a word"
DROPPED = "would be dropped without a word"
REFUSED = "would be refused"


@dataclass(frozen=True, kw_only=True)
class LoaderRules:
    """The rules by which one engine loads the files of one kind of drafter.

    A directory is refused for whatever does not fit; `missing` and `unexpected` tell what would have happened.
    """

    engine: str
    method: str  # what the serving command must name
    architecture: str | None = None  # what config.json must name; None: any causal language model
    tensors: dict[str, str] = field(default_factory=dict)  # none: as config.json (Medusa) or transformers tells
    optional_tensors: dict[str, str] = field(default_factory=dict)
    required: dict[str, type]  # for a key that is not there each engine has a default of its own
    fixed: Mapping[str, object] = field(default_factory=dict)
    off: tuple[str, ...] = ()  # flags that must be false or missing: the engine computes something else with them
    missing: str = RANDOM  # what becomes of a tensor that is not there
    unexpected: str = DROPPED  # what becomes of one that the engine does not know
    dropped: tuple[str, ...] = ()  # unknown names that are dropped without a word, where others are refused
    ignored: tuple[str, ...] = ()  # known names that the engine passes over: only zeros change nothing
    later_layers: dict[str, str] = field(default_factory=dict)  # tensors of each layer behind the first, as layer 0's
    reduced: dict[str, str] = field(default_factory=lambda: TABLES)  # tensors of a reduced draft vocabulary
    in_target: bool = False  # the drafter lies in the target's own files, so that no other model is named
    parallel_drafting: bool = False  # vLLM's setting for drafters that draft all tokens in one pass
