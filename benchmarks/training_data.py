"""Ways of feeding the same training to EAGLE-3 on the embedded target: speed, disk, and what the drafter is worth.

    python benchmarks/training_data.py --out DIR [--prompts N] [--steps N]

1. seconds a step, in turns in one process: online and stored features, packed and one sample a row
2. acceptance length on held-out prompts after the same steps with the same seed, by what features were stored in

What is in DIR already is not made again.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.progress import size_text
from draftsmith.data.prompts.prompts import encode_prompts
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target, load_drafter
from draftsmith.recipes.configs.recipes import quickstart_eagle3
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.train import TrainConfig, train
from draftsmith.train.inputs.features import feature_source
from draftsmith.train.process.stages import Stages
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.setup import set_up
from draftsmith.train.step import accumulate_gradients

transformers.utils.logging.set_verbosity_error()  # it reports each layer that a target without layers leaves out

TIMED_STEPS = 8
HELD_OUT = 16
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


def make_config(out: Path, name: str, steps: int, **data: Any) -> TrainConfig:
    config = quickstart_eagle3()
    config.target = str(EMBEDDED_TARGET)
    config.data.samples = str(out / "samples")
    config.data.batch_size = 16
    config.data.max_length = 512
    config.run.dir = str(out / name)
    config.run.steps = config.run.checkpoint_every = steps
    config.run.device = "cpu"
    for key, value in data.items():
        setattr(config.data, key, value)
    return config


def seconds_per_step(configs: dict[str, TrainConfig]) -> dict[str, float]:
    """Return the median seconds of losses and gradients, the configs in turns over the same steps."""
    runs = {}
    for name, config in configs.items():
        setup = set_up(config)
        stages = Stages(setup.accelerator.device)
        source = feature_source(config, setup.store, setup.plan, setup.drafter, setup.accelerator, stages)
        runs[name] = (setup, source)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(TIMED_STEPS + 1):
        for name, (setup, source) in runs.items():
            start = time.perf_counter()
            batches = [(rows, setup.plan.collate(rows)) for rows in setup.plan.micro_batches(step, 0, 1)]
            accumulate_gradients(setup, setup.drafter, batches, source, Stages(setup.accelerator.device))
            times[name].append(time.perf_counter() - start)
            setup.drafter.zero_grad()
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def acceptance_length(target: Target, checkpoint: Path, prompts: list[list[int]]) -> float:
    decoder = SpeculativeDecoder(target, load_drafter(checkpoint, target))
    return decoder.generate(prompts, max_new_tokens=96, draft_length=4).stats.total.mean_acceptance_length


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=768)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)

    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "prompts.jsonl", prompts_for(target, held_out=False)[: args.prompts])
    settings = PrepareSettings(max_new_tokens=128, batch_size=64)
    prepare(target, str(args.out / "prompts.jsonl"), args.out / "samples", settings)

    stored: dict[str, dict[str, Any]] = {dtype: {"features": "stored", "features_dtype": dtype} for dtype in DTYPES}
    ways: dict[str, dict[str, Any]] = {"online": {}, "online, packed": {"packing": True}, **stored}
    ways["bfloat16, packed"] = {**stored["bfloat16"], "packing": True}
    times = seconds_per_step({name: make_config(args.out, name, args.steps, **data) for name, data in ways.items()})
    machine = platform.processor() or platform.machine()
    print(f"\n{machine}, 1 thread, torch {torch.__version__}, commit {git_commit()}")
    for name, taken in times.items():
        print(f"{name:20} {1000 * taken:7.1f} ms a step of 16 samples")

    print(f"\nafter {args.steps} steps, acceptance length at draft length 4 on {HELD_OUT} held-out prompts:")
    held_out = encode_prompts(prompts_for(target, held_out=True)[:HELD_OUT], target)
    for name in ("online", *stored):
        run = train(make_config(args.out, name, args.steps, **ways[name]))
        length = acceptance_length(target, checkpoints(run)[-1], held_out)
        files = (args.out / "samples").glob(f"features*-{name}/shard-*")
        print(f"{name:20} {length:.3f}  {size_text(sum(file.stat().st_size for file in files))}", flush=True)


if __name__ == "__main__":
    main()
