"""The settings of every family of drafters: what a recipe or a user can set, and `config.yaml` and checkpoints keep.

Nothing slow is imported here, so that a mistake in a setting is reported at once.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.ranges import (
    AboveZero,
    BelowOne,
    Count,
    Depth,
    Name,
    Natural,
    NonNegative,
    Positive,
    Share,
    checked_fields,
)

FeatureNorm = Literal["none", "each", "all"]
Divergence = Literal[
    "cross_entropy",
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "lk_hybrid",
    "cross_entropy_and_l1",
]

C = TypeVar("C", bound="DrafterConfig")


@dataclass
class DrafterConfig:
    """Settings that all families have; a family adds its own fields in a subclass.

    The limits in the types of the fields hold wherever a config is made. Raises `UserError` beyond them.
    """

    kind: str
    fixed_fields: ClassVar[tuple[str, ...]] = ()  # decided by a checkpoint's tensors; the others by training

    def __post_init__(self) -> None:
        checked_fields(type(self), vars(self), "drafter.", strict=True)

    @classmethod
    def of_checkpoint(cls: type[C], config: dict[str, Any], **sizes: Any) -> C:
        """Return the config of a drafter from its config.json, with the sizes that the layout names by other keys.

        Raises `UserError` for an unknown field, which a newer version has written.
        """
        own = config.get("draftsmith", {})
        if unknown := sorted(own.keys() - {entry.name for entry in fields(cls)}):
            raise UserError(
                f"this checkpoint's config.json has the field {unknown[0]!r}, which this version of draftsmith does "
                "not know: update draftsmith to the version that wrote it"
            )
        return cls(**{**own, **sizes})

    @property
    def starts_from_layers(self) -> bool:
        """Whether a new drafter is made of the target's layers, so that stored features are not enough to start it."""
        return False

    @property
    def changes_target(self) -> bool:
        """Whether the target is trained along, so that a checkpoint holds a target of its own in `target/`."""
        return False

    @property
    def starts_from_files(self) -> bool:
        """Whether a new drafter is read from files, which decide on its size."""
        return False

    def for_overfitting(self) -> "DrafterConfig":
        """Return the config without what only helps on text that the drafter has not seen."""
        return self


@dataclass
class ReducedVocabulary(DrafterConfig):
    """Fields of the families that can draft from a part of the target's vocabulary.

    At most one of the two is set; without either it is the whole vocabulary.
    """

    fixed_fields: ClassVar[tuple[str, ...]] = ("draft_vocab_size", "draft_vocab_coverage")
    draft_vocab_size: Count | None = None  # so many of the tokens that the target writes most often
    draft_vocab_coverage: Annotated[Positive, Field(lt=1)] | None = None  # or: as many as make up this share


@dataclass
class LayersLikeTarget(DrafterConfig):
    """Fields of the families whose decoder layers are as wide as the target's."""

    intermediate_size: Count | None = None  # None: the target's
    starting_layers: Literal["random", "target"] = "random"  # of a new drafter: random, or copies of the target's last

    @property
    def num_starting_layers(self) -> int:
        """Number of layers that start as the setting says."""
        return 1


def with_random_layers(config: DrafterConfig) -> DrafterConfig:
    """Return the config of a drafter that is built for its shape alone: its weights need not be the target's."""
    return replace(config, starting_layers="random") if isinstance(config, LayersLikeTarget) else config


@dataclass
class EagleConfig(LayersLikeTarget):
    fixed_fields = ("intermediate_size", "bias")
    kind: str = "eagle"
    bias: bool = False  # of `fc`, as most public EAGLE-1 heads have one; of SGLang and SafeAILab's code, not of vLLM's
    unroll_steps: Depth = 3  # trained on its own guesses too, as HASS (arXiv 2408.15766); 1: as in the paper
    step_decay: Share = 0.8  # weight of unrolled step k is step_decay ** k
    regression_weight: NonNegative = 1.0  # of the smooth L1 distance between guess and feature, mean over H
    divergence_weight: NonNegative = 0.1
    divergence: Divergence = "forward_kl"
    noise: NonNegative = 0.1  # features in training get uniform noise of at most this

    def for_overfitting(self) -> "EagleConfig":
        """Return the config without noise, and with more weight on tokens: by features alone it would take long."""
        return replace(self, noise=0.0, divergence_weight=1.0)


