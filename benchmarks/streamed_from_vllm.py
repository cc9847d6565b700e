"""Training on a million samples whose features two vLLMs compute on the CPU meanwhile: time, waiting and memory.

    DRAFTSMITH_VLLM=VENV python benchmarks/streamed_from_vllm.py [--steps 200] [--samples 1000000] [--folder SAMPLES]

The samples are those of data_plane.py. `draftsmith train` runs as a user starts it, in a process of its own; the memory
that it has alone (RssAnon of /proc/PID/status) is read every two seconds and told by steps. The slope is that of a line
through the second half of the readings: memory that is flat has none.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from data_plane import make, private_bytes

from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train.run_folder.tracking import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from vllm_process import extraction_options, serving

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
LENGTH, MAX_LENGTH, BATCH_SIZE = 256, 320, 8
LAYER_IDS = (2, 7, 11)
LOG_EVERY = 5
PERIOD = 2.0  # seconds between two readings of memory
PARTS = 10  # of the readings that are told


@contextmanager
def two_vllms(folder: Path) -> Iterator[list[str]]:
    """Start two vLLMs on the CPU that give hidden states of the embedded target, and yield their URLs."""
    num_layers = Target.without_weights(EMBEDDED_TARGET).num_layers
    with ExitStack() as stack:
        urls = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            options = extraction_options([*LAYER_IDS, num_layers], folder / name)
            options += ["--max-model-len", "512", "--max-num-seqs", "32", "--no-enable-prefix-caching"]
            log = folder / f"{name}.log"
            urls.append(stack.enter_context(serving(str(EMBEDDED_TARGET), log, *options, PYTHONPATH=str(HELPERS))))
        yield urls


@dataclass
class Reading:
    """The memory that the trainer had alone at some moment."""

    seconds: float  # since its start
    step: int
    bytes: int


def train(samples: Path, run: Path, urls: list[str], steps: int) -> list[Reading]:
    """Train, and return the readings of memory."""
    settings = {
        "target": EMBEDDED_TARGET,
        "drafter.layer_ids": list(LAYER_IDS),
        "data.samples": samples,
        "data.features": "streamed",
        "data.features_endpoint": f"[{','.join(urls)}]",
        "data.batch_unit": "samples",
        "data.batch_size": BATCH_SIZE,
        "data.max_length": MAX_LENGTH,
        "data.held_out_prompts": 0,
        "evaluation.prompts": "null",
        "run.steps": steps,
        "run.checkpoint_every": steps // 4,
        "run.log_every": LOG_EVERY,
        "run.device": "cpu",
        "run.dir": run,
    }
    command = [sys.executable, "-m", "draftsmith.train", "quickstart_eagle3"]
    command += [f"{key}={value}" for key, value in settings.items()]
    readings, start = list[Reading](), time.perf_counter()
    with open(run.with_suffix(".log"), "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        step = max((line["step"] for line in read_metrics(run)), default=0)
        if own := private_bytes(process.pid):
            readings.append(Reading(time.perf_counter() - start, step, own))
        time.sleep(PERIOD)
    assert process.returncode == 0, run.with_suffix(".log").read_text()[-3000:]
    return readings


def tell(readings: list[Reading], run: Path) -> None:
    """Print what a run took."""
    lines = read_metrics(run)[1:]  # the first steps wait for the first features
    first = next(reading for reading in readings if reading.step)
    last = readings[-1]
    waits = sum(line["time_share_data"] for line in lines) / len(lines)
    rate = sum(line["tokens_per_second"] for line in lines) / len(lines)
    print(f"{lines[-1]['step']} steps in {last.seconds:.0f} s, of which {first.seconds:.0f} s to the first {LOG_EVERY}")
    print(f"{rate:.0f} trained tokens a second; the drafter waits {waits:.1%}; loss {lines[-1]['loss']:.4f} at the end")
    print("\n steps      seconds  MB of its own: mean   most")
    trained = [reading for reading in readings if reading.step]
    for part in np.array_split(np.arange(len(trained)), PARTS):
        of_part = [trained[number] for number in part]
        sizes = [reading.bytes / 1e6 for reading in of_part]
        steps = f"{of_part[0].step} to {of_part[-1].step}"
        print(f" {steps:10} {of_part[-1].seconds:7.0f} {sum(sizes) / len(sizes):20.1f} {max(sizes):6.1f}")
    half = trained[len(trained) // 2 :]
    slope = np.polyfit([reading.step for reading in half], [reading.bytes / 1e6 for reading in half], 1)[0]
    print(f"\n{slope:+.3f} MB a step from step {half[0].step} on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="a multiple of 20")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the samples are, or will be, written (a temporary one)")
    args = parser.parse_args()
    print(f"{psutil.cpu_count()} cores, torch {torch.__version__}, commit {git_commit()}", flush=True)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folder = args.folder or Path(name) / "samples"
        if not folder.exists():
            print(f"samples written in {make(folder, args.samples, LENGTH):.0f} s", flush=True)
        print(f"{args.samples} samples of about {LENGTH} tokens, {BATCH_SIZE} a step", flush=True)
        with two_vllms(Path(memory)) as urls:
            readings = train(folder, Path(name) / "run", urls, args.steps)
        tell(readings, Path(name) / "run")


if __name__ == "__main__":
    main()
