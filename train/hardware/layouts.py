"""Layouts of the drafter's weights, gradients and optimiser over devices, as the launcher's config says.

The configs stand in recipes/launch. Under DDP each device holds the whole drafter. FSDP2 and DeepSpeed ZeRO hold it in
pieces, which are put together for as long as a checkpoint is written.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.data.processes import rank_and_num_ranks
from draftsmith.models import Drafter
from draftsmith.models.devices import pick_device, trains_in_bf16
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.ranges import Precision
from draftsmith.train.config import TrainConfig

IN_PIECES = ("FSDP2", "ZeRO-3")  # layouts of the drafter's weights, which processes put together for each pass


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Return the processes and their devices, as the launcher started them. `UserError` for a layout not served."""
    device, num_ranks = pick_device(config.run.device), rank_and_num_ranks()[1]
    on_gpu = device.type == "cuda"
    sharded = next((name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}") == "true"), None)
    if sharded == "DEEPSPEED" and config.optimizer.matrices == "muon":
        raise UserError(
            "optimizer.matrices=muon needs whole matrices, and DeepSpeed steps on pieces of them: start with "
            "recipes/launch/ddp.yaml or fsdp2.yaml, or give optimizer.matrices=adamw optimizer.matrices_rate_factor=1"
        )
    try:
        accelerator = Accelerator(
            mixed_precision="bf16" if on_gpu and trains_in_bf16(device, config.run.precision) else "no",
            cpu=not on_gpu and not sharded,  # with it accelerate would forget that it was asked to shard
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.run.timeout))],
        )
    except (ValueError, ImportError) as error:  # of variables that it reads
        raise UserError(
            f"accelerate does not start ({first_line(error)}): mend or unset LOCAL_RANK and the variables that begin "
            "with ACCELERATE_, which launchers set"
        ) from None
    if accelerator.gradient_accumulation_steps != 1:  # by which it would divide each loss once more
        raise UserError(
            "the launcher sets gradient_accumulation_steps, which has no effect here but a wrong one: leave it out; "
            "data.tokens_per_micro_batch divides a batch"
        )
    made = accelerator.distributed_type.name, accelerator.num_processes
    if sharded and (made != (sharded, num_ranks) or not torch.distributed.is_initialized()):
        raise UserError(
            f"accelerate does not run {sharded} in {num_ranks} processes on {device.type}: on a CPU start with "
            "recipes/launch/cpu.yaml"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("fsdp_version 1 is not served: set fsdp_version: 2, as in recipes/launch/fsdp2.yaml")
    if accelerator.distributed_type == DistributedType.FSDP and accelerator.mixed_precision == "bf16":
        # accelerate's own policy adds up gradients in bf16, and rounds what a loss returns to it.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        unset_hf_deepspeed_config()  # else transformers would load the target as a model that DeepSpeed trains
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = 1  # required, and without effect: we make the batches
        settings["gradient_clipping"] = config.optimizer.max_gradient_norm
        settings["zero_force_ds_cpu_optimizer"] = False  # accelerate would put one without our betas in its place
    return accelerator


def layout_of(accelerator: Accelerator) -> str:
    """Return the name of what the drafter's weights, gradients and optimiser are spread by."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    if accelerator.distributed_type == DistributedType.FSDP:
        return "FSDP2"
    return "DDP" if accelerator.num_processes > 1 else "one process"


def check_deepspeed_precision(precision: Precision | None, accelerator: Accelerator) -> None:
    """Refuse run.precision=bf16 where DeepSpeed runs on a CPU, which computes in fp32."""
    on_cpu = accelerator.device.type == "cpu"
    if precision == "bf16" and on_cpu and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError(
            "run.precision=bf16: DeepSpeed computes in fp32 on a CPU: leave it out, or start with "
            "recipes/launch/cpu.yaml"
        )


def drafter_share(layout: str, num_devices: int, offloaded: bool = False) -> float:
    """Return the part of fp32 weights, gradients and two moments, 4 + 4 + 8 bytes, that a device holds."""
    pieces = 0.0 if offloaded else 1 / num_devices
    if layout in IN_PIECES:
        return pieces
    return 0.25 + 0.75 * pieces if layout == "ZeRO-2" else 1.0


def is_offloaded(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed keeps the optimiser, and the weights that it moves, outside of the devices' memory."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return False
    return accelerator.state.deepspeed_plugin.offload_optimizer_device != "none"


def gather_as_one(accelerator: Accelerator, drafter: Drafter) -> None:
    """Let ZeRO-3 put all weights together for a pass: losses use some of them outside of the layers they belong to."""
    if layout_of(accelerator) == "ZeRO-3":
        import deepspeed

        for parameter in drafter.parameters():
            deepspeed.zero.register_external_parameter(drafter, parameter)


def back_to_pieces(model: nn.Module) -> None:
    """Let FSDP2 drop the whole weights that a pass without a backward pass leaves: the next pass would read them again.

    Steps of the optimiser change the pieces.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def steps_in_backward(accelerator: Accelerator) -> bool:
    """Return whether the last backward pass of a step also clips and steps, as DeepSpeed's does."""
    return accelerator.distributed_type == DistributedType.DEEPSPEED


@contextlib.contextmanager
def whole_weights(accelerator: Accelerator, drafter: Drafter) -> Iterator[None]:
    """Give the drafter of the main process all of each weight for as long as the block lasts, under FSDP2 on its CPU.

    All processes call this together. Each weight is put together by itself, so no GPU holds two of them whole.
    """
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
                whole = parameter.full_tensor()
                whole = whole.cpu() if accelerator.is_main_process else whole[:0].clone()
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        for module, name, parameter in pieces:
            module._parameters[name] = parameter
