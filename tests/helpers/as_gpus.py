"""`draftsmith train` on a CPU with processes that accelerate takes for GPUs: it runs FSDP and DeepSpeed on these only.

    accelerate launch --config_file recipes/launch/fsdp2.yaml --num_processes 2 tests/helpers/as_gpus.py RECIPE ...

Several runs, one after another in the same processes, have `--then` between them: importing takes longer than each.
With `--per-rank-mean` each process divides by its own tokens alone, which is wrong. SHARD_BYTES in the environment is
the size of shards of stored features.
"""

import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState


def backend(self: PartialState, *_: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def set_device(self: PartialState) -> None:
    self.device = torch.device("cpu")


def per_rank_mean(self: Accelerator, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    is_token_count = tensor.dtype == torch.int64 and tensor.ndim == 0
    return tensor * self.num_processes if is_token_count else reduce(self, tensor, *arguments)


if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it would take minutes
if {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"} & os.environ.keys():  # else it knows processes of a CPU
    PartialState._prepare_backend = backend
    PartialState.set_device = set_device
reduce = Accelerator.reduce

if __name__ == "__main__":
    from draftsmith.data.features import stored as features
    from draftsmith.recipes.cli.main import main

    features.SHARD_BYTES = int(os.environ.get("SHARD_BYTES", features.SHARD_BYTES))

    words = sys.argv[1:]
    ends = [place for place, word in enumerate(words) if word == "--then"]
    for begin, end in zip([0, *(place + 1 for place in ends)], [*ends, len(words)], strict=True):
        run = words[begin:end]
        Accelerator.reduce = per_rank_mean if "--per-rank-mean" in run else reduce
        if code := main(["train", *(word for word in run if word != "--per-rank-mean")]):
            sys.exit(code)
