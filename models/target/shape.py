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
class TargetShape:
    """The sizes of a target. All numbers of weights are numbers of values, whatever type they have."""

    name: str
    layers: Natural
    layer_weights: Amount  # of all layers, without routed experts; every pass reads them
    head_weights: Amount  # every pass reads them
    other_weights: Amount  # looked up by rows: embeddings that are not the head
    experts: list[RoutedExperts]
    caches: list[CachedLayers]
    state_bytes: Amount  # of running states, of a text of any length

    @property
    def num_weights(self) -> int:
        routed = sum(group.layers * group.experts * group.weights for group in self.experts)
        return self.layer_weights + self.head_weights + self.other_weights + routed

    @property
    def active_weights(self) -> int:
        """Number of weights that a token is multiplied by."""
        routed = sum(group.layers * group.chosen * group.weights for group in self.experts)
        return self.layer_weights + self.head_weights + routed


def target_shape(config: PretrainedConfig, name: str) -> TargetShape:
    """Return the sizes of a target with this config. Raises `UserError` where the decoder cannot tell them."""
    target = Target(model_without_memory(config, f"target {name!r}").bfloat16(), None, name, fuse_layers=False)
    model, text = target.model, target.text_config
    experts = routed_experts(model, text, name)
    head = target.head_weight()
    looked_up = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    other = sum(weight.numel() for weight in looked_up if weight is not head)
    routed = sum(group.layers * group.experts * group.weights for group in experts)
    total = sum(parameter.numel() for parameter in model.parameters())
    cache = cache_of_a_token(model, name)
    states = (buffer.state[0] for buffer in cache.states.buffers.values())
    return TargetShape(
        name,
        text.num_hidden_layers,
        total - routed - other - head.numel(),
        head.numel(),
        other,
        experts,
        cached_layers(cache, text),
        sum(state.numel() * STATE_BYTES for state in states),
    )


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
    """Return the cache of a model on the meta device after one token of text."""
    cache = SlotCache(1, 1)
    with torch.device("meta"), library_errors(f"target {name!r} cannot be planned for", "give another target"):
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
