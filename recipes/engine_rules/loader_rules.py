"""The rules by which vLLM, SGLang and the engines of other_engines.py load a drafter's files.

Read in the released sources of vLLM 0.32.0 and SGLang 0.5.23; layout_check.py holds a directory against them. vLLM
0.33.0 has the same loaders of EAGLE-1, EAGLE-3, DFlash2 and DSpark to the byte, reads DFlash's plain weights alike,
and has no Medusa heads. `pytest -m engine` holds vLLM's rules for EAGLE-3 against the engine, those of 0.33.0 and of
SGLang against their sources. Engines are lenient where it hurts: of an EAGLE-3 drafter vLLM leaves a missing tensor at
random and drops an unknown bias, SGLang drops everything unknown, neither with a word, and drafts are then never
accepted.
"""

from dataclasses import replace
from pathlib import Path

from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.errors import UserError
from draftsmith.recipes.engine_rules.engine_key_names import (
    DFLASH,
    DFLASH2,
    DFLASH2_LAYER,
    DFLASH_FIXED,
    DFLASH_KEYS,
    DFLASH_LAYER,
    DOMINO,
    DRAFT_MODEL_KEYS,
    DSPARK,
    DSPARK_FIXED,
    DSPARK_KEYS,
    EAGLE,
    EAGLE3,
    EAGLE3_FIXED,
    EAGLE3_KEYS,
    EAGLE3_LATER_LAYER,
    EAGLE3_OFF,
    EAGLE_FIXED,
    EAGLE_KEYS,
    EAGLE_OFF,
    MEDUSA_FIXED,
    MEDUSA_KEYS,
    P_EAGLE,
    P_EAGLE_FIXED,
    P_EAGLE_KEYS,
    REFUSED,
    TABLES,
    VLLM_EAGLE3_FIXED,
    VLLM_EAGLE3_KEYS,
    LoaderRules,
)
from draftsmith.recipes.engine_rules.other_engines import OTHER_RULES, OTHER_UNSERVED, WHY_NO_OTHERS

VLLM, SGLANG = "vLLM 0.32.0", "SGLang 0.5.23"  # another version may load otherwise: read it, then change the rules

ONE_LAYOUT = ("vllm", "sglang")  # one directory may serve both

TRAINING_FREE = {  # by kind: the engines with a drafter like it
    "ngram": ("vllm", "sglang", "transformers", "llama_cpp", "tensorrt_llm"),
    "suffix": ("vllm",),
}

