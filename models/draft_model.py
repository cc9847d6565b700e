"""A standalone draft model (arXiv 2211.17192), distilled from the target (DistillSpec, arXiv 2310.08461).

Any small causal language model with the target's vocabulary; by default a copy of a few evenly spaced layers of the
target. It shares nothing with the target at decoding and keeps its own cache.

Shapes: B rows, T tokens, H hidden width, V vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from draftsmith.models.base import (
    DecodingState,
    Draft,
    Drafter,
    DrafterConfig,
    load_tensors,
)
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.fused import FusedDecoder, fuse
from draftsmith.models.layers import shift_left
from draftsmith.models.losses import Divergence, LossSums, divergence_over_rows
from draftsmith.models.slots import ATTENTION, Window, chain_window, run_causal, run_on_slots
from draftsmith.models.target import Features, Target
from draftsmith.models.tree_drafting import LevelWindows, Memory, grow, take
from draftsmith.models.trees import Chain, Shape


@dataclass
class DraftModelConfig(DrafterConfig):
    kind: str = "draft_model"
    num_layers: int = 2  # evenly spaced layers of the target to start from
    divergence: Divergence = "forward_kl"


class DraftModel(Drafter):
    kind = "draft_model"
    config_class = DraftModelConfig
    can_branch = True

    def __init__(self, config: DraftModelConfig, model: PreTrainedModel, target: Target) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.model = model
        vocab_size = model.config.get_text_config().vocab_size
        if vocab_size != target.vocab_size:
            raise UserError(
                f"this draft model has a vocabulary of {vocab_size}, but {target.name} has {target.vocab_size}: "
                "a draft model must share the target's vocabulary"
            )

    @classmethod
    def from_target(cls, config: DraftModelConfig, target: Target) -> "DraftModel":
        """The target with all but `num_layers` of its layers left out, trainable."""
        if not 1 <= config.num_layers < target.num_layers:
            raise UserError(f"num_layers {config.num_layers}: give 1 to {target.num_layers - 1}, the target has more")
        kept = [round(i * (target.num_layers - 1) / max(1, config.num_layers - 1)) for i in range(config.num_layers)]
        model = AutoModelForCausalLM.from_config(
            shallower(target.text_config, kept), attn_implementation=ATTENTION, dtype=torch.float32
        )
        model.load_state_dict(layers_of(target.model.state_dict(), kept))
        return cls(config, model, target)

    def loss(self, batch: Batch, features: Features) -> LossSums:
        """Divergence from the target at every token that the target wrote."""
        counted = shift_left(batch.loss_mask, 1)
        hidden = run_causal(self.model, batch.token_ids, batch.positions, batch.attention_mask())
        rows = divergence_over_rows(
            hidden[counted],
            self.model.get_output_embeddings(),
            features.last_hidden[counted],
            self.target.logits,
            self.config.divergence,
        )
        return {
            "loss": (rows.loss, batch.loss_mask.sum()),
            "accuracy_0": (rows.correct.sum(), counted.sum()),
            "sampled_acceptance_0": (rows.acceptance, counted.sum()),
        }

    def new_memory(self, num_rows: int, num_slots: int, shape: Shape) -> "DraftModelMemory":
        memory = DraftModelMemory(num_rows, num_slots, shape, self.model.device)
        memory.fused_decoder = fuse(self.model)
        return memory

    def read(self, memory: "DraftModelMemory", token_ids: Tensor, features: Features, window: Window) -> None:
        self._run(token_ids.gather(1, window.slots), window, memory)

    def _run(self, token_ids: Tensor, window: Window, memory: "DraftModelMemory") -> Tensor:
        """Decode the new tokens [B, T] of a window; the last hidden state [B, T, H]."""
        if memory.fused_decoder is not None:
            return memory.fused_decoder.run(token_ids, window, memory.cache)[0]
        return run_on_slots(self.model, token_ids, window, memory.cache)

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Read what is new, then draft level by level.

        After a chain the cache lacks the newest committed token, and the one before it when the whole draft was
        accepted; both are read each round, so that rows need not be told apart. After a tree, whose nodes do not stand
        where their text went, everything is read that the last round committed.
        """
        memory, head = state.memory, self.model.get_output_embeddings()
        newest = state.lengths - 1  # [B]
        if isinstance(shape, Chain):
            window = chain_window(newest - 1, 2)
        else:
            window = chain_window(state.positions[:, 0] + 1, state.positions.shape[1])
        hidden = self._run(state.token_ids.gather(1, window.slots), window, memory)
        column = (newest - window.prefix).clamp(min=0)  # a finished row committed nothing
        hidden = take(hidden, column[:, None])  # [B, 1, H]
        windows = LevelWindows(state.lengths, shape.num_read)

        def read(tokens: Tensor, parents: Tensor | None) -> Tensor:
            return head(self._run(tokens, windows.next(tokens.shape[1], parents), memory))

        return grow(shape, memory.plan, head(hidden), read, state)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """An ordinary Hugging Face directory."""
        return {**self.model.config.to_diff_dict(), "architectures": [type(self.model).__name__]}

    def engine_tensors(self) -> dict[str, Tensor]:
        return untied(self.model)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "DraftModel":
        own = config.pop("draftsmith", {})
        if config.get("model_type") not in CONFIG_MAPPING:
            raise UserError(f"config.json names model_type {config.get('model_type')!r}: give a causal language model")
        model_config = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = AutoModelForCausalLM.from_config(model_config, attn_implementation=ATTENTION, dtype=torch.float32)
        drafter = cls(DraftModelConfig(**own), model, target)
        tied = {name: tensor for name, tensor in model.state_dict().items() if name not in untied(model)}
        load_tensors(model, {**tied, **tensors}, "this draft model")
        model.tie_weights()
        return drafter


class DraftModelMemory(Memory):
    fused_decoder: FusedDecoder | None  # where the model has the shape for it


def untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict with each shared tensor under its first name only, as safetensors wants it."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            tensors[name] = tensor
            seen.add(tensor.data_ptr())
    return tensors


def shallower(config: PretrainedConfig, kept: list[int]) -> PretrainedConfig:
    """The config of a model of only the kept layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in kept]
    return config


def layers_of(tensors: dict[str, Tensor], kept: list[int]) -> dict[str, Tensor]:
    """The state dict of only the kept layers, renumbered; everything outside the layers stays."""
    renumbered = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            if int(parts[number]) not in kept:
                continue
            parts[number] = str(kept.index(int(parts[number])))
        renumbered[".".join(parts)] = tensor.float()
    return renumbered
