"""`draftsmith.train` with processes on a CPU that accelerate takes for GPUs: it runs FSDP and DeepSpeed on these only.

    accelerate launch --config_file recipes/launch/fsdp2.yaml --num_processes 2 tests/as_gpus.py RECIPE key=value ...
"""

import os
import sys

import torch
from accelerate.state import DistributedType, PartialState

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it would take minutes


def backend(self: PartialState, *_: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def set_device(self: PartialState) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = backend
PartialState.set_device = set_device

from draftsmith.recipes.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
