"""A head's logits as its family scales and caps them.

Shapes: H hidden width, V vocabulary.
"""

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

# Fields of configs.
FACTORS = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier", "final_logit_softcapping")


def scaled_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Return the logits [..., V] of a head with the scaling of its family, by the config of the language model."""
    logits = times_factor(logits, config)
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma and others
        logits = cap * torch.tanh(logits / cap)
    return logits


def times_factor(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Return logits, or the weights of a head, times the factor of its family. Caps are left out."""
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits * scale if config.model_type == "hyperclovax" else logits / scale  # else Granite
    if scale := getattr(config, "output_multiplier", None):  # Muse
        logits = logits * scale
    if scale := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
        logits = logits * scale
    return logits


class ScaledHead(nn.Module):
    """The head of a model with its family's scaling."""

    def __init__(self, head: Callable[[Tensor], Tensor], config: PretrainedConfig) -> None:
        super().__init__()
        self.head, self.config = head, config

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H]."""
        return scaled_logits(self.head(hidden), self.config)


def scaled_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that makes a model's logits of its last hidden states: its head, where nothing is scaled."""
    return cast(nn.Module, with_scaling(model.get_output_embeddings(), model.config.get_text_config()))


def with_scaling(head: Callable[[Tensor], Tensor], config: PretrainedConfig) -> Callable[[Tensor], Tensor]:
    """Return a head with the scaling of its family: itself, where nothing is scaled."""
    return ScaledHead(head, config) if any(getattr(config, name, None) for name in FACTORS) else head
