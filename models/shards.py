"""Some tensors of a target, read from its safetensors files by name.

Transformers maps every file of a target privately, so that a limit on memory counts all of them, and downloads all.
Here a file is fetched only for a tensor in it, and no more of it than that tensor gets into memory.
"""

import json
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from draftsmith.models.errors import UserError, first_line


def read_tensors(name: str | Path, wanted: Callable[[str], bool]) -> dict[str, Tensor] | None:
    """The tensors whose names are wanted, as the files have them; None of a target that is not kept as safetensors.

    `name`: a directory or a Hub name. Raises `UserError` naming a file that is not there or damaged.
    """
    files = _files(name, wanted)
    if files is None:
        return None
    tensors: dict[str, Tensor] = {}
    for file in files:
        path = _find(name, file)
        if path is None:
            raise UserError(f"target {str(name)!r} lacks {file}, which its index names: get it whole")
        try:
            with safe_open(path, "pt", backend="pread") as shard:
                tensors |= {key: shard.get_tensor(key) for key in shard.keys() if wanted(key)}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"target {str(name)!r}: {path} is damaged ({first_line(error)}): get it anew") from None
    return tensors


def _files(name: str | Path, wanted: Callable[[str], bool]) -> list[str] | None:
    """Those that hold wanted tensors, by the index where there is one."""
    if _find(name, SAFE_WEIGHTS_NAME):
        return [SAFE_WEIGHTS_NAME]
    index = _find(name, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return None
    try:
        places = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise UserError(f"target {str(name)!r}: {index} is damaged ({first_line(error)}): get it anew") from None
    return sorted({file for key, file in places.items() if wanted(key)})


def _find(name: str | Path, file: str) -> Path | None:
    """A file of the target, downloaded where need be; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(name), file))
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, OSError) as error:
        raise UserError(f"{file} of target {str(name)!r} cannot be had: {first_line(error)}") from None
