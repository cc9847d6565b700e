"""`prepare` killed at random moments, then let through: the samples are those of an uninterrupted run.

    python benchmarks/prepare_kill.py [--kills 20] [--prompts N] [--conversations N] [--seed N]

First the target answers prompts. SIGKILL comes while the command starts, or after some more answers. Then conversations
are written into columns as they are (`--as-given`), in several shards on all cores: that begins anew each time, and is
killed at any moment of it. Each time either the command's own process is killed or all of its processes are.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parent))
from prepare import write_prompts
from ranks import exit_codes, fork

from draftsmith.data.samples.folder import INDEX, PREPARED, read_samples
from draftsmith.inference.measuring.environment import git_commit
from draftsmith.models import Target
from draftsmith.recipes.cli.main import main as draftsmith
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET

STARTING_SHARE = 0.25  # of the kills of what goes on where it was stopped
BETWEEN = 0.8  # of the whole time, in which all kills of it fall on average


@dataclass
class Writer:
    """A command that writes samples, and where."""

    words: list[str]
    folder: Path

    def start(self, out: str) -> int:
        """Start it, and return its process id."""
        command = ["prepare", "--target", str(EMBEDDED_TARGET), *self.words, "--out", str(self.folder / out)]
        return fork(lambda: draftsmith(command), self.folder / "log")

    def let_through(self, out: str) -> float:
        """Run it to its end, and return the seconds that it took; workers of a killed one still hold their folder."""
        start = time.perf_counter()
        while (code := exit_codes([self.start(out)])[0]) == 2:
            assert "is being written by" in (self.folder / "log").read_text().splitlines()[-1]
            time.sleep(0.5)
        assert code == 0
        return time.perf_counter() - start

    def digest(self, out: str) -> str:
        """Return what stands for all samples that it wrote."""
        return sha256((self.folder / out / INDEX).read_bytes()).hexdigest()[:16]


def kill(pid: int, chance: random.Random) -> int:
    """Send SIGKILL to a command's process, or to all of its processes; return how many there were."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in processes[: chance.choice([1, len(processes)])]:
        process.send_signal(signal.SIGKILL)
    return len(processes)


def kill_answers(writer: Writer, kills: int, whole: float, chance: random.Random) -> None:
    """Kill a command that goes on where it was stopped, while it starts or a random time after its next answer."""
    journal = writer.folder / "killed" / "answers-0.partial"
    for number in range(kills):
        size = journal.stat().st_size if journal.exists() else 0
        pid = writer.start("killed")
        if chance.random() < STARTING_SHARE:
            time.sleep(chance.uniform(0, 1))
        else:
            while not (journal.exists() and journal.stat().st_size > size):
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 2 * BETWEEN * whole / kills))
        kill(pid, chance)
        assert exit_codes([pid]) == [-signal.SIGKILL], "it was done before: give more --prompts"
        answers = journal.read_bytes().count(b"\n") if journal.exists() else 0
        print(f"{number + 1:3}: killed, {answers} answers written", flush=True)


def kill_columns(writer: Writer, kills: int, whole: float, chance: random.Random) -> None:
    """Kill a command that begins anew each time at any moment; what it leaves is no folder of samples."""
    killed, number = writer.folder / "killed", 0
    while number < kills:
        pid = writer.start("killed")
        time.sleep(chance.uniform(0, whole))
        processes = kill(pid, chance)
        if exit_codes([pid]) == [-signal.SIGKILL]:
            number += 1
            shards = len(list(writer.folder.glob("**/*.arrow"))) - len(list(writer.folder.glob("whole/*.arrow")))
            assert not (killed / PREPARED).exists()
            print(f"{number:3}: killed, {processes} processes, {shards} shards begun", flush=True)


def write_different_prompts(path: Path, count: int) -> None:
    """Write so many prompts; equal ones would be answered once."""
    write_prompts(path, Target.without_weights(EMBEDDED_TARGET), 2 * count)
    lines = list(dict.fromkeys(path.read_text().splitlines()))
    path.write_text("".join(line + "\n" for line in lines[:count]))


def write_conversations(path: Path, count: int) -> None:
    """Write so many conversations, each different."""
    rows = (
        {
            "messages": [
                {"role": "user", "content": f"What is {number} + {number}?"},
                {"role": "assistant", "content": f"It is {2 * number}, twice {number}."},
            ]
        }
        for number in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each writer")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--conversations", type=int, default=9000, help="three shards")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    args = parser.parse_args()
    chance = random.Random(args.seed)
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"commit {git_commit()}, seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        answers, columns = Path(name, "answers"), Path(name, "columns")
        for folder in (answers, columns):
            folder.mkdir()
        write_different_prompts(answers / "in.jsonl", args.prompts)
        write_conversations(columns / "in.jsonl", args.conversations)
        decoding = ["--device", "cpu", "--max-new-tokens", "48", "--batch-size", "8"]
        jobs = [
            (Writer(["--prompts", str(answers / "in.jsonl"), *decoding], answers), kill_answers, args.prompts),
            (Writer(["--prompts", str(columns / "in.jsonl"), "--as-given"], columns), kill_columns, args.conversations),
        ]
        for writer, kill_all, count in jobs:
            try:
                whole = writer.let_through("whole")
                print(
                    f"\n{writer.folder.name} of {count} prompts, in {whole:.0f} s where nothing is killed", flush=True
                )
                kill_all(writer, args.kills, whole, chance)
                writer.let_through("killed")
            except BaseException:
                print((writer.folder / "log").read_text()[-6000:], file=sys.stderr)
                raise
            assert len(read_samples(writer.folder / "killed")) == count, "a sample is missing or there twice"
            assert writer.digest("whole") == writer.digest("killed"), "other samples"
            print(f"the samples are those of the uninterrupted run, to the byte: {writer.digest('killed')}", flush=True)


if __name__ == "__main__":
    main()
