"""Placement of the target's layers on devices, as run.target_placement says, and a check that everything fits.

The layers are whole on each device ("replicated"), in pieces on those of each machine ("sharded") or of all machines
("sharded_over_machines"), or in turn on the GPUs of one process ("device_map"). Sizes are in bytes, from shapes alone,
before anything is loaded.
"""

from collections import Counter
from dataclasses import dataclass

import psutil
import torch
from accelerate import Accelerator

from draftsmith.data.progress import size_text
from draftsmith.models import DRAFTERS, Target
from draftsmith.models.devices import default_dtype
from draftsmith.models.errors import UserError
from draftsmith.models.target.pieces import processes_of_pieces
from draftsmith.models.target.shape import target_weights, weights_of
from draftsmith.train.config import TrainConfig
from draftsmith.train.hardware.estimates import RunEstimate, estimate, share_in_pieces
from draftsmith.train.hardware.layouts import IN_PIECES, drafter_share, is_offloaded, layout_of


def check_placement(config: TrainConfig, accelerator: Accelerator) -> None:
    """Refuse what cannot be done with a target that is not whole on each device."""
    placement, layout = config.run.target_placement, layout_of(accelerator)
    if placement == "replicated":
        return
    devices = target_devices(config, accelerator.device)
    reasons = {
        "needs several processes": config.run.target_in_pieces and accelerator.num_processes == 1,
        f"needs one process that holds the drafter whole, not {layout}: start with recipes/launch/one_gpu.yaml": (
            placement == "device_map" and layout != "one process"
        ),
        f"needs several GPUs, and this process has {len(devices)}": placement == "device_map" and len(devices) < 2,
        "has no effect beside data.features_endpoint": bool(config.data.servers),
        "leaves no process a target that decodes: let an engine measure by evaluation.engine=URL, or leave out "
        "evaluation.prompts (data.held_out_prompts gives a loss and a simulated acceptance length)": (
            config.evaluation.decodes
        ),
        f"puts layers on GPUs, and this run is on {accelerator.device.type}: leave out run.device": any(
            device.type != accelerator.device.type for device in devices
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"run.target_placement={placement} {reason}")


def target_devices(config: TrainConfig, device: torch.device) -> list[torch.device]:
    """Return the devices of this process that the target's layers lie on: its own, `device`, first."""
    if config.run.target_placement != "device_map":
        return [device]
    own = torch.cuda.current_device() if device == torch.device("cuda") else device.index
    own_first = sorted(range(torch.cuda.device_count()), key=lambda index: index != own)
    return [torch.device("cuda", index) for index in own_first]


def devices_of_layers(config: TrainConfig, device: torch.device) -> list[torch.device]:
    """Return the device of each of the target's layers under device_map.

    All devices hold as much as can be: this process's own one, the first, holds all else besides, and so fewer layers.
    """
    target = Target.without_weights(config.target)
    needed, devices = memory_needed(config, device, target), target_devices(config, device)
    beside = needed.ends_bytes + needed.drafter_bytes + needed.working_bytes
    on_first = max(0.0, (needed.layer_bytes + beside) / len(devices) - beside)
    count = round(target.num_layers * on_first / needed.layer_bytes)
    others, rest = devices[1:], target.num_layers - count
    return [devices[0]] * count + [others[layer * len(others) // rest] for layer in range(rest)]


def shares_of_layers(config: TrainConfig, accelerator: Accelerator, target: Target) -> list[float]:
    """Return the part of the target's layers on each of this process's devices, its own one first."""
    if config.run.target_placement == "device_map":
        counts = Counter(devices_of_layers(config, accelerator.device))
        return [counts[device] / target.num_layers for device in target_devices(config, accelerator.device)]
    if config.run.target_in_pieces:
        return [share_in_pieces(pieces_of(config, accelerator), target.num_layers)]
    return [1.0]


def pieces_of(config: TrainConfig, accelerator: Accelerator) -> int:
    """Return the number of processes that hold the target's layers together."""
    over_machines = config.run.target_placement == "sharded_over_machines"
    return processes_of_pieces(accelerator.num_processes, over_machines) if config.run.target_in_pieces else 1


def memory_needed(config: TrainConfig, device: torch.device, target: Target) -> RunEstimate:
    """Return what a run takes if all of it lies on one device. `target` has no weights.

    A drafter that starts from files is not counted: only they tell its size.
    """
    from_files = config.init_from is not None or config.drafter.starts_from_files
    with torch.device("meta"):
        drafter = DRAFTERS["none" if from_files else config.drafter.kind].from_target(config.drafter, target)
    itemsize, on_gpu = default_dtype(device).itemsize, device.type == "cuda"
    weights = weights_of(target.model, config.target)
    return estimate(config, target.config, 1, drafter, itemsize, on_gpu, weights)


def drafter_bytes(accelerator: Accelerator, needed: RunEstimate) -> float:
    """Return what the drafter and its optimiser take on each device, at the time when they take most.

    One in pieces is whole before it is divided, in fp32: no more than its weights and gradients in a pass.
    """
    layout = layout_of(accelerator)
    share = drafter_share(layout, accelerator.num_processes, is_offloaded(accelerator))
    return needed.drafter_bytes * share + (needed.gathered_bytes if layout in IN_PIECES else 0.0)


@dataclass(frozen=True)
class Placement:
    """Bytes that lie on a device."""

    layout: str
    target: float  # on the first device of a process
    drafter: float  # weights, gradients, optimiser; 0 where its files decide on it
    working: float  # of a micro-batch
    free: float
    others: float = 0.0  # of the target's layers on any other device of the process

    @property
    def fits(self) -> bool:
        return max(self.target + self.drafter, self.others) <= self.free

    def text(self) -> str:
        """Return one line for the start of a run."""
        drafter = size_text(self.drafter) if self.drafter else "of a size that its files tell"
        held = f"target {size_text(self.target)}, drafter and optimiser {drafter}, a micro-batch"
        where, others = "on each device", ""
        if self.others:
            where, others = "on the first device", f"; on each other one up to {size_text(self.others)} of the target"
        return (
            f"{self.layout}; {where} {held} {size_text(self.working)}{others}, of {size_text(self.free)} that are free"
        )


def place(config: TrainConfig, accelerator: Accelerator, target: Target) -> Placement:
    """Return what will lie on each device. `target` has no weights.

    Raises `UserError` where weights and optimiser cannot fit. A drafter that starts from files is not counted. Where
    features come from elsewhere, evaluations that decode load a whole target beside the ends that training reads.
    """
    layout, num_ranks, target_placement = layout_of(accelerator), accelerator.num_processes, config.run.target_placement
    needed, shares = memory_needed(config, accelerator.device, target), shares_of_layers(config, accelerator, target)
    layer_bytes = needed.layer_bytes if config.data.features == "online" else 0.0
    if config.data.features != "online" and config.evaluation.decodes:
        layer_bytes = needed.ends_bytes + needed.layer_bytes
    num_pieces = pieces_of(config, accelerator)
    of_devices = f" over {len(shares)} GPUs" if target_placement == "device_map" else ""
    if num_pieces > 1:
        of_devices = f" over {num_pieces} processes"
    of_text = f", {config.run.processes_per_text} processes a text" if config.run.processes_per_text > 1 else ""
    placement = Placement(
        f"{num_ranks} x {accelerator.device.type}, {layout}, target {target_placement}{of_devices}{of_text}",
        needed.ends_bytes + layer_bytes * shares[0],
        drafter_bytes(accelerator, needed),
        needed.working_bytes,
        free_bytes(config, accelerator),
        layer_bytes * max(shares[1:], default=0.0),
    )
    if not placement.fits:
        raise UserError(f"target and drafter do not fit ({placement.text()}): {ways_out(config, accelerator)}")
    return placement


def ways_out(config: TrainConfig, accelerator: Accelerator) -> str:
    """Return what would help where target and drafter do not fit."""
    layout, num_ranks, num_pieces = layout_of(accelerator), accelerator.num_processes, pieces_of(config, accelerator)
    online, replicated = config.data.features == "online", config.run.target_placement == "replicated"
    mends = {
        "give run.target_placement=sharded": online and replicated and num_ranks > 1,
        "run.target_placement=device_map": (
            online and replicated and layout == "one process" and torch.cuda.device_count() > 1
        ),
        "run.target_placement=sharded_over_machines": online and 1 < num_pieces < num_ranks,
        "data.features=stored": online,
        "start with recipes/launch/fsdp2.yaml": layout == "DDP",
    }
    mend = ", or ".join(name for name, helps in mends.items() if helps) or "take more or larger devices"
    if config.evaluation.decodes:  # which takes the whole target wherever features come from
        without = "let an engine measure by evaluation.engine=URL, or leave out evaluation.prompts"
        return f"{without}; then {mend}" if online else f"{without}, or {mend}"
    return mend


def check_room_to_store(config: TrainConfig, accelerator: Accelerator, target: Target) -> None:
    """Refuse a pass that stores features where the layers of `target`, which has none yet, cannot fit."""
    share = max(shares_of_layers(config, accelerator, target))
    weights = target_weights(target.config, config.target)
    needed = default_dtype(accelerator.device).itemsize * weights.weights_of_layers * share
    if needed > (free := free_bytes(config, accelerator)):
        raise UserError(
            f"storing features takes {size_text(needed)} for the target's layers on each device, of {size_text(free)} "
            "that are free: give data.features_endpoint, or run.target_placement=sharded with enough processes, or "
            "device_map with enough GPUs"
        )


def free_bytes(config: TrainConfig, accelerator: Accelerator) -> float:
    """Return how much of its device's memory this process may take; of several devices the one with least."""
    if accelerator.device.type == "cuda":
        return min(torch.cuda.mem_get_info(device)[0] for device in target_devices(config, accelerator.device))
    return psutil.virtual_memory().available / accelerator.num_processes
