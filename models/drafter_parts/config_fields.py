"""The fields of a drafter's config.json that are read, with their types and limits, whoever wrote it.

The dataclasses are never built: `checked_fields` holds a config against them. Fields that are not named are not read.
"""

from dataclasses import dataclass
from typing import Any, Literal

from draftsmith.models.ranges import Count, Depth, Natural, NonNegative, Positive

Rope = dict[str, str | bool | float | list[float] | None]


@dataclass
class LayoutFields:
    """Fields that tell whose layout a checkpoint has, and what kind of drafter it holds."""

    architectures: list[str]
    model_type: str
    speculators_model_type: str
    medusa_num_heads: Natural  # of FasterDecoding, whose tensors tell it better
    medusa_num_layers: Depth
    draftsmith: dict[str, Any]


@dataclass
class OwnFields:
    """Fields of draftsmith's own entry that are not settings of the family."""

    kind: str
    trained_for: dict[str, str | None]
    trained_length: Count
    draft_vocab_hash: str


@dataclass
class EngineFields:
    """Fields of the engines' layout, from which drafters are built; draft models are transformers' affair."""

    # sizes, which all families have
    hidden_size: Count
    target_hidden_size: Count
    vocab_size: Count
    # the layer of EAGLE's families
    intermediate_size: Count
    num_hidden_layers: Depth
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    hidden_act: Literal["silu"]  # no other is computed
    rms_norm_eps: NonNegative
    max_position_embeddings: Count
    rope_theta: Positive
    rope_scaling: Rope
    rope_parameters: Rope
    # EAGLE-3 and P-EAGLE
    draft_vocab_size: Count
    eagle_aux_hidden_state_layer_ids: list[Natural]
    eagle_config: dict[str, Any]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token_id: Natural
    pard_token: Natural
    # DFlash
    layer_types: list[Literal["full_attention", "sliding_attention"]]
    sliding_window: Count
    is_causal: bool
    block_size: Depth
    dflash_config: dict[str, Any]
    sample_from_anchor: bool
    conv_kernel_size: Depth  # DFlash2
    conv_group_size: Count
    # DSpark
    target_layer_ids: list[Natural]  # outputs of layers, counted from 0
    markov_rank: Count
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    # Medusa
    num_heads: Depth
    truncated_vocab_size: Count
    original_lm_head: bool
    medusa_fc_bias: bool
    # MLP speculators
    emb_dim: Count
    inner_dim: Natural  # 0: as wide as the target
    n_predict: Depth
    tie_weights: bool
    scale_input: bool


@dataclass
class DFlashFields:
    """Fields of the entry `dflash_config` in a DFlash drafter's config.json."""

    mask_token_id: Natural
    target_layer_ids: list[Natural]  # outputs of layers, counted from 0
    block_size: Depth
    causal: bool  # as is_causal
    use_swa: bool
    swa_window_size: Count
    conv_kernel_size: Depth  # DFlash2
    conv_group_size: Count
    projector_type: str  # Domino
    shift_label: bool
    pure_draft_prefix_len: Natural
    gru_hidden_dim: Count
    emb_dim: Count
    input_embedding_scale: float  # of DFlash2 for some targets
    output_multiplier: float
    final_logit_softcapping: float


LAYER_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
)
