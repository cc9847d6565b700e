"""Features of the samples, computed once and stored, to train without the target's layers.

A folder holds shards, each of whole samples in order, and index.json, which says where each sample is. A shard says in
its header what it holds and what the checksum of it is, so that each can be refused by itself. Logits are never stored:
the last hidden state is, and the target's head makes them from it.

Shapes: B rows, T tokens, N tokens of a sample or a shard, H hidden width, A number of layers asked for.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import open_tensors, parse_json, read_json
from draftsmith.models.target.target import Features

SHARD_BYTES = 1 << 30
CHECK_THREADS = 4  # hashing lets go of Python's lock
INDEX = "index.json"
HEADER = "draftsmith"  # the key of a shard's metadata
REMOVE = "remove it, and the same command stores it anew"

StoredDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]
FeatureSource = Callable[[MicroBatch, Batch], Features]  # features of a micro-batch, on its device


def token_bytes(num_states: int, hidden_size: int, dtype: StoredDtype) -> int:
    """Return the bytes that so many hidden states of a token take, the scales of fp8 among them."""
    scale = 4 if dtype == "float8_e4m3fn" else 0
    return num_states * (hidden_size * getattr(torch, dtype).itemsize + scale)


@dataclass(frozen=True)
class Contents:
    """The facts that must agree for stored features to be those that a run needs."""

    target_fingerprint: str | None  # of the target that wrote the samples; None where servers alone ran it
    ends_fingerprint: str  # of its config, embedding and head
    layer_ids: tuple[int, ...]  # hidden states after these layers, and always the last one after the final norm
    hidden_size: int
    dtype: StoredDtype
    samples_hash: str  # of their token ids, as far as they are read

    @property
    def num_states(self) -> int:
        """Number of hidden states of a token: A + 1."""
        return len(self.layer_ids) + 1

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the states in torch."""
        return getattr(torch, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes, the scales of fp8 among them."""
        return token_bytes(self.num_states, self.hidden_size, self.dtype)


@dataclass(frozen=True)
class Shard:
    """A file that holds some samples one after another."""

    file: str
    says: dict[str, Any]  # in its header, of its place among the others
    samples: Sequence[int]
    lengths: list[int]  # tokens of each; 0 for one that is not read

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all its samples."""
        return sum(self.lengths)


class StoredFeatures:
    """The features of a plan's samples in a folder, whether all there or to be written."""

    def __init__(
        self,
        folder: Path,
        contents: Contents,
        plan: BatchPlan,
        layer_ids: tuple[int, ...] | None = None,
        shards: list[Shard] | None = None,
    ) -> None:
        """`layer_ids` are those of the stored layers that are read; None: all of them.

        `shards`: what the folder is to hold; None: all samples in order.
        """
        self.folder, self.contents, self.plan = folder, contents, plan
        self.layer_ids = contents.layer_ids if layer_ids is None else layer_ids
        self.columns = [*map(contents.layer_ids.index, self.layer_ids), contents.num_states - 1]
        if shards is None:
            read = set(plan.read)
            lengths = [length if i in read else 0 for i, length in enumerate(plan.lengths)]
            shards = list(_shards(lengths, contents.bytes_per_token))
        self.shards = shards
        self._open: dict[str, Any] = {}
        self._ahead: dict[str, tuple[Tensor, Tensor | None]] = {}

    def missing(self) -> list[Shard]:
        """Return the shards that are still to be written."""
        return [shard for shard in self.shards if not (self.folder / shard.file).is_file()]

    @cached_property
    def places(self) -> dict[int, tuple[Shard, slice]]:
        """The shard of each sample, and the tokens of the shard that are the sample's."""
        return {index: place for shard in self.shards for index, place in places_in(shard)}

    def read(self, rows: MicroBatch, batch: Batch, target: Target) -> Features:
        """Return the features of a micro-batch, on the device and in the dtype of the target; zeros in the padding."""
        key = str(rows)
        hidden, scales = self._ahead.pop(key) if key in self._ahead else self._load(rows, batch)
        states = decode(
            hidden.to(target.device, non_blocking=True),
            None if scales is None else scales.to(target.device, non_blocking=True),
            target.dtype,
        )
        layers = states[:, :, :-1].flatten(2) if self.layer_ids else None
        return Features(states[:, :, -1], layers)

    def read_ahead(self, rows: MicroBatch, batch: Batch, pin_memory: bool) -> None:
        """Take what `read` will ask for from the disk: in another thread, while a device computes."""
        tensors = self._load(rows, batch)
        if pin_memory:
            tensors = tensors[0].pin_memory(), None if tensors[1] is None else tensors[1].pin_memory()
        self._ahead[str(rows)] = tensors

    def _load(self, rows: MicroBatch, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return encoded hidden states [B, T, A + 1, H] of what is read, and the scales [B, T, A + 1] of fp8."""
        shape = (*batch.token_ids.shape, len(self.columns))
        hidden = torch.zeros(*shape, self.contents.hidden_size, dtype=self.contents.torch_dtype)
        scales = torch.zeros(shape) if self.contents.dtype == "float8_e4m3fn" else None
        for number, row in enumerate(rows):
            start = 0
            for index in row:
                encoded = self.encoded(index)
                end = start + len(encoded["hidden"])
                hidden[number, start:end] = encoded["hidden"][:, self.columns]
                if scales is not None:
                    scales[number, start:end] = encoded["scales"][:, self.columns]
                start = end
        return hidden, scales

    def encoded(self, index: int) -> dict[str, Tensor]:
        """Return the stored tensors of a sample, mapped into memory: all of its layers, as `encode` made them.

        Raises `UserError` where the shard has gone since it was checked.
        """
        shard, place = self.places[index]
        file = self._file(shard)
        return {name: file.get_slice(name)[place] for name in self.shapes(shard)}

    def _file(self, shard: Shard) -> Any:
        if shard.file not in self._open:
            path = self.folder / shard.file
            try:
                self._open[shard.file] = open_tensors(path, mapped=True)  # which a slice else reads whole
            except UserError as error:
                raise UserError(
                    f"{error}; put it back, or remove what is left of it: the same command stores it anew"
                ) from None
        return self._open[shard.file]

    @cached_property
    def verified(self) -> dict[str, list[int]]:
        """Size and time of change of each shard when its checksum was last right, as index.json has them."""
        try:
            shards = read_json(self.folder / INDEX)["shards"]
            return {shard["file"]: shard["stamp"] for shard in shards}
        except (ValueError, KeyError, TypeError):
            return {}

    def is_verified(self, shard: Shard) -> bool:
        """Return whether nobody has written to the shard since its checksum was right."""
        return self.verified.get(shard.file) == stamp(self.folder / shard.file)

    def problems(self, rank: int, num_ranks: int) -> list[str]:
        """Return what is wrong with this rank's part of the shards that are there."""
        with ThreadPoolExecutor(CHECK_THREADS) as pool:
            return [problem for problem in pool.map(self.problem, self.shards[rank::num_ranks]) if problem]

    def problem(self, shard: Shard) -> str | None:
        """Return why a shard cannot be trained on: truncated, altered, or of something else.

        None where nothing is wrong, or where it is not there.

        The checksum is computed only of shards that are not verified, since it takes the time of reading them whole.
        """
        path = self.folder / shard.file
        if not path.is_file():
            return None
        try:
            header = read_header(path)
            for name, value in self.header(shard).items():
                # It is not known of a target that only a server has loaded.
                unknown = name == "target_fingerprint" and name in header and None in (value, header[name])
                if header.get(name) != value and not unknown:
                    return (
                        f"{path} holds features of another {name} ({header.get(name)}, not {value}): give another "
                        f"data.features_dir, or remove {self.folder}"
                    )
            with open_tensors(path) as file:
                if {name: file.get_slice(name).get_shape() for name in file.keys()} != self.shapes(shard):  # noqa: SIM118
                    return f"{path} is damaged (its tensors are of other shapes than its header says): {REMOVE}"
                if self.is_verified(shard):
                    return None
                found = checksum({name: file.get_tensor(name) for name in self.shapes(shard)})
        except (SafetensorError, ValueError, OSError) as error:
            return f"{path} is damaged ({first_line(error)}): {REMOVE}"
        return None if header.get("checksum") == found else f"{path} is damaged (its checksum differs): {REMOVE}"

    def shapes(self, shard: Shard) -> dict[str, list[int]]:
        """Return the shape of each tensor of a shard."""
        hidden = [shard.num_tokens, self.contents.num_states, self.contents.hidden_size]
        return (
            {"hidden": hidden, "scales": hidden[:2]} if self.contents.dtype == "float8_e4m3fn" else {"hidden": hidden}
        )

    def header(self, shard: Shard) -> dict[str, Any]:
        """Return what a shard says of itself, beside its checksum."""
        return {**asdict(self.contents), "layer_ids": list(self.contents.layer_ids), **shard.says}


def _shards(lengths: list[int], bytes_per_token: int) -> Iterator[Shard]:
    """Yield shards of about `SHARD_BYTES`, each of whole samples."""
    number = first = num_tokens = 0
    for i, length in enumerate(lengths):
        num_tokens += length
        if num_tokens * bytes_per_token >= SHARD_BYTES or (num_tokens and i + 1 == len(lengths)):
            samples = range(first, i + 1)
            yield Shard(f"shard-{number:05d}.safetensors", {"shard": number}, samples, lengths[first : i + 1])
            number, first, num_tokens = number + 1, i + 1, 0


def places_in(shard: Shard) -> Iterator[tuple[int, tuple[Shard, slice]]]:
    """Yield each sample of a shard, with the shard and the tokens of it that are the sample's."""
    ends = itertools.accumulate(shard.lengths)
    for index, end, length in zip(shard.samples, ends, shard.lengths, strict=True):
        yield index, (shard, slice(end - length, end))


def samples_hash(plan: BatchPlan) -> str:
    """Return 16 hex digits of the token ids and the images that a plan reads, and of their places."""
    digest = hashlib.sha256()
    for index in plan.read:
        ids = plan.samples.token_ids(index)[: plan.max_length].tolist()
        images = plan.samples[index].images if plan.samples.has_images[index] else []
        digest.update(json.dumps([index, ids, *images]).encode())
    return digest.hexdigest()[:16]


def read_header(path: Path) -> dict[str, Any]:
    """Return what a shard says of itself. Raises `UserError` where it cannot be read, or says nothing."""
    with open_tensors(path) as file:
        header = parse_json((file.metadata() or {}).get(HEADER, "{}"), str(path))
    if not isinstance(header, dict):
        raise UserError(f"{path} says nothing of itself")
    return header


def stamp(path: Path) -> list[int]:
    """Return size and time of the last change of a file."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def checksum(tensors: dict[str, Tensor]) -> str:
    """Return the sha256 of the tensors' names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- codec


def encode(states: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return hidden states [N, A + 1, H] as they are stored. In fp8 each vector fills the range, and has a scale."""
    if dtype != torch.float8_e4m3fn:
        return {"hidden": states.to(dtype)}
    scales = states.float().abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny) / torch.finfo(dtype).max
    return {"hidden": (states.float() / scales[..., None]).to(dtype), "scales": scales}


def decode(hidden: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the hidden states that `encode` stored, in the target's dtype."""
    return hidden.to(dtype) if scales is None else (hidden.float() * scales[..., None]).to(dtype)
