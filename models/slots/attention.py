"""Attention over the slots of a cache, as transformers' modules call it, and within whole rows.

Shapes: B rows, T new tokens a row, M slots, Hq query heads, Hkv key-value heads, D head width of queries and keys, Dv
that of values (most often D).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.slots.row_attention import Sight, attend_in_rows, masked_attention, unfused_attention

ATTENTION = "draftsmith"  # the name under which transformers finds `slot_attention`


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention [B, T, Hq, Dv] of query [B, Hq, T, D] over key [B, Hkv, M, D] and value [B, Hkv, M, Dv].

    The mask is a window's, packed for the kernel or bool [B, 1, T, M]; without one it is causal over the T tokens
    themselves. For packed rows it says where their documents begin, int64 [1, 1, 1, documents + 1]. A token
    sees the last `sliding_window` positions of its path. `softcap` (Gemma-2) and `s_aux`, the attention sinks of
    gpt-oss, need all scores in memory; everything else goes to torch's fused attention. `indices` int [B, T, k] are
    the slots that a layer of DeepSeek's sparse attention has chosen of those that each token sees. `attend`, which
    whoever calls a layer gives it, computes the attention instead, from query, key, value and scale. Raises `TypeError`
    for a mask that a model made itself.
    """
    if indices is not None:
        assert attention_mask is not None
        attention_mask = chosen_of(attention_mask, indices)
    compute = attend or partial(
        attend_on_slots,
        mask=attention_mask,
        sliding_window=sliding_window,
        chunk=chunk_of(module),
        softcap=softcap,
        sinks=s_aux,
    )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if on_latents := getattr(module, "on_latents", None):  # latent_attention.py
        return on_latents(query, key, value, scale, compute), None
    return compute(query, key, value, scale), None


def attend_on_slots(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of `slot_attention` [B, T, Hq, Dv], of whatever module.

    `chunk`: each token sees its own chunk of so many tokens alone.
    """
    if mask is None or mask.dtype == torch.int64:
        assert query.shape[2] == key.shape[2], "a cache needs a mask"
        edges = None if mask is None else mask.flatten()
        sight = Sight((query.shape[0], query.shape[2]), edges, sliding_window, chunk)
        return attend_in_rows(query, key, value, scale, sight, softcap, sinks)
    if mask.is_floating_point():
        raise TypeError("the model makes attention masks of its own")
    if chunk is not None:
        mask, sliding_window = of_own_chunk(mask, chunk)
    on_cache = query.shape[2] != key.shape[2]  # else gradients may be asked for
    chosen_slots = on_cache and mask.dtype == torch.bool and runs_kernels(query.device)
    if mask.dtype == torch.int32 or chosen_slots:
        from draftsmith.models.slots import attention_kernel

        return attention_kernel.attend(query, key, value, mask, scale, sliding_window, softcap, sinks)
    if sliding_window is not None:
        mask = last_seen(mask, sliding_window)
    if softcap is not None or sinks is not None:
        return unfused_attention(query, key, value, mask, scale, softcap, sinks)
    return masked_attention(query, key, value, mask, scale)


def chosen_of(mask: Tensor, indices: Tensor) -> Tensor:
    """Return those of the slots seen, bool [B, 1, T, M], that are among the `indices` [B, T, k]."""
    return mask & torch.zeros_like(mask).scatter_(3, indices[:, None].long(), True)


def chunk_of(module: Any) -> int | None:
    """Return the tokens of a chunk in a layer whose tokens see their own chunk alone (Llama 4); None for others."""
    layer_types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    if "chunked_attention" in layer_types and layer_types[module.layer_idx] == "chunked_attention":
        return int(module.config.attention_chunk_size)
    return None


def of_own_chunk(mask: Tensor, chunk: int) -> tuple[Tensor, int | None]:
    """Return a mask by which each token sees the slots of its own chunk alone, and the sliding window that it needs.

    A packed mask needs one of a chunk, and one of bool [B, 1, T, M] none.
    """
    if mask.dtype == torch.int32:
        from draftsmith.models.slots import attention_kernel

        return attention_kernel.in_own_chunk(mask, chunk), chunk
    return last_seen(mask, (mask.sum(-1, keepdim=True) - 1) % chunk + 1), None


def last_seen(mask: Tensor, count: int | Tensor) -> Tensor:
    """Return the last `count` slots of those that each token sees, bool [B, 1, T, M]; counts of each are [B, 1, T, 1].

    These hold the last `count` positions: whatever tree it is a part of, a token sees one path, ancestors first.
    """
    return mask & (mask.sum(-1, keepdim=True) - mask.cumsum(-1) < count)


# transformers makes no masks for attention that has no function of its own for them. To make one of whole rows it would
# wait for the GPU, to see whether positions are those of one text.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION, slot_attention)
