"""EAGLE-3 trained here and by speculators 0.9.0's own trainer: the same target, text, features and CPU time.

    python benchmarks/peer_learning.py FOLDER --speculators PYTHON [--minutes 2 6] [--seeds 0 1 2] [--jobs 2]

PYTHON is of an environment that has speculators. The embedded target answers prompts, and its hidden states are stored
once for each side, so that neither runs the target. Then both sides train for as many minutes of CPU time, on one
thread; ours, too, for half of them. Steps follow from the times of two short runs, whose difference leaves out what
starting takes. The chains of 4 that each drafter would have had accepted are told on held-out texts of the target, one
greedy and one at temperature 1. FOLDER keeps all: give the same command again to go on.

speculators trains with its defaults, Muon among them, but for what a CPU lacks: SDPA in place of flex attention, losses
that are not fused, fp32, no worker processes, no validation; and steps of 2,048 tokens. `--their-options` changes any
of them. A real vLLM judges what stands in FOLDER/runs by `draftsmith evaluate --engine` (docs/serving.md).
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Literal

import torch
from datasets import Dataset
from learning import DRAFT_LENGTH, MODES, acceptance_lengths
from safetensors.torch import save_file

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.prompts.prompts import read_prompt_set
from draftsmith.data.samples.folder import read_samples
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.replay.replay import Recording, record
from draftsmith.models import Target, load_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.target import spread_layer_ids
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.train import train
from draftsmith.train.run_folder.checkpoint import checkpoints

Side = Literal["ours", "theirs"]
NUM_PROMPTS, NUM_HELD_OUT, MAX_NEW_TOKENS = 12000, 157, 96
ONE_AT_A_TIME = Lock()  # for loading a model, which two threads of transformers cannot do side by side
SHORT_RUNS = 8, 40  # steps of the two runs that tell the time of a step
TOKENS_A_STEP = 2048  # of theirs, packed: its default of 8192 leaves few steps for minutes of CPU time
FOR_A_CPU = (
    "--draft-attn-impl sdpa --loss-implementation eager --hidden-states-dtype float32 --num-workers 0 "
    "--on-missing raise --train-data-ratio 0.99 --log-freq 1000"
)


@dataclass(frozen=True)
class PeerRun:
    """A training run of one side, on one thread."""

    side: Side
    steps: int
    seed: int


@dataclass
class PeerResult:
    """A drafter that a run made, and how much of its chains is accepted."""

    side: Side
    minutes: float  # of CPU time
    seed: int
    steps: int
    cpu_seconds: float  # of the run's process, from start to end
    greedy: float  # acceptance length
    sampled: float  # the same at temperature 1


# --- text and features, for both sides


def write_inputs(folder: Path, target: Target) -> None:
    """Write samples, held-out prompts, and the features that both sides read."""
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / "prompts.jsonl", prompts_for(target, held_out=False)[:NUM_PROMPTS])
    write_jsonl(folder / "held_out.jsonl", prompts_for(target, held_out=True)[:NUM_HELD_OUT])
    settings = PrepareSettings(MAX_NEW_TOKENS, batch_size=64)
    prepare(target, str(folder / "prompts.jsonl"), folder / "samples", settings)
    if not their_data(folder).is_dir():
        write_their_inputs(folder, target)
    if not checkpoints(folder / "stored_by"):
        train_ours(folder, PeerRun("ours", 1, 0), folder / "stored_by")  # a run stores features before its first step


def their_data(folder: Path) -> Path:
    """Return the folder of the data set that speculators trains on."""
    return folder / "speculators_data"


def write_their_inputs(folder: Path, target: Target) -> None:
    """Write the samples as speculators' data set, and a file of hidden states for each of them."""
    samples = read_samples(folder / "samples")
    layer_ids = (*spread_layer_ids(target.num_layers), target.num_layers)  # the last one before the final norm
    (folder / "hidden_states").mkdir(exist_ok=True)
    rows, masks = [], []
    for number, sample in enumerate(samples):
        ids = torch.tensor([sample.token_ids])  # [1, T]
        found = target.features(Batch(ids, torch.ones_like(ids, dtype=torch.bool)), layer_ids)
        assert found.layers is not None
        states = found.layers[0].unflatten(-1, (len(layer_ids), -1))  # [T, A + 1, H]
        tensors = {"hidden_states": states.bfloat16(), "token_ids": ids[0]}
        save_file(tensors, folder / "hidden_states" / f"hs_{number}.safetensors")
        rows.append(sample.token_ids)
        masks.append([any(span.start <= place < span.end for span in sample.spans) for place in range(ids.shape[1])])
    data = Dataset.from_dict({"input_ids": rows, "loss_mask": masks, "seq_len": list(map(len, rows))})
    data.with_format("torch").save_to_disk(str(their_data(folder)))


# --- training


def train_ours(folder: Path, run: PeerRun, out: Path) -> None:
    """Train by the quickstart's recipe from stored features, in this process."""
    config = RECIPES["quickstart_eagle3"]()
    config.target = str(EMBEDDED_TARGET)
    config.data = replace(config.data, samples=str(folder / "samples"), features="stored")
    config.run = replace(
        config.run, dir=str(out), device="cpu", seed=run.seed, steps=run.steps, checkpoint_every=run.steps
    )
    train(config)


