"""Where the target's features come from in training: computed beside the drafter, or stored once and read."""

import gc
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from draftsmith.data.features.served import ServedFeatures
from draftsmith.data.features.stored import Contents, FeatureSource, StoredFeatures, samples_hash
from draftsmith.data.features.writer import check_disk, write_index, write_shards
from draftsmith.data.prompts.checks import check_capture
from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.data.samples.samples import check_same_target, read_prepared
from draftsmith.models import Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Features
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.placement import check_room_to_store, devices_of_layers
from draftsmith.train.process.stages import Stages


def load_target(config: TrainConfig, device: torch.device) -> Target:
    """The target that wrote the samples; only its ends where features are stored. `UserError` where it did not."""
    fingerprint = read_prepared(Path(config.data.samples))["target_fingerprint"]
    if config.data.features == "online":
        return load_whole(config, device)
    if fingerprint is None and config.data.features_endpoint is None:  # written by a server, of weights not seen here
        fingerprint = load_whole(config, device).fingerprint()
    return Target.head_from_pretrained(config.target, fingerprint, device)


def load_whole(config: TrainConfig, device: torch.device) -> Target:
    """The target with its layers, placed as the config says. `UserError` if it did not write the samples."""
    match config.run.target_placement:
        case "replicated":
            target = Target.from_pretrained(config.target, device)
        case "sharded":
            target = Target.sharded_from_pretrained(config.target, device)
        case "device_map":
            target = Target.spread_from_pretrained(config.target, device, devices_of_layers(config, device))
    check_same_target(Path(config.data.samples), target)
    return target


def whole_target(config: TrainConfig, target: Target) -> Target:
    """The same target with its layers, loaded where it has none."""
    return target if target.has_layers else load_whole(config, target.device)


def open_store(config: TrainConfig, drafter: Drafter, target: Target, plan: BatchPlan) -> StoredFeatures | None:
    """The store that training reads from, checked against the disk's room; None where features are made online."""
    if config.data.features == "online":
        return None
    contents = Contents(
        target_fingerprint=target.fingerprint(),
        ends_fingerprint=target.head_fingerprint(),
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
    config: TrainConfig,
    store: StoredFeatures | None,
    drafter: Drafter,
    target: Target,
    accelerator: Accelerator,
    stages: Stages,
) -> FeatureSource:
    """Reads the features of a micro-batch. A store is written first where it is not whole, and checked.

    Raises `UserError` naming a shard that is damaged or of something else, on every rank.
    """
    if store is None:
        return lambda rows, batch: target.features(batch, drafter.layer_ids)
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    if problems := gather_object(store.problems(rank, num_ranks)):
        raise UserError(problems[0] + (f" ({len(problems) - 1} more shards like it)" if len(problems) > 1 else ""))
    missing = broadcast_object_list([store.missing()])[0]  # as seen before anything is written
    if missing:
        make_source = source_of_server
        if config.data.features_endpoint is None:
            check_room_to_store(config, accelerator, target)
            make_source = source_of_layers
        in_step = config.run.target_placement == "sharded"
        stages.enter("storing features")
        source = watched_source(make_source(config, drafter, target, store.plan), stages)
        write_shards(store, missing, source, rank, num_ranks, in_step)
        del source  # and the layers with it
        free_memory()
        accelerator.wait_for_everyone()
    if rank == 0 and not all(map(store.is_verified, store.shards)) and os.access(store.folder, os.W_OK):
        write_index(store)
    return lambda rows, batch: store.read(rows, batch, target)


def watched_source(source: FeatureSource, stages: Stages) -> FeatureSource:
    """The same; each batch shows that the pass moves."""

    def moving(rows: MicroBatch, batch: Batch) -> Features:
        stages.enter("storing features")
        return source(rows, batch)

    return moving


def source_of_layers(config: TrainConfig, drafter: Drafter, target: Target, plan: BatchPlan) -> FeatureSource:
    """Features as the target's own layers compute them."""
    whole = whole_target(config, target)
    check_capture(whole, drafter.layer_ids, plan.samples[0].token_ids)
    return lambda rows, batch: whole.features(batch.to(whole.device), drafter.layer_ids)


def source_of_server(config: TrainConfig, drafter: Drafter, target: Target, plan: BatchPlan) -> FeatureSource:
    """Features as the server at data.features_endpoint computes them."""
    assert config.data.features_endpoint is not None
    return ServedFeatures(config.data.features_endpoint, target, drafter.layer_ids, plan)


def free_memory() -> None:
    """Of what nobody refers to any more; layers in pieces refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
