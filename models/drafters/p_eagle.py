"""P-EAGLE (arXiv 2602.01469): EAGLE-3's drafter, made deeper, that drafts all its tokens in one pass.

A slot t reads features and token as in EAGLE-3 and predicts x_{t+2}. Behind it stand mask slots, one for each further
depth d: at position t + d, with the embedding of a mask token and one learned state for the features that are not there
yet. Mask slot d of anchor t sees what the anchor sees, the anchor and the mask slots before it, and predicts x_{t+2+d}.

Shapes: B rows, T slots, S mask slots of a row, K depths, H hidden width, A layers read, N heads, D head width,
V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftsmith.models.batch import Batch, send
from draftsmith.models.drafter_configs import PEagleConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import loaded
from draftsmith.models.drafter_parts.decoder_layer import DecoderLayer, DeeperLayer, randomize, start_as_target
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, in_target_vocabulary, with_no_token
from draftsmith.models.drafter_parts.tree_drafting import DrafterCache, grow
from draftsmith.models.drafter_parts.vocabulary import mask_token_of
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.errors import UserError
from draftsmith.models.layers import (
    checkpoint_tensors,
    fused_attention,
    gather_columns,
    made_anew,
    rotary_table,
    shift_left,
)
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, marked_rows, teacher_rows
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.attention import slot_attention
from draftsmith.models.slots.row_attention import MOST_PAIRS, part_size
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features, Target

SHARED_FIELDS = ("layer_ids", "draft_vocab_size", "intermediate_size", "feature_norm")  # of EAGLE-3's config, too


@dataclass
class MaskSlots:
    """The mask slots of some anchors, in the order of the anchors and then by depth, padded to one length in all rows.

    All three tensors are in the host's memory, or all on the device.
    """

    anchors: Tensor  # [B, S] int64
    depths: Tensor  # [B, S] int64, from 1 on
    real: Tensor  # [B, S] bool, False for padding

    def to(self, device: torch.device) -> "MaskSlots":
        return MaskSlots(*(send(tensor, device) for tensor in (self.anchors, self.depths, self.real)))


class PEagle(Drafter):
    kind = "p_eagle"
    config_class = PEagleConfig
    attends_to_text = True
    can_branch = True
    independent_depths = True

    def __init__(self, config: PEagleConfig, eagle3: Eagle3, target: Target) -> None:
        super().__init__(config)
        self.target, self.layer_ids = target, eagle3.layer_ids
        self.max_draft_length = self.training_depth = config.num_depths
        sizes = {name: getattr(eagle3.config, name) for name in SHARED_FIELDS}
        self.config = replace(config, **sizes, mask_token_id=mask_token_of(config.mask_token_id, target))
        self.eagle3 = eagle3  # fusion, first layer, final norm, head and draft vocabulary
        self.deeper = nn.ModuleList([DeeperLayer(eagle3.layer_config) for _ in range(config.num_layers - 1)])
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, eagle3.fc.in_features))

    @classmethod
    def from_target(cls, config: PEagleConfig, target: Target) -> "PEagle":
        """Return a drafter that starts as EAGLE-3's, with a random state for mask slots.

        The layers are random or, as `starting_layers` says, copies of the target's last ones, in their order.
        """
        drafter = cls(config, Eagle3.from_target(eagle3_config(config), target), target)
        randomize(drafter.deeper)
        if config.starting_layers == "target":
            start_as_target(drafter.layers(), drafter.eagle3.norm, target)
        nn.init.normal_(drafter.mask_hidden)
        return drafter

    def fit_vocabulary(self, counts: Tensor) -> None:
        self.eagle3.fit_vocabulary(counts)
        self.forget_vocabulary()

    def draft_to_target(self) -> Tensor | None:
        return self.eagle3.draft_to_target()

    def project(
        self, layer: int, hidden: Tensor, embedded: Tensor, rotary: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of a layer, each [B, N, T, D], from its input and the embeddings [B, T, H]."""
        if layer == 0:
            return self.eagle3.layer.project(embedded, hidden, rotary, positions)
        return cast(DeeperLayer, self.deeper[layer - 1]).project(hidden, rotary, positions)

    def layers(self) -> list[DecoderLayer]:
        return [self.eagle3.layer, *cast("list[DeeperLayer]", self.deeper)]

    def mask_inputs(self, rows: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the fused state and the embedding that `count` mask slots a row read, both [rows, count, H]."""
        hidden = self.eagle3.fuse(self.mask_hidden).expand(rows, count, -1)
        token = torch.full((rows, count), self.config.mask_token_id, device=hidden.device)
        return hidden, self.target.embedding(token)

    @property
    def training_passes(self) -> float:
        """Average number of slots for a token: one of the text, and the mask slots that are kept."""
        return sum(self.share_kept(depth) for depth in range(self.config.num_depths))

    @property
    def layer_passes(self) -> float:
        return self.training_passes * self.config.num_layers

    def share_kept(self, depth: int) -> float:
        """Return the share of slots that is trained at a depth."""
        return max(self.config.keep_ratio**depth, self.config.keep_least)

    # --- training

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the depths: depth d at slot t predicts x_{t+2+d}, whose distribution the target had at t+1+d.

        In training a random part of the mask slots is kept, and each weight is divided by that part, so that sums and
        means are right on average.
        """
        assert features.layers is not None
        kept_slots, shares = self.keep(chain_loss)
        behind = mask_slots(kept_slots[1:])
        text, masked = self.run(batch, features.layers, behind.to(features.layers.device))
        for d, (kept, share) in enumerate(zip(kept_slots[:depth], shares[:depth], strict=True)):
            rows = marked_rows(masked, behind.real & (behind.depths == d)) if d else marked_rows(text, kept)
            yield Depth(
                self.eagle3.norm(rows), self.eagle3.lm_head, teacher_rows(kept, d), self.config.depth_decay**d / share
            )

    def keep(self, chain_loss: ChainLoss) -> tuple[list[Tensor], list[float]]:
        """Return the slots to train at each depth, drawn from those of the depth before, and the share kept.

        Slots are bool [B, T] in the host's memory.
        """
        chance = torch.rand(chain_loss.loss_mask.shape)
        shares = [self.share_kept(depth) if self.training else 1.0 for depth in range(self.config.num_depths)]
        return [chain_loss.next_depth(chance < share, share) for share in shares], shares

    def run(self, batch: Batch, layers: Tensor, slots: MaskSlots) -> tuple[Tensor, Tensor]:
        """Return the last layer's outputs of slots [B, T, H] and mask slots [B, S, H] from features [B, T, A * H]."""
        text = self.eagle3.fuse(layers)
        masked, mask_embedded = self.mask_inputs(*slots.anchors.shape)
        embedded = self.target.embedding(shift_left(batch.token_ids, 1))
        positions = batch.positions.expand(len(text), -1)
        mask_positions = positions.gather(1, slots.anchors) + slots.depths
        rotary = rotary_table(self.eagle3.rotary, text.shape[1] + self.config.num_depths, text)
        text_sees, masked_see = batch.attention_mask(), SeenByMaskSlots(slots, positions, self.config.num_depths)
        for number, layer in enumerate(self.layers()):
            query, key, value = self.project(number, text, embedded, rotary, positions)
            own = self.project(number, masked, mask_embedded, rotary, mask_positions)
            text = layer.finish(text, slot_attention(layer, query, key, value, text_sees)[0])
            masked = layer.finish(masked, masked_see.attend(own, (key, value)))
        return text, masked

    # --- drafting

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "PEagleCache":
        return PEagleCache(self, num_rows, num_slots, shape)

    @torch.inference_mode()
    def prefill(self, cache: "PEagleCache", token_ids: Tensor, features: Features, window: Window) -> None:
        assert features.layers is not None
        embedded = self.target.embedding(token_ids.gather(1, window.positions + 1))
        self.decode(cache, self.eagle3.fuse(features.layers), embedded, window, window.slots)

    @torch.inference_mode()
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft in one pass over the newest features and the mask slots behind the newest committed one."""
        assert state.features.layers is not None
        cache, batch, width = state.cache, *state.positions.shape
        hidden, embedded = self.eagle3.fuse(state.features.layers), self.target.embedding(state.next_ids)
        mask_hidden, mask_embedded = self.mask_inputs(batch, shape.depth - 1)
        mask_places = state.lengths[:, None] - 1 + torch.arange(shape.depth - 1, device=hidden.device)
        places = torch.cat([state.positions, mask_places], 1)  # [B, T + K - 1]
        # what was not committed must not be kept, for its places are those of mask slots
        written = state.committed_slots(cache.kv.num_slots)
        hidden = self.decode(
            cache,
            torch.cat([hidden, mask_hidden], 1),
            torch.cat([embedded, mask_embedded], 1),
            Window(places, places, places[:, 0]),
            torch.cat([written, mask_places], 1),
        )
        newest = state.newest_column[:, None]
        drafting = torch.cat([newest, width + torch.arange(shape.depth - 1, device=newest.device).expand(batch, -1)], 1)
        logits = self.eagle3.lm_head(self.eagle3.norm(gather_columns(hidden, drafting)))  # [B, K, Vd]
        depths: Iterator[Tensor] = iter(logits.split(1, 1))

        def next_depth(*_: Tensor | None) -> Tensor:
            return next(depths)  # [B, 1, Vd], whatever was drafted before

        draft = grow(shape, cache.tree, next_depth(), next_depth, state)
        return in_target_vocabulary(draft, cache.ids, self.target.vocab_size)

    def decode(self, cache: "PEagleCache", hidden: Tensor, embedded: Tensor, window: Window, written: Tensor) -> Tensor:
        """Return the outputs [B, T, H] of all layers on the cache, from inputs [B, T, H] at the places of a window.

        `written` [B, T]: the slots that keep keys and values.
        """
        cache.kv.write_to(written)
        mask = window.mask(cache.kv.num_slots)
        positions = window.positions.clamp(max=len(cache.rotary) - 1)
        for number, layer in enumerate(self.layers()):
            query, key, value = self.project(number, hidden, embedded, cache.rotary, positions)
            keys, values = cache.kv.update(key, value, number)
            hidden = layer.finish(hidden, slot_attention(layer, query, keys, values, mask)[0])
        return hidden

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config as vLLM reads it (method eagle3 with `parallel_drafting`); SGLang has no P-EAGLE."""
        return {
            **self.eagle3.engine_config(),
            "architectures": ["LlamaForCausalLMEagle3"],  # PeagleLlamaForCausalLM is for the speculators layout
            "num_hidden_layers": self.config.num_layers,
            "pard_token": self.config.mask_token_id,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        tensors = {name.removeprefix("eagle3."): tensor for name, tensor in checkpoint_tensors(self).items()}
        return {deeper_name(name, "deeper.", "layers.", 1): tensor for name, tensor in tensors.items()}

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "PEagle":
        if config.get("norm_before_residual"):
            raise UserError(
                "this P-EAGLE drafter was trained with norm_before_residual, which draftsmith's does not know"
            )
        named = [config[key] for key in ("mask_token_id", "pard_token") if config.get(key) is not None]  # vLLM's order
        if not named or "num_hidden_layers" not in config:
            raise UserError(
                "this P-EAGLE drafter's config.json lacks num_hidden_layers, or pard_token or mask_token_id: add them"
            )
        tensors = {deeper_name(name, "layers.", "deeper.", -1): tensor for name, tensor in tensors.items()}
        rest = {key: tensor for key, tensor in tensors.items() if key == "mask_hidden" or key.startswith("deeper.")}
        first = {key: tensor for key, tensor in tensors.items() if key not in rest}
        eagle3 = Eagle3.from_engine({**config, "draftsmith": {}}, first, target)
        own = PEagleConfig.of_checkpoint(config, num_layers=config["num_hidden_layers"], mask_token_id=named[0])
        eagle3_tensors = {f"eagle3.{name}": tensor for name, tensor in checkpoint_tensors(eagle3).items()}
        return loaded(lambda: cls(own, eagle3, target), {**eagle3_tensors, **rest}, "this P-EAGLE drafter")


class PEagleCache(DrafterCache):
    """Keys and values of all layers for the text, and for a moment of the mask slots behind it."""

    def __init__(self, drafter: PEagle, num_rows: int, num_slots: int, shape: Shape) -> None:
        like = drafter.eagle3.fc.weight
        super().__init__(num_rows, num_slots, shape, like.device)
        self.rotary = rotary_table(drafter.eagle3.rotary, self.kv.num_slots, like)
        self.ids = with_no_token(drafter.draft_to_target())


def eagle3_config(config: PEagleConfig) -> Eagle3Config:
    shared = {name: getattr(config, name) for name in SHARED_FIELDS}
    return Eagle3Config(**shared, starting_layers=config.starting_layers)


def deeper_name(name: str, before: str, after: str, step: int) -> str:
    """Return a tensor's name with layers renumbered: layer 0 of `deeper` is layer 1 of engines."""
    if not name.startswith(before) or (step < 0 and name.startswith(f"{before}0.")):
        return name
    number, _, rest = name.removeprefix(before).partition(".")
    return f"{after}{int(number) + step}.{rest}"


def mask_slots(anchors: list[Tensor]) -> MaskSlots:
    """Return the mask slots of the anchors [B, T] that are marked for depth 1, 2, ..."""
    marked = torch.stack(anchors, 2)  # [B, T, K - 1]
    count = int(marked.flatten(1).sum(1).max())
    real, places = marked.flatten(1).sort(dim=1, descending=True, stable=True)
    places = places[:, :count]
    return MaskSlots(places // marked.shape[2], 1 + places % marked.shape[2], real[:, :count])


class SeenByMaskSlots:
    """The attention of mask slots to the text up to their anchors and to the mask slots before them.

    It is computed for some of them at a time, as many as `MOST_PAIRS` allows. Where these are not all, the backward
    pass computes it again.
    """

    def __init__(self, slots: MaskSlots, positions: Tensor, num_depths: int) -> None:
        """`positions` [B, T]: those of the text's tokens in their documents."""
        self.slots, self.length, self.num_depths = slots, positions.shape[1], num_depths
        self.begins = slots.anchors - positions.gather(1, slots.anchors)  # [B, S] columns where their documents begin
        count, size = slots.anchors.shape[1], part_size(MOST_PAIRS // len(positions), self.length)
        self.parts = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        self.mask = self.seen(*self.with_keys(self.parts[0])) if len(self.parts) == 1 else None

    def with_keys(self, queries: slice) -> tuple[slice, slice]:
        """Return a slice of mask slots and the slice that they see, which begins `num_depths` places earlier."""
        return queries, slice(max(0, queries.start - self.num_depths), queries.stop)

    def seen(self, queries: slice, keys: slice) -> Tensor:
        """Return what C mask slots see of the T tokens of the text and of M mask slots: bool [B, 1, C, T + M]."""
        anchors, begins = self.slots.anchors[:, queries, None], self.begins[:, queries, None]
        columns = torch.arange(self.length, device=anchors.device)
        same_anchor = anchors == self.slots.anchors[:, None, keys]
        not_deeper = self.slots.depths[:, None, keys] <= self.slots.depths[:, queries, None]
        own = same_anchor & not_deeper & self.slots.real[:, None, keys]
        return torch.cat([(columns <= anchors) & (columns >= begins), own], 2)[:, None]

    def attend(self, own: tuple[Tensor, Tensor, Tensor], text: tuple[Tensor, Tensor]) -> Tensor:
        """Return attention [B, S, N, D] of mask slots by their query, key and value, and the text's keys and values."""

        def part(queries: slice) -> Tensor:
            _, keys = slices = self.with_keys(queries)
            key, value = (torch.cat([of_text, x[:, :, keys]], 2) for of_text, x in zip(text, own[1:], strict=True))
            mask = self.seen(*slices) if self.mask is None else self.mask
            query = own[0][:, :, queries]
            return fused_attention(query, key, value, mask)

        attended = [made_anew(part, queries) if self.mask is None else part(queries) for queries in self.parts]
        return torch.cat(attended or [own[0]], 2).transpose(1, 2)
