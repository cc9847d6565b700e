"""The few blocks that drafters of our own share, in plain PyTorch.

Shapes: B rows, T tokens, H hidden width, N heads, D head width, M positions.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from draftsmith.models.errors import require_at_least
from draftsmith.models.half_weights import DraftingLinear


class RMSNorm(nn.RMSNorm):
    """torch's fused RMSNorm over the last dimension; `weight` [H] as in every Llama-like checkpoint."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x in its own dtype, in which alone torch computes it in one launch."""
        in_fp32 = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if in_fp32 and torch.is_grad_enabled():
            return _TrainingNorm.apply(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class _TrainingNorm(torch.autograd.Function):
    """The same norm for training in fp32 on a CPU: torch's own takes some twenty-five operators with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # one over the root mean square [..., 1]
        inverse = length.hypot_(length.new_tensor(math.sqrt(width * eps))).reciprocal_().mul_(math.sqrt(width))
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x, weight).mul_(inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        product = grad * x
        grad_weight = inverse.flatten() @ product.flatten(0, -2)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        through_length = (product @ weight)[..., None].mul_(inverse.pow(3)).div_(-x.shape[-1])
        return torch.mul(grad, weight).mul_(inverse).addcmul_(x, through_length), grad_weight, None


class DecodingNorm:
    """The same norm as `RMSNorm`, for decoding, where weights do not change.

    In fp32 as x * (weight * r) / sqrt(|x|^2 + r^2 eps) with r^2 the width: four operators, where torch's own is nine
    on a CPU.
    """

    @torch.no_grad()
    def __init__(self, weight: Tensor, eps: float) -> None:
        """Take a weight [H], or [..., H] with one for each of several inputs side by side."""
        require_at_least("rms_norm_eps", eps, 0)
        width = weight.shape[-1]
        self.weight, self.eps = weight, eps
        self.scaled_weight = weight * math.sqrt(width)
        self.floor = torch.tensor(math.sqrt(width * eps), device=weight.device)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the normed x [..., H], in fp32 written to `out` where one is given."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x, self.scaled_weight, out=out).div_(length.hypot_(self.floor))


class MergedLinear(DraftingLinear):
    """Projections of one input as one matrix product; in a checkpoint the rows of each have a name of their own."""

    def __init__(self, width: int, parts: dict[str, int]) -> None:
        """`parts`: how many outputs each projection has, in order."""
        super().__init__(width, sum(parts.values()), bias=False)
        self.parts = parts


def checkpoint_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with each `MergedLinear` split into parts, as views: writing to them loads a checkpoint."""
    tensors = module.state_dict()
    for path, child in module.named_modules():
        if isinstance(child, MergedLinear):
            parent = path.rpartition(".")[0]
            rows = tensors.pop(f"{path}.weight").split(list(child.parts.values()))
            tensors.update({f"{parent}.{part}.weight": r for part, r in zip(child.parts, rows, strict=True)})
    return tensors


def as_computed(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that autocast computes in.

    Use it for parts of a weight, since autocast casts views at each use, and for operators that autocast does not know.
    """
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return torch's attention [B, Hq, T, D] of query [B, Hq, T, D] over key and value [B, Hkv, M, D].

    Under autocast on a CPU it is in fp32: its gradient in bf16 takes far longer there.
    """
    in_fp32 = torch.is_autocast_enabled("cpu") and query.device.type == "cpu"
    if in_fp32:
        query, key, value = query.float(), key.float(), value.float()
    with torch.autocast("cpu", enabled=False) if in_fp32 else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )


def made_anew(compute: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return what `compute` gives; the backward pass computes it again, so that no memory holds what led to it."""
    if not torch.is_grad_enabled():
        return compute(*arguments)
    return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), the SwiGLU of Llama."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedLinear(width, {"gate_proj": inner, "up_proj": inner})
        self.down_proj = DraftingLinear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


def rotary_table(rotary: nn.Module, num_positions: int, like: Tensor) -> Tensor:
    """Return cosine and sine at each position, [M, 2, D] in the dtype and on the device of `like`, for `rotate`.

    `rotary` is a Hugging Face rotary embedding. The sine of the first half of a head is negated, which makes rotating a
    shift of the halves, two products and a sum.
    """
    cos, sin = rotary(like, torch.arange(num_positions, device=like.device)[None])
    half = sin.shape[-1] // 2
    return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)], 1)


def rotary_angles(rotary: nn.Module, num_positions: int, device: torch.device) -> Tensor:
    """Return cosine and sine at each position, fp32 [M, 2, D / 2], for the kernels of a fused layer."""
    like = torch.empty(0, device=device)
    parts = rotary(like, torch.arange(num_positions, device=device)[None])
    return torch.stack([part[0, :, part.shape[2] // 2 :] for part in parts], 1)


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Apply the rotary embedding to heads x [B, N, T, D] at positions [B or 1, T]."""
    cos, sin = table[positions].unsqueeze(1).unbind(3)  # each [B, 1, T, D]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def shift_left(x: Tensor, by: int) -> Tensor:
    """Move x[:, t + by] to x[:, t] along dimension 1; zeros (False) come in at the end."""
    if by == 0:
        return x
    shifted = torch.zeros_like(x)
    shifted[:, :-by] = x[:, by:]
    return shifted


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return the columns [B, C] of x [B, T, H], as [B, C, H]."""
    return x.gather(1, columns[..., None].expand(-1, -1, x.shape[-1]))
