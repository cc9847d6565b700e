"""EAGLE-3 (arXiv 2503.01840): a decoder layer, or several, that continue the target's own features.

A slot t holds the target's features g_t (three layers' states, fused by `fc`) and the embedding of x_{t+1}, and
predicts x_{t+2}. Drafting goes on from the last layer's own output in place of features; training unrolls that
recurrence ("training-time test", section 3.2) with the true tokens fed in. EAGLE-3.1 norms each of the three layers'
states before `fc`, since their sizes differ widely. It goes on from the normed output, so that the output does not grow
from step to step.

Shapes: B rows, T slots, H hidden width, Ht the target's, A layers read, N heads, D head width, V target vocabulary,
Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import Eagle3Config, FeatureNorm
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import OWN_EMBEDDING, check_same_shape, loaded
from draftsmith.models.drafter_parts.decoder_layer import (
    DecoderLayer,
    DeeperLayer,
    engine_layer_config,
    layer_config_for,
    layer_config_of,
    pass_on_last,
    randomize,
    start_as_target,
)
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, with_no_token
from draftsmith.models.drafter_parts.vocabulary import add_map, copy_head, fit_map, mapped_ids, too_large
from draftsmith.models.eagle_parts.eagle_layer import (
    EagleCache,
    UnrolledLayer,
    Unrolling,
    decoding_norm,
    drafting_slots,
)
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import RMSNorm, as_computed
from draftsmith.models.losses.chain_loss import ChainLoss, Depth
from draftsmith.models.losses.divergences import Divergence
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features, Target, check_layer_ids, spread_layer_ids


class Layer(DecoderLayer):
    """The first decoder layer, which reads embedding and feature side by side.

    Its residual is the feature without a norm, or with `norm_before_residual` the feature behind `hidden_norm`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def project(
        self, embedded: Tensor, hidden: Tensor, rotary: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        return self.self_attn.project(x, rotary, positions)


class Eagle3(Drafter):
    kind = "eagle3"
    config_class = Eagle3Config
    attends_to_text = True
    can_branch = True
    can_embed = True
    divides_texts = True
    d2t: Tensor  # [Vd] int64, target id - draft id; only with a reduced vocabulary, for engines reject it otherwise
    t2d: Tensor  # [V] bool, in the draft vocabulary?

    def __init__(self, config: Eagle3Config, layer_config: LlamaConfig, target: Target, embeds: bool = False) -> None:
        """`embeds`: the drafter has an embedding of its own, in place of the target's."""
        super().__init__(config)
        self.layer_config, self.target, self.training_depth = layer_config, target, config.unroll_steps
        self.layer_ids = check_layer_ids(config.layer_ids or spread_layer_ids(target.num_layers), target)
        width, vocab = layer_config.hidden_size, config.draft_vocab_size or target.vocab_size
        self.config = replace(
            config,
            layer_ids=list(self.layer_ids),
            draft_vocab_size=vocab,
            intermediate_size=layer_config.intermediate_size,
        )
        if vocab > target.vocab_size:
            raise UserError(too_large(vocab, target.vocab_size))
        self.embed_tokens: nn.Embedding | None = None  # frozen, of checkpoints that bring their own
        if embeds:
            self.embed_tokens = nn.Embedding(target.vocab_size, width).requires_grad_(False)
        eps, num_states = layer_config.rms_norm_eps, len(self.layer_ids)
        if config.feature_norm == "each":
            self.fc_norm = nn.ModuleList([RMSNorm(target.hidden_size, eps) for _ in self.layer_ids])
        elif config.feature_norm == "all":
            self.input_norm = RMSNorm(num_states * target.hidden_size, eps)
        self.fc = DraftingLinear(num_states * target.hidden_size, width, bias=False)
        self.layers = nn.ModuleList(
            [Layer(layer_config), *(DeeperLayer(layer_config) for _ in range(config.num_layers - 1))]
        )
        self.norm = RMSNorm(width, eps)
        self.lm_head = DraftingLinear(width, vocab, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer_config)
        if vocab < target.vocab_size:
            add_map(self, vocab, target.vocab_size)

    @property
    def layer(self) -> Layer:
        return cast(Layer, self.layers[0])

    @property
    def deeper(self) -> list[DeeperLayer]:
        """The layers behind the first one."""
        return cast("list[DeeperLayer]", [*self.layers[1:]])

    @property
    def embedding(self) -> nn.Module:
        """The embedding of the tokens that the drafter reads."""
        return self.embed_tokens or self.target.embedding

    # --- built for a target

    @classmethod
    def from_target(cls, config: Eagle3Config, target: Target) -> "Eagle3":
        """Return a drafter with a random layer, or several, between a random `fc` and the target's head.

        With `starting_layers=target` it begins as the end of the target: `fc` passes on the highest layer read to
        copies of the target's last layers, with the final norm behind them. The embedding is the target's own, frozen
        and not stored.
        """
        drafter = cls(config, layer_config_for(config.intermediate_size, target), target)
        randomize(drafter)
        copy_head(drafter.lm_head, target, torch.arange(drafter.lm_head.out_features))
        if config.starting_layers == "target":
            pass_on_last(drafter.fc, target.hidden_size)
            start_as_target([drafter.layer, *drafter.deeper], drafter.norm, target)
        return drafter

    def fit_vocabulary(self, counts: Tensor) -> None:
        """Choose the draft vocabulary: the tokens that the target wrote most often; ties go to the lower id."""
        if self.lm_head.out_features < self.target.vocab_size:
            fit_map(self, self.lm_head, counts, self.target)
            self.forget_vocabulary()

    def draft_to_target(self) -> Tensor | None:
        """Return the target ids of the draft vocabulary [Vd]; None where it is the whole vocabulary."""
        return None if self.lm_head.out_features == self.target.vocab_size else mapped_ids(self.d2t)

    @property
    def training_passes(self) -> float:
        in_warmup = max(1.0, self.training_depth / 2)  # the mean of 1 to one less than all
        share = self.config.unroll_warmup
        return (1 - share) * self.training_depth + share * in_warmup

    @property
    def layer_passes(self) -> float:
        return self.training_depth * self.config.num_layers  # behind a warm-up: the most

    @property
    def state_norms(self) -> list[RMSNorm]:
        """The norms of the states that `fc` reads: one of each layer's, one of all side by side, or none."""
        if self.config.feature_norm == "each":
            return [cast(RMSNorm, norm) for norm in self.fc_norm]
        return [self.input_norm] if self.config.feature_norm == "all" else []

    def fuse(self, states: Tensor) -> Tensor:
        """Return the features that the layer reads, [..., H], from the states of the target's layers [..., A * Ht]."""
        if self.config.feature_norm == "each":
            each = states.unflatten(-1, (len(self.layer_ids), -1))  # [..., A, Ht]
            weights = torch.stack([norm.weight for norm in self.state_norms])
            states = (F.rms_norm(each, each.shape[-1:], None, self.norm.eps) * weights).flatten(-2)
        elif self.config.feature_norm == "all":
            states = self.input_norm(states)
        return self.fc(states)

    # --- training

    @property
    def depth_now(self) -> int:
        """Number of unrolled steps at this point of training: in a warm-up it grows evenly from one to all."""
        share = self.config.unroll_warmup
        grown = self.loss_progress / share if share else 1.0
        return min(self.training_depth, 1 + int(grown * (self.training_depth - 1)))

    def divergence(self) -> Divergence:
        return self.config.divergence if self.loss_progress >= self.config.kl_share else "forward_kl"

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the outputs of the unrolled layer, with the true tokens fed in: step k of slot t predicts x_{t+2+k}."""
        assert features.layers is not None
        drafting, counted = drafting_slots(chain_loss, batch, depth)
        outputs = self.unroll(batch, features.layers, drafting, depth)
        for k, (hidden, (rows, teachers)) in enumerate(zip(outputs, counted, strict=True)):
            yield Depth(self.head_input(hidden[rows]), self.lm_head, teachers, self.config.step_decay**k)

    def head_input(self, hidden: Tensor) -> Tensor:
        """Return what the head reads [..., H], from outputs [..., H] of the last layer."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def unroll(self, batch: Batch, layers: Tensor, slots: DraftingSlots, num_steps: int) -> Iterator[Tensor]:
        """Yield the last layer's output [R, H] at each unrolled step of R drafting slots from states [B, T, A * Ht]."""
        features = self.fuse(slots.part.of(layers))  # [L, H]
        layer = UnrolledEagle3Layer(self, Unrolling(batch, slots, num_steps))
        yield from layer.run(features, self.config.detach, self.config.recompute)

    # --- drafting

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "Eagle3Cache":
        return Eagle3Cache(self, num_rows, num_slots, shape)

    @torch.inference_mode()
    def prefill(self, cache: "Eagle3Cache", token_ids: Tensor, features: Features, window: Window) -> None:
        assert features.layers is not None
        cache.read_prompt(token_ids.gather(1, window.positions + 1), cache.fuse(features.layers), window)

    @torch.inference_mode()
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        assert state.features.layers is not None
        return state.cache.draft(state, state.cache.fuse(state.features.layers), shape, self.target.vocab_size)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the one config.json that vLLM and SGLang both read right, although their layer ids differ by one."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **engine_layer_config(self.layer_config, self.target),
            "num_hidden_layers": self.config.num_layers,
            "target_hidden_size": self.target.hidden_size,
            "draft_vocab_size": self.lm_head.out_features,
            "norm_before_residual": self.config.norm_before_residual,
            "norm_before_fc": self.config.feature_norm == "all",
            "fc_norm": self.config.feature_norm == "each",
            "norm_output": self.config.norm_output,
            "num_aux_hidden_states": len(self.layer_ids),
            "eagle_aux_hidden_state_layer_ids": list(self.layer_ids),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in self.layer_ids],
            },
        }

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Eagle3":
        check_same_shape("this EAGLE-3 drafter", config, target)
        own = Eagle3Config.of_checkpoint(
            config,
            layer_ids=config.get("eagle_aux_hidden_state_layer_ids") or spread_layer_ids(target.num_layers),
            draft_vocab_size=config.get("draft_vocab_size"),
            feature_norm=feature_norm_of(config),
            norm_output=bool(config.get("norm_output")),
            norm_before_residual=bool(config.get("norm_before_residual")),
            num_layers=len({name.split(".")[1] for name in tensors if name.startswith("layers.")}) or 1,
        )
        layer_config, embeds = layer_config_of(config), OWN_EMBEDDING in tensors
        return loaded(lambda: cls(own, layer_config, target, embeds), tensors, "this EAGLE-3 drafter")


