"""Weights on disk, which anybody may have written: they are read without running code and compared with config.json.

Nothing is allocated for a size that a config claims and no tensor has, and no loop runs over parts without tensors.
"""

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import open_tensors, read_json_object, refuse_stand_in

PARTS = re.compile(r"(n|num)_(\w+_)?(layers?|experts)|num_heads|n_predict")  # fields that count parts with tensors
OTHER_TYPES = {  # of safetensors: those that quantised weights are stored in
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
}
REPEATED = 2  # at most so many times may a pickle's tensors hold its bytes: an embedding may be the head, too


def read_weights(
    path: Path, device: str = "cpu", wanted: Callable[[str], bool] = lambda name: True, mapped: bool = False
) -> dict[str, Tensor]:
    """Return the wanted tensors of a .safetensors file, or else of a file of `torch.save`.

    On device `meta` they have sizes and no values, and fp32 stands for all floating-point types of 16 bits or more.
    `mapped`: those of a .safetensors file are read when they are used. Raises `UserError` for a file that is damaged,
    is not what its name says, or holds more than tensors.
    """
    if path.suffix != ".safetensors":
        return {name: tensor for name, tensor in _read_pickle(path, device).items() if wanted(name)}
    with open_tensors(path, mapped) as file:
        names = filter(wanted, file.keys())
        if device == "meta":
            return {name: _without_values(file.get_slice(name)) for name in names}
        return {name: file.get_tensor(name) for name in names}


def _without_values(part: Any) -> Tensor:
    """Return a tensor on `meta` for a slice of an opened safetensors file."""
    dtype = OTHER_TYPES.get(part.get_dtype(), torch.float32)
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


def _read_pickle(path: Path, device: str) -> dict[str, Tensor]:
    refuse_stand_in(path)
    mend = "get the weights as .safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            packed = any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist())
        content = None if packed else torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} is a pickle that holds more than tensors, and no code of it is run: {mend}") from None
    except Exception as error:  # of torch and zipfile, which have many for damaged files
        raise UserError(f"{path} is no file of torch.save, or is damaged ({first_line(error)}): {mend}") from None
    if not isinstance(content, dict) or not all(map(_is_named_tensor, content.items())):
        raise UserError(f"{path} holds other things than plain tensors by their names: {mend}")
    if sum(tensor.nbytes for tensor in content.values()) > REPEATED * path.stat().st_size:
        raise UserError(f"{path} claims larger tensors than its bytes hold: {mend}")
    return content


def _is_named_tensor(entry: tuple[Any, Any]) -> bool:
    name, tensor = entry
    is_plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and not tensor.is_quantized
    return isinstance(name, str) and is_plain


def check_finite(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise `UserError`, naming the tensor, where one holds NaN or infinity: every output would be NaN.

    Tensors on the meta device, whose values stay on disk until they are needed, are passed over.
    """
    for name, tensor in tensors:
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta and not is_finite(tensor):
            raise UserError(
                f"{what}: {name} holds NaN or infinity; its training failed, or its file is damaged: take another one"
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are numbers; ten times as fast as `isfinite` on a CPU."""
    low, high = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)  # NaN makes both NaN
    return bool(low.isfinite() & high.isfinite())


def check_counts(config: dict[str, Any], most: int, place: str) -> None:
    """Raise `UserError` where config.json, at any depth, counts more layers, heads or experts than there are tensors.

    To build so many might never end.
    """
    parts = [config]
    while parts:
        for key, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif isinstance(value, int | float) and value > most and PARTS.fullmatch(key):
                raise UserError(
                    f"{place} has {key} {value}, and there are {most} tensors: these files are not of one model, take "
                    "another copy"
                )


def files_of_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index of weights. Raises `UserError` where one lies in another folder.

    Links may lead to the blobs beside the snapshots of the Hub's cache, whose folders consist of them.
    """
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{index} has no weight_map, as an index of weights must: get it anew")
    folder = Path(os.path.realpath(index.parent))
    places = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]

    def lies_there(name: str) -> bool:
        is_plain = PurePath(name).name == name and "\0" not in name
        return is_plain and Path(os.path.realpath(folder / name)).parent in places

    wrong = [file for file in files.values() if not isinstance(file, str)]
    if wrong := wrong or [name for name in {*files.values()} if not lies_there(name)]:
        raise UserError(
            f"{index} names {str(wrong[0])!r}, which is no file of its folder: take another copy of the model"
        )
    return files
