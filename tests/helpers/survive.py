"""What test_survival.py runs in a process of its own: runs of several ranks, forked from here. Prints its findings.

python survive.py FOLDER JSON_OF_SETTINGS
"""

import errno
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from runs import arguments

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from ranks import exit_codes, fork_ranks

import draftsmith.train.evaluation.evaluate as evaluating
from draftsmith.models.drafters.medusa import Medusa
from draftsmith.train.run_folder import checkpoint as checkpointing
from draftsmith.train.run_folder.tracking import read_metrics


def newest_step(run: Path) -> int:
    return max((line["step"] for line in read_metrics(run)), default=0)


def main() -> None:
    folder, base = Path(sys.argv[1]), json.loads(sys.argv[2])
    evaluation = {"prompts": folder / "held_out.txt", "max_new_tokens": 6, "repeats": 1, "time_share": None}
    log = folder / "log"
    findings: dict[str, Any] = {}

    def command(name: str, **parts: dict[str, Any]) -> list[str]:
        return ["train", "medusa", *arguments(base, folder / name, **parts)]

    def signalled(num_ranks: int, rank: int, number: int) -> list[int]:
        """Exit codes when one rank gets a signal after three more steps."""
        before = newest_step(folder / "chain")
        pids = fork_ranks(command("chain", run=json.loads(sys.argv[3])), num_ranks, log)
        while newest_step(folder / "chain") < before + 3:
            time.sleep(0.005)
        os.kill(pids[rank], number)
        return exit_codes(pids)

    findings["chain"] = [
        signalled(2, 1, signal.SIGTERM),
        signalled(1, 0, signal.SIGTERM),
        signalled(2, 0, signal.SIGKILL),
        exit_codes(fork_ranks(command("chain", run=json.loads(sys.argv[3])), 2, log)),
    ]

    def break_evaluation(rank: int) -> None:
        """It fails on rank 1 at the first checkpoint only."""
        measure, calls = evaluating.measure, [0]

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if rank == 1 and calls[0] == 1:
                raise RuntimeError("no luck today")
            return measure(*args)

        evaluating.measure = failing

    short = {"run": {"steps": 4, "checkpoint_every": 2, "log_every": 2}, "evaluation": evaluation}
    findings["evaluated"] = exit_codes(fork_ranks(command("evaluated", **short), 2, log, break_evaluation))

    def fill_disk(rank: int) -> None:
        """Checkpoints cannot be written, by a thread of the first rank."""

        def full(folder: Path) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        checkpointing.manifest = full

    full = {"run": {"steps": 6, "checkpoint_every": 2}}
    findings["full"] = exit_codes(fork_ranks(command("full", **full), 2, folder / "full.log", fill_disk))

    def fall_asleep(rank: int) -> None:
        """Rank 1 does nothing more from its third step on, until the other one has ended."""
        loss, awake = Medusa.loss, folder / "awake"

        def asleep(self: Medusa, *args: Any) -> Any:
            while rank == 1 and self.progress == 2 / 6 and not awake.exists():
                time.sleep(0.05)
            return loss(self, *args)

        Medusa.loss = asleep  # type: ignore[method-assign]

    waiting = {"run": {"steps": 6, "checkpoint_every": 6, "stuck_after": 2, "timeout": 5}}
    pids = fork_ranks(command("stuck", **waiting), 2, folder / "stuck.log", fall_asleep)
    findings["stuck"] = exit_codes(pids[:1])
    (folder / "awake").touch()
    findings["stuck"] += exit_codes(pids[1:])
    (folder / "findings.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main()
