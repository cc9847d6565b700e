"""The layouts of other projects: speculators' format, and those that EAGLE's and Medusa's authors load."""

from dataclasses import replace

from draftsmith.models import Checkpoint, Target
from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING
from draftsmith.models.errors import UserError
from draftsmith.models.storage.reading import JsonObject
from draftsmith.recipes.engine_rules.layout_check import default_layers

# fmt: off
SPECULATORS_LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "vocab_size", "max_position_embeddings", "rope_parameters",
)
# fmt: on
SPECULATORS_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
BLOCK_KEYS = (
    *("block_size", "sample_from_anchor"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),  # DSpark
)
EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NOT_SAFEAILAB = (
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "num_aux_hidden_states",
    "draftsmith",
)


def in_project_layout(project: str, files: Checkpoint, target: Target) -> Checkpoint:
    """Return a checkpoint in the layout of a project. Raises `UserError` for what that layout cannot hold."""
    layouts = {
        "speculators": in_speculators_layout,
        "safeailab": in_safeailab_layout,
        "fasterdecoding": in_fasterdecoding_layout,
    }
    return layouts[project](files, target)


def refuse_other_kinds(files: Checkpoint, layout: str, *kinds: str) -> None:
    """Raise `UserError` for a drafter of a kind that a layout does not hold."""
    if files.kind not in kinds:
        raise UserError(f"{layout} has no {files.kind} drafters (it has {', '.join(kinds)}): export for vllm")


def in_speculators_layout(files: Checkpoint, target: Target) -> Checkpoint:
    """Return EAGLE-3, DFlash, DFlash2 or DSpark in the format of vllm-project/speculators 0.9.0."""
    refuse_other_kinds(files, "the speculators format", *SPECULATORS_CLASSES)
    if files.kind == "eagle3":
        own, length = eagle3_entries(files.config), 4
    else:
        own, length = block_entries(files.config), drafted_tokens(files.config)
    config = {
        "architectures": [SPECULATORS_CLASSES[files.kind]],
        "speculators_model_type": files.kind,
        **own,
        **{key: files.config[key] for key in ("draft_vocab_size", "target_hidden_size", "dtype")},
        "speculators_config": {
            "algorithm": files.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": target.name, "architectures": target.config.architectures},
        },
    }
    return replace(files, config=config)


def eagle3_entries(config: JsonObject) -> JsonObject:
    """Return the entries that speculators' format has for EAGLE-3, from the engines' config."""
    return {
        "transformer_layer_config": {key: config[key] for key in SPECULATORS_LAYER_KEYS},
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        **{key: config[key] for key in EAGLE3_FLAGS},  # vLLM takes a missing norm_before_residual for True
        "embed_requires_grad": False,
    }


def drafted_tokens(config: JsonObject) -> int:
    """Return the number of tokens that a block drafts: one less than its rows if the first row predicts nothing."""
    return config["block_size"] if config["sample_from_anchor"] else config["block_size"] - 1


def block_entries(config: JsonObject) -> JsonObject:
    """Return the entries that speculators' format has for DFlash and DSpark, from the engines' config.

    vLLM serves full attention as causal unless `sliding_window_non_causal` is true, which speculators itself does not
    read there. Raises `UserError` where layers differ: vLLM reads that entry for all of them.
    """
    if "is_causal" not in config:
        raise UserError(
            "vLLM reads one kind of attention for all layers of a drafter in speculators' format, and here "
            "drafter.full_layers differ: export it with --engine vllm"
        )
    nested, keys = config["dflash_config"], (*SPECULATORS_LAYER_KEYS, "layer_types", "use_sliding_window")
    return {
        "transformer_layer_config": {**{key: config[key] for key in keys}, "sliding_window": config["sliding_window"]},
        **{key: nested[key] for key in DFLASH2_KEYS if key in nested},
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in nested["target_layer_ids"]],
        "mask_token_id": nested["mask_token_id"],
        "sliding_window_non_causal": not config["is_causal"],
        **{key: config[key] for key in BLOCK_KEYS if key in config},
    }


def in_safeailab_layout(files: Checkpoint, target: Target) -> Checkpoint:
    """Return EAGLE as SafeAILab's own code loads it: without layer ids and `target_hidden_size`."""
    refuse_other_kinds(files, "SafeAILab's layout", "eagle3", "eagle")
    is_eagle3, tensors = files.kind == "eagle3", files.tensors
    if is_eagle3:
        refuse_other_eagle3(files, target)
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    config = {key: value for key, value in files.config.items() if key not in NOT_SAFEAILAB}
    config["architectures"] = ["LlamaForCausalLMEagle3" if is_eagle3 else "LlamaForCausalLM"]
    return replace(files, config=config, tensors=tensors)


def refuse_other_eagle3(files: Checkpoint, target: Target) -> None:
    """Raise `UserError` for an EAGLE-3 drafter that SafeAILab's code would compute otherwise, or not load."""
    ids, reference = files.config["eagle_aux_hidden_state_layer_ids"], default_layers(target.num_layers)
    if ids != reference:
        raise UserError(f"SafeAILab's code reads the layers {reference}, but this drafter was trained on {ids}")
    for flag in EAGLE3_FLAGS:
        if files.config[flag]:
            raise UserError(f"SafeAILab's layout has no {flag}: export for vllm")
    if OWN_EMBEDDING in files.tensors:
        raise UserError("SafeAILab's layout shares the target's embedding: export for vllm")
    if files.config["hidden_size"] != target.hidden_size:
        raise UserError("SafeAILab's code cannot load a drafter of another width than the target's")


def in_fasterdecoding_layout(files: Checkpoint, target: Target) -> Checkpoint:
    """Return Medusa heads as FasterDecoding's own code loads them, which repeats one block in each head."""
    refuse_other_kinds(files, "FasterDecoding's layout", "medusa")
    num_heads, num_layers = files.config["num_heads"], files.config["num_hidden_layers"]
    if files.config["original_lm_head"] or "token_map" in files.tensors:
        raise UserError("FasterDecoding's code has a whole output matrix for each head: export for vllm")
    if num_layers != 1:
        raise UserError(
            f"these heads have {num_layers} blocks each, which FasterDecoding's code would load as one block repeated: "
            "export for vllm"
        )
    tensors = {}
    for head in range(num_heads):
        for part in ("weight", "bias"):
            tensors[f"{head}.0.linear.{part}"] = files.tensors[f"blocks.{head}.layers.0.{part}"]
        tensors[f"{head}.1.weight"] = files.tensors[f"lm_heads.{head}.weight"]
    config = {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": target.name,
        "torch_dtype": files.config["torch_dtype"],
    }
    return replace(files, config=config, tensors=tensors)