def their_options(folder: Path, run: PeerRun, out: Path) -> str:
    """Return the options of `speculators train`."""
    num_tokens = int(read_samples(folder / "samples").lengths.sum())
    epochs = math.ceil(run.steps * TOKENS_A_STEP / num_tokens) + 1  # the steps end the last one
    names = {
        "verifier-name-or-path": EMBEDDED_TARGET,
        "data-path": their_data(folder),
        "hidden-states-path": folder / "hidden_states",
        "save-path": out,
        "total-seq-len": TOKENS_A_STEP,
        "max-steps": run.steps,
        "epochs": epochs,
        "seed": run.seed,
    }
    return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in names.items()) + f" {FOR_A_CPU}"


def cpu_seconds_of(args: argparse.Namespace, run: PeerRun, out: Path) -> float:
    """Take a run in a process of its own and return the CPU time of it."""
    if run.side == "ours":
        command = [sys.executable, __file__, str(args.folder), "--train", str(run.steps), str(run.seed), str(out)]
    else:
        trainer = str(Path(__file__).with_name("peer_trainer.py"))
        options = shlex.split(f"{their_options(args.folder, run, out)} {args.their_options}")
        command = [args.speculators, trainer, *options]
    out.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with out.with_name(f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{shlex.join(command)} failed: {log.name} says why")
    return usage.ru_utime + usage.ru_stime


def seconds_a_step(args: argparse.Namespace, side: Side) -> float:
    """Return the CPU time that a step takes, without what starting takes."""
    path = args.folder / "timed" / f"{side}.json"
    if not path.is_file():
        few, many = (
            cpu_seconds_of(args, PeerRun(side, steps, 0), path.with_name(f"{side}-{steps}")) for steps in SHORT_RUNS
        )
        path.write_text(json.dumps((many - few) / (SHORT_RUNS[1] - SHORT_RUNS[0])))
    return float(json.loads(path.read_text()))


# --- results


def drafter_in(out: Path) -> Path:
    """Return the last checkpoint of a run of either side."""
    ours = checkpoints(out)
    return ours[-1] if ours else max((path for path in out.iterdir() if path.name.isdigit()), key=lambda p: int(p.name))


@cache
def held_out_texts(folder: Path) -> list[Recording]:
    """Return the target's texts on the held-out prompts, one recording greedy and one at temperature 1."""
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    prompts = read_prompt_set(str(folder / "held_out.jsonl"), target, None, MAX_NEW_TOKENS).token_ids
    return [record(target, prompts, Sampling(heat), MAX_NEW_TOKENS, DRAFT_LENGTH) for heat in MODES]


def result_of(args: argparse.Namespace, side: Side, minutes: float, seed: int) -> PeerResult:
    """Train and measure a drafter, or read what an earlier call measured."""
    out = args.folder / "runs" / f"{side}-{minutes:g}-minutes-seed-{seed}"
    path = out.with_suffix(".json")
    if not path.is_file():
        steps = round(60 * minutes / seconds_a_step(args, side))
        cpu_seconds = cpu_seconds_of(args, PeerRun(side, steps, seed), out)
        with ONE_AT_A_TIME:
            target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
            lengths = acceptance_lengths(target, load_drafter(drafter_in(out), target), held_out_texts(args.folder))
        path.write_text(json.dumps(asdict(PeerResult(side, minutes, seed, steps, cpu_seconds, *lengths))))
    return PeerResult(**json.loads(path.read_text()))


def line_of(results: list[PeerResult]) -> str:
    """Return a line of the table: the seeds of one side and one time."""
    steps = "/".join(str(result.steps) for result in results)
    lengths = [[getattr(result, name) for result in results] for name in ("greedy", "sampled")]
    shown = [f"{statistics.mean(found):.3f} ({', '.join(f'{one:.3f}' for one in found)})" for found in lengths]
    return f"| {results[0].minutes:g} | {results[0].side} | {steps} | {shown[0]} | {shown[1]} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--speculators", metavar="PYTHON")
    parser.add_argument("--their-options", default="", help="of `speculators train`, which override those given here")
    parser.add_argument("--minutes", nargs="+", type=float, default=[2, 6])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)  # one run of ours, in this process
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.train:
        steps, seed, out = args.train
        train_ours(args.folder, PeerRun("ours", int(steps), int(seed)), Path(out))
        return
    if args.speculators is None:
        parser.error("--speculators: give the Python of an environment that has speculators 0.9.0")
    target = Target.from_pretrained(EMBEDDED_TARGET, "cpu")
    write_inputs(args.folder, target)
    sides: list[Side] = ["ours", "theirs"]
    for side in sides:
        print(f"{side}: {seconds_a_step(args, side):.3f} CPU seconds a step", flush=True)
    wanted = sorted({*((side, m) for side in sides for m in args.minutes), *(("ours", m / 2) for m in args.minutes)})
    with ThreadPoolExecutor(args.jobs) as pool:
        found = {
            key: [pool.submit(result_of, args, *key, seed) for seed in args.seeds]
            for key in sorted(wanted, key=lambda key: key[1])
        }
        env = environment(target)
        print(f"{env.command}, {env.device}, one thread a run, commit {env.git_commit}\n")
        print("| CPU minutes | side | steps | acceptance length, greedy (seeds) | at temperature 1 (seeds) |")
        print("|---|---|---|---|---|")
        for futures in found.values():
            print(line_of([future.result() for future in futures]), flush=True)


if __name__ == "__main__":
    main()
