"""MTP: the head for further tokens that many targets bring along, trained on (arXiv 2412.19437, section 2.2).

The head is one more decoder layer of the target's own class. A slot t holds the target's last hidden state h_t and the
embedding of x_{t+1}, each behind a norm of its own; one matrix makes the layer's input of them, and from the layer's
output the target's own head predicts x_{t+2}. To draft further tokens the head reads its own output in place of h_t.
Targets train their heads for one token alone; here the head is unrolled in training (FastMTP, arXiv 2509.18362, section
3.1). A target without a head gets a new one in its family's layout. What differs by family stands in mtp_layouts.py.

Shapes: B rows, T slots, S = B * T, R of them draft, H hidden width.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import MtpConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.drafter_parts.target_layers import layer_tensors
from draftsmith.models.eagle_parts.eagle_layer import FeatureCache, drafting_slots
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots, UnrolledSteps
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.losses.chain_loss import ChainLoss, Depth
from draftsmith.models.mtp_heads.mtp_layouts import from_layout, head_layout, num_heads, to_layout, together
from draftsmith.models.mtp_heads.mtp_stitching import as_in_files, write_with_head
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.window import Window
from draftsmith.models.target.loading import drop_layers, model_without_memory
from draftsmith.models.target.target import Features, Target
from draftsmith.models.target.target_files import read_tensors


class Mtp(Drafter):
    kind = "mtp"
    config_class = MtpConfig
    can_branch = True
    served_in_target = True
    drafts_by_target_head = True

    def __init__(self, config: MtpConfig, target: Target) -> None:
        """Raises `UserError` for a target of a family whose heads are not known."""
        super().__init__(config)
        self.target, self.training_depth = target, config.unroll_steps
        self.attends_to_text = config.starting_layers != "native"  # which learnt from the texts of its target
        self.layout = head_layout(target.text_config)
        self.layer_ids = () if self.layout.reads_normed else (target.num_layers,)
        layer_config = config_of_layer(target.text_config)
        stock: Any = model_without_memory(layer_config, f"target {target.name!r}").base_model
        width = target.hidden_size
        self.token_norm, self.state_norm, self.last_norm = (
            type(stock.norm)(width, eps=layer_config.rms_norm_eps) for _ in range(3)
        )
        self.fuse = DraftingLinear(2 * width, width, bias=False)
        self.layer = type(stock.layers[0])(layer_config, 0)

    # --- built for a target

    @classmethod
    def from_target(cls, config: MtpConfig, target: Target) -> "Mtp":
        """Return the target's own head or, as `starting_layers` says, a new one.

        Raises `UserError` where the target has none and its own is asked for.
        """
        native = {} if config.starting_layers in ("random", "target") else native_tensors(target)
        if native:
            config = replace(config, starting_layers="native")
            return loaded(lambda: cls(config, target), native, f"the head for further tokens of {target.name}")
        if config.starting_layers == "native":
            raise UserError(
                f"drafter.starting_layers=native: the files of {target.name} hold no head for further tokens; give "
                "drafter.starting_layers=random"
            )
        config = replace(config, starting_layers=config.starting_layers or "random")
        drafter = cls(config, target)
        drafter._start_new()
        return drafter

    @property
    def comes_with_target(self) -> bool:
        return self.config.starting_layers == "native"

    @torch.no_grad()
    def _start_new(self) -> None:
        """Give the head random weights or, as `starting_layers` says, let it start as the target's last layer.

        A copied layer reads the target's state alone. The norm behind the layer is a copy of the target's final one.
        """
        if self.target.device.type == "meta":  # where tensors have sizes alone
            return
        for parameter in [self.fuse.weight, *self.layer.parameters()]:
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        for name, parameter in self.layer.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
        base: Any = self.target.model.base_model
        self.last_norm.load_state_dict(base.norm.state_dict())
        if self.config.starting_layers == "target":
            width = self.target.hidden_size
            state = slice(width) if self.layout.state_first else slice(width, None)
            nn.init.zeros_(self.fuse.weight)
            self.fuse.weight[:, state] = torch.eye(width)
            self.layer.load_state_dict(together(layer_tensors(self.target, number_of_layer(self.target.text_config))))

    @property
    def training_passes(self) -> float:
        return self.training_depth

    # --- the head

    def states(self, features: Features) -> Tensor:
        """Return the target's states [B, T, H] that the head reads."""
        if self.layout.reads_normed:
            return features.last_hidden
        assert features.layers is not None
        return features.layers

    def read(self, token_ids: Tensor, states: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Return the layer's output [B, T, H] from tokens x_{t+1} [B, T], states h_t [B, T, H] and positions t [B, T].

        `attention` holds further arguments of the layer, such as mask and cache.
        """
        embedded = self.target.embedding(token_ids)
        if self.layout.zeroes_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        pair = [self.token_norm(embedded), self.state_norm(states)]
        x = self.fuse(torch.cat(pair[::-1] if self.layout.state_first else pair, -1))
        rotary: Any = self.target.model.base_model.rotary_emb
        has_axes = hasattr(rotary, "mrope_section")  # three; a text has the same positions on each
        rotated = rotary(x, positions.expand(3, -1, -1) if has_axes else positions)
        return self.layer(x, position_embeddings=rotated, position_ids=positions, **attention)

    def recycled(self, hidden: Tensor) -> Tensor:
        """Return what the next token reads in place of the target's state, from the layer's output [..., H]."""
        return self.last_norm(hidden) if self.layout.recycles_normed else hidden

    # --- training

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the outputs of the unrolled layer, with the true tokens fed in: step k of slot t predicts x_{t+2+k}."""
        drafting, counted = drafting_slots(chain_loss, batch, depth)
        outputs = self.unroll(batch, self.states(features).flatten(0, 1), drafting, depth)
        for k, (hidden, (rows, teachers)) in enumerate(zip(outputs, counted, strict=True)):
            yield Depth(self.last_norm(hidden[rows]), self.target.head, teachers, self.config.step_decay**k)

    def unroll(self, batch: Batch, states: Tensor, drafting: DraftingSlots, num_steps: int) -> Iterator[Tensor]:
        """Yield the layer's output [R, H] at each step of the drafting slots, from states [S, H].

        Step k feeds x_{t+1+k} into slot t, at position t + k. Step 0 reads all slots, since in drafting there are keys
        and values of all of them.
        """
        token_ids, positions = batch.token_ids.flatten(), batch.positions.expand_as(batch.token_ids).flatten()  # [S]
        on_host = batch.on_host
        texts = DraftingSlots.from_counted(torch.ones_like(on_host.loss_mask), on_host.positions)
        steps = UnrolledSteps(texts.to(token_ids.device), drafting)
        index = drafting.index
        hidden = self.read(token_ids.roll(-1)[None], states[None], positions[None], attention_mask=None, attend=steps)
        hidden = hidden[:, index]
        yield hidden[0]
        for k in range(1, num_steps):
            if len(index):  # layers of transformers cannot read nothing
                fed, places = token_ids[(index + 1 + k).clamp(max=len(token_ids) - 1)], positions[index] + k
                hidden = self.read(fed[None], self.recycled(hidden), places[None], attention_mask=None, attend=steps)
            yield hidden[0]

    # --- drafting

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "MtpCache":
        return MtpCache(self, num_rows, num_slots, shape)

    @torch.inference_mode()
    def prefill(self, cache: "MtpCache", token_ids: Tensor, features: Features, window: Window) -> None:
        cache.run(token_ids.gather(1, window.positions + 1), self.states(features), window)

    @torch.inference_mode()
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        return state.cache.draft(state, self.states(state.features), shape, self.target.vocab_size)

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return a config that names the sizes of the head's target; engines read the target's own config.json."""
        return {
            "architectures": ["MTPDraftModel"],
            "hidden_size": self.target.hidden_size,
            "vocab_size": self.target.vocab_size,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        """Return the head's tensors by their names in the target's own files."""
        return to_layout(self.state_dict(), self.layout, self.target.text_config)

    def check_in_target(self) -> None:
        as_in_files(self.target.name, self.target.text_config, self.engine_tensors(), self.layout)

    def write_in_target(self, directory: Path) -> None:
        target = self.target
        write_with_head(target.name, target.text_config, self.engine_tensors(), self.layout, directory)

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "Mtp":
        check_same_shape("this MTP head", config, target)
        own = MtpConfig.of_checkpoint(config)
        tensors = from_layout(tensors, head_layout(target.text_config), target.text_config)
        return loaded(lambda: cls(own, target), tensors, "this MTP head")


class MtpCache(FeatureCache):
    """The head in drafting."""

    def __init__(self, drafter: Mtp, num_rows: int, num_slots: int, shape: Shape) -> None:
        super().__init__(num_rows, num_slots, shape, drafter.fuse.weight.device)
        self.drafter = drafter

    def run(self, token_ids: Tensor, hidden: Tensor, window: Window) -> Tensor:
        self.kv.write_to(window.slots)
        mask = window.mask(self.kv.num_slots)
        return self.drafter.read(token_ids, hidden, window.positions, attention_mask=mask, past_key_values=self.kv)

    def recycled(self, hidden: Tensor) -> Tensor:
        return self.drafter.recycled(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.drafter.target.logits(self.drafter.last_norm(hidden))


def native_tensors(target: Target) -> dict[str, Tensor]:
    """Return the tensors of the target's own head, by the names of `Mtp`; none where its files hold none."""
    config = target.text_config
    layout = head_layout(config)
    if not num_heads(config, layout):
        return {}
    prefix = layout.prefix.format(layers=config.num_hidden_layers)
    tensors = read_tensors(target.name, lambda name: name.startswith(prefix), torch.float32)
    return from_layout(tensors, layout, config)


def number_of_layer(config: PretrainedConfig) -> int:
    """Return which of the target's layers, counted from 0, the head's is like: the last one with full attention."""
    kinds = getattr(config, "layer_types", None) or []
    return max(
        (number for number, kind in enumerate(kinds) if kind == "full_attention"), default=config.num_hidden_layers - 1
    )


def config_of_layer(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a model of the head's layer alone.

    The layer sees the whole text, and has experts where any layer of the target has.
    """
    layer_config = copy.deepcopy(config)
    drop_layers(layer_config, [number_of_layer(config)])
    if getattr(layer_config, "layer_types", None):
        layer_config.layer_types = ["full_attention"]
    if hasattr(layer_config, "sliding_window"):
        layer_config.sliding_window = None
    if hasattr(layer_config, "first_k_dense_replace"):
        layer_config.first_k_dense_replace = 0
    layer_config._attn_implementation = ATTENTION
    return layer_config
