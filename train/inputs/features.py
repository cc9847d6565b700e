"""The sources of the target's features in training: the target beside the drafter, a store, or servers."""

import gc
import os
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from draftsmith.data.console import say
from draftsmith.data.features.endpoint import FeatureServer
from draftsmith.data.features.kept import KeptFeatures
from draftsmith.data.features.stored import Contents, Shard, StoredFeatures, samples_hash, token_bytes
from draftsmith.data.features.streamed import StreamedFeatures, steps_ahead
from draftsmith.data.features.writer import check_disk, write_index, write_shards
from draftsmith.data.progress import size_text
from draftsmith.data.prompts.checks import check_capture
from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.data.samples.folder import check_same_target, read_prepared
from draftsmith.data.samples.samples import Samples
from draftsmith.models import Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError
from draftsmith.models.target.support import read_decoded
from draftsmith.models.target.target import Features, check_layer_ids
from draftsmith.models.text_team import Team
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.placement import check_room_to_store, devices_of_layers
from draftsmith.train.process.faults import failing_together
from draftsmith.train.process.stages import Stages

MICRO_BATCHES_AHEAD = 2  # that servers are asked for while another one is stored


class RunFeatures:
    """The source of a run's features: here the target's own layers, which compute them when they are asked for."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        self.target, self.layer_ids = target, layer_ids
        # The number of steps whose batches are made before their turn comes, in another thread. On a CPU such a thread
        # slows every operation, probably since OpenMP lets its threads sleep as soon as it has more than there are
        # cores: plain decoding by the quickstart's target took three times as long.
        self.steps_ahead = 1 if target.device.type == "cuda" else 0

    def __call__(self, micro_batch: MicroBatch, batch: Batch) -> Features:
        """Return the features of a micro-batch, on the target's device."""
        return self.target.features(batch.to(self.target.device), self.layer_ids)

    def read_ahead(self, micro_batch: MicroBatch, batch: Batch, pin_memory: bool) -> None:
        """Fetch what can be had before a micro-batch is asked for: in another thread, while a device computes."""

    def stop(self) -> None:
        """Let go of what is being fetched."""


class FeaturesOfStore(RunFeatures):
    """The features of a run that a store holds."""

    def __init__(self, store: StoredFeatures, target: Target) -> None:
        super().__init__(target, store.layer_ids)
        self.store = store

    def __call__(self, micro_batch: MicroBatch, batch: Batch) -> Features:
        return self.store.read(micro_batch, batch, self.target)

    def read_ahead(self, micro_batch: MicroBatch, batch: Batch, pin_memory: bool) -> None:
        self.store.read_ahead(micro_batch, batch, pin_memory)


class FeaturesOfServers(RunFeatures):
    """The features of a run that servers compute while it trains, for several steps at once."""

    def __init__(self, servers: StreamedFeatures, target: Target, layer_ids: tuple[int, ...], num_ahead: int) -> None:
        super().__init__(target, layer_ids)
        self.servers, self.steps_ahead = servers, num_ahead

    def __call__(self, micro_batch: MicroBatch, batch: Batch) -> Features:
        return self.servers(micro_batch, batch)

    def read_ahead(self, micro_batch: MicroBatch, batch: Batch, pin_memory: bool) -> None:
        self.servers.read_ahead(micro_batch, batch, pin_memory)

    def stop(self) -> None:
        self.servers.stop()


class FeaturesOfFirst(RunFeatures):
    """The features that the first member of a team gets, and sends to the others."""

    def __init__(self, source: RunFeatures, team: Team) -> None:
        super().__init__(source.target, source.layer_ids)
        self.source, self.team, self.steps_ahead = source, team, source.steps_ahead

    def __call__(self, micro_batch: MicroBatch, batch: Batch) -> Features:
        if self.team.place == 0:
            found = self.source(micro_batch, batch)
        else:
            shape = *batch.token_ids.shape, self.target.hidden_size
            states = torch.empty(shape, dtype=self.target.dtype, device=self.target.device)
            num_layers = len(self.layer_ids)
            found = Features(states, states.repeat(1, 1, num_layers) if num_layers else None)
        layers = None if found.layers is None else self.team.send_(found.layers.contiguous())
        return Features(self.team.send_(found.last_hidden.contiguous()), layers)

    def read_ahead(self, micro_batch: MicroBatch, batch: Batch, pin_memory: bool) -> None:
        if self.team.place == 0:
            self.source.read_ahead(micro_batch, batch, pin_memory)

    def stop(self) -> None:
        self.source.stop()