VLLM_EAGLE3 = LoaderRules(
    engine=VLLM,
    method="eagle3",
    architecture="LlamaForCausalLMEagle3",
    tensors=EAGLE3,
    optional_tensors={OWN_EMBEDDING: "V H"},
    later_layers=EAGLE3_LATER_LAYER,
    required=VLLM_EAGLE3_KEYS,
    fixed=VLLM_EAGLE3_FIXED,
    off=EAGLE3_OFF,
    unexpected=REFUSED,
    dropped=("*.bias",),
)
LOADER_RULES = {
    ("vllm", "eagle"): LoaderRules(
        engine=VLLM,
        method="eagle",
        architecture="LlamaForCausalLM",
        tensors=EAGLE,
        required=EAGLE_KEYS,
        fixed=EAGLE_FIXED,
        off=EAGLE_OFF,
        unexpected=REFUSED,
        dropped=("*.bias",),
        ignored=("fc.bias",),
    ),
    ("vllm", "eagle3"): VLLM_EAGLE3,
    ("vllm", "p_eagle"): replace(  # PEagleDraftModel and PeagleLlamaForCausalLM are other names of EAGLE-3's class
        VLLM_EAGLE3,
        tensors=P_EAGLE,
        optional_tensors={},
        required=P_EAGLE_KEYS,
        fixed=P_EAGLE_FIXED,
        parallel_drafting=True,
    ),
    ("vllm", "dflash"): LoaderRules(
        engine=VLLM,
        method="dflash",
        architecture="DFlashDraftModel",
        tensors=DFLASH,
        later_layers=DFLASH_LAYER,
        reduced={**TABLES, "lm_head.weight": EAGLE3["lm_head.weight"]},
        required=DFLASH_KEYS,
        fixed=DFLASH_FIXED,
        unexpected=REFUSED,
    ),
    ("vllm", "dflash2"): LoaderRules(
        engine=VLLM,
        method="dflash",
        architecture="DFlash2DraftModel",
        tensors=DFLASH2,
        later_layers=DFLASH2_LAYER,
        reduced={},
        required=DFLASH_KEYS,
        fixed=DFLASH_FIXED,
        unexpected=REFUSED,
    ),
    ("vllm", "dspark"): LoaderRules(
        engine=VLLM,
        method="dspark",
        architecture="Qwen3DSparkModel",
        tensors=DSPARK,
        later_layers=DFLASH_LAYER,
        reduced={**TABLES, "lm_head.weight": EAGLE3["lm_head.weight"]},
        required=DSPARK_KEYS,
        fixed=DSPARK_FIXED,
        unexpected=REFUSED,
    ),
    ("vllm", "mtp"): LoaderRules(engine=VLLM, method="mtp", required={}, in_target=True),
    ("vllm", "medusa"): LoaderRules(
        engine=VLLM,
        method="medusa",
        architecture="MedusaModel",
        required=MEDUSA_KEYS,
        fixed=MEDUSA_FIXED,
        missing=REFUSED,
    ),
    ("vllm", "draft_model"): LoaderRules(
        engine=VLLM, method="draft_model", required=DRAFT_MODEL_KEYS, missing=REFUSED, unexpected=REFUSED
    ),
    ("sglang", "eagle"): LoaderRules(
        engine=SGLANG,
        method="EAGLE",
        architecture="LlamaForCausalLMEagle",
        tensors=EAGLE,
        required=EAGLE_KEYS,
        fixed=EAGLE_FIXED,
        off=EAGLE_OFF,
    ),
    ("sglang", "eagle3"): LoaderRules(
        engine=SGLANG,
        method="EAGLE3",
        architecture="LlamaForCausalLMEagle3",
        tensors=EAGLE3,
        required=EAGLE3_KEYS,
        fixed=EAGLE3_FIXED,
        off=EAGLE3_OFF,
    ),
    ("sglang", "dflash"): LoaderRules(
        engine=SGLANG,
        method="DFLASH",
        architecture="DFlashDraftModel",
        tensors=DFLASH,
        later_layers=DFLASH_LAYER,
        reduced={},  # it would take drafts for ids of the target
        required=DFLASH_KEYS,
        fixed=DFLASH_FIXED,
    ),
    ("sglang", "dspark"): LoaderRules(
        engine=SGLANG,
        method="DSPARK",
        architecture="Qwen3DSparkModel",
        tensors=DSPARK,
        later_layers=DFLASH_LAYER,
        reduced={},  # it has the target's head alone
        required=DSPARK_KEYS,
        fixed=DSPARK_FIXED,
    ),
    ("sglang", "domino"): LoaderRules(  # it drafts with bf16 weights alone, and corrects the 2048 likeliest tokens
        engine=SGLANG,
        method="DFLASH",
        architecture="DFlashDraftModel",
        tensors=DOMINO,
        later_layers=DFLASH_LAYER,
        reduced={},
        required=DFLASH_KEYS,
        fixed={key: value for key, value in DFLASH_FIXED.items() if key != "sample_from_anchor"},
    ),
    ("sglang", "draft_model"): LoaderRules(engine=SGLANG, method="STANDALONE", required=DRAFT_MODEL_KEYS),
    **OTHER_RULES,
}
UNSERVED = {
    ("sglang", "mtp"): "SGLang's rules for MTP heads (NEXTN) are not written down here",
    ("vllm", "hydra"): "no engine serves Hydra heads",
    ("sglang", "hydra"): "no engine serves Hydra heads",
    ("vllm", "mlp_speculator"): "vLLM reads MLP speculators up to 0.32.0, but has run none since its V1 engine",
    ("sglang", "mlp_speculator"): "SGLang serves no MLP speculators",
    ("sglang", "p_eagle"): "SGLang serves no P-EAGLE drafters",
    ("vllm", "domino"): "vLLM serves no Domino drafters",
    ("sglang", "dflash2"): "draftsmith has not read how SGLang loads DFlash2",
    ("sglang", "medusa"): "SGLang serves no medusa drafters: it has EAGLE, EAGLE3, STANDALONE and NGRAM",
    **OTHER_UNSERVED,
}
SHIFTED_ONLY_FROM_1 = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # targets whose nested ids SGLang counts so


def is_served(kind: str, engine: str) -> bool:
    """Return whether an engine serves drafters of a kind."""
    return (engine, kind) in LOADER_RULES or engine in TRAINING_FREE.get(kind, ())


def rules_for(engine: str, kind: str) -> LoaderRules:
    """Return the rules of an engine for a kind of drafter. Raises `UserError` with the reason where it serves none."""
    rules = LOADER_RULES.get((engine, kind))
    if rules is None:
        raise UserError(f"{why_unserved(engine, kind)}; export for another engine, or train another kind")
    return rules


def why_unserved(engine: str, kind: str) -> str:
    """Return why an engine serves no drafters of a kind."""
    return UNSERVED.get((engine, kind)) or WHY_NO_OTHERS.get(engine, f"{engine} serves no {kind} drafters")


# --- names of directories and on the Hub


def guessed_method(path: str) -> str | None:
    """Return the method that vLLM reads out of a drafter's path; None where it looks into config.json."""
    words = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}  # in vLLM's order
    return next((method for word, method in words.items() if word in path.lower()), None)


def check_name(method: str, option: str, name: str) -> None:
    """Refuse a whole path or a name on the Hub, given by `option`, from which vLLM guesses another method.

    For eagle and eagle3 a method that is given counts, so that only the last part of the name is held against it, for
    those who leave it out. For medusa and draft_model the guess wins over the method that was given.
    """
    guessed = guessed_method(Path(name).name if method in ("eagle", "eagle3") else name)
    if guessed not in (None, method):
        raise UserError(f"{option} {name}: vLLM would take the drafter for {guessed!r} by this name: give another one")