@dataclass
class Eagle3Config(ReducedVocabulary, LayersLikeTarget):
    fixed_fields = (
        *ReducedVocabulary.fixed_fields,
        "layer_ids",
        "intermediate_size",
        "num_layers",
        "feature_norm",
        "norm_before_residual",
        "norm_output",
    )
    kind: str = "eagle3"
    layer_ids: list[Natural] | None = None  # after-N-layers ids to read; None: 2, L // 2, L - 3
    feature_norm: FeatureNorm = "none"  # before `fc`, of each layer's states (EAGLE-3.1) or of all as one
    norm_output: bool = False  # drafting goes on from the normed output (EAGLE-3.1)
    norm_before_residual: bool = False  # the layer's residual is the normed feature; of vLLM's engines, not of SGLang's
    num_layers: Depth = 1  # all but the first are Llama's; more than one is of vLLM, not of SGLang
    unroll_steps: Depth = 4  # length of the training-time test
    unroll_warmup: Share = 0.0  # of training, in which the unroll grows from one step to all
    step_decay: Share = 0.8  # weight of unrolled step k is step_decay ** k
    divergence: Divergence = "forward_kl"
    kl_share: BelowOne = 0.0  # share of training with forward_kl, before `divergence`
    detach: bool = False  # no gradient from one unrolled step into the one before
    recompute: bool = False  # unrolled steps are computed again in the backward pass: less memory, more time

    @property
    def num_starting_layers(self) -> int:
        return self.num_layers

    def for_overfitting(self) -> "Eagle3Config":
        """Return the config without a warm-up of the unroll, which would not end."""
        return replace(self, unroll_warmup=0.0)


@dataclass
class MtpConfig(DrafterConfig):
    fixed_fields = ("starting_layers",)
    kind: str = "mtp"
    # Of a new drafter: the target's own head, or a new head with a random layer or a copy of the target's last one.
    # None: the target's own head where it has one, else a new head with a random layer.
    starting_layers: Literal["native", "random", "target"] | None = None
    unroll_steps: Depth = 3  # tokens in a row that the one layer is trained to draft
    step_decay: Share = 0.6  # weight of unrolled step k is step_decay ** k (FastMTP, arXiv 2509.18362)
    divergence: Divergence = "forward_kl"


@dataclass
class PEagleConfig(ReducedVocabulary, LayersLikeTarget):
    fixed_fields = (
        *ReducedVocabulary.fixed_fields,
        "layer_ids",
        "intermediate_size",
        "feature_norm",
        "num_layers",
        "mask_token_id",
    )
    kind: str = "p_eagle"
    layer_ids: list[Natural] | None = None  # after-N-layers ids to read; None: 2, L // 2, L - 3
    feature_norm: FeatureNorm = "none"  # before `fc`, of each layer's states or of all as one
    num_layers: Depth = 4
    num_depths: Annotated[Depth, Field(ge=2)] = 8  # K, tokens of the longest draft
    mask_token_id: Natural | None = None  # whose embedding mask slots read; None: the end of text
    keep_ratio: AboveZero = 0.7  # share keep_ratio ** d of slots trains depth d
    keep_least: AboveZero = 0.2  # smallest such share
    depth_decay: Share = 0.8  # weight of depth d is depth_decay ** d, whatever share of it is trained
    divergence: Divergence = "forward_kl"

    @property
    def num_starting_layers(self) -> int:
        return self.num_layers