def load_target(config: TrainConfig, device: torch.device) -> Target:
    """Return the target that wrote the samples, without its layers where features are stored or streamed.

    Raises `UserError` where it cannot be had, or has to decode in this run and cannot.
    """
    if config.evaluation.decodes:
        read_decoded(config.target)
    fingerprint = read_prepared(Path(config.data.samples))["target_fingerprint"]
    if config.data.features == "online":
        return load_whole(config, device)
    return Target.head_from_pretrained(config.target, fingerprint, device)


def check_images(config: TrainConfig, samples: Samples) -> None:
    """Refuse samples with images where no server computes the features: the towers that read them are not loaded."""
    number = int(samples.has_images.sum())
    if number and not config.data.servers:
        raise UserError(
            f"{number} of {len(samples)} samples in {config.data.samples} hold images, which only a server reads: "
            "give data.features=streamed data.features_endpoint=URL"
        )


def load_whole(config: TrainConfig, device: torch.device) -> Target:
    """Return the target with its layers, placed as the config says. `UserError` if it did not write the samples."""
    match config.run.target_placement:
        case "replicated":
            target = Target.from_pretrained(config.target, device)
        case "sharded" | "sharded_over_machines" as placement:
            over_machines = placement == "sharded_over_machines"
            target = Target.sharded_from_pretrained(config.target, device, over_machines=over_machines)
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
    if config.data.features != "stored":
        return None
    layer_ids = tuple(config.data.features_layers or drafter.layer_ids)
    check_layer_ids((layer_id for layer_id in layer_ids if layer_id != target.num_layers), target)  # MTP heads read it
    if missing := set(drafter.layer_ids) - set(layer_ids):
        raise UserError(
            f"data.features_layers={list(layer_ids)} lacks {sorted(missing)}, which the drafter reads: add them, or "
            "leave the setting out"
        )
    contents = contents_of(config, layer_ids, target, plan)
    store = StoredFeatures(folder_of(config, "features", contents), contents, plan, drafter.layer_ids)
    check_disk(store)
    return store


def contents_of(config: TrainConfig, layer_ids: tuple[int, ...], target: Target, plan: BatchPlan) -> Contents:
    """Return what features of a run have to be of."""
    return Contents(
        target_fingerprint=target.fingerprint(),
        ends_fingerprint=target.head_fingerprint(),
        layer_ids=layer_ids,
        hidden_size=target.hidden_size,
        dtype=config.data.features_dtype,
        samples_hash=samples_hash(plan),
    )


def folder_of(config: TrainConfig, name: str, contents: Contents) -> Path:
    """Return the folder of features on the disk: the one that is given, or one in that of the samples."""
    name = "-".join([name, *map(str, contents.layer_ids), contents.dtype])
    return Path(config.data.features_dir or Path(config.data.samples) / name)


def feature_source(
    config: TrainConfig,
    store: StoredFeatures | None,
    plan: BatchPlan,
    drafter: Drafter,
    accelerator: Accelerator,
    stages: Stages,
) -> RunFeatures:
    """Return the source of the run's features; a store is checked, and what is missing in it written first.

    Servers are asked once for what a team of processes reads together; all else each member gets by itself.

    Raises `UserError`, on every rank, naming a shard that is damaged or holds something else, and for servers that give
    no features of the drafter's target.
    """
    target, team = drafter.target, drafter.team
    if config.data.features == "streamed":
        servers = streamed_features(config, drafter.layer_ids, plan, target)
        if config.data.features_kept_gb:
            servers.kept = open_kept(config, drafter.layer_ids, target, plan, accelerator)
        num_ahead = steps_ahead(bytes_per_step(drafter, plan) * team.size / accelerator.num_processes)
        source = FeaturesOfServers(servers, target, drafter.layer_ids, num_ahead)
        return source if team.size == 1 else FeaturesOfFirst(source, team)
    if store is None:
        return RunFeatures(target, drafter.layer_ids)
    check_shards(store, accelerator)
    missing = broadcast_object_list([store.missing()])[0]  # as seen before anything is written
    if missing:
        write_missing(config, store, missing, accelerator, target, stages)
    note_verified(store, accelerator)
    return FeaturesOfStore(store, target)


