"""Llama-shaped decoders in few operations: what `slots.run_on_slots` computes, without a module for every step.

A small target is bound by the number of its operations, not by their size, and stock modelling takes about seventy a
layer. Here q, k and v are one product, gate and up another, each with the norm before it, and the product that ends a
block adds the residual. The steps are those of `layer_steps` or, on a GPU, of `layer_kernels`. Masks, rotary angles and
the buffers between steps are made once a pass and serve every layer. The model's own parameters become views of the
merged matrices: names, values and memory stay as they were.

Shapes: B rows, T new tokens a row, N = B * T, V vocabulary, H hidden width, Hq query heads, Hkv key-value heads,
D head width, I width inside the MLP, A number of layers asked for.
"""

import itertools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.fused import layer_steps
from draftsmith.models.half_weights import Matrix, in_half
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Window

# Those whose layers `FusedLayer` computes, without and with mixtures of experts.
DENSE_FAMILIES = ("cwm", "llama", "ministral", "mistral", "qwen2", "qwen3", "seed_oss")
FAMILIES = (*DENSE_FAMILIES, "mixtral", "qwen3_moe")
STEADY_ROTARY = ("default", "linear", "llama3", "yarn")  # kinds whose angles do not depend on the text's length


def fuse(model: PreTrainedModel, frozen: bool = False) -> "FusedDecoder | None":
    """Return a fused decoder over the weights of a model that stays where it is; None for a model of another shape.

    `frozen`: they will not change, so that a CPU may read them in fp16 where that holds their values.
    """
    config = model.config
    base: Any = model.base_model
    if config.model_type not in FAMILIES or config.hidden_act != "silu":
        return None
    if config.rope_parameters["rope_type"] not in STEADY_ROTARY:
        return None
    if model.device.type == "cpu" and model.dtype != torch.float32:
        return None
    ends = [layer.self_attn.o_proj for layer in base.layers]
    ends += [layer.mlp.down_proj for layer in base.layers if not is_mixture(layer.mlp)]
    products = [module for module in base.layers.modules() if isinstance(module, nn.Linear)]
    is_plain = all(type(product) is nn.Linear for product in products)  # BitNet's round what they multiply
    return FusedDecoder(model, frozen) if is_plain and all(end.bias is None for end in ends) else None


def is_mixture(mlp: Any) -> bool:
    """Return whether the MLP of a decoder layer is a mixture of experts."""
    return hasattr(mlp, "experts")


def steps_on(device: torch.device) -> ModuleType:
    """Return the steps between the products, for a device."""
    if not runs_kernels(device):
        return layer_steps
    from draftsmith.models.fused import layer_kernels

    return layer_kernels


class FusedDecoder:
    """The base model of a Llama-shaped causal language model, decoding on a slot cache."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, frozen: bool = False) -> None:
        base: Any = model.base_model
        self.steps = steps_on(model.device)
        self.context: int = model.config.max_position_embeddings
        self.embedding: Tensor = base.embed_tokens.weight  # [V, H]
        self.rotary: Any = base.rotary_emb
        self._angles = self.embedding.new_empty(0)
        self.layers = [FusedLayer(layer) for layer in base.layers]
        self.norm = DecodingNorm(base.norm.weight, base.norm.variance_epsilon)
        if frozen:
            for layer in self.layers:
                layer.read_in_half()

    @torch.no_grad()
    def run(
        self, token_ids: Tensor, window: Window, cache: SlotCache, layer_ids: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Decode the new tokens [B, T] of a window on the cache.

        Returns the last hidden state [B, T, H] and those after `layer_ids` layers, side by side, [B, T, A * H].
        """
        batch, length = token_ids.shape
        width = self.embedding.shape[1]
        hidden = self.embedding.new_empty(batch, length, width)  # like the cache, it outlives inference mode
        captured = self.embedding.new_empty(batch, length, len(layer_ids), width)
        for layer in self.layers:
            cache.reserve(layer.number, layer.kv_heads, (layer.head_dim, layer.head_dim), like=hidden)
        if cache.angles is None:
            cache.angles = self._angles_of(cache.num_slots)
        with torch.inference_mode():
            buffers = PassBuffers(self, token_ids, window, cache)
            x = buffers.x
            for layer in self.layers:
                layer.run(x, self.steps, buffers, cache)
                if layer.number + 1 in layer_ids:
                    captured[:, :, layer_ids.index(layer.number + 1)] = x.view(batch, length, width)
            self.steps.rms_norm(x, self.norm, out=hidden.view(-1, width))
        return hidden, captured.flatten(2) if layer_ids else None

    def _angles_of(self, num_positions: int) -> Tensor:
        """Return cosine and sine at the first positions, or at more: fp32 [positions, 2, D / 2]; caches share them."""
        count = min(num_positions, self.context)
        if len(self._angles) < count:
            angles = torch.arange(count, device=self.embedding.device)[:, None] * self.rotary.inv_freq
            self._angles = torch.stack([angles.cos(), angles.sin()], 1) * self.rotary.attention_scaling
        return self._angles


