"""Quantised weights of a target, unpacked: what the plain checkpoint would hold that they were made from.

A matrix is stored as small numbers, or codes, each times the scale of its row, block or group. Whoever reads a target's
weights gets the products by the plain names: taken in fp32 and rounded once, to the dtype asked for. Activations are
not rounded, as they are by an engine that computes with the codes.

Names and types of the tensors tell how each parameter is stored, so one checkpoint may mix several forms. Codes are
fp8 or int8; e2m1, two in a byte; or whole numbers packed in int32. The forms are those that transformers reads as fp8,
mxfp8 and mxfp4, and those of compressed-tensors, ModelOpt and torchao (int8 and fp8).

Shapes: R rows and C columns of a matrix, r and c its scales along them; experts may stand before them.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from draftsmith.models.errors import UserError, shown

READ = ("compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8", "torchao")  # values of quant_method
MEND = "give the BF16 model that it was made from, which its model card names"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CODES = (*FP8, torch.int8, torch.uint8, torch.int32)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the values of three bits; the fourth is the sign
BITS = (2, 4, 8)  # of a whole number in int32
PARTS = {  # of `weight`, for example: the endings of its tensors' names -> what they are
    "_packed": "codes",
    "_qdata": "codes",
    "_blocks": "blocks",  # codes of the transpose
    "_global_scale": "divisor",  # before the shorter ending
    "_scale_2": "factor",
    "_scale_inv": "scale",
    "_scales": "scale",
    "_scale": "scale",
    "_zero_point": "zero",
    "_g_idx": "order",
    "_shape": "shape",
}
STORED = ("codes", "blocks", "values")  # one of which each parameter is stored as
OF_ACTIVATIONS = re.compile(r"(activation|input|output|q|k|v|kv)_\w+|_\w+_act_quant_\w+")  # no weight needs them


@dataclass(frozen=True)
class WeightForm:
    """The form of the weights of a group of layers in a config of compressed-tensors."""

    block_structure: tuple[int, int] | None = None
    num_bits: int | None = None


@dataclass(frozen=True)
class LayerGroup:
    """A group of layers in a config of compressed-tensors."""

    weights: WeightForm | None = None


@dataclass(frozen=True)
class Quantisation:
    """The field quantization_config of a target's config.json, as far as it is needed."""

    quant_method: str | None = None
    format: str | None = None  # of compressed-tensors
    quant_algo: str | None = None  # of ModelOpt
    weight_block_size: tuple[int, int] | None = None  # of fp8
    config_groups: dict[str, LayerGroup | list[str]] | None = None  # of compressed-tensors
    transform_config: dict[str, Any] | None = None  # of compressed-tensors
    quantization_mode: str | None = None  # of BitNet
    bits: int | None = None  # of AWQ and GPTQ

    @property
    def most_bits(self) -> int | None:
        """Number of bits of a weight, in the group of layers that has most of them; None where no number is named."""
        return max((bits for bits in (self.bits, *(weights.num_bits for weights in self.groups)) if bits), default=None)

    def __str__(self) -> str:
        form = self.format or self.quant_algo
        return f"{self.quant_method} ({form})" if form else str(self.quant_method)

    @property
    def groups(self) -> list[WeightForm]:
        """The forms of the groups of layers in a config of compressed-tensors."""
        groups = [group.weights for group in (self.config_groups or {}).values() if isinstance(group, LayerGroup)]
        return [weights for weights in groups if weights]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Sizes of the blocks that share a scale."""
        named = [self.weight_block_size, *(weights.block_structure for weights in self.groups)]
        return [block for block in (*named, (128, 128)) if block and min(block) > 0]

    @property
    def is_computed(self) -> bool:
        """Whether the weights are plain, and are rounded as the model computes: by layers of transformers (BitNet)."""
        return self.quant_method == "bitnet" and self.quantization_mode == "online"

    def why_not_read(self) -> str | None:
        """Return why such weights cannot be read, in a clause; None where they can."""
        if self.is_computed:
            return None
        if self.quant_method not in READ:
            known = ", ".join(READ)
            return f"its weights are quantised by {shown(self.quant_method)}, and draftsmith unpacks {known}: {MEND}"
        if self.transform_config:
            return f"its weights need transform_config, a transform of the activations, which is not computed: {MEND}"
        return None


@dataclass(frozen=True)
class Packed:
    """A quantised parameter. Indexed with `...` it is unpacked, as transformers reads a parameter from a file."""

    codes: Tensor  # [..., R, C], or fewer columns where several are in one
    scale: Tensor  # [..., r, c]
    shape: torch.Size  # of the values: [..., R, C], or [..., C, R] where they are transposed
    dtype: torch.dtype  # of the values
    each: tuple[int, int] | None  # rows and columns that share a scale; None of scales that do not fit
    transposed: bool = False
    bits: int | None = None  # of a whole number in int32
    factor: Tensor | None = None  # of all scales, one number
    divisor: Tensor | None = None  # of all scales, one number
    zero: Tensor | None = None  # [r, c], subtracted from the codes; of those in int32 packed along r
    order: Tensor | None = None  # [C] the column of `scale` that each column takes, where they are not in order

    def numel(self) -> int:
        return self.shape.numel()

    def __getitem__(self, index: Any) -> Tensor:
        """Return the values. They are made matrix by matrix, for there may be many experts."""
        scale = powers_of_two(self.scale) if self.scale.dtype == torch.uint8 else self.scale.float()
        if self.factor is not None:
            scale = scale * self.factor.float().view(())
        if self.divisor is not None:
            scale = scale / self.divisor.float().view(())
        if self.codes.dim() == 2:
            return self._matrix(self.codes, scale)[index]
        pairs = zip(self.codes, scale.expand(len(self.codes), -1, -1), strict=True)
        values = torch.stack([self._matrix(*pair) for pair in pairs])
        return (values.mT.contiguous() if self.transposed else values)[index]

    def _matrix(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the values [R, C] of a matrix from its codes and its scales [r, c]."""
        values = numbers(codes, self.bits)[:, : self.shape[-2 if self.transposed else -1]]
        if self.zero is not None:
            zero = numbers(self.zero.t(), self.bits)[:, : len(scale)].t() if self.bits else self.zero.float()
            values = values - self._spread(zero, values.shape)
        return (values * self._spread(scale, values.shape)).to(self.dtype)

    def _spread(self, scale: Tensor, shape: torch.Size) -> Tensor:
        """Return scales [r, c] as a tensor that values [R, C] can be multiplied with."""
        if self.order is not None:
            return scale.index_select(1, self.order.int())
        assert self.each is not None
        for dim, count in enumerate(self.each):
            if scale.shape[dim] > 1:
                scale = scale.repeat_interleave(count, dim).narrow(dim, 0, shape[dim])
        return scale

    def is_known(self) -> bool:
        """Return whether its tensors fit each other."""
        (*_, r, c), codes, scale = self.scale.shape, self.codes, self.scale
        fits = self.each is not None and (self.bits is not None) == (codes.dtype == torch.int32)
        fits &= codes.dim() in (2, 3) and (scale.is_floating_point() or scale.dtype == torch.uint8)
        fits &= scale.numel() == 1 or scale.shape[:-2] in (codes.shape[:-2], torch.Size([1] * (codes.dim() - 2)))
        fits &= all(part is None or part.numel() == 1 for part in (self.factor, self.divisor))
        if self.zero is not None:
            zeros = -(-r * self.bits // 32) if self.bits else r
            fits &= codes.dim() == 2 and self.zero.shape == (zeros, c)
        if self.order is not None:
            columns = codes.dim() == 2 and self.order.shape == self.shape[-1:]
            fits &= columns and bool(((self.order >= 0) & (self.order < c)).all())
        return fits


def numbers(codes: Tensor, bits: int | None) -> Tensor:
    """Return codes in fp32. Those that are several in one stand side by side then, the lowest bits first.

    `bits`: those of a whole number in int32, which is stored plus half of its range.
    """
    if bits is not None:
        places = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((codes[..., None] >> places & (2**bits - 1)) - 2 ** (bits - 1)).flatten(-2).float()
    if codes.dtype == torch.uint8:
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)  # [256, 2] of each byte
        return embedding(codes.int(), pairs).flatten(-2)
    return codes.float()


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return scales that are stored as bytes, of which 127 is 1 (e8m0)."""
    return exponents.view(torch.float8_e8m0fnu).float()


def unpacked(
    tensors: dict[str, Tensor], quantisation: Quantisation, dtype: torch.dtype, what: str
) -> dict[str, Tensor | Packed]:
    """Return the parameters of a quantised checkpoint by their plain names; what was packed becomes a dtype's.

    Raises `UserError`, which names `what`, where tensors are quantised in a form that is not known.
    """
    parameters: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, part = part_of(name, tensor)
        if part in parameters.setdefault(parameter, {}):
            raise UserError(f"{what} holds two tensors that could be the {part} of {parameter}: {MEND}")
        parameters[parameter][part] = tensor
    packed = {name: parts for name, parts in parameters.items() if "scale" in parts and parts.keys() & {*STORED}}
    if packed and (reason := quantisation.why_not_read()):
        raise UserError(f"{what} is not read: {reason}")
    layers = {name.rpartition(".")[0] for name in packed}
    plain: dict[str, Tensor | Packed] = {}
    for name, tensor in tensors.items():
        layer, _, own = name.rpartition(".")
        if part_of(name, tensor)[0] in packed or (layer in layers and OF_ACTIVATIONS.fullmatch(own)):
            continue
        if layer in layers and not own.endswith("bias"):
            raise UserError(f"{what}: {name} is of a quantised layer, and of no form that is known: {MEND}")
        plain[name] = tensor
    return plain | {name: _packed(name, parts, quantisation, dtype, what) for name, parts in packed.items()}


def part_of(name: str, tensor: Tensor) -> tuple[str, str]:
    """Return the parameter that a stored tensor may belong to, and what it is of it."""
    layer, dot, own = name.rpartition(".")
    for ending, part in PARTS.items():
        if own.endswith(ending) and own != ending:
            return layer + dot + own.removesuffix(ending).removeprefix("_"), part
    return name, "codes" if tensor.dtype in CODES else "values"


def _packed(name: str, parts: dict[str, Tensor], quantisation: Quantisation, dtype: torch.dtype, what: str) -> Packed:
    """Return a parameter of its stored tensors. Raises `UserError` where they are of no known form."""
    others = {part: tensor for part, tensor in parts.items() if part not in (*STORED, "scale", "shape")}
    scale = parts["scale"].view(1, 1) if parts["scale"].numel() == 1 else parts["scale"]
    found = [parts[part] for part in STORED if part in parts]
    transposed = "blocks" in parts and found[0].dim() == 4  # [E, R, groups, bytes of a group]
    if len(found) == 1 and found[0].dtype in CODES and min(found[0].dim(), scale.dim()) > 1:
        codes = found[0].flatten(2) if transposed else found[0]
        columns, bits = columns_and_bits(codes, parts.get("shape"))
        *before, rows, _ = codes.shape
        each = sharing((rows, columns), scale.shape, quantisation.blocks)
        shape = torch.Size([*before, columns, rows] if transposed else [*before, rows, columns])
        packed = Packed(codes, scale, shape, dtype, each, transposed, bits, **others)
        plain_scale = codes.dtype in (*FP8, torch.int8) and scale.dtype.itemsize > 1
        is_known = packed.is_known() and transposed == ("blocks" in parts)
        if is_known and (quantisation.quant_method != "torchao" or plain_scale):
            return packed
    stored = ", ".join(f"{part} {str(tensor.dtype)[6:]} {list(tensor.shape)}" for part, tensor in parts.items())
    raise UserError(f"{what}: {name} is quantised in a form that draftsmith does not unpack ({stored}): {MEND}")


def columns_and_bits(codes: Tensor, shape: Tensor | None) -> tuple[int, int | None]:
    """Return the columns of values that codes [..., R, ...] stand for, and the bits of each where they are in int32.

    `shape` is that of the values, as it is stored beside codes in int32.
    """
    if codes.dtype != torch.int32:
        return codes.shape[-1] * (2 if codes.dtype == torch.uint8 else 1), None
    columns = int(shape[-1]) if shape is not None and shape.dim() == 1 and len(shape) else 0
    return columns, next((bits for bits in BITS if -(-columns * bits // 32) == codes.shape[-1]), None)


def sharing(size: tuple[int, int], scales: torch.Size, blocks: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Return how many rows and columns of a matrix share a scale; None where the scales [..., r, c] do not fit.

    The last rows and columns of a matrix may be fewer, where they are in blocks of a known size.
    """
    counts = tuple(scales[-2:])
    for block in blocks:
        if counts == tuple(-(-length // each) for length, each in zip(size, block, strict=True)):
            return block
    if 0 in counts or any(length % count for length, count in zip(size, counts, strict=True)):
        return None
    return size[0] // counts[0], size[1] // counts[1]