def check_shards(store: StoredFeatures, accelerator: Accelerator) -> None:
    """Raise `UserError`, on every rank, naming a shard that is damaged or holds something else."""
    if problems := gather_object(store.problems(accelerator.process_index, accelerator.num_processes)):
        raise UserError(problems[0] + (f" ({len(problems) - 1} more shards like it)" if len(problems) > 1 else ""))


def note_verified(store: StoredFeatures, accelerator: Accelerator) -> None:
    """Note in index.json that the shards are whole, so that later runs need not read all of them for that."""
    unknown = accelerator.is_main_process and not all(map(store.is_verified, store.shards))
    if unknown and os.access(store.folder, os.W_OK):
        write_index(store)


def open_kept(
    config: TrainConfig, layer_ids: tuple[int, ...], target: Target, plan: BatchPlan, accelerator: Accelerator
) -> KeptFeatures:
    """Return what is kept of streamed features, checked as stored ones are."""
    contents = contents_of(config, layer_ids, target, plan)
    folder, most_bytes = folder_of(config, "kept", contents), config.data.features_kept_gb * 1e9
    rank, num_keepers = accelerator.process_index, accelerator.num_processes // config.run.processes_per_text
    with failing_together():
        kept = KeptFeatures(folder, contents, plan, target, most_bytes, rank, num_keepers)
    try:
        check_shards(kept.store, accelerator)
    except UserError:
        kept.stop()
        raise
    note_verified(kept.store, accelerator)
    if rank == 0:
        say(f"features in {folder}: {size_text(kept.found)} are kept, and up to {size_text(kept.room)} more will be")
    return kept


def streamed_features(
    config: TrainConfig, layer_ids: tuple[int, ...], plan: BatchPlan, target: Target
) -> StreamedFeatures:
    """Return what the servers at data.features_endpoint compute."""
    folder = Path(config.data.samples)
    files: list[str | None] = [*config.data.file_services] or [None] * len(config.data.servers)
    servers = [
        FeatureServer(url, target, layer_ids, plan, folder, files_url)
        for url, files_url in zip(config.data.servers, files, strict=True)
    ]
    return StreamedFeatures(servers, target)


def bytes_per_step(drafter: Drafter, plan: BatchPlan) -> float:
    """Return about how many bytes the features of a step take, which servers give in 16 bits."""
    tokens = sum(plan.lengths[index] for index in plan.trained) / plan.steps_per_epoch
    return tokens * token_bytes(len(drafter.layer_ids) + 1, drafter.target.hidden_size, "bfloat16")


def write_missing(
    config: TrainConfig,
    store: StoredFeatures,
    missing: list[Shard],
    accelerator: Accelerator,
    target: Target,
    stages: Stages,
) -> None:
    """Write this rank's part of a store's missing shards, and wait for the others."""
    if not config.data.servers:
        check_room_to_store(config, accelerator, target)
    stages.enter("storing features")
    in_step = config.run.target_in_pieces
    num_ahead = MICRO_BATCHES_AHEAD if config.data.servers else 0
    features = features_to_store(config, store, target)
    source = partial(in_stage, stages, features)
    try:
        write_shards(store, missing, source, accelerator.process_index, accelerator.num_processes, in_step, num_ahead)
    finally:
        features.stop()
    del source, features  # and the target's layers with them
    free_memory()
    accelerator.wait_for_everyone()


def in_stage(stages: Stages, features: RunFeatures, micro_batch: MicroBatch, batch: Batch) -> Features:
    """Return features of a run; the stage is entered anew for each batch, which shows that the pass moves."""
    stages.enter("storing features")
    return features(micro_batch, batch)


def features_to_store(config: TrainConfig, store: StoredFeatures, target: Target) -> RunFeatures:
    """Return the features to store: of the servers at data.features_endpoint, or of the target's own layers."""
    layer_ids = store.contents.layer_ids
    if config.data.servers:
        servers = streamed_features(config, layer_ids, store.plan, target)
        return FeaturesOfServers(servers, target, layer_ids, MICRO_BATCHES_AHEAD)
    whole = whole_target(config, target)
    check_capture(whole, layer_ids, store.plan.samples[0].token_ids)
    return RunFeatures(whole, layer_ids)


def free_memory() -> None:
    """Free the memory of what nobody refers to any more; layers in pieces refer to themselves."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