def feature_norm_of(config: dict[str, Any]) -> FeatureNorm:
    """Return the norm of the layers' states by its flags in config.json. Raises `UserError` where there are two."""
    if config.get("norm_before_fc") and config.get("fc_norm"):
        raise UserError(
            "this EAGLE-3 drafter's config.json has norm_before_fc and fc_norm: take another copy, with one"
        )
    return "all" if config.get("norm_before_fc") else "each" if config.get("fc_norm") else "none"


class UnrolledEagle3Layer(UnrolledLayer):
    """EAGLE-3's layers in training, fed with what tokens add to the first layer's queries, keys and values."""

    def __init__(self, drafter: Eagle3, unrolling: Unrolling) -> None:
        embedded = drafter.embedding(unrolling.fed_ids())
        weight = as_computed(drafter.layer.self_attn.qkv_proj.weight)
        token_weight, self.feature_weight = weight.split(embedded.shape[1], 1)
        fed = F.linear(drafter.layer.input_layernorm(embedded), token_weight)  # [.., (Nq + 2 Nkv) D]
        super().__init__(drafter.layer, drafter.rotary, fed, unrolling, drafter.deeper)
        self.hidden_norm, self.norm_before_residual = drafter.layer.hidden_norm, drafter.config.norm_before_residual
        self.output_norm = drafter.norm if drafter.config.norm_output else nn.Identity()

    def enter(self, fed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return fed + F.linear(self.hidden_norm(hidden), self.feature_weight), hidden

    def residual(self, entered: Tensor) -> Tensor:
        return self.hidden_norm(entered) if self.norm_before_residual else entered

    def output(self, hidden: Tensor) -> Tensor:
        return self.output_norm(hidden)


class Eagle3Cache(EagleCache):
    """EAGLE-3's layer in drafting."""

    def __init__(self, drafter: Eagle3, num_rows: int, num_slots: int, shape: Shape) -> None:
        layer = drafter.layer
        super().__init__(layer, drafter.embedding, drafter.rotary, num_rows, num_slots, shape, drafter.deeper)
        self.norm_before_residual, self.norm_output = drafter.config.norm_before_residual, drafter.config.norm_output
        self.ids = with_no_token(drafter.draft_to_target())
        self.input_norms = decoding_norm(layer.input_layernorm, layer.hidden_norm)
        norms = drafter.state_norms
        self.state_norm, self.num_norms = decoding_norm(*norms) if norms else None, len(norms)
        self.fc, self.lm_head = drafter.fc, drafter.lm_head
        self.final_norm, self.head = decoding_norm(drafter.norm), drafter.lm_head.for_drafting()

    def fuse(self, states: Tensor) -> Tensor:
        """Do what `Eagle3.fuse` does, with states [B, T, A * Ht]."""
        if self.state_norm is not None:
            states = self.state_norm(states.unflatten(-1, (self.num_norms, -1))).flatten(-2)
        return self.fc(states)

    def enter(self, read: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return read.flatten(2), read[:, :, 1] if self.norm_before_residual else hidden

    def finish(self, query: Tensor, residual: Tensor, window: Window) -> Tensor:
        hidden = super().finish(query, residual, window)
        return self.final_norm(hidden) if self.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        norm = None if self.norm_output else self.final_norm
        if self.steps is None:
            return self.lm_head(hidden if norm is None else norm(hidden))
        logits = hidden.new_empty(*hidden.shape[:2], self.lm_head.out_features)
        self.steps.product(hidden.flatten(0, 1), self.head, logits.flatten(0, 1), norm)
        return logits
