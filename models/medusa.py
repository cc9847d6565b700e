"""Medusa heads (arXiv 2401.10774): head i reads the target's last hidden state at t and predicts x_{t+2+i}.

The target's own head gives x_{t+1}. All heads run at once, each blind to what the others chose.

Shapes: B rows, T tokens, H hidden width, V vocabulary.
"""

import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.base import (
    DecodingState,
    Draft,
    Drafter,
    DrafterConfig,
    check_same_shape,
    load_tensors,
)
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, require_at_least
from draftsmith.models.layers import shift_left
from draftsmith.models.losses import ChainLoss, Divergence, LossSums, divergence_over_rows
from draftsmith.models.target import Features, Target
from draftsmith.models.tree_drafting import Plan, grow, plan_of, take
from draftsmith.models.trees import Shape, StaticTree


@dataclass
class MedusaConfig(DrafterConfig):
    kind: str = "medusa"
    num_heads: int = 4
    num_layers: int = 1  # residual blocks a head
    head_decay: float = 0.8  # weight of head i is head_decay ** i
    divergence: Divergence = "forward_kl"


MC_SIM_7B_63 = StaticTree(
    (
        *[(i,) for i in range(10)],
        *[(i, j) for i, children in enumerate((10, 7, 3, 2, 1, 1, 1, 1, 1, 1)) for j in range(children)],
        *[(0, j, k) for j, children in enumerate((10, 3, 2, 1, 1, 1, 1, 1)) for k in range(children)],
        *[(1, 0, 0), (1, 0, 1), (2, 0, 0), (0, 0, 0, 0), (0, 0, 0, 1)],
    )
)
"""The tree that the paper's code uses by default, made for Vicuna-7B: 63 nodes, 4 heads."""


def likeliest_tree(accuracies: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """The tree of `num_nodes` whose expected number of accepted nodes is highest, for heads that err independently.

    `accuracies[i][r]`: how often the token that head i ranks r-th (from 0) is right, falling with r, as
    `Medusa.rank_accuracies` measures it. A node is right as often as all choices on its path are; the likeliest nodes
    are added one by one (arXiv 2401.10774, section 2.3.3). Raises `UserError` for more nodes than there can be.
    """
    frontier: list[tuple[float, tuple[int, ...]]] = [
        (-accuracies[0][0], (0,))
    ]  # the next sibling of every node in the tree, and its first child
    nodes: list[tuple[int, ...]] = []
    while len(nodes) < num_nodes:
        if not frontier:
            raise UserError(f"tree of {num_nodes} nodes: these accuracies allow {len(nodes)} at most")
        _, path = heapq.heappop(frontier)
        nodes.append(path)
        for new in ((*path[:-1], path[-1] + 1), (*path, 0)):
            if len(new) <= len(accuracies) and new[-1] < len(accuracies[len(new) - 1]):
                heapq.heappush(frontier, (-math.prod(map(operator.getitem, accuracies, new)), new))
    return StaticTree(tuple(nodes))


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

    @torch.no_grad()
    def rank_accuracies(self, batch: Batch, features: Features, num_ranks: int = 10) -> Tensor:
        """How often the token that head i ranks r-th is what the target wrote: [heads, num_ranks], for a tree."""
        counted = ChainLoss(batch.loss_mask)
        hits = []
        for i, (block, head) in enumerate(zip(self.blocks, self.lm_heads, strict=True)):
            slots = counted.next_depth()
            ranked = head(block(features.last_hidden[slots])).topk(num_ranks).indices  # [slots, num_ranks]
            hits.append((ranked == shift_left(batch.token_ids, 2 + i)[slots][:, None]).double().mean(0))
        return torch.stack(hits)

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
