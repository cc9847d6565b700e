"""`prepare` killed at random moments, then let through: the file is that of an uninterrupted run.

    python benchmarks/prepare_kill.py [--prompts N] [--kills N] [--seed N]

Each time SIGKILL comes up to a fifth of the uninterrupted run's time after the first new answer.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

import torch

from draftsmith.data.samples.folder import INDEX, read_samples
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

sys.path.append(str(Path(__file__).parent))
from prepare import write_prompts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(
            folder / "prompts.jsonl", Target.from_pretrained(EMBEDDED_TARGET, "cpu", torch.float32), args.prompts
        )
        command = [sys.executable, "-m", "draftsmith.data", "--target", str(EMBEDDED_TARGET), "--device", "cpu"]
        command += ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "48", "--batch-size", "8", "--out"]

        start = time.perf_counter()
        subprocess.run([*command, str(folder / "whole")], check=True)
        whole = time.perf_counter() - start
        journal = folder / "killed" / "answers-0.partial"
        kills = 0
        while kills < args.kills:
            size = journal.stat().st_size if journal.exists() else 0
            process = subprocess.Popen([*command, str(folder / "killed")])
            while process.poll() is None and not (journal.exists() and journal.stat().st_size > size):
                time.sleep(0.01)
            time.sleep(whole * generator.uniform(0, 0.2))
            process.kill()
            assert process.wait() == -signal.SIGKILL, "it was done before: give more --prompts"
            kills += 1
            print(f"\nkilled: {journal.read_bytes().count(10)} answers written", flush=True)
        subprocess.run([*command, str(folder / "killed")], check=True)
        digests = [sha256((folder / out / INDEX).read_bytes()).hexdigest()[:16] for out in ("whole", "killed")]
        indices = [int(index) for index in read_samples(folder / "killed").prompts]
    assert indices == list(range(args.prompts)), "an answer is missing or there twice"
    print(f"\ncommit {git_commit()}: {args.prompts} prompts, killed {kills} times; uninterrupted run: {whole:.0f} s")
    same = "the same" if digests[0] == digests[1] else "DIFFERENT"
    print(f"samples: {digests[0]} uninterrupted, {digests[1]} killed: {same}")


if __name__ == "__main__":
    main()
