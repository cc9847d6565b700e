"""The rules of transformers' assisted generation, llama.cpp and TensorRT-LLM, as those of loader_rules.py.

engine_table.py says which were run: transformers, and llama.cpp for most kinds; TensorRT-LLM was only read. llama.cpp
loads GGUF files: what its own converter takes of config.json and tensors is the rule here.
"""

from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.recipes.engine_rules.engine_key_names import (
    DFLASH,
    DFLASH2,
    DFLASH2_LAYER,
    DFLASH_FIXED,
    DFLASH_KEYS,
    DFLASH_LAYER,
    DRAFT_MODEL_KEYS,
    DSPARK,
    DSPARK_FIXED,
    DSPARK_KEYS,
    EAGLE3,
    EAGLE3_FIXED,
    EAGLE3_LATER_LAYER,
    EAGLE3_OFF,
    EAGLE_FIXED,
    REFUSED,
    TABLES,
    VLLM_EAGLE3_FIXED,
    VLLM_EAGLE3_KEYS,
    LoaderRules,
)

TRANSFORMERS = "transformers 5.23.0"
LLAMA_CPP = "llama.cpp as in llama-cpp-python 0.3.36"
TENSORRT_LLM = "TensorRT-LLM at 00679c6"

LLAMA_CPP_DFLASH = LoaderRules(
    engine=LLAMA_CPP,
    method="draft-dflash",
    architecture="DFlashDraftModel",
    tensors=DFLASH,
    later_layers=DFLASH_LAYER,
    reduced={},  # its converter reads d2t of EAGLE-3 and DSpark alone
    required={**DFLASH_KEYS, "is_causal": bool},  # of all layers alike
    fixed=DFLASH_FIXED,
    unexpected=REFUSED,
)
OTHER_RULES = {
    ("transformers", "draft_model"): LoaderRules(
        engine=TRANSFORMERS, method="assistant_model", required=DRAFT_MODEL_KEYS
    ),
    ("llama_cpp", "draft_model"): LoaderRules(
        engine=LLAMA_CPP, method="draft-simple", required=DRAFT_MODEL_KEYS, missing=REFUSED, unexpected=REFUSED
    ),
    ("llama_cpp", "eagle3"): LoaderRules(
        engine=LLAMA_CPP,
        method="draft-eagle3",
        architecture="LlamaForCausalLMEagle3",
        tensors=EAGLE3,
        optional_tensors={OWN_EMBEDDING: "V H"},
        required={**VLLM_EAGLE3_KEYS, "norm_before_residual": bool},
        fixed={**EAGLE_FIXED, "num_aux_hidden_states": 3},  # "expected 3 extract layers"
        off=(*EAGLE3_OFF, "fc_norm", "norm_output"),  # EAGLE-3.1: the flags are dropped without a word
        missing=REFUSED,
        unexpected=REFUSED,
    ),
    ("llama_cpp", "dflash"): LLAMA_CPP_DFLASH,
    ("llama_cpp", "dflash2"): LoaderRules(
        engine=LLAMA_CPP,
        method="draft-dflash",
        architecture="DFlash2DraftModel",
        tensors=DFLASH2,
        later_layers=DFLASH2_LAYER,
        reduced={},
        required={**DFLASH_KEYS, "is_causal": bool},
        fixed=DFLASH_FIXED,
        unexpected=REFUSED,
    ),
    ("llama_cpp", "dspark"): LoaderRules(
        engine=LLAMA_CPP,
        method="draft-dspark",
        architecture="Qwen3DSparkModel",
        tensors=DSPARK,
        later_layers=DFLASH_LAYER,
        reduced={**TABLES, "lm_head.weight": EAGLE3["lm_head.weight"]},
        required={**DSPARK_KEYS, "is_causal": bool},
        fixed=DSPARK_FIXED,
        unexpected=REFUSED,
    ),
    ("tensorrt_llm", "draft_model"): LoaderRules(engine=TENSORRT_LLM, method="Draft_Target", required=DRAFT_MODEL_KEYS),
    ("tensorrt_llm", "eagle3"): LoaderRules(
        engine=TENSORRT_LLM,
        method="Eagle",
        architecture="LlamaForCausalLMEagle3",  # with a draft_vocab_size it becomes EAGLE3LlamaForCausalLM
        tensors=EAGLE3,
        later_layers=EAGLE3_LATER_LAYER,
        required=VLLM_EAGLE3_KEYS,
        fixed={**VLLM_EAGLE3_FIXED, "norm_before_residual": EAGLE3_FIXED["norm_before_residual"]},
        off=(*EAGLE3_OFF, "norm_before_fc"),  # looked for in eagle_config, where it is not written
    ),
}
OTHER_UNSERVED = {
    ("transformers", "mtp"): "transformers' use_mtp, in 5.23, was not compared with draftsmith's MTP heads",
    ("transformers", "dflash"): "transformers 5.23 drafts in blocks with one model's own class only",
    ("llama_cpp", "mtp"): "llama.cpp's rules for MTP heads (draft-mtp) are not written down here",
    ("tensorrt_llm", "medusa"): (
        "TensorRT-LLM's PyTorch backend refuses Medusa heads, and its older engines are built from FasterDecoding's "
        "layout (--engine fasterdecoding)"
    ),
}
WHY_NO_OTHERS = {
    "transformers": "transformers' assisted generation takes draft models and lookups only",
    "llama_cpp": "llama.cpp drafts with draft models, EAGLE-3, DFlash, DSpark, MTP heads and n-grams only",
    "tensorrt_llm": "of the kinds here, TensorRT-LLM's rules are written down for draft models and EAGLE-3 only",
}
