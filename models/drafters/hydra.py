"""Hydra heads (arXiv 2402.05109): Medusa's heads, each of which also reads the tokens that were drafted before.

Head i reads the target's last hidden state at t and the embeddings of x_{t+1} to x_{t+1+i}, and predicts x_{t+2+i}.
With a prefix layer (Hydra++, in the same paper) it reads another state in place of the target's: a decoder layer of the
drafter makes it of the hidden states of the whole text up to t.

Shapes: B rows, T tokens, W drafted tokens that are read, H hidden width, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import HydraConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.decoder_layer import DeeperLayer, layer_config_for, randomize
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.drafter_parts.tree_drafting import DrafterCache, grow
from draftsmith.models.drafter_parts.vocabulary import copy_head
from draftsmith.models.drafters.medusa import ResidualBlocks
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import gather_columns, rotary_table, shift_left
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, marked_rows, teacher_rows
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.attention import slot_attention
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features, Target


class HydraBlocks(nn.Module):
    """Residual blocks of width H over several inputs side by side; the first is linear(x) + silu(W x + b)."""

    def __init__(self, width: int, num_inputs: int, num_layers: int) -> None:
        super().__init__()
        self.residual = DraftingLinear(num_inputs * width, width)
        self.inner = DraftingLinear(num_inputs * width, width)
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
        self.lm_heads = nn.ModuleList([DraftingLinear(width, target.vocab_size, bias=False) for _ in heads])
        self.prefix: DeeperLayer | None = None
        self.attends_to_text = config.prefix_layer
        if config.prefix_layer:
            layer_config = layer_config_for(None, target)
            self.prefix, self.rotary = DeeperLayer(layer_config), LlamaRotaryEmbedding(layer_config)

    @classmethod
    def from_target(cls, config: HydraConfig, target: Target) -> "Hydra":
        """Return heads that all predict x_{t+1} at first: layer and blocks pass the state on to copies of its head."""
        drafter = cls(config, target)
        if drafter.prefix is not None:
            randomize(drafter.prefix)
            nn.init.zeros_(drafter.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(drafter.prefix.mlp.down_proj.weight)
        for parameter in drafter.blocks.parameters():
            nn.init.zeros_(parameter)
        for block, head in zip(drafter.blocks, drafter.lm_heads, strict=True):
            assert isinstance(block, HydraBlocks)
            nn.init.eye_(block.residual.weight)  # 1 where hidden state and output have the same place
            copy_head(cast(nn.Linear, head), target, None)
        return drafter

    @property
    def layer_passes(self) -> float:
        return self.training_passes + self.config.prefix_layer

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the heads: head i at t predicts x_{t+2+i}, whose distribution the target had at t+1+i."""
        embedded = self.target.embedding(batch.token_ids)  # [B, T, H]
        read = self.behind_prefix(batch, features.last_hidden)
        for i, (block, head) in enumerate(zip(self.blocks[:depth], self.lm_heads[:depth], strict=True)):
            counted = chain_loss.next_depth()
            read = torch.cat([read, shift_left(embedded, 1 + i)], -1)  # [B, T, (i + 2) H]
            yield Depth(block(marked_rows(read, counted)), head, teacher_rows(counted, i), self.config.head_decay**i)

    def behind_prefix(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Return the states [B, T, H] that the heads read, from the target's hidden states [B, T, H]."""
        if self.prefix is None:
            return hidden
        rotary, positions = rotary_table(self.rotary, hidden.shape[1], hidden), batch.positions.expand(len(hidden), -1)
        query, key, value = self.prefix.project(hidden, rotary, positions)
        attended = slot_attention(self.prefix, query, key, value, batch.attention_mask())[0]
        return self.prefix.finish(hidden, attended)

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> Any:
        if self.prefix is None:
            return super().new_cache(num_rows, num_slots, shape)
        return HydraCache(self, num_rows, num_slots, shape)

    @torch.inference_mode()
    def prefill(self, cache: Any, token_ids: Tensor, features: Features, window: Window) -> None:
        if self.prefix is not None:
            cache.read(features.last_hidden, window)

    @torch.inference_mode()
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft head after head from the newest position that is committed; each reads the tokens drafted before."""
        heads, tree, hidden = zip(self.blocks, self.lm_heads, strict=True), state.cache, state.features.last_hidden
        if self.prefix is not None:
            tree = state.cache.tree
            hidden = state.cache.read(hidden, Window(state.positions, state.positions, state.positions[:, 0]))
        inputs = gather_columns(hidden, state.newest_column[:, None])  # [B, 1, H]

        def read(tokens: Tensor, parents: Tensor | None) -> Tensor:
            nonlocal inputs
            before = inputs if parents is None else gather_columns(inputs, parents)
            inputs = torch.cat([before, self.target.embedding(tokens)], -1)  # [B, W, (i + 2) H]
            block, head = next(heads)
            return head(block(inputs))

        return grow(shape, tree, read(state.newest()[:, None], None), read, state)

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


class HydraCache(DrafterCache):
    """Keys and values of the prefix layer."""

    def __init__(self, drafter: Hydra, num_rows: int, num_slots: int, shape: Shape) -> None:
        assert drafter.prefix is not None
        like = drafter.prefix.self_attn.o_proj.weight
        super().__init__(num_rows, num_slots, shape, like.device)
        self.prefix, self.rotary = drafter.prefix, rotary_table(drafter.rotary, self.kv.num_slots, like)

    def read(self, hidden: Tensor, window: Window) -> Tensor:
        """Return the layer's outputs [B, T, H] from hidden states [B, T, H] of a window, and keep keys and values."""
        self.kv.write_to(window.slots)
        query, key, value = self.prefix.project(hidden, self.rotary, window.positions)
        keys, values = self.kv.update(key, value, 0)
        mask = window.mask(self.kv.num_slots)
        return self.prefix.finish(hidden, slot_attention(self.prefix, query, keys, values, mask)[0])