@dataclass
class DFlashConfig(ReducedVocabulary, LayersLikeTarget):
    fixed_fields = (
        *ReducedVocabulary.fixed_fields,
        *("layer_ids", "intermediate_size", "num_layers", "block_size", "layout", "sliding_window"),
        *("full_layers", "mask_token_id", "key_norm"),
    )
    kind: str = "dflash"
    layer_ids: list[Natural] | None = None  # after-N-layers ids to read; None: one a layer, spread evenly
    num_layers: Depth = 5
    block_size: Annotated[Depth, Field(ge=2)] = 8  # rows, of which the first reads the newest token
    layout: Literal["fill_in", "next_token"] = "fill_in"  # a row predicts the token at its place, or the one behind it
    sliding_window: Count | None = None  # tokens that each row sees, up to itself; None: all before it, and its block
    full_layers: list[Natural] = field(default_factory=list)  # of the drafter, from 0 on, that have no such window
    mask_token_id: Natural | None = None  # whose embedding the other rows read; None: the end of text
    key_norm: bool = False  # norms of keys have weights, which vLLM's CPU build mixes up between layers
    anchor_share: AboveZero = 0.5  # of the slots whose blocks a step trains
    position_weights: Literal["decay", "d_pace"] = "decay"  # of depths in the loss: fixed, or by the drafter's chances
    decay_length: Positive | None = None  # decay gives depth i exp(-i / decay_length); None: 4, for blocks of 8
    divergence: Divergence = "forward_kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.position_weights != "decay" and self.decay_length is not None:
            raise UserError(
                "drafter.decay_length is of position_weights=decay: set it to null, or position_weights to decay"
            )
        if self.full_layers and self.sliding_window is None:
            raise UserError(
                "drafter.full_layers are those without a window: give drafter.sliding_window, or leave it out"
            )
        if any(layer >= self.num_layers for layer in self.full_layers) or len({*self.full_layers}) == self.num_layers:
            raise UserError(
                f"drafter.full_layers {self.full_layers}: give some of the layers 0 to {self.num_layers - 1}, not all"
            )

    @property
    def num_starting_layers(self) -> int:
        return self.num_layers


@dataclass
class DFlash2Config(DFlashConfig):
    fixed_fields = (*DFlashConfig.fixed_fields, "conv_kernel_size", "conv_group_size")
    kind: str = "dflash2"
    conv_kernel_size: Annotated[Depth, Field(ge=2)] = 2  # rows that a convolution mixes: each, and those before it
    conv_group_size: Count = 16  # channels that share a part of their kernel; must divide the target's width

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("drafter.block_size", self.block_size, self.conv_kernel_size)


@dataclass
class DominoConfig(DFlashConfig):
    fixed_fields = (*DFlashConfig.fixed_fields, "memory_size", "code_size")
    kind: str = "domino"
    layout: Literal["fill_in", "next_token"] = "next_token"  # in either a block drafts a token less than it has rows
    memory_size: Count = 1024  # of the recurrent unit that reads the tokens of a block
    code_size: Count = 256  # rank of the correction
    base_share: Share = 1.0  # of the loss that is of logits without correction, at first; it falls to 0 by the end


@dataclass
class DSparkConfig(DFlashConfig):
    fixed_fields = (*DFlashConfig.fixed_fields, "markov_rank")
    kind: str = "dspark"
    layout: Literal["fill_in", "next_token"] = "next_token"
    markov_rank: Count = 256  # of the matrix by which a token shifts the logits of the one behind it
    divergence: Divergence = "cross_entropy_and_l1"
    confidence_weight: NonNegative = 1.0  # of the confidence head's cross-entropy in the loss


@dataclass
class MedusaConfig(ReducedVocabulary):
    fixed_fields = (*ReducedVocabulary.fixed_fields, "num_heads", "num_layers", "output")
    kind: str = "medusa"
    num_heads: Depth = 4
    num_layers: Depth = 1  # residual blocks a head
    output: Literal["own", "shared", "target"] = "own"  # a matrix for each head, one for all, or the target's, frozen
    head_decay: Share = 0.8  # weight of head i is head_decay ** i
    divergence: Divergence = "forward_kl"
    adapt_target: Literal["no", "low_rank", "full"] = "no"  # Medusa-2: train the target along, which changes it
    adapter_rank: Count = 32  # of low_rank
    adapter_alpha: NonNegative = 16.0  # of low_rank
    distillation_weight: NonNegative = 5.0  # of what keeps a changed target near the original one

    @property
    def changes_target(self) -> bool:
        return self.adapt_target != "no"


