"""What lies where: the drafter as the launcher's config says (recipes/launch), the target as run.target_placement does.

Under DDP each device holds the whole drafter. FSDP2 and DeepSpeed ZeRO hold it in pieces, which are put together for
as long as a checkpoint is written. The target's layers are whole on each device, in pieces on all, or in turn on
the GPUs of one process.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.data.progress import size_text
from draftsmith.data.ranks import rank_and_num_ranks
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import default_dtype, pick_device
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.estimates import estimate, target_size


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Processes and their devices, as the launcher started them. Raises `UserError` for a layout that is not served."""
    device, num_ranks = pick_device(config.run.device), rank_and_num_ranks()[1]
    mixed_precision = "bf16" if default_dtype(device) == torch.bfloat16 else "no"
    process_group = InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout))
    sharded = next((name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"), None)
    accelerator = Accelerator(
        mixed_precision=mixed_precision,
        cpu=device.type == "cpu" and not sharded,  # with it accelerate would forget that it was asked to shard
        kwargs_handlers=[process_group],
    )
    if sharded and (accelerator.distributed_type.name != sharded or accelerator.num_processes != num_ranks):
        raise UserError(
            f"accelerate does not run {sharded} in {num_ranks} processes on {device.type}: on a CPU start with "
            "recipes/launch/cpu.yaml"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("fsdp_version 1 is not served: set fsdp_version: 2, as in recipes/launch/fsdp2.yaml")
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        unset_hf_deepspeed_config()  # else transformers would load the target as a model that DeepSpeed trains
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = 1  # asked for, and of no effect: we make the batches
        settings["gradient_clipping"] = config.optimizer.max_gradient_norm
        settings["zero_force_ds_cpu_optimizer"] = False  # accelerate would put one without our betas in its place
    return accelerator


def check_placement(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse what cannot be done with a target that is not whole on each device."""
    placed, layout = config.run.target_placement, layout_of(accelerator)
    if placed == "replicated":
        return
    devices = target_devices(config, accelerator.device)
    reasons = {
        "needs several processes": placed == "sharded" and accelerator.num_processes == 1,
        f"needs one process that holds the drafter whole, not {layout}: start with recipes/launch/one_gpu.yaml": (
            placed == "device_map" and layout != "one process"
        ),
        f"needs several GPUs, and this process has {len(devices)}": placed == "device_map" and len(devices) < 2,
        "has no effect beside data.features_endpoint": config.data.features_endpoint is not None,
        "leaves no process a target to evaluate with: leave out evaluation.prompts, and run draftsmith evaluate": (
            config.evaluation.prompts is not None
        ),
        f"puts layers on GPUs, and this run is on {accelerator.device.type}: leave out run.device": any(
            device.type != accelerator.device.type for device in devices
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"run.target_placement={placed} {reason}")


def target_devices(config: TrainConfig, device: torch.device) -> list[torch.device]:
    """Those of this process that the target's layers lie on: its own, `device`, first."""
    if config.run.target_placement != "device_map":
        return [device]
    own_first = sorted(range(torch.cuda.device_count()), key=lambda index: index != (device.index or 0))
    return [torch.device("cuda", index) for index in own_first]


def gather_as_one(accelerator: Accelerator, drafter: Drafter) -> None:
    """Let ZeRO-3 put all weights together for a pass: losses use some of them outside of the layers they belong to."""
    if layout_of(accelerator) == "ZeRO-3":
        import deepspeed

        for parameter in drafter.parameters():
            deepspeed.zero.register_external_parameter(drafter, parameter)


def steps_in_backward(accelerator: Accelerator) -> bool:
    """Whether the backward pass of a step's last micro-batch clips and steps, too, as DeepSpeed's does."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


@contextlib.contextmanager
def whole_weights(accelerator: Accelerator, drafter: Drafter) -> Iterator[None]:
    """The drafter with all of each weight, for as long as the block lasts. All processes call this together."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(drafter.parameters())):  # does nothing below ZeRO-3
            yield
        return
    pieces: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in drafter.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                pieces.append((module, name, parameter))
                module._parameters[name] = nn.Parameter(parameter.full_tensor(), requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in pieces:
            module._parameters[name] = parameter


@dataclass(frozen=True)
class Sizes:
    """Of everything that a run holds, in bytes."""

    ends: float  # of the target: embedding and head
    layers: float  # of the target
    drafter: float | None  # weights, gradients, optimiser; None where files decide on it
    working: float  # of a micro-batch, an estimate


def sizes(config: TrainConfig, device: torch.device, target: Target) -> Sizes:
    """From shapes alone: `target` has no weights."""
    size = target_size(target.model.config)
    from_files = config.init_from or getattr(config.drafter, "model", None)
    with torch.device("meta"):
        drafter = DRAFTERS["none" if from_files else config.drafter.kind].from_target(config.drafter, target)
    taken = estimate(config, target.model.config, tokens_per_sample=1, drafter=drafter)
    bytes_each = torch.finfo(default_dtype(device)).bits // 8
    return Sizes(
        bytes_each * (size.head + size.embedding),
        bytes_each * size.layers,
        None if from_files else taken.drafter_bytes,
        taken.working_bytes * bytes_each / 2,
    )


def devices_of_layers(config: TrainConfig, device: torch.device) -> list[torch.device]:
    """Where each of the target's layers lies under device_map, in turn.

    All devices hold as much as can be: this process's own one, the first, holds all else besides, and so fewer layers.
    """
    target = Target.without_weights(config.target)
    taken, devices, num_layers = sizes(config, device, target), target_devices(config, device), target.num_layers
    beside = taken.ends + (taken.drafter or 0.0) + taken.working
    on_first = max(0.0, (taken.layers + beside) / len(devices) - beside)
    count = round(num_layers * on_first / taken.layers)
    others, rest = devices[1:], num_layers - count
    return [devices[0]] * count + [others[layer * len(others) // rest] for layer in range(rest)]


@dataclass(frozen=True)
class Placement:
    """What a device holds, in bytes."""

    layout: str
    target: float
    drafter: float | None  # weights, gradients, optimiser; None where files decide on it
    working: float  # of a micro-batch, an estimate
    free: float
    others: float = 0.0  # of the target's layers on any device but the first, where they lie in turn

    @property
    def fits(self) -> bool:
        return max(self.target + (self.drafter or 0.0), self.others) <= self.free

    def text(self) -> str:
        """One line for the start of a run."""
        drafter = "of a size that its files tell" if self.drafter is None else size_text(self.drafter)
        held = f"target {size_text(self.target)}, drafter and optimiser {drafter}, a micro-batch"
        where, others = "on each device", ""
        if self.others:
            where, others = "on the first device", f"; on each other one up to {size_text(self.others)} of the target"
        return (
            f"{self.layout}; {where} {held} {size_text(self.working)}{others}, of {size_text(self.free)} that are free"
        )


def placement(config: TrainConfig, accelerator: Accelerator, target: Target) -> Placement:
    """What will lie on each device, from shapes alone: `target` has no weights.

    Raises `UserError` where weights and optimiser cannot fit. A drafter that starts from files is not counted.
    """
    device, layout, count = accelerator.device, layout_of(accelerator), accelerator.num_processes
    taken, placed = sizes(config, device, target), config.run.target_placement
    shares = shares_of_layers(config, accelerator, target)
    first, others = taken.layers * shares[0], taken.layers * max(shares[1:], default=0.0)
    if config.data.features == "stored":
        first = others = 0.0
    of_devices = f" over {len(shares)} GPUs" if placed == "device_map" else ""
    found = Placement(
        f"{count} x {device.type}, {layout}, target {placed}{of_devices}",
        taken.ends + first,
        None if taken.drafter is None else taken.drafter * drafter_share(layout, count),
        taken.working,
        free_bytes(config, accelerator),
        others,
    )
    if not found.fits:
        mends = {
            "give run.target_placement=sharded": placed == "replicated" and count > 1,
            "run.target_placement=device_map": (
                placed == "replicated" and layout == "one process" and torch.cuda.device_count() > 1
            ),
            "data.features=stored": config.data.features == "online",
            "start with recipes/launch/fsdp2.yaml": layout == "DDP",
        }
        mend = ", or ".join(name for name, helps in mends.items() if helps) or "take more or larger devices"
        raise UserError(f"target and drafter do not fit ({found.text()}): {mend}")
    return found


def shares_of_layers(config: TrainConfig, accelerator: Accelerator, target: Target) -> list[float]:
    """Parts of the target's layers on this process's devices, its own one first."""
    if config.run.target_placement == "device_map":
        counts = Counter(devices_of_layers(config, accelerator.device))
        return [counts[device] / target.num_layers for device in target_devices(config, accelerator.device)]
    return [1 / accelerator.num_processes if config.run.target_placement == "sharded" else 1.0]


def check_room_to_store(config: TrainConfig, accelerator: Accelerator, target: Target) -> None:
    """Refuse a pass that stores features where the layers of `target`, which has none yet, cannot fit."""
    bytes_each = torch.finfo(default_dtype(accelerator.device)).bits // 8
    share = max(shares_of_layers(config, accelerator, target))
    needed = bytes_each * target_size(target.text_config).layers * share
    if needed > (free := free_bytes(config, accelerator)):
        raise UserError(
            f"storing features takes {size_text(needed)} for the target's layers on each device, of {size_text(free)} "
            "that are free: give data.features_endpoint, or run.target_placement=sharded with enough processes, or "
            "device_map with enough GPUs"
        )


def free_bytes(config: TrainConfig, accelerator: Accelerator) -> float:
    """What this process may take of its device's memory; of several the one with least."""
    if accelerator.device.type == "cuda":
        return min(torch.cuda.mem_get_info(device)[0] for device in target_devices(config, accelerator.device))
    return psutil.virtual_memory().available / accelerator.num_processes


def layout_of(accelerator: Accelerator) -> str:
    """What the drafter's weights, gradients and optimiser are spread by."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "FSDP2"
    return "DDP" if accelerator.num_processes > 1 else "one process"


def drafter_share(layout: str, count: int) -> float:
    """Part of fp32 weights, gradients and two moments, 4 + 4 + 8 bytes, that a device holds."""
    if layout in ("FSDP2", "ZeRO-3"):
        return 1 / count
    return 0.25 + 0.75 / count if layout == "ZeRO-2" else 1.0
