"""The time that a checkpoint takes from training, written while training waits and beside it.

    python benchmarks/checkpoints.py [--width 1024] [--steps 8] [--rounds 5] [--folder DIR]

An EAGLE-3 drafter of a random Llama of that width takes so many steps with no checkpoint, with one that is written
while training waits, and with one that is written beside it, in turns in one process. The steps have to be as many as a
checkpoint beside training lasts.
"""

import argparse
import platform
import statistics
import tempfile
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from training import write_samples
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftsmith.data.progress import size_text
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.recipes.configs.recipes import quickstart_eagle3
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train import TrainConfig
from draftsmith.train.config import resolve
from draftsmith.train.loop import TrainingRun
from draftsmith.train.process.signals import StopRequest
from draftsmith.train.process.stages import Stages
from draftsmith.train.run_folder.checkpoint import Progress, checkpoints
from draftsmith.train.run_folder.run_folder import open_run
from draftsmith.train.setup import set_up

WAYS = ("none", "waiting", "beside")


def write_target_and_samples(folder: Path, width: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    write_samples(folder, folder / "target", num_prompts=32)


def config_of(folder: Path) -> TrainConfig:
    changes = {
        "target": folder / "target",
        "data.samples": folder / "samples",
        "data.held_out_prompts": 0,
        "data.batch_size": 4,
        "drafter.draft_vocab_size": "null",
        "run.dir": folder / "run",
        "run.steps": 10_000,
        "run.device": "cpu",
    }
    return resolve(quickstart_eagle3(), None, [f"{key}={value}" for key, value in changes.items()])


class Steps:
    """A run of which steps are taken one by one."""

    def __init__(self, config: TrainConfig) -> None:
        setup, stages = set_up(config), Stages(torch.device("cpu"))
        folder = open_run(config, setup.target, setup.plan.row_length, setup.accelerator)
        self.run, self.number = TrainingRun(config, setup, folder, stages, StopRequest()), 0
        self.run.model.train()
        self.take(2)

    def take(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.run.take_step(self.number, self.run.load(self.number))
            self.number += 1

    def timed(self, way: str, num_steps: int) -> "Seconds":
        """Take steps behind a checkpoint that is written in a way, or behind none."""
        writer, optimizer, progress = self.run.writer, self.run.optimizer, Progress(self.number, 0.0)
        start = time.perf_counter()
        if way != "none":
            (writer.save if way == "waiting" else writer.save_beside)(optimizer, progress)
        still = time.perf_counter() - start
        self.take(num_steps)
        with_steps = time.perf_counter() - start
        writer.wait()
        return Seconds(still, with_steps, time.perf_counter() - start)


@dataclass
class Seconds:
    """Seconds from when a checkpoint is begun."""

    still: float  # in which training stands still
    with_steps: float  # until the steps behind it are taken
    written: float  # until it is on the disk and the steps are taken


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to write to; else a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_target_and_samples(folder, args.width)
        steps = Steps(config_of(folder))
        found: dict[str, list[Seconds]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way in WAYS:
                found[way].append(steps.timed(way, args.steps))
        size = sum(path.stat().st_size for path in checkpoints(folder / "run")[-1].rglob("*") if path.is_file())
    plain = statistics.median(each.with_steps for each in found["none"])
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"commit {git_commit()}: a checkpoint of {size_text(size)}, {args.steps} steps of {plain / args.steps:.2f} s, "
        f"medians of {args.rounds} rounds"
    )
    for way in WAYS[1:]:
        still, with_steps, written = map(statistics.median, zip(*map(astuple, found[way]), strict=True))
        print(
            f"{way}: training stands still for {still:.2f} s; the steps take {with_steps / plain:.2f} of the time "
            f"without a checkpoint, {with_steps - plain:.2f} s more; all is on the disk after {written:.2f} s"
        )


if __name__ == "__main__":
    main()
