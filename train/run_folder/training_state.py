"""Weights and the state of the optimiser by the names of parameters: the same from every layout, and for every one.

FSDP2 and DeepSpeed ZeRO hold pieces, each in its own way. They are put together for a checkpoint, one parameter after
the other, so that a run goes on in another layout or on another number of processes.

torch.distributed.checkpoint does not do this. It knows nothing of DeepSpeed; its whole optimiser state fills the main
process's memory at once, not one part at a time; and it makes up a state for parameters that have not been moved yet.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from draftsmith.models import Drafter
from draftsmith.models.storage.reading import open_tensors

WEIGHT, STEP, MOMENTS = "weight", "step", ("exp_avg", "exp_avg_sq")  # the last three as AdamW calls them
MOMENTUM = "momentum_buffer"  # as Muon calls it
PARTS = (WEIGHT, STEP, *MOMENTS, MOMENTUM)  # each is a file of a checkpoint, the last one where Muon trains


def part_file(folder: Path, part: str) -> Path:
    return folder / f"{part}.safetensors"


def whole_part(accelerator: Accelerator, drafter: Drafter, optimizer: Any, part: str) -> dict[str, Tensor]:
    """Return one of `PARTS` of all parameters by name, fp32, on the CPU of the main process; elsewhere nothing.

    All processes call this together. The weights come with the persistent buffers. Parameters that the optimiser has
    not moved yet have no state, and are missing.
    """
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    read: Callable[..., Tensor | None] = whole_of_zero if deepspeed else whole_of_torch
    buffers = persistent_buffers(drafter) if part == WEIGHT else {}
    whole = {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
    for name, parameter in drafter.named_parameters():
        value = read(optimizer, parameter, part)
        if value is not None and accelerator.is_main_process:
            whole[name] = value.detach().to("cpu", copy=True).contiguous()
    return whole if accelerator.is_main_process else {}


@torch.no_grad()
def load_parts(accelerator: Accelerator, drafter: Drafter, optimizer: Any, folder: Path) -> None:
    """Load what `whole_part` returned from its files. All processes call this together; each takes its own pieces."""
    files = {part: open_tensors(part_file(folder, part)) for part in PARTS if part_file(folder, part).is_file()}
    names = {part: set(file.keys()) for part, file in files.items()}
    for name, buffer in persistent_buffers(drafter).items():
        buffer.copy_(files[WEIGHT].get_tensor(name))
    write = write_to_torch
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        write = write_to_zero
        if names[STEP]:  # DeepSpeed counts the steps of all parameters as one
            begin_zero(optimizer, max(files[STEP].get_tensor(name) for name in names[STEP]))
    for name, parameter in drafter.named_parameters():
        write(optimizer, parameter, {part: files[part].get_tensor(name) for part in files if name in names[part]})


def persistent_buffers(drafter: Drafter) -> dict[str, Tensor]:
    """Return the buffers that are part of what was learnt or chosen, such as a draft vocabulary, by name."""
    persistent = drafter.state_dict().keys()
    return {name: buffer for name, buffer in drafter.named_buffers() if name in persistent}


# --- torch: one process, DDP, and FSDP2, whose pieces are DTensors


def whole_of_torch(optimizer: Any, parameter: nn.Parameter, part: str) -> Tensor | None:
    """Return one of `PARTS` of a parameter; None where it has not been moved, and for parts of another optimiser."""
    value = parameter if part == WEIGHT else optimizer.state.get(parameter, {}).get(part)
    return value.full_tensor() if isinstance(value, DTensor) else value


def write_to_torch(optimizer: Any, parameter: nn.Parameter, whole: dict[str, Tensor]) -> None:
    """Set a parameter, and its state where `whole` has one."""

    def own(value: Tensor) -> Tensor:
        value = value.to(parameter.device)
        if isinstance(parameter, DTensor):
            return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return value

    parameter.copy_(own(whole.pop(WEIGHT)))
    if whole:
        optimizer.state[parameter] = {
            part: value.to(parameter.device) if part == STEP else own(value) for part, value in whole.items()
        }


# --- DeepSpeed ZeRO-2 and ZeRO-3: pieces of one long tensor, beside weights of the dtype that it computes in


def whole_of_zero(optimizer: Any, parameter: nn.Parameter, part: str) -> Tensor | None:
    """Return one of `PARTS` of a parameter; None where AdamW has not moved it."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if part == WEIGHT:
        if parameter.requires_grad:
            return safe_get_full_fp32_param(parameter)
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().to(torch.float32, copy=True)  # after the block it is in pieces again
    states = [state for state in zero_states(optimizer).values() if STEP in state]
    if part == MOMENTUM or not (states and parameter.requires_grad):
        return None
    return states[0][STEP] if part == STEP else safe_get_full_optimizer_state(parameter, part)


def write_to_zero(optimizer: Any, parameter: nn.Parameter, whole: dict[str, Tensor]) -> None:
    """Set a parameter, and its state where `whole` has one and `begin_zero` has made room for it."""
    import deepspeed
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(whole[WEIGHT])
    if not parameter.requires_grad:
        return
    zero3 = hasattr(parameter, "ds_id")
    set_weight, set_moment = safe_set_full_fp32_param, safe_set_full_optimizer_state
    if zero3:  # its "full" forms fail where the processes' pieces are not equally long
        set_weight, set_moment = safe_set_local_fp32_param, safe_set_local_optimizer_state
        whole = {part: value if part == STEP else piece_of_zero3(parameter, value) for part, value in whole.items()}
    set_weight(parameter, whole[WEIGHT])
    if STEP in whole:
        for part in MOMENTS:
            set_moment(parameter, whole[part], part)


def piece_of_zero3(parameter: Any, value: Tensor) -> Tensor:
    """Return this process's piece of a whole parameter; the last piece is filled up with zeros."""
    size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
    piece = value.flatten()[rank * size : (rank + 1) * size]
    return nn.functional.pad(piece, (0, size - len(piece)))


def zero_states(optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Return AdamW's state of each long tensor; empty before the first step."""
    return optimizer.optimizer.optimizer.state


def begin_zero(optimizer: Any, step: Tensor) -> None:
    """Give AdamW the state that it has after `step` steps, with moments of zero, to be filled in."""
    zero, states = optimizer.optimizer, zero_states(optimizer)
    if zero3 := hasattr(zero, "fp32_partitioned_groups_flat"):
        long_tensors = zero.fp32_partitioned_groups_flat
    else:
        long_tensors = zero.single_partition_of_fp32_groups
    for tensor in long_tensors:
        moments = {part: torch.zeros_like(tensor) for part in MOMENTS}
        states[tensor] = {STEP: step.to(tensor.device, copy=True), **moments}
    if not zero3:
        zero._lazy_init_hp_params_optimizer_state()  # which DeepSpeed does after its first step
