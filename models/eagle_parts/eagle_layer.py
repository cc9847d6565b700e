"""The decoder layer of EAGLE-1 and EAGLE-3: unrolled over a batch in training, and level by level in drafting.

Both continue the target's features: a slot t reads the feature of x_t and the embedding of x_{t+1}, and the layer's
output takes the place of the next feature. How the two enter the layer differs by family, the rest is here.

Training ("training-time test", arXiv 2503.01840 section 3.2) computes only slots that draft; the others are keys and
values at step 0. Rows of a batch lie one after another, so that documents, padding and prompts cost what they hold and
no more. Where several processes take a text together, each computes its part of the slots and gives the others their
keys and values at step 0, which are all that a slot reads of other slots. Drafting computes the same on plain tensors
in few operations: a small drafter is bound by the number of its operations and module calls, not by their size.

Shapes: B rows, T tokens of a row, S = B * T slots, L of them in this process's part, R of those draft, H hidden width,
E width of what the layer makes of a token, W width of what the attention reads, Nq query heads, Nkv key-value heads,
D head width, M slots of a cache, V vocabulary that the drafter has logits for.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.models.batch import Batch, send
from draftsmith.models.drafter_parts.decoder_layer import DecoderLayer, DeeperLayer
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, in_target_vocabulary
from draftsmith.models.drafter_parts.tree_drafting import DrafterCache, LevelWindows, grow
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots, KeyValue, unrolled_attention
from draftsmith.models.fused.fused_layers import steps_on
from draftsmith.models.fused.layer_steps import Beside
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.layers import DecodingNorm, gather_columns, rotary_angles, rotary_table
from draftsmith.models.losses.chain_loss import ChainLoss
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.slots.attention import slot_attention
from draftsmith.models.slots.window import Window

# --- training


@dataclass
class Unrolling:
    """The slots of a batch that draft, and over how many steps."""

    batch: Batch
    slots: DraftingSlots
    num_steps: int

    def fed_ids(self) -> Tensor:
        """Return the tokens that the part's slots are fed with, [L + steps - 1] int64: place i is of slot i at step 0.

        At step k it is of slot i - k.
        """
        part, token_ids = self.slots.part, self.batch.token_ids.flatten()
        places = torch.arange(part.first + 1, part.last + self.num_steps, device=token_ids.device)
        return token_ids.index_select(0, places.clamp(max=len(token_ids) - 1))

    def all_slots(self) -> DraftingSlots:
        """Return all slots of the part, as if all drafted."""
        host, part = self.batch.on_host, self.slots.part
        counted = part.within(torch.ones_like(host.loss_mask))
        return DraftingSlots.from_counted(counted, host.positions, part).to(self.slots.index.device)


class UnrolledLayer(ABC):
    """The layer on a batch, unrolled over steps which share what it makes of the tokens.

    Behind it may stand deeper layers, whose keys and values are made of its output: it is computed at all slots then.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        rotary: nn.Module,
        fed: Tensor,
        unrolling: Unrolling,
        deeper: Sequence[DeeperLayer] = (),
    ) -> None:
        """`fed` [L + steps - 1, E]: what the layer makes of each of `fed_ids`, the same at every step."""
        self.layer, self.fed, self.deeper, self.unrolling = layer, fed, deeper, unrolling
        self.slots, self.part = unrolling.slots, unrolling.slots.part
        self.places = self.slots.index_in_part
        batch = unrolling.batch
        self.positions = self.part.of(batch.positions.expand_as(batch.token_ids))  # [L]
        self.rotary = rotary_table(rotary, batch.token_ids.shape[1] + unrolling.num_steps, fed)

    @abstractmethod
    def enter(self, fed: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values side by side [R, (Nq + 2 Nkv) D], and the residual [R, H].

        `fed` [R, E] comes of the tokens, `hidden` [R, H] is the feature or the output of the step before.
        """

    def residual(self, entered: Tensor) -> Tensor:
        """Return the residual [R, H] to which the attention's output is added, from that of `enter`."""
        return entered

    def run(self, features: Tensor, detach: bool = False, recompute: bool = False) -> Iterator[Tensor]:
        """Yield the output [R, H] of each step at the drafting slots, from features [L, H].

        Step k feeds x_{t+1+k} into slot t, at position t + k, with the output of step k - 1 in place of the feature.
        Where that reaches beyond the document nothing is counted, and no other slot sees it. `detach`: no gradient
        flows from one step into the one before; `recompute`: the backward pass computes steps again.
        """
        residual, query, key, value = self.project(features, self.fed[: self.part.size], self.positions)
        text = self.part.joined(key), self.part.joined(value)
        read = self.unrolling.all_slots() if self.deeper else self.slots
        places = read.index_in_part
        residual, query = residual.index_select(0, places), query.index_select(0, places)
        hidden = self.finish(residual, query, text, [], read)
        hidden, deeper = self.go_deeper(hidden, self.positions, [], read)
        steps = [[text, *deeper]]  # of the text, then of each step
        if self.deeper:
            hidden = hidden.index_select(0, self.places)
        yield hidden
        for k in range(1, self.unrolling.num_steps):
            if detach:
                hidden = hidden.detach()
            step = (hidden, k, steps)
            hidden, newest = checkpoint(self.step, *step, use_reentrant=False) if recompute else self.step(*step)
            steps = [*steps, newest]
            yield hidden

    def step(self, hidden: Tensor, k: int, before: list[list[KeyValue]]) -> tuple[Tensor, list[KeyValue]]:
        """Return the output [R, H] of step k >= 1 from that of the step before, and each layer's own key and value.

        `before`: those of the text and of the steps before.
        """
        fed = self.fed.index_select(0, self.places + k)
        positions = self.positions[self.places] + k
        residual, query, key, value = self.project(hidden, fed, positions)
        text, *own = [step[0] for step in before]
        hidden = self.finish(residual, query, text, [*own, (key, value)], self.slots)
        hidden, deeper = self.go_deeper(hidden, positions, before, self.slots)
        return hidden, [(key, value), *deeper]

    def go_deeper(
        self, hidden: Tensor, positions: Tensor, before: list[list[KeyValue]], slots: DraftingSlots
    ) -> tuple[Tensor, list[KeyValue]]:
        """Return the last layer's output [R, H] from the first one's, and keys and values of each layer between.

        `before`: those of the text and of the steps before, by step and layer; at step 0 none.
        """
        pairs = list[KeyValue]()
        for number, layer in enumerate(self.deeper, 1):
            projected = layer.project(hidden[None], self.rotary, positions[None])
            value = projected[2][0].transpose(0, 1)
            query, key = (x[0].transpose(0, 1).to(value.dtype) for x in projected[:2])
            pairs.append((key, value) if before else (self.part.joined(key), self.part.joined(value)))
            text, *own = [*(step[number] for step in before), pairs[-1]]
            hidden = layer.finish(hidden[None], unrolled_attention(query, text, own, slots)[None])[0]
        return self.output(hidden), pairs

    def output(self, hidden: Tensor) -> Tensor:
        """Return what the next step reads in place of a feature, and the head, from the last layer's output [R, H]."""
        return hidden

    def project(self, hidden: Tensor, fed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return residual [R, H], rotated query [R, Nq, D], rotated key [R, Nkv, D] and value of slots [R]."""
        attention = self.layer.self_attn
        x, residual = self.enter(fed, hidden)
        num_turning = attention.num_heads + attention.num_kv_heads
        turning, value = x.unflatten(1, (-1, attention.head_dim)).split([num_turning, attention.num_kv_heads], 1)
        cos, sin = self.rotary[positions][:, :, None].unbind(1)
        turned = torch.addcmul(turning * cos, turning.roll(attention.head_dim // 2, -1), sin)
        turned = turned.to(value.dtype)  # autocast leaves the table, and what is multiplied by it, in fp32
        query, key = turned.split([attention.num_heads, attention.num_kv_heads], 1)
        return residual, query, key, value

    def finish(
        self, residual: Tensor, query: Tensor, text: KeyValue, own: list[KeyValue], slots: DraftingSlots
    ) -> Tensor:
        """Return the first layer's output [R, H] from the residual [R, H] and the query [R, Nq, D]."""
        attended = unrolled_attention(query, text, own, slots)
        return self.layer.finish(self.residual(residual)[None], attended[None])[0]


def drafting_slots(
    chain_loss: ChainLoss, batch: Batch, depth: int
) -> tuple[DraftingSlots, list[tuple[Tensor, Tensor]]]:
    """Return the slots that draft, and of each depth the rows among them that count and the target's rows there.

    Both are int64 [R], the first on the device and the second in the host's memory.
    """
    device, counted = batch.token_ids.device, [chain_loss.next_depth() for _ in range(depth)]
    drafting = DraftingSlots.from_counted(counted[0], batch.on_host.positions, chain_loss.part)
    rows = [marks.flatten()[drafting.index].nonzero()[:, 0] for marks in counted]
    on_device = send(torch.cat(rows), device).split(list(map(len, rows)))
    teachers = [drafting.index[row] + 1 + k for k, row in enumerate(rows)]
    return drafting.to(device), list(zip(on_device, teachers, strict=True))


# --- drafting


class FeatureCache(DrafterCache):
    """The keys and values of one layer that continues the target's features, and the loop that drafts with it."""

    ids: Tensor | None = None  # [V + 1] target ids of a draft vocabulary, of `with_no_token`

    def __init__(self, num_rows: int, num_slots: int, shape: Shape, device: torch.device) -> None:
        super().__init__(num_rows, num_slots, shape, device, first_read=-1)

    @abstractmethod
    def run(self, token_ids: Tensor, hidden: Tensor, window: Window) -> Tensor:
        """Return the layer's output [B, T, H] at tokens [B, T] with their features [B, T, H], and store both."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, T, V] from the layer's output [B, T, H]."""

    def recycled(self, hidden: Tensor) -> Tensor:
        """Return what the next token reads in place of a feature, from the layer's output [B, T, H]."""
        return hidden

    def draft(self, state: DecodingState, features: Tensor, shape: Shape, vocab_size: int) -> Draft:
        """Read the features [B, T, H] of the last target pass, then draft level by level."""
        hidden = self.read_features(state, features)
        windows = LevelWindows(state.lengths, self)

        def read(tokens: Tensor, parents: Tensor | None) -> Tensor:
            nonlocal hidden
            window = windows.next(tokens.shape[1], parents)
            token_ids = tokens if self.ids is None else self.ids[tokens]
            before = hidden if parents is None else gather_columns(hidden, parents)
            hidden = self.run(token_ids, self.recycled(before), window)
            return self.logits(hidden)

        return in_target_vocabulary(grow(shape, self.tree, self.logits(hidden), read, state), self.ids, vocab_size)

    def read_features(self, state: DecodingState, features: Tensor) -> Tensor:
        """Make the features [B, T, H] of the last target pass keys and values.

        Returns the layer's output [B, 1, H] at the newest committed one.
        """
        window = Window(state.positions, state.positions, state.positions[:, 0])
        return gather_columns(self.run(state.next_ids, features, window), state.newest_column[:, None])


class EagleCache(FeatureCache):
    """Everything that drafting makes or looks up once: keys and values, the rotary table, and the weights.

    A single layer behind an ordinary embedding takes the steps of the target's fused layers, on a CPU in fp32 alone.
    """

    input_norms: DecodingNorm | None = None  # of embedding and feature; None where neither is normed

    def __init__(
        self,
        layer: DecoderLayer,
        embedding: nn.Module,
        rotary: nn.Module,
        num_rows: int,
        num_slots: int,
        shape: Shape,
        deeper: Sequence[DeeperLayer] = (),
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        weight = attention.o_proj.weight
        super().__init__(num_rows, num_slots, shape, weight.device)
        self.layer, self.attention, self.embedding, self.deeper = layer, attention, embedding, deeper
        takes_steps = runs_kernels(weight.device) or weight.dtype == torch.float32
        in_steps = takes_steps and type(embedding) is nn.Embedding and not deeper
        self.steps = steps_on(weight.device) if in_steps else None
        self.rotary = rotary_table(rotary, self.kv.num_slots, weight)
        if self.steps is not None:
            self.kv.reserve(0, attention.num_kv_heads, (attention.head_dim, attention.head_dim), like=weight)
            self.kv.angles = rotary_angles(rotary, self.kv.num_slots, weight.device)
        self.qkv, self.output = attention.qkv_proj.for_drafting(), attention.o_proj.for_drafting()
        self.mlp_norm = decoding_norm(layer.post_attention_layernorm)
        self.gate_up, self.down = mlp.gate_up_proj.for_drafting(), mlp.down_proj.for_drafting()

    @abstractmethod
    def enter(self, read: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention reads [B, T, W] and the residual [B, T, H], from features [B, T, H].

        `read` [B, T, H] are the embeddings, or with `input_norms` these and the features, both normed, [B, T, 2, H].
        """

    def run(self, token_ids: Tensor, hidden: Tensor, window: Window) -> Tensor:
        return self.finish(*self.write(token_ids, hidden, window), window)

    def read_prompt(self, token_ids: Tensor, hidden: Tensor, window: Window) -> None:
        """Store keys and values of tokens [B, T] with their features [B, T, H], in all layers."""
        if self.deeper:
            self.run(token_ids, hidden, window)
        else:
            self.write(token_ids, hidden, window)

    def write(self, token_ids: Tensor, hidden: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Store the first layer's keys and values of tokens [B, T] with their features [B, T, H].

        Returns the query [B, Nq, T, D] and the residual [B, T, H].
        """
        if self.steps is not None:
            return self._write_in_steps(self.steps, token_ids, hidden, window)
        read = self.embedding(token_ids)
        if self.input_norms is not None:
            read = self.input_norms(torch.stack([read, hidden], 2))
        x, residual = self.enter(read, hidden)
        query, key, value = self.attention.project(x, self.rotary, window.positions)
        self.kv.write_to(window.slots)
        self.keys, self.values = self.kv.update(key, value, 0)
        return query, residual

    def finish(self, query: Tensor, residual: Tensor, window: Window) -> Tensor:
        """Return the last layer's output [B, T, H], from the first one's query [B, Nq, T, D] and residual [B, T, H].

        The residual may change.
        """
        if self.steps is not None:
            return self._finish_in_steps(self.steps, query, residual)
        mask = window.mask(self.kv.num_slots)
        attended, _ = slot_attention(self.layer, query, self.keys, self.values, mask)
        hidden = self.layer.finish(residual, attended)
        for number, layer in enumerate(self.deeper, 1):
            query, key, value = layer.project(hidden, self.rotary, window.positions)
            keys, values = self.kv.update(key, value, number)
            hidden = layer.finish(hidden, slot_attention(layer, query, keys, values, mask)[0])
        return hidden

    def _write_in_steps(
        self, steps: ModuleType, token_ids: Tensor, hidden: Tensor, window: Window
    ) -> tuple[Tensor, Tensor]:
        attention, (batch, length) = self.attention, token_ids.shape
        beside = self.input_norms and Beside(hidden.flatten(0, 1), self.input_norms)
        entry = steps.enter(token_ids, self.embedding.weight, window, self.kv, {None}, beside)
        self.mask = entry.mask  # of the tokens that are written; `finish` reads the same ones
        x, residual = self.enter(entry.x.unflatten(0, token_ids.shape), hidden)
        query, kept = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        qkv = x.new_empty(batch * length, query + 2 * kept)
        steps.product(x.flatten(0, 1), self.qkv, qkv)
        heads = qkv[:, : query + kept].view(len(qkv), -1, 2, attention.head_dim // 2)
        steps.rotate_and_store(heads, qkv[:, query:], entry.cos, entry.sin, None, self.kv.written, self.kv.flat(0))
        self.keys, self.values = self.kv.keys_and_values(0)
        return qkv[:, :query].view(batch, length, -1, attention.head_dim).transpose(1, 2), residual

    def _finish_in_steps(self, steps: ModuleType, query: Tensor, residual: Tensor) -> Tensor:
        attended = steps.attend(query, self.keys, self.values, self.mask, query.shape[-1] ** -0.5, None)
        x = residual.flatten(0, 1)  # a view, to which both halves of the layer are added
        inner = x.new_empty(len(x), self.layer.mlp.down_proj.in_features)
        steps.product(attended.reshape(len(x), -1), self.output, x, ending="add")
        steps.product(x, self.gate_up, inner, self.mlp_norm, ending="gate")
        steps.product(inner, self.down, x, ending="add")
        return x.view_as(residual)

    def read_features(self, state: DecodingState, features: Tensor) -> Tensor:
        """Do what every `FeatureCache` does; on a CPU the newest one alone goes through the whole of a single layer.

        On a GPU all of them do: that reads the weights once, too, and takes fewer launches than to part them.
        """
        if runs_kernels(features.device) or self.deeper:
            return super().read_features(state, features)
        window = Window(state.positions, state.positions, state.positions[:, 0])
        query, residual = self.write(state.next_ids, features, window)
        newest = state.newest_column
        rows = torch.arange(len(query), device=query.device)
        if self.steps is not None:
            self.mask = {None: self.mask[None][rows, :, newest][:, :, None]}  # of the newest one alone
        slots = state.lengths[:, None] - 2
        window = Window(slots, slots, slots[:, 0])
        return self.finish(query[rows, :, newest][:, :, None], residual[rows, newest][:, None], window)


def decoding_norm(*norms: nn.RMSNorm) -> DecodingNorm:
    """Return one norm, or several side by side [B, T, norms, H]."""
    eps = norms[0].eps
    assert eps is not None
    weights: list[Tensor] = [norm.weight for norm in norms]
    return DecodingNorm(torch.stack(weights) if weights[1:] else weights[0], eps)
