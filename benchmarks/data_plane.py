"""How long a training run takes to start on a million samples, and how much memory each of its processes has alone.

    python benchmarks/data_plane.py --samples 1000000 --length 1000 --processes 2

The samples are random tokens of the quickstart target, written as `prepare` writes answers. Then `draftsmith train`
takes one step on them, in fresh processes, with everything that stands before a step: imports, checksums, checks, the
plan of batches. Memory is what is not shared through the page cache (RssAnon of /proc/PID/status), at its peak.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from draftsmith.data.samples.folder import PREPARED, shard_parts, write_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target
from draftsmith.models.target.identity import identity
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

LAUNCHER = Path(__file__).parents[1] / "recipes" / "launch" / "cpu.yaml"


def random_samples(vocab_size: int, length: int, part: range) -> Iterator[Sample]:
    """Yield samples of about `length` tokens, the same for the same places."""
    for index in part:
        generator = np.random.default_rng(index)
        size = int(generator.integers(length * 3 // 4, length * 5 // 4))
        token_ids = generator.integers(5, vocab_size, size).tolist()
        yield Sample(token_ids, [Span(size // 4, size)], "given", 1.0, 1.0, 0, index, f"domain {index % 8}")


def make(folder: Path, num_samples: int, length: int) -> float:
    """Write the samples and return the seconds that it took."""
    target = Target.without_weights(EMBEDDED_TARGET)
    folder.mkdir(parents=True)
    prepared = {"target": str(EMBEDDED_TARGET), **identity(Target.from_pretrained(EMBEDDED_TARGET, "cpu"))}
    (folder / PREPARED).write_text(json.dumps({**prepared, "written_by": "given"}))
    start = time.perf_counter()
    write_samples(folder, shard_parts(range(num_samples)), partial(random_samples, target.vocab_size, length))
    return time.perf_counter() - start


@dataclass
class Start:
    """The cost of a command that takes one step."""

    seconds: float  # by the clock
    cpu_seconds: float  # of all its processes together
    memory: list[int]  # bytes that each process has alone, at their peak


def train(folder: Path, run: Path, num_processes: int) -> Start:
    """Take one step on the samples of a folder."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(LAUNCHER)]
    launcher += ["--num_processes", str(num_processes), "--main_process_port", "0"]
    settings = f"target={EMBEDDED_TARGET} data.samples={folder} run.dir={run} run.steps=1 data.batch_size=2"
    command = [*(launcher if num_processes > 1 else []), "-m", "draftsmith.train", "eagle3", *settings.split()]
    peaks: dict[int, int] = {}
    start, before = time.perf_counter(), os.times()
    process = subprocess.Popen([sys.executable, *command, "run.device=cpu"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                peaks[member.pid] = max(peaks.get(member.pid, 0), private_bytes(member.pid))
        time.sleep(0.25)
    assert process.returncode == 0
    seconds, after = time.perf_counter() - start, os.times()
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(seconds, cpu_seconds, sorted(peaks.values())[-num_processes:])


def private_bytes(process_id: int) -> int:
    """Return the private memory of a process; 0 for one that has ended."""
    try:
        status = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the samples are, or will be, written (a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name) / "samples"
        print(f"{psutil.cpu_count()} cores, commit {git_commit()}")
        if not folder.exists():
            print(
                f"{args.samples} samples of about {args.length} tokens: {make(folder, args.samples, args.length):.0f} s"
            )
        print(f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e9:.2f} GB of samples", flush=True)
        for num_processes in sorted({1, args.processes}):
            start = train(folder, Path(name) / f"run-{num_processes}", num_processes)
            print(
                f"{num_processes} processes: done with one step after {start.seconds:.0f} s ({start.cpu_seconds:.0f} s "
                f"of CPU time), each with {max(start.memory) / 1e9:.2f} GB of its own at most",
                flush=True,
            )


if __name__ == "__main__":
    main()
