"""Writing stored features. The size is said first, and an interruption costs a shard at most.

Shapes: B rows, T tokens, H hidden width, A number of layers asked for.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.data.console import say
from draftsmith.data.features.stored import (
    HEADER,
    INDEX,
    FeatureSource,
    Shard,
    StoredFeatures,
    checksum,
    encode,
    read_header,
    stamp,
)
from draftsmith.data.prefetch import prefetched
from draftsmith.data.processes import locked
from draftsmith.data.progress import progress_bar, size_text
from draftsmith.data.samples.batches import MicroBatch, group_rows
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole, writing

ANNOUNCED_AFTER = 2.0  # seconds, in which the first batches show how long the pass will take


def check_disk(store: StoredFeatures) -> str:
    """Return what storing the missing shards takes, in words. Raises `UserError` where the disk has less room."""
    num_tokens = sum(shard.num_tokens for shard in store.missing())
    needed = num_tokens * store.contents.bytes_per_token
    folder = store.folder.absolute()
    existing = next(path for path in [folder, *folder.parents] if path.exists())
    free = shutil.disk_usage(existing).free
    amount = f"{num_tokens} tokens x {store.contents.bytes_per_token} bytes = {size_text(needed)}"
    if needed > free:
        raise UserError(
            f"stored features need {amount}, but {existing} has {size_text(free)} free: give data.features_dir on a "
            "larger disk, data.features_dtype=float8_e4m3fn, a smaller data.max_length, or data.features=online"
        )
    return f"{amount} of {size_text(free)} free"


def write_shards(
    store: StoredFeatures,
    missing: list[Shard],
    source: FeatureSource,
    rank: int = 0,
    num_ranks: int = 1,
    in_step: bool = False,
    num_ahead: int = 0,
) -> None:
    """Write this rank's part of the missing shards, each whole or not at all, with the features that `source` gives.

    All ranks get the same missing shards, and no other run writes into the folder meanwhile. `in_step`: they ask the
    source equally often, as a target in pieces needs, which computes when all do; a rank with less to write asks for
    what nobody keeps. `num_ahead`: number of micro-batches that the source is asked for at once beside the next one.
    """
    own, announced = missing[rank::num_ranks], rank > 0
    if rank == 0:
        say(f"storing features in {store.folder}: {check_disk(store)}")
    with locked(store.folder), writing(store.folder), progress_bar(rank == 0) as progress:
        store.folder.mkdir(parents=True, exist_ok=True)
        task = progress.add_task(
            "storing the target's features", total=sum(shard.num_tokens for shard in own), detail="tokens"
        )
        for shard in own:
            tensors: dict[str, Tensor] = {}
            for micro_batch, computed in computed_ahead(store, shard, source, num_ahead):
                for name, encoded in computed.items():
                    room = torch.empty(shard.num_tokens, *encoded.shape[2:], dtype=encoded.dtype)
                    whole = tensors.setdefault(name, room)
                    for number, (index,) in enumerate(micro_batch):
                        whole[store.places[index][1]] = encoded[number, : store.plan.lengths[index]]
                progress.update(task, advance=sum(store.plan.lengths[index] for (index,) in micro_batch))
                bar = progress.tasks[task]
                if not announced and (bar.elapsed or 0) > ANNOUNCED_AFTER and bar.time_remaining:
                    say(f"about {bar.time_remaining / 60:.1f} minutes are left")
                    announced = True
            save_shard(store, shard, tensors)
    if in_step:
        most = max(num_batches(store, missing[other::num_ranks]) for other in range(num_ranks))
        for _ in range(most - num_batches(store, own)):
            compute(store, [[store.plan.trained[0]]], source)


def num_batches(store: StoredFeatures, shards: list[Shard]) -> int:
    """Return how often the source is asked for some shards."""
    return sum(len(batches_of(store, shard)) for shard in shards)


def batches_of(store: StoredFeatures, shard: Shard) -> list[MicroBatch]:
    """Return the samples of a shard, one a row, in batches of similar length."""
    rows = [[index] for index, length in zip(shard.samples, shard.lengths, strict=True) if length]
    plan = store.plan
    return group_rows(rows, plan.lengths, plan.tokens_per_micro_batch, plan.width_multiple)


def computed_ahead(
    store: StoredFeatures, shard: Shard, source: FeatureSource, num_ahead: int
) -> Iterator[tuple[MicroBatch, dict[str, Tensor]]]:
    """Yield the micro-batches of a shard with their encoded hidden states."""
    batches = batches_of(store, shard)
    numbers = range(len(batches))
    computed = prefetched(lambda number: compute(store, batches[number], source), numbers, num_ahead)
    yield from zip(batches, computed, strict=True)


def compute(store: StoredFeatures, micro_batch: MicroBatch, source: FeatureSource) -> dict[str, Tensor]:
    """Return the encoded hidden states of a micro-batch [B, T, A + 1, ...]. Raises `UserError` for infinite ones."""
    features = source(micro_batch, store.plan.collate(micro_batch))
    states = features.last_hidden[:, :, None]
    if features.layers is not None:
        states = torch.cat([features.layers.unflatten(2, (-1, store.contents.hidden_size)), states], 2)
    finite = states.isfinite().flatten(1).all(1)
    if not finite.all():
        index = micro_batch[int((~finite).nonzero()[0])][0]
        raise UserError(f"the target's hidden states are not finite on sample {index}: look at its text")
    return {name: tensor.cpu() for name, tensor in encode(states, store.contents.torch_dtype).items()}


def save_shard(store: StoredFeatures, shard: Shard, tensors: dict[str, Tensor]) -> None:
    """Write a shard under a hidden name, and rename it when all of it is on disk."""
    header = {**store.header(shard), "checksum": checksum(tensors)}
    partial, final = store.folder / f".{shard.file}", store.folder / shard.file
    with writing(final):
        try:
            save_file(tensors, partial, metadata={HEADER: json.dumps(header)})
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
            partial.rename(final)
        finally:
            partial.unlink(missing_ok=True)


def write_index(store: StoredFeatures) -> None:
    """Write index.json: what is stored, where each sample is, and the stamps of shards that were whole.

    Training believes only the stamps, and the shards' own headers.
    """
    shards = [
        {
            "file": shard.file,
            "first_sample": shard.samples[0],
            "lengths": shard.lengths,
            "checksum": read_header(store.folder / shard.file)["checksum"],
            "stamp": stamp(store.folder / shard.file),
        }
        for shard in store.shards
    ]
    write_whole(store.folder / INDEX, json.dumps({**asdict(store.contents), "shards": shards}) + "\n")
