"""Medusa heads (arXiv 2401.10774): head i reads the target's last hidden state at t and predicts x_{t+2+i}.

The target's own head gives x_{t+1}. All heads run at once, and none reads what another one chose.

Shapes: B rows, T tokens, H hidden width, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import MedusaConfig
from draftsmith.models.drafter_parts.adapters import Corrections
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, in_target_vocabulary, with_no_token
from draftsmith.models.drafter_parts.tree_drafting import grow
from draftsmith.models.drafter_parts.vocabulary import copy_head, highest_ranked, too_large
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import gather_columns, shift_left
from draftsmith.models.losses.chain_loss import (
    ChainLoss,
    Depth,
    LossSums,
    divergence_over_rows,
    marked_rows,
    teacher_rows,
)
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.forward import run_causal
from draftsmith.models.target.loading import whole_of
from draftsmith.models.target.target import Features, Target


class ResidualBlocks(nn.Module):
    """x + silu(W x + b), `num_layers` times, each with weights of its own; zero weights make it the identity."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DraftingLinear(width, width) for _ in range(num_layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class Medusa(Drafter):
    kind = "medusa"
    config_class = MedusaConfig
    can_branch = True
    independent_depths = True
    token_map: Tensor | None  # [Vd] int64 target ids of a reduced vocabulary

    def __init__(self, config: MedusaConfig, target: Target) -> None:
        super().__init__(config)
        width, vocab = target.hidden_size, config.draft_vocab_size or target.vocab_size
        if vocab > target.vocab_size:
            raise UserError(too_large(vocab, target.vocab_size))
        self.config, self.target = replace(config, draft_vocab_size=vocab), target
        self.max_draft_length = self.training_depth = config.num_heads
        self.blocks = nn.ModuleList([ResidualBlocks(width, config.num_layers) for _ in range(config.num_heads)])
        num_matrices = config.num_heads if config.output == "own" else 1
        self.lm_heads = nn.ModuleList([DraftingLinear(width, vocab, bias=False) for _ in range(num_matrices)])
        self.lm_heads.requires_grad_(config.output != "target")
        self.register_buffer("token_map", torch.arange(vocab) if vocab < target.vocab_size else None)
        if self.config.changes_target:
            if whole_of(target.model) is not target.model:
                raise UserError(
                    f"drafter.adapt_target={config.adapt_target} writes a changed target, and of the multimodal "
                    f"{target.name} the language model alone is loaded: give drafter.adapt_target=no"
                )
            rank = config.adapter_rank if config.adapt_target == "low_rank" else 0
            self.corrections = Corrections(target.decoder_layers, rank, config.adapter_alpha)

    @classmethod
    def from_target(cls, config: MedusaConfig, target: Target) -> "Medusa":
        """Return new heads: blocks start as the identity and heads as the target's, so that each predicts x_{t+1}."""
        drafter = cls(config, target)
        for parameter in drafter.blocks.parameters():
            nn.init.zeros_(parameter)
        drafter._copy_heads()
        return drafter

    def fit_vocabulary(self, counts: Tensor) -> None:
        """Choose the draft vocabulary: the tokens that the target wrote most often; ties go to the lower id."""
        if (ids := self.draft_to_target()) is not None:
            ids.copy_(highest_ranked(counts, len(ids)))
            self.forget_vocabulary()
            self._copy_heads()

    def draft_to_target(self) -> Tensor | None:
        """Return the target ids of the draft vocabulary [Vd]; None where it is the whole vocabulary."""
        return self.token_map

    def _copy_heads(self) -> None:
        for head in self.lm_heads:
            copy_head(cast(nn.Linear, head), self.target, self.draft_to_target())

    def heads(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the residual blocks and the output matrix of each head."""
        matrices = [*self.lm_heads] if self.config.output == "own" else [self.lm_heads[0]] * self.config.num_heads
        return list(zip(self.blocks, matrices, strict=True))

    def loss(self, batch: Batch, features: Features) -> LossSums:
        """Return the divergence of head i at t from the target's distribution of x_{t+2+i}, held at t+1+i.

        Where the target is trained along (Medusa-2, section 2.2.2) the heads read its changed hidden states. Its
        divergence from the original target is then added, which keeps it near that: the self-distillation of section
        2.3.2.
        """
        read = self._changed_hidden(batch) if self.config.changes_target else features.last_hidden
        chain_loss = self.new_chain_loss(batch)
        self.add_divergences(chain_loss, list(self.heads_on(chain_loss, read, self.training_depth)), features)
        sums = chain_loss.sums()
        if self.config.changes_target:
            counted = shift_left(batch.on_host.loss_mask, 1)
            now, before = marked_rows(read, counted), marked_rows(features.last_hidden, counted)
            kept = divergence_over_rows(
                now, self.target.head, before, self.target.head, "forward_kl", compiled=self.compile_loss
            )
            total, count = sums["loss"]
            sums["loss"] = (total + self.config.distillation_weight * kept.loss, count)
            sums["target_change"] = (kept.loss.detach(), torch.full_like(count, int(counted.sum())))
        return sums

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the first `depth` heads, which read the original target."""
        return self.heads_on(chain_loss, features.last_hidden, depth)

    def heads_on(self, chain_loss: ChainLoss, read: Tensor, depth: int) -> Iterator[Depth]:
        """Yield the first `depth` heads, which read hidden states [B, T, H]."""
        for i, (block, head) in enumerate(self.heads()[:depth]):
            counted = chain_loss.next_depth()
            yield Depth(block(marked_rows(read, counted)), head, teacher_rows(counted, i), self.config.head_decay**i)

    def _changed_hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden state [B, T, H] of the target as it is now, with gradient."""
        with self.corrections.applied():
            return run_causal(self.target.model, batch.token_ids, batch.positions, batch.attention_mask())

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft by the first heads at the last position that the target read."""
        hidden = gather_columns(state.features.last_hidden, state.newest_column[:, None])  # [B, 1, H]
        heads = iter(self.heads())

        def next_head(*_: Tensor | None) -> Tensor:
            block, head = next(heads)
            return head(block(hidden))  # [B, 1, V], whatever the heads before it proposed

        draft = grow(shape, state.cache, next_head(), next_head, state)
        return in_target_vocabulary(draft, with_no_token(self.draft_to_target()), self.target.vocab_size)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config as vLLM up to 0.32.0 reads it; without `medusa_fc_bias` it silently drops biases."""
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": self.config.draft_vocab_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            "max_seq_len": self.target.context,
            "original_lm_head": self.config.output != "own",
            "medusa_fc_bias": True,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("corrections.")}

    def changed_target(self) -> dict[str, Tensor]:
        """Return a copy of the target's weights, in the CPU's memory, with what was trained into them."""
        model = self.target.model
        prefix = next(name for name, module in model.named_modules() if module is self.target.decoder_layers)
        tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
        for name, change in self.corrections.matrices().items():
            weight = tensors[f"{prefix}.{name}.weight"]
            weight += change.detach().to(weight)
        return tensors

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Medusa":
        check_same_shape("these Medusa heads", config, target)
        output = "shared" if config.get("original_lm_head") else "own"
        own = MedusaConfig.of_checkpoint(
            config,
            output=config.get("draftsmith", {}).get("output", output),
            num_heads=config["num_heads"],
            num_layers=config["num_hidden_layers"],
            draft_vocab_size=config.get("truncated_vocab_size"),
            adapt_target="no",  # it is already changed
        )
        return loaded(lambda: cls(own, target), tensors, "these Medusa heads")
