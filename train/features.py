"""Where the target's features come from in training: computed beside the drafter, or stored once and read."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from draftsmith.data.batches import BatchPlan
from draftsmith.data.checks import check_capture
from draftsmith.data.feature_writer import check_disk, write_index, write_shards
from draftsmith.data.features import Contents, FeatureSource, StoredFeatures, samples_hash
from draftsmith.data.samples import check_same_target, read_prepared
from draftsmith.models import Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.train.config import TrainConfig


def load_target(config: TrainConfig, device: torch.device) -> Target:
    """The target that wrote the samples; only its ends where features are stored. `UserError` where it did not."""
    folder = Path(config.data.samples)
    fingerprint = read_prepared(folder)["target_fingerprint"]
    if config.data.features == "online" or fingerprint is None:  # None: written by a server, to be compared with
        load = Target.from_pretrained if config.run.target_placement == "replicated" else Target.sharded_from_pretrained
        target = load(config.target, device)
        check_same_target(folder, target)
        if config.data.features == "online":
            return target
        fingerprint = target.fingerprint()
    return Target.ends_from_pretrained(config.target, fingerprint, device)


def open_store(config: TrainConfig, drafter: Drafter, target: Target, plan: BatchPlan) -> StoredFeatures | None:
    """The store that training reads from, checked against the disk's room; None where features are made online."""
    if config.data.features == "online":
        return None
    contents = Contents(
        target_fingerprint=target.fingerprint(),
        ends_fingerprint=target.ends_fingerprint(),
        layer_ids=drafter.layer_ids,
        hidden_size=target.hidden_size,
        dtype=config.data.features_dtype,
        samples_hash=samples_hash(plan),
    )
    name = "-".join(["features", *map(str, contents.layer_ids), contents.dtype])
    folder = Path(config.data.features_dir or Path(config.data.samples) / name)
    store = StoredFeatures(folder, contents, plan)
    check_disk(store)
    return store


def feature_source(
    config: TrainConfig, store: StoredFeatures | None, drafter: Drafter, target: Target, accelerator: Accelerator
) -> FeatureSource:
    """Reads the features of a micro-batch. A store is written first where it is not whole, and checked.

    Raises `UserError` naming a shard that is damaged or of something else, on every rank.
    """
    if store is None:
        return lambda rows, batch: target.features(batch, drafter.layer_ids)
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    if problems := gather_object(store.problems(rank, num_ranks)):
        raise UserError(problems[0] + (f" ({len(problems) - 1} more shards like it)" if len(problems) > 1 else ""))
    if store.missing():
        accelerator.wait_for_everyone()  # all have seen what is missing
        whole = whole_target(config, target)
        check_capture(whole, drafter.layer_ids, store.plan.samples[0].token_ids)
        write_shards(store, whole, rank, num_ranks)
        accelerator.wait_for_everyone()
    if rank == 0 and not all(map(store.is_verified, store.shards)):
        write_index(store)
    return lambda rows, batch: store.read(rows, batch, target)


def whole_target(config: TrainConfig, target: Target) -> Target:
    """The target with its layers, loaded where it has none; `UserError` if it did not write the samples."""
    if not target.has_layers:
        target = Target.from_pretrained(config.target, target.device)
        check_same_target(Path(config.data.samples), target)
    return target
