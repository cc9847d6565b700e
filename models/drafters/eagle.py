"""EAGLE-1 (arXiv 2401.15077): one decoder layer that continues the target's last hidden state.

A slot t holds the target's feature f_t (its last hidden state after the final norm) and the embedding of x_{t+1}; both
are fused to one input of the layer. Its output is a guess of f_{t+1}, from which the target's own frozen head predicts
x_{t+2}. Drafting goes on from the guess in place of the feature. With a dynamic tree this is EAGLE-2
(arXiv 2406.16858).

Shapes: B rows, T slots, H hidden width, V target vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.batch import Batch, send
from draftsmith.models.drafter_configs import EagleConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.decoder_layer import (
    DecoderLayer,
    engine_layer_config,
    layer_config_for,
    layer_config_of,
    pass_on_last,
    randomize,
    start_as_target,
)
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.eagle_parts.eagle_layer import (
    EagleCache,
    UnrolledLayer,
    Unrolling,
    drafting_slots,
)
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import checkpoint_tensors
from draftsmith.models.losses.chain_loss import ChainLoss, Depth
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features, Target


class Eagle(Drafter):
    kind = "eagle"
    config_class = EagleConfig
    attends_to_text = True
    can_branch = True
    divides_texts = True
    drafts_by_target_head = True

    def __init__(self, config: EagleConfig, layer_config: LlamaConfig, target: Target) -> None:
        super().__init__(replace(config, intermediate_size=layer_config.intermediate_size))
        self.layer_config, self.target, self.training_depth = layer_config, target, config.unroll_steps
        width = target.hidden_size
        self.fc = DraftingLinear(2 * width, width, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(layer_config, width)])
        self.rotary = LlamaRotaryEmbedding(layer_config)

    @property
    def layer(self) -> DecoderLayer:
        return cast(DecoderLayer, self.layers[0])

    @classmethod
    def from_target(cls, config: EagleConfig, target: Target) -> "Eagle":
        """Return a drafter of random weights, or one whose `fc` passes the feature on to a copy of the last layer."""
        drafter = cls(config, layer_config_for(config.intermediate_size, target), target)
        randomize(drafter)
        if config.bias:
            nn.init.zeros_(drafter.fc.bias)
        if config.starting_layers == "target":
            pass_on_last(drafter.fc, target.hidden_size)
            start_as_target([drafter.layer], None, target)
        return drafter

    @property
    def training_passes(self) -> float:
        return self.training_depth

    # --- training

    def chain_loss(self, batch: Batch, features: Features) -> ChainLoss:
        """Return the weighted sum of two losses: the distance of guesses from features and the divergence of logits."""
        chain_loss, wanted = self.new_chain_loss(batch), features.last_hidden.flatten(0, 1).float()
        depths = list(self.depths(chain_loss, batch, features, self.training_depth))
        self.add_divergences(chain_loss, depths, features)
        distance = sum(depth.weight * feature_distance(depth, wanted) for depth in depths)
        chain_loss.total = self.config.regression_weight * distance + self.config.divergence_weight * chain_loss.total
        return chain_loss

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the guesses of the target's last hidden state, which its own head reads."""
        drafting, counted = drafting_slots(chain_loss, batch, depth)
        layer = UnrolledEagleLayer(self, Unrolling(batch, drafting, depth))
        features_read = self.with_noise(features.last_hidden)  # all members draw that of the whole batch
        guesses = layer.run(drafting.part.of(features_read))
        for k, (guess, (rows, teachers)) in enumerate(zip(guesses, counted, strict=True)):
            yield Depth(guess[rows], self.target.head, teachers, self.config.step_decay**k)

    def with_noise(self, features: Tensor) -> Tensor:
        """Return features [B, T, H] as training reads them: with noise, because in drafting the layer reads guesses.

        The noise is uniform, as in the paper's section 4.1; its code has more of it for texts shorter than 512 tokens.
        """
        if not self.training or not self.config.noise:
            return features
        return features + self.config.noise * (2 * torch.rand_like(features) - 1)

    # --- drafting

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "Eagle1Cache":
        return Eagle1Cache(self, num_rows, num_slots, shape)

    @torch.inference_mode()
    def prefill(self, cache: "Eagle1Cache", token_ids: Tensor, features: Features, window: Window) -> None:
        cache.read_prompt(token_ids.gather(1, window.positions + 1), features.last_hidden, window)

    @torch.inference_mode()
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        return state.cache.draft(state, state.features.last_hidden, shape, self.target.vocab_size)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config as vLLM reads it. SGLang only wants another architecture, `LlamaForCausalLMEagle`."""
        return {"architectures": ["LlamaForCausalLM"], **engine_layer_config(self.layer_config, self.target)}

    def engine_tensors(self) -> dict[str, Tensor]:
        """Return the tensors with a bias of `fc` in any case: SGLang would start one at random, and vLLM ignores it."""
        return {"fc.bias": torch.zeros(self.target.hidden_size), **checkpoint_tensors(self)}

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Eagle":
        what = "this EAGLE-1 drafter"
        check_same_shape(what, config, target)
        biased = "fc.bias" in tensors and bool(tensors["fc.bias"].any())
        own = EagleConfig.of_checkpoint(config, bias=config.get("draftsmith", {}).get("bias", biased))
        if not own.bias and not biased:
            tensors = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
        layer_config = layer_config_of(config)
        return loaded(lambda: cls(own, layer_config, target), tensors, what)


def feature_distance(depth: Depth, features: Tensor) -> Tensor:
    """Return the smooth L1 distance of guesses from their features among `features` [S, H], a mean over H, summed."""
    features = features.index_select(0, send(depth.teachers, features.device))
    return F.smooth_l1_loss(depth.hidden.float(), features, reduction="none").mean(-1).sum()


class UnrolledEagleLayer(UnrolledLayer):
    """EAGLE-1's layer in training; the tokens are fed as embeddings."""

    def __init__(self, drafter: Eagle, unrolling: Unrolling) -> None:
        fed = drafter.target.embedding(unrolling.fed_ids())
        super().__init__(drafter.layer, drafter.rotary, fed, unrolling)
        self.fc = drafter.fc

    def enter(self, fed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([fed, hidden], -1))
        return self.layer.self_attn.qkv_proj(x), x


class Eagle1Cache(EagleCache):
    """EAGLE-1's layer in drafting."""

    def __init__(self, drafter: Eagle, num_rows: int, num_slots: int, shape: Shape) -> None:
        super().__init__(drafter.layer, drafter.target.embedding, drafter.rotary, num_rows, num_slots, shape)
        self.fc, self.target_logits = drafter.fc, drafter.target.logits

    def enter(self, read: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self.fc(torch.cat([read, hidden], -1))
        return x, x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target_logits(hidden)
