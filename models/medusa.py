"""Medusa heads (arXiv 2401.10774): head i reads the target's last hidden state at t and predicts x_{t+2+i}.

The target's own head gives x_{t+1}. All heads run at once, each blind to what the others chose.

Shapes: B rows, T tokens, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from draftsmith.models.base import (
    Batch,
    DecodingState,
    Draft,
    Drafter,
    DrafterConfig,
    check_same_shape,
    load_tensors,
)
from draftsmith.models.errors import require_at_least
from draftsmith.models.layers import shift_left
from draftsmith.models.losses import ChainLoss, Divergence, LossSums, divergence_over_rows
from draftsmith.models.target import Features, Target
from draftsmith.models.tree_drafting import Plan, grow, plan_of, take
from draftsmith.models.trees import Shape


@dataclass
class MedusaConfig(DrafterConfig):
    kind: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1  # residual blocks a head
    head_decay: float = 0.8  # weight of head i is head_decay ** i
    divergence: Divergence = "forward_kl"


class ResidualBlocks(nn.Module):
    """x + silu(W x + b), `num_layers` times, each with weights of its own; zero weights make it the identity."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class Medusa(Drafter):
    kind = "medusa"
    config_class = MedusaConfig
    can_branch = True

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        super().__init__()
        require_at_least("drafter.num_heads", config.num_heads)
        require_at_least("drafter.num_layers", config.num_layers)
        self.config, self.target = config, target
        self.max_draft_length = config.num_heads
        width, heads = target.hidden_size, range(config.num_heads)
        self.blocks = nn.ModuleList([ResidualBlocks(width, config.num_layers) for _ in heads])
        self.lm_heads = nn.ModuleList([nn.Linear(width, target.vocab_size, bias=False) for _ in heads])

    @classmethod
    def from_target(cls, config: MedusaConfig, target: Target) -> "Medusa":
        """Blocks start as the identity and heads as the target's: every head first predicts x_{t+1}."""
        drafter = cls(config, target)
        for block, head in zip(drafter.blocks, drafter.lm_heads, strict=True):
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
            head.load_state_dict({"weight": target.head_weight()})
        return drafter

    def loss(self, batch: Batch, features: Features) -> LossSums:
        """Divergence of head i at t from the target's distribution of x_{t+2+i}, which the target had at t+1+i."""
        chain_loss = ChainLoss(batch.loss_mask)
        for i, (block, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            counted = chain_loss.next_depth()
            rows = divergence_over_rows(
                block(features.last_hidden[counted]),
                head,
                shift_left(features.last_hidden, 1 + i)[counted],
                self.target.logits,
                self.config.divergence,
            )
            chain_loss.add(rows, self.config.head_decay**i)
        return chain_loss.sums()

    def new_memory(self, num_rows: int, num_slots: int, shape: Shape) -> Plan | None:
        return plan_of(shape, self.target.device)

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """The first heads at the last position that the target read."""
        hidden = take(state.features.last_hidden, (state.num_new - 1)[:, None])  # [B, 1, H]
        heads = zip(self.blocks, self.lm_heads, strict=True)

        def next_head(*_: Tensor | None) -> Tensor:
            block, head = next(heads)
            return head(block(hidden))  # [B, 1, V], whatever the heads before it proposed

        return grow(shape, state.memory, next_head(), next_head, state)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """As vLLM reads it up to 0.32.0. `medusa_fc_bias` must be there, or the biases are dropped in silence."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": self.target.vocab_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            "max_seq_len": self.target.context,
            "original_lm_head": False,
            "medusa_fc_bias": True,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        return self.state_dict()

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Medusa":
        check_same_shape("these Medusa heads", config, target)
        sizes = {"num_heads": config["num_heads"], "num_layers": config["num_hidden_layers"]}
        drafter = cls(MedusaConfig(**{**config.get("draftsmith", {}), **sizes}), target)
        load_tensors(drafter, tensors, "these Medusa heads")
        return drafter
