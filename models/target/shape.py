"""The sizes of a target that set its speed, from its config.json alone: weights, experts, what a text keeps.

The model is built on the meta device, where tensors have sizes and no values, and reads one token there. So the sizes
are those of the decoder itself, for every family that it decodes: latents and indexer keys, windows, running states.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from draftsmith.models.errors import UserError, library_errors
from draftsmith.models.ranges import Natural
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.forward import run_on_slots
from draftsmith.models.slots.window import chain_window
from draftsmith.models.target.loading import model_without_memory
from draftsmith.models.target.target import Target

CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")  # names in configs
Amount = Annotated[int, Field(ge=0)]  # of weights or bytes, which may be more than other settings are
STATE_BYTES = 4  # of a value of a running state, which the decoder keeps in fp32


@dataclass(frozen=True)
class RoutedExperts:
    """Layers of equal experts, of which each token is sent to a few."""

    layers: Natural
    experts: Natural  # of a layer
    chosen: Natural  # of them, by a token
    weights: Amount  # of one expert


@dataclass(frozen=True)
class CachedLayers:
    """Layers that keep equally much of a text."""

    layers: Natural
    values: Natural  # of a token
    window: Natural | None  # tokens that a new one sees at most; None: all


@dataclass(frozen=True)
class TargetWeights:
    """The numbers of a target's weights: of values, whatever type they have."""

    layer_weights: Amount  # of all layers, without routed experts; every pass reads them
    head_weights: Amount  # every pass reads them
    other_weights: Amount  # looked up by rows: embeddings that are not the head
    experts: list[RoutedExperts]

    @property
    def weights_of_layers(self) -> int:
        """Number of weights of all layers, with all their experts."""
        return self.layer_weights + sum(group.layers * group.experts * group.weights for group in self.experts)

    @property
    def active_weights_of_layers(self) -> int:
        """Number of weights of all layers that a token is multiplied by."""
        return self.layer_weights + sum(group.layers * group.chosen * group.weights for group in self.experts)

    @property
    def num_weights(self) -> int:
        return self.weights_of_layers + self.head_weights + self.other_weights

    @property
    def active_weights(self) -> int:
        """Number of weights that a token is multiplied by."""
        return self.active_weights_of_layers + self.head_weights


@dataclass(frozen=True)
class TargetShape(TargetWeights):
    """The sizes of a target."""

    name: str
    layers: Natural
    caches: list[CachedLayers]
    state_bytes: Amount  # of running states, of a text of any length

    def kept_bytes(self, num_tokens: float, value_bytes: float) -> float:
        """Return the bytes that are kept of a text: keys and values, or latents, of so many bytes each, and states."""
        seen = (group.layers * group.values * min(num_tokens, group.window or num_tokens) for group in self.caches)
        return value_bytes * sum(seen) + self.state_bytes


def target_weights(config: PretrainedConfig, name: str) -> TargetWeights:
    """Return the numbers of weights of a target with this config, whether or not it is decoded here."""
    return weights_of(model_without_memory(config, f"target {name!r}"), name)


def target_shape(config: PretrainedConfig, name: str) -> TargetShape:
    """Return the sizes of a target with this config. Raises `UserError` where the decoder cannot tell them."""
    model = model_without_memory(config, f"target {name!r}").bfloat16()
    return shape_of(Target(model, None, name, fuse_layers=False))


def shape_of(target: Target) -> TargetShape:
    """Return the sizes of a target, which reads a token for that, on the meta device or where it is."""
    cache = cache_of_a_token(target.model, target.name)
    states = (buffer.state[0] for buffer in cache.states.buffers.values())
    return TargetShape(
        **vars(weights_of(target.model, target.name)),
        name=target.name,
        layers=target.num_layers,
        caches=cached_layers(cache, target.text_config),
        state_bytes=sum(state.numel() * STATE_BYTES for state in states),
    )


def weights_of(model: PreTrainedModel, name: str) -> TargetWeights:
    """Return the numbers of a model's weights. Raises `UserError` where a config does not tell of its experts."""
    experts = routed_experts(model, model.config.get_text_config(), name)
    head = model.get_output_embeddings().weight
    looked_up = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    other = sum(weight.numel() for weight in looked_up if weight is not head)
    routed = sum(group.layers * group.experts * group.weights for group in experts)
    total = sum(parameter.numel() for parameter in model.parameters())
    return TargetWeights(total - routed - other - head.numel(), head.numel(), other, experts)


def routed_experts(model: PreTrainedModel, text: PretrainedConfig, name: str) -> list[RoutedExperts]:
    """Return the groups of equal layers of routed experts, by the model's own parameters."""
    sizes: Counter[str] = Counter()  # weights of all experts, by the module of them
    numbers: dict[str, int] = {}
    for key, parameter in model.named_parameters():
        layer, is_routed, rest = key.partition(".experts.")
        if is_routed:
            sizes[layer] += parameter.numel()
            listed = rest.split(".")[0]  # a number where every expert is a module, else the tensor holds all of them
            count = int(listed) + 1 if listed.isdigit() else parameter.shape[0]
            numbers[layer] = max(count, numbers.get(layer, 0))
    if not sizes:
        return []
    chosen = next((value for field in CHOSEN if isinstance(value := getattr(text, field, None), int)), None)
    if chosen is None:
        raise UserError(f"target {name!r}: its config.json does not say how many experts a token is sent to")
    groups = Counter((numbers[layer], size // numbers[layer]) for layer, size in sizes.items())
    return [RoutedExperts(layers, experts, chosen, weights) for (experts, weights), layers in groups.items()]


@torch.no_grad()
def cache_of_a_token(model: PreTrainedModel, name: str) -> SlotCache:
    """Return the cache of a model after one token of text, on the model's device."""
    cache = SlotCache(1, 1)
    with model.device, library_errors(f"target {name!r} cannot be planned for", "give another target"):
        zero, one = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        run_on_slots(model, zero[None], chain_window(zero, 1, one), cache)
    return cache


def cached_layers(cache: SlotCache, text: PretrainedConfig) -> list[CachedLayers]:
    """Return the groups of equal layers of a cache of one slot."""
    groups = Counter((values, window_of(layer, text)) for layer, values in cache.slot_sizes().items())
    return [CachedLayers(layers, values, window) for (values, window), layers in groups.items()]


def window_of(layer: int, text: Any) -> int | None:
    """Return how many tokens a layer sees at most; None: all. Below 0 are the keys of DeepSeek's indexer: all."""
    if layer < 0:
        return None
    kinds = getattr(text, "layer_types", None)
    kind = kinds[layer] if kinds else "sliding_attention"  # of older configs, a window is that of all layers
    if kind == "chunked_attention":
        return text.attention_chunk_size
    if "sliding" in kind and getattr(text, "use_sliding_window", True):
        return getattr(text, "sliding_window", None)
    return getattr(text, "index_topk", None)
