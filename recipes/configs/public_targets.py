"""Recipes for public targets, in three sizes. The targets' shapes are written out, so that nothing needs a download.

| size | samples | epochs | what for |
|---|---|---|---|
| smoke | 2,000 | 1 | to see that everything runs, in minutes |
| usable | 70,000 | 3 | the size of ShareGPT: a drafter that pays on traffic like its training text |
| production | 530,000 | 3 | the size that EAGLE-3 was published with (arXiv 2503.01840, section 4) |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.models.drafter_configs import LayersLikeTarget
from draftsmith.models.storage.reading import JsonObject
from draftsmith.train.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EPOCHS = 3
SIZES = {"smoke": (2_000, 1), "usable": (70_000, EPOCHS), "production": (530_000, EPOCHS)}  # samples, epochs
MICRO_BATCH = 8192  # tokens: what a device computes at a time, in gigabytes still, not tens of them
# The types below whose heads for further tokens (MTP) models/mtp_heads/mtp_layouts.py knows, by the recipe for them:
# targets that bring a head along, and others.
TYPES_WITH_MTP = {"mtp": ("qwen3_5_text", "qwen3_5_moe_text"), "new_mtp": ("llama", "qwen3")}
TOKENS_PER_SAMPLE = 800  # of a conversation of the ShareGPT kind, prompt and answer


@dataclass(frozen=True)
class PublicTarget:
    name: str  # on the Hub
    model_type: str  # as transformers names its architecture
    shape: JsonObject  # fields of its config

    @property
    def config(self) -> "PretrainedConfig":
        from transformers import AutoConfig  # here, so that recipes are listed without waiting for it

        return AutoConfig.for_model(self.model_type, **self.shape)


QWEN3: dict[str, int] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "eos_token_id": 151645,
}


def _llama(name: str, hidden: int, layers: int, heads: int, inner: int) -> PublicTarget:
    shape = {
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "eos_token_id": 128001,
        "tie_word_embeddings": False,
    }
    return PublicTarget(name, "llama", shape)


def _qwen3(name: str, hidden: int, layers: int, heads: int, inner: int, tied: bool = False) -> PublicTarget:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }
    return PublicTarget(name, "qwen3", QWEN3 | shape)


QWEN3_5: dict[str, int] = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "eos_token_id": 248046,
    "tie_word_embeddings": False,
}
NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_LAYERS = {"M": "mamba", "E": "moe", "*": "attention"}

PUBLIC_TARGETS: dict[str, PublicTarget] = {
    "llama_3_1_8b": _llama("meta-llama/Llama-3.1-8B-Instruct", 4096, 32, 32, 14336),
    "llama_3_3_70b": _llama("meta-llama/Llama-3.3-70B-Instruct", 8192, 80, 64, 28672),
    "qwen3_0_6b": _qwen3("Qwen/Qwen3-0.6B", 1024, 28, 16, 3072, tied=True),
    "qwen3_8b": _qwen3("Qwen/Qwen3-8B", 4096, 36, 32, 12288),
    "qwen3_32b": _qwen3("Qwen/Qwen3-32B", 5120, 64, 64, 25600),
    "qwen3_30b_a3b": PublicTarget(
        "Qwen/Qwen3-30B-A3B",
        "qwen3_moe",
        {
            **QWEN3,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
    ),
    "gemma_3_1b": PublicTarget(
        "google/gemma-3-1b-it",
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "eos_token_id": 1,
        },
    ),
    "gpt_oss_20b": PublicTarget(
        "openai/gpt-oss-20b",
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "eos_token_id": 200002,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_6_27b": PublicTarget(
        "Qwen/Qwen3.6-27B",
        "qwen3_5_text",
        {
            **QWEN3_5,
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "intermediate_size": 17408,
            "linear_num_value_heads": 48,
        },
    ),
    "qwen3_6_35b_a3b": PublicTarget(
        "Qwen/Qwen3.6-35B-A3B",
        "qwen3_5_moe_text",
        {
            **QWEN3_5,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "linear_num_value_heads": 32,
        },
    ),
    "gemma_4_31b": PublicTarget(
        "google/gemma-4-31B-it",
        "gemma4_text",
        {
            "vocab_size": 262144,
            "hidden_size": 5376,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "intermediate_size": 21504,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "max_position_embeddings": 262144,
            "eos_token_id": 1,
        },
    ),
    "nemotron_3_nano": PublicTarget(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nemotron_h",
        {
            "vocab_size": 131072,
            "hidden_size": 2688,
            "layers_block_type": [NEMOTRON_LAYERS[letter] for letter in NEMOTRON_3_NANO],
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "max_position_embeddings": 262144,
            "eos_token_id": 11,
        },
    ),
    "glm_4_7_flash": PublicTarget(
        "zai-org/GLM-4.7-Flash",
        "glm4_moe_lite",
        {
            "vocab_size": 154880,
            "hidden_size": 2048,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "max_position_embeddings": 202752,
            "eos_token_id": 154820,
        },
    ),
}


def public_target(name: str) -> PublicTarget | None:
    """Return a target of the list by its key or its name on the Hub; None for others, and for a folder."""
    if Path(name).is_dir():
        return None
    return next((public for key, public in PUBLIC_TARGETS.items() if name in (key, public.name)), None)


def target_config(name: str) -> tuple["PretrainedConfig", str]:
    """Return the config of a target and its name on the Hub; that of a target of the list needs no download.

    `name`: one of `PUBLIC_TARGETS` or its name on the Hub, or whatever `read_config` takes. Raises `UserError`.
    """
    if public := public_target(name):
        return public.config, public.name
    from draftsmith.models.target.target_files import read_config

    return read_config(name), name


def for_target(general: Callable[[], TrainConfig], target: str, size: str) -> TrainConfig:
    """Return a general recipe for a public target; the samples and the folder are left to the user.

    The dense part of a sparse target sets the drafter's width: layers as wide as four times the hidden size. A head
    for further tokens (MTP) has experts as the target has.
    """
    public, config = PUBLIC_TARGETS[target], general()
    num_samples, epochs = SIZES[size]
    config.target = public.name
    if "num_experts_per_tok" in public.shape and isinstance(config.drafter, LayersLikeTarget):
        config.drafter.intermediate_size = 4 * public.shape["hidden_size"]
    config.data.tokens_per_micro_batch = min(MICRO_BATCH, config.data.tokens_per_micro_batch)
    config.run.steps = num_samples * epochs // config.data.batch_size
    config.run.checkpoint_every = max(1, config.run.steps // 10)
    return config


def target_recipes(*generals: Callable[[], TrainConfig]) -> dict[str, Callable[[], TrainConfig]]:
    """Return recipes for the public targets by name, KIND_TARGET_SIZE, made of general ones, named by their kind.

    For a head for further tokens (MTP) the target has to be of a type whose heads are known.
    """
    return {
        f"{general.__name__}_{name}_{size}": partial(for_target, general, name, size)
        for general in generals
        for name, public in PUBLIC_TARGETS.items()
        if public.model_type in TYPES_WITH_MTP.get(general.__name__, [public.model_type])
        for size in SIZES
    }