@dataclass
class HydraConfig(DrafterConfig):
    fixed_fields = ("num_heads", "num_layers", "prefix_layer")
    kind: str = "hydra"
    num_heads: Depth = 4
    num_layers: Depth = 1  # residual blocks a head; Hydra++ has 4
    prefix_layer: bool = False  # heads read what a decoder layer makes of the target's states of the text, as Hydra++'s
    head_decay: Share = 0.8  # weight of head i is head_decay ** i
    divergence: Divergence = "forward_kl"


@dataclass
class MLPSpeculatorConfig(DrafterConfig):
    fixed_fields = ("num_heads", "inner_size", "tie_weights", "scale_input")
    kind: str = "mlp_speculator"
    num_heads: Depth = 4  # stages
    inner_size: Count | None = None  # width of the state; None: the target's hidden size
    tie_weights: bool = False  # one embedding, projection (but for the first stage's), norm and head for all stages
    scale_input: bool = False  # norm of the target's hidden state, without weights
    head_decay: Share = 1.0  # weight of stage i is head_decay ** i
    divergence: Divergence = "forward_kl"


@dataclass
class DraftModelConfig(DrafterConfig):
    fixed_fields = ("model", "num_layers", "hidden_size")
    kind: str = "draft_model"
    model: Name | None = None  # Hub name or directory of a model to start from; None: parts of the target
    num_layers: Depth | None = None  # evenly spaced layers of the target to start from; None: 2
    hidden_size: Count | None = None  # of a narrower model, whose layers start at random; None: the target's
    divergence: Divergence = "forward_kl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and (self.num_layers, self.hidden_size) != (None, None):
            raise UserError(
                "drafter.model brings its own num_layers and hidden_size: leave them out, or leave out model"
            )

    @property
    def starts_from_files(self) -> bool:
        return self.model is not None

    @property
    def starts_from_layers(self) -> bool:
        return self.model is None


@dataclass
class NgramConfig(DrafterConfig):
    kind: str = "ngram"
    longest: Count = 4  # tokens of the suffix that is looked up; shorter ones are tried down to `shortest`
    shortest: Count = 2
    occurrence: Literal["latest", "earliest"] = "latest"  # which copy is continued; vLLM takes the earliest


@dataclass
class SuffixConfig(DrafterConfig):
    kind: str = "suffix"
    longest: Count = 8  # tokens of the suffix that is looked up; longer matches count as so long
    shortest: Count = 1  # tokens that have to match for a draft
    history: Natural = 65_536  # tokens of finished texts that are kept, the oldest leave first; 0: this text alone
    tokens_per_match: Positive = 2.0  # drafted tokens for each token that matched
    copies: Count = 32  # latest ones of the longest match that vote on what follows
    least_share: Share = 0.1  # of these copies that a draft has to follow


@dataclass
class LookaheadConfig(DrafterConfig):
    kind: str = "lookahead"
    window: Depth = 7  # places guessed ahead
    candidates: Depth = 7  # n-grams of the pool that a round verifies at most
    pool: Count = 512  # n-grams that a text keeps, the oldest leave first

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("drafter.pool", self.pool, max(self.window, self.candidates))


@dataclass
class NoneConfig(DrafterConfig):
    kind: str = "none"


@dataclass
class CascadeConfig(DrafterConfig):
    kind: str = "cascade"
    shortest: Count = 3  # matched tokens from which on a row takes what was looked up


@dataclass
class DraftModelCascadeConfig(DrafterConfig):
    kind: str = "draft_model_cascade"


DRAFTER_CONFIGS: dict[str, type[DrafterConfig]] = {
    config_class.kind: config_class
    for config_class in (
        EagleConfig,
        Eagle3Config,
        PEagleConfig,
        DFlashConfig,
        DFlash2Config,
        DSparkConfig,
        DominoConfig,
        MtpConfig,
        MedusaConfig,
        HydraConfig,
        MLPSpeculatorConfig,
        DraftModelConfig,
        NgramConfig,
        SuffixConfig,
        LookaheadConfig,
        NoneConfig,
    )
}
