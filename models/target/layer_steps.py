"""The steps of a fused layer, in plain PyTorch: what `layer_kernels` does in one launch each, and the path of a CPU.

Shapes: B rows, T new tokens a row, N = B * T, H hidden width, Hq query heads, Hkv key-value heads, D head width,
I width inside the MLP, M slots, R = B * (M + 1).
"""

import math

import torch
from torch import Tensor, nn

from draftsmith.models.layers import DecodingNorm
from draftsmith.models.target.slots import Window, last_seen


def rms_norm(x: Tensor, norm: DecodingNorm, out: Tensor) -> None:
    """Norm x [N, H] into `out`, of the same shape."""
    norm(x, out=out)


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


def mask(window: Window, num_slots: int, reaches: set[int | None]) -> dict[int | None, Tensor]:
    """Return what `attend` reads: for each sliding window, fp32 [B, 1, T, M] to add to the scores."""
    seen = window.bool_mask(num_slots)
    zeros = torch.zeros(seen.shape, device=seen.device)
    return {
        reach: zeros.masked_fill(~(seen if reach is None else last_seen(seen, reach)), -math.inf) for reach in reaches
    }


def attend(
    query: Tensor, key: Tensor, value: Tensor, masks: dict[int | None, Tensor], scaling: float, reach: int | None
) -> Tensor:
    """Return attention [B, T, Hq, D] of query [B, Hq, T, D] over key and value [B, Hkv, M, D]."""
    output = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=masks[reach], scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2)


def silu_mul_(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up in gate and return it; both are halves of one tensor [N, 2 * I]."""
    return nn.functional.silu(gate, inplace=True).mul_(up)
