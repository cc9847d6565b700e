"""Features that servers gave, kept on the disk as stored ones are, so that later epochs need not ask for them again.

A shard holds the samples that a process got one after another, which its header names. It is written whole under a
hidden name before it gets its own, so whatever is found under that is whole. A sample that no shard holds is asked for.

Shapes: T tokens of a sample, H hidden width, A number of layers asked for.
"""

import contextlib
import copy
import hashlib
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from draftsmith.data.features.stored import Contents, Shard, StoredFeatures, decode, encode, places_in, read_header
from draftsmith.data.features.writer import save_shard
from draftsmith.data.processes import locked
from draftsmith.data.progress import size_text
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.models import Target
from draftsmith.models.errors import UserError

SHARD_BYTES = 1 << 28  # of features that a process holds in memory until they are written
FILES = "kept-{}.safetensors"


class KeptFeatures:
    """The features of samples that servers gave, up to a size; any number of threads may read and keep at once.

    States go through the stored form whether they are kept or not, so that what the disk holds changes no step.
    """

    def __init__(
        self, folder: Path, contents: Contents, plan: BatchPlan, target: Target, most_bytes: float, rank: int, of: int
    ) -> None:
        """Find what is there, unchecked. `most_bytes` of the folder are shared by those that keep, `of` of all ranks.

        Raises `UserError` where another run keeps features there, and where the disk has no room for them.
        """
        self._norm, self._dtype = copy.deepcopy(target.final_norm).cpu(), target.dtype
        self._lock, self._folder_lock = threading.Lock(), contextlib.ExitStack()
        self._folder_lock.enter_context(locked(folder))
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            for path in folder.glob(f".{FILES.format('*')}"):  # of a process that was killed
                path.unlink()
        shards = [read_shard(path, plan) for path in sorted(folder.glob(FILES.format("*")))]
        self.store = StoredFeatures(folder, contents, plan, shards=shards)
        found, wanted = sum(shard.num_tokens for shard in shards), sum(plan.lengths[index] for index in plan.read)
        room = max(0, min(int(most_bytes // contents.bytes_per_token), wanted) - found)
        self.found, self.room = found * contents.bytes_per_token, room * contents.bytes_per_token
        free = shutil.disk_usage(folder).free
        if self.room > free:
            raise UserError(
                f"data.features_kept_gb: {size_text(self.room)} of features would come to the {size_text(self.found)} "
                f"in {folder}, which has {size_text(free)} free: give less, or data.features_dir on a larger disk"
            )
        self._num_ranks, self._tokens_left, self._seen_at = of, room // of, 0
        self._held: dict[int, dict[str, Tensor]] = {}  # encoded states of samples that are not written yet
        self._tokens_held = 0

    def read(self, index: int) -> Tensor | None:
        """Return the states of a sample, [T, A + 1, H], the last one normed; None where it is to be asked for."""
        with self._lock:
            encoded = self._held.get(index)
            if encoded is None:
                self._look_for_new()
                try:
                    encoded = self.store.encoded(index) if index in self.store.places else None
                except UserError:  # somebody removed it
                    self._forget(self.store.places[index][0])
        return None if encoded is None else self._decode(encoded)

    @torch.no_grad()
    def keep(self, index: int, states: Tensor) -> Tensor:
        """Return the states that a server gave as `read` would return them, and keep them where there is room."""
        states = states.to(self._dtype)
        states = torch.cat([states[:, :-1], self._norm(states[:, -1:])], 1)
        encoded = encode(states, self.store.contents.torch_dtype)
        with self._lock:
            if len(states) <= self._tokens_left and index not in self._held and index not in self.store.places:
                self._held[index] = encoded
                self._tokens_left -= len(states)
                self._tokens_held += len(states)
                if self._tokens_held * self.store.contents.bytes_per_token >= SHARD_BYTES:
                    self._write()
        return self._decode(encoded)

    def stop(self) -> None:
        """Write what is still held, keep no more, and let go of the folder."""
        with self._lock, self._folder_lock:
            self._tokens_left = 0
            if self._held:
                self._write()

    def _decode(self, encoded: dict[str, Tensor]) -> Tensor:
        return decode(encoded["hidden"], encoded.get("scales"), self._dtype)

    def _write(self) -> None:
        shard, parts = shard_of(list(self._held), self.store.plan), list(self._held.values())
        self.store.folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
        save_shard(self.store, shard, {name: joined([part[name] for part in parts]) for name in parts[0]})
        self._add(shard)
        self._held, self._tokens_held = {}, 0

    def _add(self, shard: Shard) -> None:
        self.store.shards.append(shard)
        self.store.places.update(places_in(shard))

    def _forget(self, gone: Shard) -> None:
        self.store.shards.remove(gone)
        self._tokens_left += gone.num_tokens // self._num_ranks  # each rank forgets it
        for index in gone.samples:
            self.store.places.pop(index, None)

    def _look_for_new(self) -> None:
        """Find what other processes of this run wrote since the last look."""
        changed_at = self.store.folder.stat().st_mtime_ns if self.store.folder.is_dir() else 0
        if changed_at == self._seen_at:
            return
        self._seen_at = changed_at
        known = {shard.file for shard in self.store.shards}
        for path in self.store.folder.glob(FILES.format("*")):
            if path.name not in known:
                with contextlib.suppress(UserError):  # it may be gone again
                    self._add(read_shard(path, self.store.plan))


def read_shard(path: Path, plan: BatchPlan) -> Shard:
    """Return the shard that a file says it is. Raises `UserError` where it does not say of which samples."""
    samples = read_header(path).get("samples")
    if not (
        isinstance(samples, list) and samples and all(type(i) is int and 0 <= i < len(plan.lengths) for i in samples)
    ):
        raise UserError(f"{path} does not keep features of these samples: remove it, or give another data.features_dir")
    return replace(shard_of(samples, plan), file=path.name)


def joined(parts: list[Tensor]) -> Tensor:
    """Return tensors of any dtype one behind the other."""
    whole, start = parts[0].new_empty([sum(map(len, parts)), *parts[0].shape[1:]]), 0
    for part in parts:
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def shard_of(samples: list[int], plan: BatchPlan) -> Shard:
    """Return the shard that holds some samples in this order, in a file that no shard of others has."""
    name = FILES.format(hashlib.sha256(json.dumps(samples).encode()).hexdigest()[:16])
    return Shard(name, {"samples": samples}, samples, [plan.lengths[index] for index in samples])
