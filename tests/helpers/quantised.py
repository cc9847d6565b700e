"""Quantised checkpoints of every form, of random codes and scales, and what they stand for by the forms' definitions.

The values are computed in numpy, element by element: nothing of the code under test is used.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]  # by the endings of their names, such as "weight_scale"


@dataclass(frozen=True)
class Form:
    """A way to store matrices: `write(rows, columns)` returns a random one's tensors, and its values in fp64."""

    config: dict[str, Any]  # quantization_config
    write: Callable[[int, int], tuple[Stored, np.ndarray]]


def random_bytes(*shape: int) -> np.ndarray:
    return torch.randint(0, 256, shape, dtype=torch.int32).numpy()


def random_scale(*shape: int, size: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.rand(shape) + 0.5) * size).to(dtype)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Sign, four bits of the exponent, three of the fraction."""
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(codes >> 7, -size, size)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Sign, two bits of the exponent, one of the fraction."""
    exponent, fraction = codes >> 1 & 3, codes & 1
    size = np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    return np.where(codes >> 3, -size, size)


def as_type(codes: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The bytes of codes 0 to 255, as the numbers of a type of 8 bits."""
    return torch.tensor(codes.astype(np.uint8)).view(dtype)


def fp8_codes(rows: int, columns: int) -> tuple[Tensor, np.ndarray]:
    codes = random_bytes(rows, columns)
    codes = np.where(codes % 128 > 120, 0, codes)  # 127 is NaN
    return as_type(codes, torch.float8_e4m3fn), e4m3(codes)


def int8_codes(rows: int, columns: int) -> tuple[Tensor, np.ndarray]:
    codes = random_bytes(rows, columns)
    return as_type(codes, torch.int8), np.where(codes > 127, codes - 256, codes).astype(float)


def e2m1_codes(*shape: int) -> tuple[Tensor, np.ndarray]:
    """Two in a byte: the first in its lower half."""
    pairs = random_bytes(*shape[:-1], shape[-1] // 2)
    values = np.stack([e2m1(pairs & 15), e2m1(pairs >> 4)], -1).reshape(shape)
    return torch.tensor(pairs.astype(np.uint8)), values


def int32_codes(rows: int, columns: int, bits: int) -> tuple[Tensor, np.ndarray]:
    """Whole numbers plus half their range, in int32 from the lowest bits on."""
    values = random_bytes(rows, columns) % 2**bits
    each = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -columns % each))).reshape(rows, -1, each)
    words = sum(padded[..., place].astype(np.int64) << bits * place for place in range(each))
    return torch.tensor(words).to(torch.int32), values - 2.0 ** (bits - 1)


def spread(scale: Tensor | np.ndarray, rows: int, columns: int, each: tuple[int, int]) -> np.ndarray:
    """The scale of each element, where so many rows and columns share one."""
    numbers = scale.double().numpy() if isinstance(scale, Tensor) else scale
    return numbers[np.arange(rows)[:, None] // each[0], np.arange(columns)[None] // each[1]]


# --- forms


def fp8_in_blocks(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = fp8_codes(rows, columns)
    scale = random_scale(-(-rows // 128), -(-columns // 128), size=0.001)
    return {"weight": codes, "weight_scale_inv": scale}, values * spread(scale, rows, columns, (128, 128))


def fp8_of_one_scale(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = fp8_codes(rows, columns)
    scale = random_scale(size=0.001, dtype=torch.bfloat16)
    stored = {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.ones(())}
    return stored, values * float(scale)


def mxfp8(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = fp8_codes(rows, columns)
    exponents = random_bytes(rows, columns // 32) % 3 + 116
    stored = {"weight": codes, "weight_scale_inv": torch.tensor(exponents.astype(np.uint8))}
    return stored, values * spread(2.0 ** (exponents - 127), rows, columns, (1, 32))


def fp8_by_rows(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = fp8_codes(rows, columns)
    scale = random_scale(rows, 1, size=0.001, dtype=torch.bfloat16)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)}
    return stored, values * spread(scale, rows, columns, (1, columns))


def int8_by_rows(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = int8_codes(rows, columns)
    scale = random_scale(rows, 1, size=0.001, dtype=torch.bfloat16)
    zero, zeros = int8_codes(rows, 1)
    values = (values - zeros) * spread(scale, rows, columns, (1, columns))
    return {"weight": codes, "weight_scale": scale, "weight_zero_point": zero}, values


def int4_in_groups(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = int32_codes(rows, columns, 4)
    scale = random_scale(rows, columns // 32, size=0.03, dtype=torch.bfloat16)
    stored = {"weight_packed": codes, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    return stored, values * spread(scale, rows, columns, (1, 32))


def int4_in_groups_of_mixed_columns(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    stored, _ = int4_in_groups(rows, columns)
    codes, values = int32_codes(rows, columns, 4)
    packed_zero, zeros = int32_codes(columns // 32, rows, 4)  # packed along the rows
    order = torch.randint(0, columns // 32, (columns,), dtype=torch.int32)
    scale = stored["weight_scale"].double().numpy()[:, order]
    stored |= {"weight_packed": codes, "weight_zero_point": packed_zero.t().contiguous(), "weight_g_idx": order}
    return stored, (values - zeros.T[:, order]) * scale


def int8_packed(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = int32_codes(rows, columns, 8)
    scale = random_scale(rows, 1, size=0.001)
    stored = {"weight_packed": codes, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    return stored, values * spread(scale, rows, columns, (1, columns))


def nvfp4_parts(rows: int, columns: int) -> tuple[Tensor, np.ndarray, Tensor, np.ndarray]:
    codes, values = e2m1_codes(rows, columns)
    bits = random_bytes(rows, columns // 16) % 64 + 32
    return codes, values, as_type(bits, torch.float8_e4m3fn), spread(e4m3(bits), rows, columns, (1, 16))


def nvfp4(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values, scale, scales = nvfp4_parts(rows, columns)
    whole = random_scale(1, size=150.0)
    stored = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": whole}
    stored |= {"input_global_scale": torch.ones(1)}
    return stored, values * (np.float32(scales) / whole.numpy())


def nvfp4_of_modelopt(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values, scale, scales = nvfp4_parts(rows, columns)
    whole = random_scale(size=0.007)
    stored = {"weight": codes, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.ones(())}
    return stored, values * (np.float32(scales) * whole.numpy())


def mxfp4(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = e2m1_codes(rows, columns)
    exponents = random_bytes(rows, columns // 32) % 4 + 121
    stored = {"weight_packed": codes, "weight_scale": torch.tensor(exponents.astype(np.uint8))}
    return stored, values * spread(2.0 ** (exponents - 127), rows, columns, (1, 32))


def int8_of_torchao(rows: int, columns: int) -> tuple[Stored, np.ndarray]:
    codes, values = int8_codes(rows, columns)
    scale = random_scale(rows, 1, size=0.001)
    stored = {"_weight_qdata": codes, "_weight_scale": scale, "_weight_zero_point": torch.zeros(rows, 1).char()}
    return stored, values * spread(scale, rows, columns, (1, columns))


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


FORMS = {
    "fp8 in blocks": Form({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_in_blocks),
    "fp8 of one scale": Form({"quant_method": "fp8", "weight_block_size": None}, fp8_of_one_scale),
    "mxfp8": Form({"quant_method": "mxfp8", "scale_fmt": "ue8m0"}, mxfp8),
    "compressed fp8": Form(compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_by_rows),
    "compressed int8": Form(compressed("int-quantized", num_bits=8, symmetric=False), int8_by_rows),
    "compressed int4": Form(compressed("pack-quantized", num_bits=4, group_size=32), int4_in_groups),
    "compressed int4, columns in another order": Form(
        compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False, actorder="group"),
        int4_in_groups_of_mixed_columns,
    ),
    "compressed int8 in int32": Form(compressed("pack-quantized", num_bits=8, strategy="channel"), int8_packed),
    "compressed nvfp4": Form(compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), nvfp4),
    "compressed mxfp4": Form(compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), mxfp4),
    "modelopt nvfp4": Form({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_of_modelopt),
    "modelopt fp8": Form({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_by_rows),
    "torchao int8": Form({"quant_method": "torchao", "quant_type": {"default": {}}}, int8_of_torchao),
}


def quantise(
    target: Path,
    quantised: Path,
    plain: Path,
    form: Form,
    chosen: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> None:
    """Write a copy of a target whose chosen matrices are stored in a form, and one that has the values they stand for.

    The chosen matrices become others, of random codes.
    """
    for folder in (quantised, plain):
        shutil.copytree(target, folder)
    tensors = load_file(target / "model.safetensors")
    packed: Stored = {}
    names = list(filter(chosen, tensors))
    for name in names:
        stored, values = form.write(*tensors[name].shape)
        packed |= {name.removesuffix("weight") + part: tensor for part, tensor in stored.items()}
        tensors[name] = torch.tensor(values.astype(np.float32))
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    save_file(kept | packed, quantised / "model.safetensors", {"format": "pt"})
    set_config(quantised, quantization_config=form.config)


def set_config(folder: Path, **fields: Any) -> None:
    """Change fields of a config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
