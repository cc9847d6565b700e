"""The sources of the target's features in training: computed beside the drafter, or stored once and read."""

import gc
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from draftsmith.data.features.endpoint import EndpointFeatures
from draftsmith.data.features.stored import Contents, FeatureSource, StoredFeatures, samples_hash
from draftsmith.data.features.writer import check_disk, write_index, write_shards
from draftsmith.data.prompts.checks import check_capture
from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.data.samples.folder import check_same_target, read_prepared
from draftsmith.data.samples.samples import Samples
from draftsmith.models import Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.target.support import read_decoded
from draftsmith.models.target.target import Features, check_layer_ids
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.placement import check_room_to_store, devices_of_layers
from draftsmith.train.process.stages import Stages


def load_target(config: TrainConfig, device: torch.device) -> Target:
    """Return the target that wrote the samples, without its layers where features are stored.

    Raises `UserError` where it cannot be had, or has to decode in this run and cannot.
    """
    if config.evaluation.prompts is not None and config.evaluation.engine is None:
        read_decoded(config.target)
    fingerprint = read_prepared(Path(config.data.samples))["target_fingerprint"]
    if config.data.features == "online":
        return load_whole(config, device)
    if fingerprint is None and config.data.features_endpoint is None:  # a server wrote the samples, its weights unseen
        fingerprint = load_whole(config, device).fingerprint()
    return Target.head_from_pretrained(config.target, fingerprint, device)


def check_images(config: TrainConfig, samples: Samples) -> None:
    """Refuse samples with images where no server computes the features: the towers that read them are not loaded."""
    number = int(samples.has_images.sum())
    if number and config.data.features_endpoint is None:
        raise UserError(
            f"{number} of {len(samples)} samples in {config.data.samples} hold images, which only a server reads: "
            "give data.features=stored data.features_endpoint=URL"
        )


def load_whole(config: TrainConfig, device: torch.device) -> Target:
    """Return the target with its layers, placed as the config says. `UserError` if it did not write the samples."""
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
    """Return the same target with its layers, loaded where it has none."""
    return target if target.has_layers else load_whole(config, target.device)


def open_store(config: TrainConfig, drafter: Drafter, target: Target, plan: BatchPlan) -> StoredFeatures | None:
    """Return the store that training reads from, if any.

    Raises `UserError` where the disk has no room for it, and where it would lack layers that the drafter reads.
    """
    if config.data.features == "online":
        return None
    layer_ids = tuple(config.data.features_layers or drafter.layer_ids)
    check_layer_ids((layer_id for layer_id in layer_ids if layer_id != target.num_layers), target)  # MTP heads read it
    if missing := set(drafter.layer_ids) - set(layer_ids):
        raise UserError(
            f"data.features_layers={list(layer_ids)} lacks {sorted(missing)}, which the drafter reads: add them, or "
            "leave the setting out"
        )
    contents = Contents(
        target_fingerprint=target.fingerprint(),
        ends_fingerprint=target.head_fingerprint(),
        layer_ids=layer_ids,
        hidden_size=target.hidden_size,
        dtype=config.data.features_dtype,
        samples_hash=samples_hash(plan),
    )
    name = "-".join(["features", *map(str, contents.layer_ids), contents.dtype])
    folder = Path(config.data.features_dir or Path(config.data.samples) / name)
    store = StoredFeatures(folder, contents, plan, drafter.layer_ids)
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
    """Return the source of a micro-batch's features; a store is checked, and what is missing in it written first.

    Raises `UserError`, on every rank, naming a shard that is damaged or holds something else.
    """
    if store is None:
        return lambda micro_batch, batch: target.features(batch, drafter.layer_ids)
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    if problems := gather_object(store.problems(rank, num_ranks)):
        raise UserError(problems[0] + (f" ({len(problems) - 1} more shards like it)" if len(problems) > 1 else ""))
    missing = broadcast_object_list([store.missing()])[0]  # as seen before anything is written
    if missing:
        if config.data.features_endpoint is None:
            check_room_to_store(config, accelerator, target)
        stages.enter("storing features")
        in_step = config.run.target_placement == "sharded"
        source = source_to_store(config, store, target, stages)
        write_shards(store, missing, source, rank, num_ranks, in_step)
        del source  # and the target's layers with it
        free_memory()
        accelerator.wait_for_everyone()
    if rank == 0 and not all(map(store.is_verified, store.shards)) and os.access(store.folder, os.W_OK):
        write_index(store)
    return lambda micro_batch, batch: store.read(micro_batch, batch, target)


def source_to_store(config: TrainConfig, store: StoredFeatures, target: Target, stages: Stages) -> FeatureSource:
    """Return the source of features to store: the server at data.features_endpoint, or the target's own layers.

    Each batch enters its stage anew, which shows that the pass moves.
    """
    if config.data.features_endpoint is not None:
        layer_ids = store.contents.layer_ids
        folder = Path(config.data.samples)
        compute: FeatureSource = EndpointFeatures(config.data.features_endpoint, target, layer_ids, store.plan, folder)
    else:
        compute = source_of_layers(config, store, target)

    def source(micro_batch: MicroBatch, batch: Batch) -> Features:
        stages.enter("storing features")
        return compute(micro_batch, batch)

    return source


def source_of_layers(config: TrainConfig, store: StoredFeatures, target: Target) -> FeatureSource:
    """Return the source of features that the target's own layers compute, loaded where the target has none."""
    whole, layer_ids = whole_target(config, target), store.contents.layer_ids
    check_capture(whole, layer_ids, store.plan.samples[0].token_ids)
    return lambda micro_batch, batch: whole.features(batch.to(whole.device), layer_ids)


def free_memory() -> None:
    """Free the memory of what nobody refers to any more; layers in pieces refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
