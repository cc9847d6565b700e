"""Weights in fp16 for a CPU that decodes in fp32.

Decoding multiplies a few tokens by every weight of a model. On a CPU that takes as long as reading the weights, and
fp16 is half as much to read. torch on x86 comes with products that read fp16 and multiply and add in fp32 (FBGEMM).
With its ordinary ones, a pass over three to eight tokens took up to 1.6 times as long as one over a single token; with
these it takes little longer (benchmarks/half_weights.py).

A target's weights take this form where it holds their values, so that its answers stay its own. Those of a drafter may
be rounded, since the target checks what is drafted.

Shapes: N rows, H inputs, O outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftsmith.models.kernels import runs_kernels

LARGEST_ROUNDING = 2.0**-25  # of fp16, for values next to zero: half of the distance between two of them


class HalfWeight:
    """A matrix [H, O] in fp16, for products with fp32 rows on a CPU. It does not follow later changes of the matrix."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.t().contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product [..., O] of x [..., H], without a gradient."""
        if x.dim() == 1:  # which the operator refuses
            return self(x[None])[0]
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


Matrix = Tensor | HalfWeight  # [H, O]


def has_half_products(weight: Tensor) -> bool:
    """Return whether there are products for weights in fp16 on the device and in the dtype of this one."""
    on_cpu = weight.device.type == "cpu" and not runs_kernels(weight.device)
    return on_cpu and weight.dtype == torch.float32 and torch.backends.quantized.engine in ("x86", "fbgemm")


def in_half(weight: Matrix) -> Matrix:
    """Return a matrix [H, O] in fp16, where that holds its values and products can be had; else the matrix itself.

    Values next to zero may be rounded, by 2^-25 at most: that is less than fp32 loses when it adds up a product.
    """
    if isinstance(weight, HalfWeight) or not has_half_products(weight) or not holds_values(weight):
        return weight
    return HalfWeight(weight)


def frozen_product(linear: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what computes a linear map whose weight will not change: with that in fp16 as by `in_half`, or the map."""
    if type(linear) is not nn.Linear or linear.bias is not None:
        return linear
    weight = in_half(linear.weight.t())
    return weight if isinstance(weight, HalfWeight) else linear


def holds_values(weight: Tensor) -> bool:
    """Return whether fp16 holds the values of a tensor, but for the last digits of those next to zero."""
    return bool(((weight.half().float() - weight).abs() <= LARGEST_ROUNDING).all())


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return the product [N, O] of x [N, H] and a matrix, plus the bias [O] if there is one; in `out` if that is given.

    With a weight in fp16 x may have any number of dimensions.
    """
    if isinstance(weight, Tensor):
        return torch.mm(x, weight, out=out) if bias is None else torch.addmm(bias, x, weight, out=out)
    product = weight(x) if bias is None else weight(x).add_(bias)
    return product if out is None else out.copy_(product)


class DraftingLinear(nn.Linear):
    """A linear map of a drafter. In eval mode, where nothing is learnt, drafting reads its weight as is fastest.

    That form is made once. After weights have changed, `train` or `eval` has to be called, which drop it.
    """

    _half: HalfWeight | None = None

    def train(self, mode: bool = True) -> "DraftingLinear":
        self._half = None
        return super().train(mode)

    def for_drafting(self) -> Matrix:
        """Return the matrix for products of few rows: on a CPU in fp16, else in the layout that is fastest there."""
        if not self.training and has_half_products(self.weight):
            if self._half is None:
                self._half = HalfWeight(self.weight.detach().t())
            return self._half
        if not runs_kernels(self.weight.device):
            store_by_columns(self)
        return self.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        """Return the product [..., O] of x [..., H], plus the bias.

        In eval mode within torch's inference mode, as drafting is, a CPU multiplies by the weight in fp16.
        """
        drafts = torch.is_inference_mode_enabled() and not self.training
        if not drafts or x.dtype != torch.float32 or not has_half_products(self.weight):
            return super().forward(x)
        return multiply(x, self.for_drafting(), self.bias)


def store_by_columns(linear: nn.Linear) -> None:
    """Lay out the matrix by columns, so that a CPU multiplies a single row by it fastest; its values stay."""
    linear.weight.data = linear.weight.data.t().contiguous().t()
