"""The steps of a fused layer, in plain PyTorch: what `layer_kernels` does in one launch each, and the path of a CPU.

Shapes: B rows, T new tokens a row, N = B * T, H inputs and O outputs of a product, Hq query heads, Hkv key-value heads,
D head width, M slots, R = B * (M + 1).
"""

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.models.half_weights import Matrix, multiply
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.slots.attention import last_seen
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Places, Window


class Beside(NamedTuple):
    """Hidden states that a drafter reads beside embeddings, and the norm of both."""

    hidden: Tensor  # [N, H]
    norm: DecodingNorm  # of weight [2, H]: the embedding's, then that of `hidden`


class Entry(NamedTuple):
    """Tensors that all layers of a pass read."""

    x: Tensor  # [N, H] embedded tokens, the residual stream; [N, 2, H] with something beside them, both normed
    mask: Any  # what `attend` takes
    cos: Tensor  # [N, 1, 1, D / 2] fp32
    sin: Tensor  # [N, 1, 2, D / 2] fp32, negative for first halves


def enter(
    token_ids: Tensor,
    embedding: Tensor,
    window: Window,
    cache: SlotCache,
    reaches: set[int | None],
    beside: Beside | None = None,
) -> Entry:
    """Begin a pass over new tokens [B, T]: look up their embeddings [V, H] and angles, and set where they are stored.

    The mask is, for each sliding window of `reaches`, fp32 [B, 1, T, M] to add to the scores.
    """
    places = places_of(window, cache, reaches)
    cache.written = places.written.flatten()
    x = nn.functional.embedding(token_ids.flatten(), embedding)
    if beside is not None:
        x = beside.norm(torch.stack([x, beside.hidden], 1))
    return Entry(x, places.masks, places.cos.flatten(0, 1), places.sin.flatten(0, 1))


def places_of(window: Window, cache: SlotCache, reaches: set[int | None]) -> Places:
    """Return the places of a window; where it is a part of a longer one, that one's places are worked out once.

    Angles past the last one that the cache holds, of drafts that are never kept, are those of the last.
    """
    if window.part_of is not None:
        whole, columns = window.part_of
        if whole.places is None:
            whole.places = places_of(whole, cache, reaches)
        return whole.places.part(columns)
    assert cache.angles is not None
    seen = window.bool_mask(cache.num_seen)
    masks = {reach: torch.where(seen if reach is None else last_seen(seen, reach), 0.0, -math.inf) for reach in reaches}
    positions = window.positions.clamp(max=len(cache.angles) - 1)
    cos, sin = cache.angles[positions][:, :, None, :, None].unbind(3)  # [B, T, 1, 1, D / 2]
    return Places(cache.rows_of(window.slots), masks, cos, torch.cat((-sin, sin), 3))


# What becomes of a product: it is written, added to what is there, or the gates and ups of an MLP.
Ending = Literal["write", "add", "gate"]


def rms_norm(x: Tensor, norm: DecodingNorm, out: Tensor) -> None:
    """Norm x [N, H] into `out`, of the same shape."""
    norm(x, out=out)


def product(
    x: Tensor,
    weight: Matrix,
    out: Tensor,
    norm: DecodingNorm | None = None,
    bias: Tensor | None = None,
    ending: Ending = "write",
) -> None:
    """Multiply x [N, H], after the norm if there is one, by weight [H, O], and give the product to `out`, no part of x.

    It is written to `out` [N, O], or added to what is there; `bias` [O] is for the others. With the ending "gate" the
    outputs are gates, then ups, and silu(gate) * up is written to `out` [N, O / 2].
    """
    x = x if norm is None else norm(x)
    if ending == "add":
        assert bias is None
        if isinstance(weight, Tensor):
            out.addmm_(x, weight)
        else:
            out.add_(weight(x))
    elif ending == "write":
        multiply(x, weight, bias, out)
    else:
        gate, up = multiply(x, weight, bias).chunk(2, 1)
        torch.mul(nn.functional.silu(gate, inplace=True), up, out=out)


def experts(x: Tensor, normed: Tensor, mixture: nn.Module) -> None:
    """Add to x [N, H] what a mixture of experts of transformers makes of the normed x [N, H]."""
    x += mixture(normed[None])[0]


def rotate_and_store(
    heads: Tensor, stored: Tensor, cos: Tensor, sin: Tensor, norm: DecodingNorm | None, written: Tensor, flat: Tensor
) -> None:
    """Norm and rotate the heads of q and k, then store keys and values in rows `written` of a layer of the cache.

    heads [N, Hq + Hkv, 2, D / 2] and stored [N, 2 * Hkv * D], of k and v, are views of one tensor [N, q | k | v]. Its q
    is changed in place; its k and v are undefined afterwards. cos [N, 1, 1, D / 2]; sin [N, 1, 2, D / 2], negative for
    first halves; norm of weight [Hq + Hkv, D]; written [N] int64; flat [R, 2 * Hkv * D].
    """
    if norm is not None:
        norm(heads.flatten(2), out=heads.flatten(2))
    swapped = heads.flip(2)
    heads.mul_(cos).addcmul_(swapped, sin)
    flat.index_copy_(0, written, stored)


def attend(
    query: Tensor, key: Tensor, value: Tensor, masks: dict[int | None, Tensor], scaling: float, reach: int | None
) -> Tensor:
    """Return attention [B, T, Hq, D] of query [B, Hq, T, D] over key and value [B, Hkv, M, D]."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=masks[reach], scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)