class PassBuffers:
    """Tensors that the layers of one pass share: masks, rotary angles, and the buffers between their steps."""

    def __init__(self, decoder: FusedDecoder, token_ids: Tensor, window: Window, cache: SlotCache) -> None:
        layer, like = decoder.layers[0], decoder.embedding
        batch, length = token_ids.shape
        num_tokens, half = batch * length, layer.head_dim // 2
        reaches = {layer.sliding_window for layer in decoder.layers}
        self.x, self.mask, self.cos, self.sin = decoder.steps.enter(token_ids, like, window, cache, reaches)
        query, keys, values = layer.widths
        self.qkv = like.new_empty(num_tokens, query + keys + values)
        self.heads = self.qkv[:, : query + keys].view(num_tokens, -1, 2, half)  # of q and k, in halves
        self.query = self.qkv[:, :query].view(batch, length, -1, layer.head_dim).transpose(1, 2)  # [B, Hq, T, D]
        self.stored = self.qkv[:, query:]  # [N, 2 * Hkv * D]
        widths = [layer.mlp.width for layer in decoder.layers if isinstance(layer.mlp, FusedMlp)]
        self.inner = {width: like.new_empty(num_tokens, width) for width in set(widths)}  # [N, I] for each I


class FusedLayer:
    """A decoder layer: attention and gated MLP, each on the normed residual stream and added to it."""

    def __init__(self, layer: Any) -> None:  # a decoder layer of transformers
        attention, mlp = layer.self_attn, layer.mlp
        self.number: int = attention.layer_idx  # from 0
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.widths = [projection.out_features for projection in projections]  # Hq * D, Hkv * D, Hkv * D
        self.head_dim: int = attention.head_dim
        self.kv_heads = self.widths[1] // self.head_dim
        self.scaling: float = attention.scaling
        # Mistral's layers read the config's window. Llama's have none, even where a config names one.
        owner = attention.config if attention.config.model_type in ("mistral", "mixtral") else attention
        self.sliding_window: int | None = getattr(owner, "sliding_window", None)

        self.attention_norm = DecodingNorm(layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
        qkv, self.qkv_bias = merge(projections)
        self.qkv: Matrix = qkv  # [H, (Hq + 2 * Hkv) * D]
        self.head_norm = _head_norm(attention, *self.widths[:2]) if hasattr(attention, "q_norm") else None
        self.attention_out: Matrix = merge([attention.o_proj])[0]  # [Hq * D, H]
        norm = DecodingNorm(layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon)
        self.mlp = FusedExperts(mlp, norm) if is_mixture(mlp) else FusedMlp(mlp, norm)

    def read_in_half(self) -> None:
        """Read the weights in fp16 from now on, where that holds their values."""
        self.qkv, self.attention_out = in_half(self.qkv), in_half(self.attention_out)
        if isinstance(self.mlp, FusedMlp):
            self.mlp.gate_up, self.mlp.out = in_half(self.mlp.gate_up), in_half(self.mlp.out)

    def run(self, x: Tensor, steps: ModuleType, buffers: PassBuffers, cache: SlotCache) -> None:
        """Add the layer's output to the residual stream x [N, H] in place."""
        steps.product(x, self.qkv, buffers.qkv, self.attention_norm, self.qkv_bias)
        steps.rotate_and_store(
            buffers.heads,
            buffers.stored,
            buffers.cos,
            buffers.sin,
            self.head_norm,
            cache.written,
            cache.flat(self.number),
        )
        keys, values = cache.keys_and_values(self.number)
        mixed = steps.attend(buffers.query, keys, values, buffers.mask, self.scaling, self.sliding_window)
        steps.product(mixed.reshape(len(x), -1), self.attention_out, x, ending="add")
        self.mlp.run(x, steps, buffers)


class FusedMlp:
    """A gated MLP on the normed residual stream, in two products."""

    def __init__(self, mlp: Any, norm: DecodingNorm) -> None:
        self.norm = norm
        gate_up, self.gate_up_bias = merge([mlp.gate_proj, mlp.up_proj])
        self.gate_up: Matrix = gate_up  # [H, 2 * I]
        self.out: Matrix = merge([mlp.down_proj])[0]  # [I, H]
        self.width: int = mlp.down_proj.in_features

    def run(self, x: Tensor, steps: ModuleType, buffers: PassBuffers) -> None:
        """Add the output to the residual stream x [N, H] in place."""
        inner = buffers.inner[self.width]
        steps.product(x, self.gate_up, inner, self.norm, self.gate_up_bias, "gate")
        steps.product(inner, self.out, x, ending="add")


class FusedExperts:
    """A mixture of experts of transformers, on the normed residual stream."""

    def __init__(self, mlp: Any, norm: DecodingNorm) -> None:
        self.norm, self.mixture = norm, mlp

    def run(self, x: Tensor, steps: ModuleType, buffers: PassBuffers) -> None:
        """Add the output to the residual stream x [N, H] in place."""
        normed = torch.empty_like(x)
        steps.rms_norm(x, self.norm, out=normed)
        steps.experts(x, normed, self.mixture)


def _head_norm(attention: Any, query: int, keys: int) -> DecodingNorm:
    """Return the norms of q and k heads (Qwen3) as one, with a weight for each head, [Hq + Hkv, D]."""
    norms = (attention.q_norm, query), (attention.k_norm, keys)
    weights = [norm.weight.expand(width // attention.head_dim, -1) for norm, width in norms]
    return DecodingNorm(torch.cat(weights), attention.q_norm.variance_epsilon)


def merge(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Merge several products of one input: return weight [in, all out] and bias. The linears' parameters become views.

    Where the parameters are views already, the merged tensors come back. On a CPU a row of the weight holds what one
    input adds to all outputs: for a few tokens that is faster than the order of a Linear.

    """
    by_columns = not runs_kernels(linears[0].weight.device)
    weight = merged_parameter([linear.weight for linear in linears], by_columns).t()
    has_bias = linears[0].bias is not None
    return weight, merged_parameter([linear.bias for linear in linears], by_columns=False) if has_bias else None


def merged_parameter(parts: list[Tensor], by_columns: bool) -> Tensor:
    """Return parameters [out, ...] one below the other, as one tensor of which they become views.

    `by_columns`: the matrix is stored with its columns in one piece each.
    """
    first, height = parts[0], sum(map(len, parts))
    stride = (1, height) if by_columns else first.new_empty(0, *first.shape[1:]).stride()
    starts = itertools.accumulate(map(len, parts[:-1]), initial=first.storage_offset() // stride[0])
    expected = [(first.untyped_storage().data_ptr(), start * stride[0], stride) for start in starts]
    if [(part.untyped_storage().data_ptr(), part.storage_offset(), part.stride()) for part in parts] == expected:
        return first.data.as_strided((height, *first.shape[1:]), stride)
    merged = torch.cat([part.data for part in parts])
    if by_columns:
        merged = merged.t().contiguous().t()
    for part, view in zip(parts, merged.split(list(map(len, parts))), strict=True):
        part.data = view
    return merged
