"""A training run on two processes, killed at random moments and resumed each time: it ends as if nothing had happened.

    python benchmarks/sigkill.py [--kills 20] [--seed N] [--unmeasured]

SIGKILL comes to one of the processes or to both. After each, every file of the run must be readable; in the end weights
and losses are those of an uninterrupted run, bit for bit. `--unmeasured` leaves out the evaluations, so that each
checkpoint is written while training goes on.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

sys.path.append(str(Path(__file__).parent))
from ranks import exit_codes, fork, fork_ranks
from training import write_samples

from draftsmith.inference.measuring.environment import git_commit
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET
from draftsmith.train.run_folder.checkpoint import WEIGHTS, checkpoints, damage, resumable
from draftsmith.train.run_folder.tracking import read_metrics

CHECKPOINT_EVERY = 5
STEPS_A_KILL, MOST_STEPS = 4, 8  # on average with those done twice, and at most
STARTING_SHARE = 0.25  # of the kills
LAUNCHER_SECONDS = 5.0  # after a process has died until the others are killed


def command(args: argparse.Namespace, run: Path) -> list[str]:
    changes = {
        "target": args.target,
        "data.samples": args.samples,
        "data.batch_size": 4,
        "evaluation.prompts": "null" if args.unmeasured else run.parent / "held_out.txt",
        "evaluation.baselines": [],
        "evaluation.max_new_tokens": 4,
        "evaluation.repeats": 1,
        "run.dir": run,
        "run.steps": args.steps,
        "run.checkpoint_every": CHECKPOINT_EVERY,
        "run.keep_checkpoints": 3,
        "run.log_every": 1,
        "run.device": "cpu",
    }
    return ["train", "quickstart_medusa", *(f"{key}={value}" for key, value in changes.items())]


def newest_step(run: Path) -> int:
    """Return the newest step that the metrics tell of."""
    return max((line["step"] for line in read_metrics(run)), default=0)


def wait(run: Path, most: int, chance: random.Random, start: float, per_step: float) -> None:
    """Wait up to a random moment: while the run starts, or in its next steps, checkpoints, evaluations to `most`."""
    if chance.random() < STARTING_SHARE:
        time.sleep(chance.uniform(0, start))
        return
    awaited = min(most, newest_step(run) + chance.randint(1, MOST_STEPS))
    while newest_step(run) < awaited:
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 2 * per_step))


def check_files(run: Path) -> None:
    """Raise `AssertionError` where a file under its final name is half written."""
    if not (run / "config.yaml").is_file():
        return
    assert isinstance(yaml.safe_load((run / "config.yaml").read_text()), dict)
    for path in [run / "environment.json", *run.glob("checkpoints/step-*/evaluation*.json")]:
        assert not path.is_file() or json.loads(path.read_text()), path
    for checkpoint in resumable(run):
        assert damage(checkpoint) is None, checkpoint
    if (run / "best").is_symlink():
        assert (run / "best" / WEIGHTS).is_file()


def kill(pids: list[int], chance: random.Random) -> str:
    """Send SIGKILL to one of the processes or to both; end the other as a launcher would. Return what was done."""
    killed = chance.choice([[0], [1], [0, 1]])
    for rank in killed:
        os.kill(pids[rank], signal.SIGKILL)
    codes = dict(zip(killed, exit_codes([pids[rank] for rank in killed]), strict=True))
    for rank in {0, 1} - set(killed):
        patience = threading.Timer(LAUNCHER_SECONDS, os.kill, (pids[rank], signal.SIGKILL))
        patience.start()
        codes[rank] = exit_codes([pids[rank]])[0]
        patience.cancel()
    assert all(codes[rank] == -signal.SIGKILL for rank in killed), f"ended by itself: {codes}; give more --steps"
    return f"killed {killed}, exit codes {[codes[0], codes[1]]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--target", default=str(EMBEDDED_TARGET))
    parser.add_argument("--samples", type=Path, help="of that target")
    parser.add_argument("--unmeasured", action="store_true", help="without evaluations")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    args = parser.parse_args()
    args.steps = STEPS_A_KILL * args.kills + 4 * CHECKPOINT_EVERY
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, whole, killed = folder / "log", folder / "whole", folder / "killed"
        (folder / "held_out.txt").write_text("def heat(iron):\n")
        try:
            if args.samples is None:
                args.samples = folder / "samples"
                assert exit_codes([fork(lambda: write_samples(folder, args.target, 32, 16), log)]) == [0]
            start, per_step = run_whole(args, whole, log)
            for number in range(args.kills):
                pids = fork_ranks(command(args, killed), 2, log)
                wait(killed, args.steps - 3 * CHECKPOINT_EVERY, chance, start, per_step)
                done = kill(pids, chance)
                check_files(killed)
                print(f"{number + 1:3}: {done}, step {newest_step(killed)}", flush=True)
            assert exit_codes(fork_ranks(command(args, killed), 2, log)) == [0, 0]
            check_files(killed)
            compare(whole, killed)
        except BaseException:
            print(log.read_text()[-6000:] if log.is_file() else "nothing was logged", file=sys.stderr)
            raise
    print(
        f"commit {git_commit()}, seed {args.seed}: {args.kills} kills in {args.steps} steps of {per_step * 1000:.0f} "
        f"ms, {start:.1f} s to the first: the weights of each checkpoint that is kept and the losses of all steps are "
        "those of the uninterrupted run, bit for bit"
    )


def run_whole(args: argparse.Namespace, whole: Path, log: Path) -> tuple[float, float]:
    """Make the uninterrupted run; return the seconds to its first step, and of a step with its share of checkpoints."""
    start = time.perf_counter()
    pids = fork_ranks(command(args, whole), 2, log)
    while not newest_step(whole):
        time.sleep(0.005)
    first = time.perf_counter() - start
    assert exit_codes(pids) == [0, 0]
    return first, (time.perf_counter() - start - first) / args.steps


def compare(whole: Path, killed: Path) -> None:
    names = [checkpoint.name for checkpoint in checkpoints(whole)]
    assert names == [checkpoint.name for checkpoint in checkpoints(killed)]
    for name in names[-3:]:
        weights = [(run / "checkpoints" / name / WEIGHTS).read_bytes() for run in (whole, killed)]
        assert weights[0] == weights[1], f"{name}: other weights"
    losses = [[(line["step"], line["loss"]) for line in read_metrics(run) if "loss" in line] for run in (whole, killed)]
    assert losses[0] == losses[1], "other losses"


if __name__ == "__main__":
    main()
