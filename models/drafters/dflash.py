"""DFlash (arXiv 2602.06036): a small decoder that drafts a whole block of tokens in one pass.

Each layer attends to keys and values made from the target's features of the text before the newest token, the anchor,
and to the block itself: the anchor and mask tokens behind it, which see each other in both directions. A block never
enters the text: what is kept of a token are the keys and values of its features.

Row k of a block stands at position a + k, where a is the anchor's. In the layout `fill_in` it predicts the token at its
own place, so that row 0 predicts nothing; in the layout `next_token` the token behind it. Slot t below is the place of
the newest features, so that its anchor is x_{t+1} and depth i predicts x_{t+2+i}, as in all families.

Shapes: B rows, T tokens, M anchors of a row, R rows of a block, K depths, H hidden width, A layers read, N heads,
D head width, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.models.batch import Batch, send
from draftsmith.models.block_parts.anchors import block_tokens, padded_anchors, seen_by_blocks
from draftsmith.models.block_parts.block_layer import KEY_NORM, BlockLayer, KeysValues, attention_of
from draftsmith.models.block_parts.slot_correctors import ConfidenceHead, CorrectedHead, SlotCorrector, SlotWalk
from draftsmith.models.drafter_configs import DFlashConfig
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.checkpoint_interface import check_same_shape, loaded
from draftsmith.models.drafter_parts.decoder_layer import (
    engine_layer_config,
    layer_config_for,
    layer_config_of,
    randomize,
    start_as_target,
)
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, in_target_vocabulary, with_no_token
from draftsmith.models.drafter_parts.tree_drafting import DrafterCache, grow
from draftsmith.models.drafter_parts.vocabulary import (
    add_map,
    copy_head,
    draft_ids,
    fit_map,
    mapped_ids,
    mask_token_of,
    too_large,
)
from draftsmith.models.errors import UserError
from draftsmith.models.half_weights import DraftingLinear
from draftsmith.models.layers import (
    RMSNorm,
    checkpoint_tensors,
    fused_attention,
    made_anew,
    rotary_table,
    shift_left,
)
from draftsmith.models.losses.chain_loss import ChainLoss, Depth, marked_rows, teacher_rows
from draftsmith.models.losses.position_weights import chances_of, d_pace
from draftsmith.models.sampling.trees import WORD, Shape, pack
from draftsmith.models.slots.attention import slot_attention
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.row_attention import MOST_PAIRS, part_size
from draftsmith.models.slots.window import Window
from draftsmith.models.target.target import Features, Target, check_layer_ids

D = TypeVar("D", bound="DFlash")
SHORT_TEXT = 64  # tokens; blocks of no more rows than this cost less together than apart
DECAY_LENGTH = 4.0  # of position weights; the paper has it for blocks of 8, and 7 for blocks of 16


class DFlash(Drafter):
    kind = "dflash"
    config_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    attends_to_text = True
    can_branch = True
    independent_depths = True
    d2t: Tensor  # [Vd] int64, target id - draft id; only with a reduced vocabulary
    t2d: Tensor  # [V] bool, in the draft vocabulary?

    def __init__(self, config: DFlashConfig, layer_config: LlamaConfig, target: Target) -> None:
        super().__init__(config)
        self.layer_config, self.target = layer_config, target
        self.layer_ids = check_layer_ids(
            config.layer_ids or even_layer_ids(target.num_layers, config.num_layers), target
        )
        vocab = config.draft_vocab_size or target.vocab_size
        if vocab > target.vocab_size:
            raise UserError(too_large(vocab, target.vocab_size))
        self.config = replace(
            config,
            layer_ids=list(self.layer_ids),
            draft_vocab_size=vocab,
            intermediate_size=layer_config.intermediate_size,
            mask_token_id=mask_token_of(config.mask_token_id, target),
        )
        self.first_row = int(config.layout == "fill_in")  # of a block that predicts a token
        self.max_draft_length = self.training_depth = config.block_size - self.first_row
        width, eps = layer_config.hidden_size, layer_config.rms_norm_eps
        self.fc = DraftingLinear(len(self.layer_ids) * target.hidden_size, width, bias=False)
        self.hidden_norm, self.norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.layers = nn.ModuleList([self.new_layer(self.window_of(number)) for number in range(config.num_layers)])
        self.rotary = LlamaRotaryEmbedding(layer_config)
        self.confidence_head: ConfidenceHead | None = None
        self.lm_head: nn.Linear | None = None  # with the whole vocabulary the target's own, frozen and not stored
        self.drafts_by_target_head = vocab == target.vocab_size
        if vocab < target.vocab_size:
            self.lm_head = DraftingLinear(width, vocab, bias=False)
            add_map(self, vocab, target.vocab_size)

    def new_layer(self, window: int | None) -> BlockLayer:
        return BlockLayer(self.layer_config, self.config.key_norm, window)

    def window_of(self, layer: int) -> int | None:
        """Return the tokens that a row sees in a layer; None: all before it, and its block."""
        return None if layer in self.config.full_layers else self.config.sliding_window

    @classmethod
    def from_target(cls: type[D], config: DFlashConfig, target: Target) -> D:
        """Return a drafter that begins with the highest layer read and ends with its rows of the target's head.

        Between them stand random layers or, as `starting_layers` says, copies of the target's last ones, in order.
        """
        drafter = cls(config, layer_config_for(config.intermediate_size, target), target)
        randomize(drafter)
        if config.starting_layers == "target":
            start_as_target([*drafter.block_layers()], drafter.norm, target)
        width = target.hidden_size
        drafter.fc.weight.data[:, -width:] += torch.eye(width)
        if drafter.lm_head is not None:
            copy_head(drafter.lm_head, target, torch.arange(drafter.lm_head.out_features))
        drafter.start_own_parts()
        return drafter

    def start_own_parts(self) -> None:
        """Give the parts that a family adds to DFlash weights by which they change nothing at first."""

    def fit_vocabulary(self, counts: Tensor) -> None:
        """Choose the draft vocabulary: the tokens that the target wrote most often; ties go to the lower id."""
        if self.lm_head is not None:
            fit_map(self, self.lm_head, counts, self.target)
            self.forget_vocabulary()

    def draft_to_target(self) -> Tensor | None:
        """Return the target ids of the draft vocabulary [Vd]; None where it is the whole vocabulary."""
        return None if self.lm_head is None else mapped_ids(self.d2t)

    def block_layers(self) -> list[BlockLayer]:
        return cast("list[BlockLayer]", [*self.layers])

    @property
    def training_passes(self) -> float:
        """Average number of block rows for a token of a text."""
        return self.config.anchor_share * self.config.block_size

    @property
    def layer_passes(self) -> float:
        return self.training_passes * self.config.num_layers

    @property
    def head_passes(self) -> float:
        return self.config.anchor_share * self.training_depth

    # --- the parts of a forward pass

    def context(self, layers: Tensor) -> Tensor:
        """Return the fused features [B, T, H] that keys and values of the context are made from.

        They are made of the features [B, T, A * H] of the layers read.
        """
        return self.hidden_norm(self.fc(layers))

    def embed_blocks(self, anchors: Tensor) -> Tensor:
        """Return the embeddings [B, M, R, H] that blocks read: those of anchors, token ids [B, M], and mask tokens."""
        tokens = torch.full((*anchors.shape, self.config.block_size), self.config.mask_token_id, device=anchors.device)
        tokens[..., 0] = anchors
        return self.target.embedding(tokens)

    @property
    def head(self) -> Callable[[Tensor], Tensor]:
        """The head that makes logits [..., Vd] of normed outputs [..., H] of the last layer."""
        return self.target.head if self.lm_head is None else self.lm_head

    @property
    def corrector(self) -> SlotCorrector | None:
        """The corrector of slots by the tokens before them; None: slots do not depend on each other."""
        return None

    # --- training

    def depths(self, chain_loss: ChainLoss, batch: Batch, features: Features, depth: int) -> Iterator[Depth]:
        """Yield the depths: depth i at slot t predicts x_{t+2+i}.

        In training a random part of the slots is kept, and each weight is divided by that part, so that sums and means
        are right on average.
        """
        assert features.layers is not None
        share = self.config.anchor_share if self.training else 1.0
        kept = torch.rand(chain_loss.loss_mask.shape) < share
        counted = [chain_loss.next_depth(kept, share) for _ in range(depth)]
        anchors = padded_anchors(counted[0])
        trained = [anchors.real & slots.gather(1, anchors.slots) for slots in counted]
        slots = send(anchors.slots, features.layers.device)
        rows = slice(self.first_row, self.first_row + depth)
        tokens = block_tokens(batch, slots, depth)  # [B, M, K + 1]
        hidden = self.norm(self.run_blocks(batch, features.layers, slots)[:, :, rows])  # [B, M, K, H]
        inputs, head = self.with_codes(hidden, tokens[..., :-1])
        weights = self.weights(inputs, head, tokens[..., 1:], torch.stack(trained, -1))
        for i, marked in enumerate(trained):
            weight, read = marked_rows(weights[..., i], marked) / share, marked_rows(inputs[:, :, i], marked)
            confidence = None if self.confidence_head is None else self.confidence_head(read)
            yield Depth(read, head, teacher_rows(counted[i], i), weight, confidence)

    def with_codes(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return what the head reads of each slot, and the head, from hidden states [B, M, K, H].

        With a corrector the codes that it makes of the tokens before the slots, [B, M, K], stand beside the hidden
        states.
        """
        if self.corrector is None:
            return hidden, self.head
        codes, _ = self.corrector.codes(hidden.flatten(0, 1), token_ids.flatten(0, 1), None)
        codes = codes.unflatten(0, hidden.shape[:2])
        return torch.cat([hidden, codes], -1), CorrectedHead(self.head, self.corrector.readout)

    def weights(self, inputs: Tensor, head: Callable[[Tensor], Tensor], tokens: Tensor, trained: Tensor) -> Tensor:
        """Return the weights of all depths in the loss, fp32 [B, M, K].

        They are made from what the head reads [B, M, K, ...], the text's tokens there [B, M, K], and which of them are
        trained, [B, M, K] bool in the host's memory. D-PACE's move with the drafter: outside of training, where losses
        of checkpoints are compared, weights are those of the decay.
        """
        if self.config.position_weights == "decay" or not self.training:
            length = self.config.decay_length or DECAY_LENGTH
            depths = torch.arange(tokens.shape[2], device=tokens.device)
            return torch.exp(-depths / length).expand(tokens.shape)
        ids = self.draft_to_target()
        places = tokens.flatten() if ids is None else draft_ids(ids, tokens.flatten())
        chances = chances_of(places, inputs.flatten(0, 2), head)
        return d_pace(chances.view(tokens.shape), send(trained, tokens.device))

    def run_blocks(self, batch: Batch, layers: Tensor, slots: Tensor) -> Tensor:
        """Return the last layer's outputs [B, M, R, H] of the blocks at some slots [B, M], from features [B, T, A * H].

        Blocks see the text, but not each other, so a few are computed at a time: memory grows with their number, and
        not with its square. They have no more rows together than the text has tokens, or `SHORT_TEXT` where it has
        fewer. A long text allows fewer rows still; the backward pass then computes attention again, since masks that
        were kept would fill the memory.
        """
        context, rows = self.context(layers), self.config.block_size
        positions, length = batch.positions.expand(len(context), -1), context.shape[1]
        rotary = rotary_table(self.rotary, length + rows, context)
        text = [layer.self_attn.keys_values(context, rotary, positions) for layer in self.block_layers()]
        most_rows = part_size(MOST_PAIRS // len(context), length)
        anew = most_rows < length
        parts = slots.split(max(1, (most_rows if anew else max(length, SHORT_TEXT)) // rows), 1)
        return torch.cat([self.run_some_blocks(batch, positions, rotary, text, part, anew) for part in parts], 1)

    def run_some_blocks(
        self, batch: Batch, positions: Tensor, rotary: Tensor, text: list[KeysValues], slots: Tensor, anew: bool
    ) -> Tensor:
        """Return the last layer's outputs [B, M, R, H] of the blocks at some slots [B, M].

        `text` has keys and values of the context in each layer, at positions [B, T]. `anew`: the backward pass computes
        masks and attention again.
        """
        num_rows = self.config.block_size
        anchors = shift_left(batch.token_ids, 1).gather(1, slots)
        hidden = self.embed_blocks(anchors).flatten(1, 2)  # [B, M * R, H]
        steps = torch.arange(1, num_rows + 1, device=slots.device)
        places = (positions.gather(1, slots)[..., None] + steps).flatten(1)  # [B, M * R]
        seen = partial(seen_by_blocks, batch, positions, slots, num_rows)
        seen_in_layers = seen if anew else cache(seen)

        def attend(query: Tensor, text: KeysValues, own: KeysValues, window: int | None) -> Tensor:
            key, value = (torch.cat(pair, 2) for pair in zip(text, own, strict=True))
            mask = seen_in_layers(window)
            return fused_attention(query, key, value, mask)

        for layer, of_text in zip(self.block_layers(), text, strict=True):
            query, *own = layer.project(hidden, rotary, places)
            arguments = query, of_text, (own[0], own[1]), layer.sliding_window
            attended = made_anew(attend, *arguments) if anew else attend(*arguments)
            hidden = layer.finish(hidden, attended.transpose(1, 2))
        return hidden.unflatten(1, (-1, num_rows))

    # --- drafting

    def new_cache(self, num_rows: int, num_slots: int, shape: Shape) -> "DFlashCache":
        return DFlashCache(self, num_rows, num_slots, shape)

    @torch.inference_mode()
    def prefill(self, cache: "DFlashCache", token_ids: Tensor, features: Features, window: Window) -> None:
        assert features.layers is not None
        self.keep_context(cache, features.layers, window.positions, window.slots)

    @torch.inference_mode()
    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        """Draft in one pass, behind the context of what was committed in the last round."""
        assert state.features.layers is not None
        cache = state.cache
        written = state.committed_slots(cache.kv.num_slots)
        self.keep_context(cache, state.features.layers, state.positions, written)
        drafting = slice(self.first_row, self.first_row + shape.depth)
        hidden = self.norm(self.decode_block(cache, state)[:, drafting])
        walk = SlotWalk(hidden, self.head(hidden), self.corrector, self.confidence_head, cache.ids)
        draft = grow(shape, cache.tree, walk.first(state.newest()), walk.read, state, walk.confidence)
        return in_target_vocabulary(draft, cache.ids, self.target.vocab_size)

    def keep_context(self, cache: "DFlashCache", layers: Tensor, positions: Tensor, written: Tensor) -> None:
        """Keep keys and values of features [B, T, A * H] at positions [B, T], in the slots `written` [B, T]."""
        context = self.context(layers)
        cache.kv.write_to(written)
        for number, layer in enumerate(self.block_layers()):
            cache.kv.update(*layer.self_attn.keys_values(context, cache.rotary, cache.clamped(positions)), number)

    def decode_block(self, cache: "DFlashCache", state: DecodingState) -> Tensor:
        """Return the last layer's outputs [B, R, H] of each row's block, whose keys and values are overwritten later.

        The block is as long as in training, however few tokens are drafted, since its rows see each other.
        """
        prefix = state.lengths - 1
        hidden = self.embed_blocks(state.newest()[:, None])[:, 0]
        places = prefix[:, None] + torch.arange(self.config.block_size, device=prefix.device)  # [B, R]
        cache.kv.write_to(places)
        all_columns = cache.all_columns.expand(*places.shape, -1)
        both_ways = Window(places[:, -1:].expand_as(places), places, prefix, all_columns)
        masks = {
            window: (both_ways if window is None else Window(places, places, prefix)).mask(cache.kv.num_slots)
            for window in {layer.sliding_window for layer in self.block_layers()}
        }
        for number, layer in enumerate(self.block_layers()):
            query, key, value = layer.project(hidden, cache.rotary, cache.clamped(places))
            keys, values = cache.kv.update(key, value, number)
            mask, window = masks[layer.sliding_window], layer.sliding_window
            hidden = layer.finish(hidden, slot_attention(layer, query, keys, values, mask, sliding_window=window)[0])
        return hidden

    # --- checkpoints

    def engine_config(self) -> dict[str, Any]:
        """Return the config of the plain layout, which vLLM and SGLang read; its layer ids count outputs from 0."""
        sliding = [layer.sliding_window is not None for layer in self.block_layers()]
        nested = {
            "mask_token_id": self.config.mask_token_id,
            "target_layer_ids": [layer_id - 1 for layer_id in self.layer_ids],
            "block_size": self.config.block_size,
        }
        return {
            **engine_layer_config(self.layer_config, self.target),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": self.config.num_layers,
            "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
            "use_sliding_window": any(sliding),
            "sliding_window": self.config.sliding_window,
            # Both engines read it for all layers, and their defaults differ unless layers do.
            **({} if self.config.full_layers else {"is_causal": any(sliding)}),
            "block_size": self.config.block_size,
            "sample_from_anchor": self.config.layout == "next_token",
            "num_target_layers": self.target.num_layers,
            "target_hidden_size": self.target.hidden_size,
            "draft_vocab_size": self.config.draft_vocab_size,
            "dflash_config": nested,
        }

    def engine_tensors(self) -> dict[str, Tensor]:
        """Return the tensors, with norms of keys that change nothing where they have no weights."""
        tensors = checkpoint_tensors(self)
        for number, layer in enumerate(self.block_layers()):
            if not self.config.key_norm:
                tensors[f"layers.{number}.{KEY_NORM}"] = torch.ones_like(layer.self_attn.q_norm.weight)
        return tensors

    @classmethod
    def from_engine(cls, config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> "DFlash":
        what = f"this {cls.__name__} drafter"
        check_same_shape(what, config, target)
        window, full_layers = attention_of(config)
        norms = [name for name in tensors if name.endswith(KEY_NORM)]
        key_norm = any(bool((tensors[name] != 1).any()) for name in norms)
        if not key_norm:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in norms}
        own = cls.config_class.of_checkpoint(
            config,
            layer_ids=config["eagle_aux_hidden_state_layer_ids"],
            draft_vocab_size=config.get("draft_vocab_size") or target.vocab_size,
            num_layers=config["num_hidden_layers"],
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            sliding_window=window,
            full_layers=full_layers,
            key_norm=key_norm,
            layout="next_token" if cls.predicts_next(config) else "fill_in",
            **cls.own_sizes(config),
        )
        layer_config = layer_config_of(config)
        return loaded(lambda: cls(own, layer_config, target), tensors, what)

    @classmethod
    def predicts_next(cls, config: dict[str, Any]) -> bool:
        """Return whether a row predicts the token behind its place, from config.json."""
        return config.get("sample_from_anchor", cls.config_class.layout == "next_token")

    @classmethod
    def own_sizes(cls, config: dict[str, Any]) -> dict[str, int]:
        """Return the sizes of what a family adds to DFlash, by the fields of its config, from config.json.

        Raises `UserError` for a part that draftsmith does not compute, and for a size that is missing.
        """
        return {}

    @classmethod
    def check_has(cls, fields: Iterable[str], config: dict[str, Any], place: str = "") -> None:
        """Raise `UserError` for the first of some fields that config.json lacks, or the object in it at a `place`."""
        for name in fields:
            if config.get(name) is None:
                raise UserError(f"this {cls.__name__} drafter's config.json lacks {name}{place}: take another copy")


class DFlashCache(DrafterCache):
    """Keys and values of the context, with room for a block behind it."""

    def __init__(self, drafter: DFlash, num_rows: int, num_slots: int, shape: Shape) -> None:
        like, block_size = drafter.fc.weight, drafter.config.block_size
        super().__init__(num_rows, num_slots, shape, like.device)
        self.kv = SlotCache(num_rows, num_slots + block_size)
        self.rotary = rotary_table(drafter.rotary, self.kv.num_slots, like)
        self.ids = with_no_token(drafter.draft_to_target())
        columns = (torch.arange(-(-block_size // WORD) * WORD, device=like.device) < block_size).long()
        self.all_columns = pack(columns)  # [W] ancestor words of a row that sees the whole block

    def clamped(self, positions: Tensor) -> Tensor:
        """Return positions within the rotary table; only rows whose output is not used lie beyond it."""
        return positions.clamp(max=len(self.rotary) - 1)


def even_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Return after-N-layers ids of the target's layers to read: evenly from the second to the last but two.

    One id for each layer of the drafter (section 1.1 of the authors' code); fewer of a shallow target.
    """
    if num_layers == 1:
        return [max(1, num_target_layers // 2)]
    step = (num_target_layers - 4) / (num_layers - 1)
    ids = {1 + round(1 + i * step) for i in range(num_layers)}  # halves are rounded as by the authors
    return sorted({min(max(1, layer_id), num_target_layers - 1) for layer_id in ids})
