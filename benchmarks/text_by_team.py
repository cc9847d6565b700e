"""What a step of EAGLE-3 takes of processes that take one long text together (`run.processes_per_text`), on a CPU.

    python benchmarks/text_by_team.py [--lengths 8192 16384] [--sizes 1 2 4] [--steps 1]

A text is one row, of which the first quarter is a prompt; seven unrolled steps train on the rest. Features are
random and given, so that the drafter is measured alone. Each process has one thread, and all may share a core, so time
is the CPU time of the member that took most, which leaves out what it waits. Memory is the most that a member's process
ever held beyond what it held before the first step, with the features, which are whole on each member. The allocator
gives large tensors back at once, so that what it keeps for itself is not counted.
"""

import argparse
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from dataclasses import dataclass

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import Eagle3Config
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.target.target import Features
from draftsmith.models.text_team import Team

SHAPE = LlamaConfig(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1 << 17,
)
STEPS = 7  # unrolled, as in the recipes for public targets


@dataclass
class Taken:
    """What a member took."""

    seconds: float  # of CPU time, a step
    most_bytes: float
    loss: float  # of its part, at the last step


def made() -> Eagle3:
    """Return the same drafter in every process."""
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(SHAPE), None, "random")
    return Eagle3.from_target(Eagle3Config(unroll_steps=STEPS), target).train()


def member(place: int, size: int, length: int, steps: int, folder: str) -> Taken:
    """Take some steps on a text as one of a team."""
    torch.set_num_threads(1)
    drafter, width = made(), SHAPE.hidden_size
    if size > 1:
        torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=place, world_size=size)
        drafter.team = Team(size, place, torch.distributed.group.WORLD)
    batch = Batch(torch.randint(3, SHAPE.vocab_size, (1, length)), torch.arange(length)[None] >= length // 4)

    def step(batch: Batch) -> float:
        features = Features(*(torch.randn(1, batch.token_ids.shape[1], n * width) for n in (1, len(drafter.layer_ids))))
        total, count = drafter.loss(batch, features)["loss"]
        (total / length).backward()
        return float(total.detach())

    step(Batch(batch.token_ids[:, :256], batch.loss_mask[:, :256] | True))
    before, start = psutil.Process().memory_info().rss, time.process_time()
    for _ in range(steps):
        torch.manual_seed(1)
        loss = step(batch)
    seconds = (time.process_time() - start) / steps
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Taken(seconds, most - before, loss)


def measured(size: int, length: int, steps: int) -> list[Taken]:
    """Return what each member of a team took, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(size) as pool:
        found = pool.starmap(member, [(place, size, length, steps, folder) for place in range(size)], chunksize=1)
        pool.close()
        pool.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # bytes; read when a process starts
    machine = platform.processor() or platform.machine()
    drafter = made()
    print(f"{machine}, 1 thread a process, torch {torch.__version__}, commit {git_commit()}")
    print(
        f"EAGLE-3 of width {SHAPE.hidden_size}, {drafter.training_depth} unrolled steps, fp32; {args.steps} steps each"
    )
    print("\n tokens  processes  CPU s a step  tokens/s of CPU time  most MB of a member      loss")
    for length in args.lengths:
        for size in args.sizes:
            found = measured(size, length, args.steps)
            seconds, most = max(taken.seconds for taken in found), max(taken.most_bytes for taken in found)
            loss = sum(taken.loss for taken in found)
            print(
                f"{length:7} {size:10} {seconds:13.1f} {length / seconds:21.0f} {most / 1e6:20.0f} {loss:13.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
