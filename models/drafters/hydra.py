"""Hydra heads (arXiv 2402.05109): Medusa's heads, each of which also reads the tokens that were drafted before.

Head i reads the target's last hidden state at t and the embeddings of x_{t+1} to x_{t+1+i}, and predicts x_{t+2+i}.

Shapes: B rows, T tokens, W drafted tokens that are read, H hidden width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import HydraConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.drafter_parts.tree_drafting import grow
from draftsmith.models.drafters.medusa import ResidualBlocks
from draftsmith.models.layers import gather_columns, shift_left
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, marked_rows, teacher_rows
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.target.target import Features, Target


class HydraBlocks(nn.Module):
    """Residual blocks of width H over several inputs side by side; the first is linear(x) + silu(W x + b)."""

    def __init__(self, width: int, num_inputs: int, num_layers: int) -> None:
        super().__init__()
        self.residual = nn.Linear(num_inputs * width, width)
        self.inner = nn.Linear(num_inputs * width, width)
        self.rest = ResidualBlocks(width, num_layers - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs side by side [..., num_inputs * H] to [..., H]."""
        return self.rest(self.residual(x) + F.silu(self.inner(x)))


class Hydra(Drafter):
    kind = "hydra"
    config_class = HydraConfig
    can_branch = True

    def __init__(self, config: HydraConfig, target: Target) -> None:
        super().__init__(config)
        self.target = target
        self.max_draft_length = self.training_depth = config.num_heads
        width, heads = target.hidden_size, range(config.num_heads)
        self.blocks = nn.ModuleList([HydraBlocks(width, i + 2, config.num_layers) for i in heads])
        self.lm_heads = nn.ModuleList([nn.Linear(width, target.vocab_size, bias=False) for _ in heads])

    @classmethod
    def from_target(cls, config: HydraConfig, target: Target) -> "Hydra":
        """Blocks start by passing the hidden state on and heads as the target's: every head first predicts x_{t+1}."""
        drafter = cls(config, target)
        for parameter in drafter.blocks.parameters():
            nn.init.zeros_(parameter)
        for block, head in zip(drafter.blocks, drafter.lm_heads, strict=True):
            assert isinstance(block, HydraBlocks)
            nn.init.eye_(block.residual.weight)  # 1 where hidden state and output have the same place
            head.load_state_dict({"weight": target.head_weight()})
        return drafter

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the heads: head i at t predicts x_{t+2+i}, whose distribution the target had at t+1+i."""
        embedded = self.target.embedding(batch.token_ids)  # [B, T, H]
        read = features.last_hidden
        for i, (block, head) in enumerate(zip(self.blocks[:depth], self.lm_heads[:depth], strict=True)):
            counted = chain_loss.next_depth()
            read = torch.cat([read, shift_left(embedded, 1 + i)], -1)  # [B, T, (i + 2) H]
            yield Depth(block(marked_rows(read, counted)), head, teacher_rows(counted, i), self.config.head_decay**i)

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft head after head from the last position that the target read, each on what was drafted before."""
        heads = zip(self.blocks, self.lm_heads, strict=True)
        inputs = gather_columns(state.features.last_hidden, state.newest_column[:, None])  # [B, 1, H]

        def read(tokens: Tensor, parents: Tensor | None) -> Tensor:
            nonlocal inputs
            before = inputs if parents is None else gather_columns(inputs, parents)
            inputs = torch.cat([before, self.target.embedding(tokens)], -1)  # [B, W, (i + 2) H]
            block, head = next(heads)
            return head(block(inputs))

        return grow(shape, state.cache, read(state.newest()[:, None], None), read, state)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return a config with the keys of Medusa's: no engine serves Hydra heads."""
        return {
            "architectures": ["HydraModel"],
            "model_type": "hydra",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
        }

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Hydra":
        check_same_shape("these Hydra heads", config, target)
        own = HydraConfig.of_checkpoint(config)
        return loaded(lambda: cls(own, target), tensors, "these Hydra heads")
