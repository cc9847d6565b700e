"""MLP speculator (IBM, arXiv 2404.19124; also Arctic's): a small recurrent network on the target's last hidden state.

Stage i turns the state and the embedding of x_{t+1+i} into the next state, from which a head predicts x_{t+2+i}. The
first state is the target's last hidden state at t.

Shapes: B rows, T tokens, W drafted tokens that are read, H hidden width, I inner width, V vocabulary.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import MLPSpeculatorConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.drafter_parts.tree_drafting import grow
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import gather_columns, shift_left
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, marked_rows, teacher_rows
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.target.target import Features, Target

EPS = 1e-6


class ShiftedNorm(nn.Module):
    """RMS norm with a weight and a bias, [I] each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, EPS) + self.bias


class MLPSpeculator(Drafter):
    kind = "mlp_speculator"
    config_class = MLPSpeculatorConfig
    can_branch = True

    def __init__(self, config: MLPSpeculatorConfig, target: Target) -> None:
        super().__init__(config)
        if config.tie_weights and config.num_heads < 2:
            raise UserError("drafter.tie_weights: a single head has nothing to share, give more or leave it out")
        self.target = target
        self.max_draft_length = self.training_depth = count = config.num_heads
        width, vocab = target.hidden_size, target.vocab_size
        inner = config.inner_size or width

        def stages(*modules: nn.Module) -> nn.ModuleList:
            """Return one module for each stage, the last one again for stages that share it."""
            return nn.ModuleList([modules[min(i, len(modules) - 1)] for i in range(count)])

        own = range(1 if config.tie_weights else count)
        projections = range(min(count, 2) if config.tie_weights else count)
        self.emb = stages(*(nn.Embedding(vocab, inner) for _ in own))
        self.proj = stages(*(DraftingLinear(inner if i else width, inner, bias=False) for i in projections))
        self.ln = stages(*(ShiftedNorm(inner) for _ in own))
        self.head = stages(*(DraftingLinear(inner, vocab, bias=False) for _ in own))
        # with these weights half of the last state comes from the first state, if all parts are of one size
        self.state_weight = 0.5 ** (0.5 / count)
        self.embedding_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    @classmethod
    def from_target(cls, config: MLPSpeculatorConfig, target: Target) -> "MLPSpeculator":
        drafter = cls(config, target)
        inner = config.inner_size or target.hidden_size
        for module in drafter.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.trunc_normal_(module.weight, std=inner**-0.5)
            elif isinstance(module, ShiftedNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        return drafter

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Return the state [..., H] before the first stage."""
        if not self.config.scale_input:
            return last_hidden
        return F.rms_norm(last_hidden, last_hidden.shape[-1:], None, EPS) * 0.5**0.5

    def next_state(self, stage: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """Return the next state [..., I] from a state [..., H or I] and the token that came next [...]."""
        mixed = self.proj[stage](state) * self.state_weight + self.emb[stage](token_ids) * self.embedding_weight
        return F.gelu(self.ln[stage](mixed))

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the stages: stage i at t predicts x_{t+2+i}, whose distribution the target had at t+1+i."""
        state = self.first_state(features.last_hidden)
        for i, head in enumerate(self.head[:depth]):
            counted = chain_loss.next_depth()
            state = self.next_state(i, state, shift_left(batch.token_ids, 1 + i))  # [B, T, I]
            yield Depth(marked_rows(state, counted), head, teacher_rows(counted, i), self.config.head_decay**i)

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft stage after stage from the last position that the target read."""
        hidden = gather_columns(state.features.last_hidden, state.newest_column[:, None])  # [B, 1, H]
        inner, stages = self.first_state(hidden), iter(range(self.config.num_heads))

        def read(tokens: Tensor, parents: Tensor | None) -> Tensor:
            nonlocal inner
            stage = next(stages)
            before = inner if parents is None else gather_columns(inner, parents)
            inner = self.next_state(stage, before, tokens)  # [B, W, I]
            return self.head[stage](inner)

        return grow(shape, state.cache, read(state.newest()[:, None], None), read, state)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config as vLLM up to 0.32.0 and IBM's own code read it."""
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": self.target.hidden_size,
            "inner_dim": self.config.inner_size or 0,
            "vocab_size": self.target.vocab_size,
            "n_predict": self.config.num_heads,
            "n_candidates": 1,
            "top_k_tokens_per_head": [1] * self.config.num_heads,
            "tie_weights": self.config.tie_weights,
            "scale_input": self.config.scale_input,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        """Return a copy of each tensor under every stage's name, also of shared ones: engines ask for each."""
        return {name: tensor.clone() for name, tensor in self.state_dict().items()}

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "MLPSpeculator":
        what = "this MLP speculator"
        check_same_shape(what, {**config, "hidden_size": config.get("emb_dim")}, target)
        own = MLPSpeculatorConfig.of_checkpoint(
            config,
            num_heads=config.get("n_predict", 3),  # defaults are those of IBM's MLPSpeculatorConfig
            inner_size=config.get("inner_dim") or None,
            tie_weights=config.get("tie_weights", False),
            scale_input=config.get("scale_input", False),
        )
        tensors = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
        return loaded(lambda: cls(own, target), tensors, what)
