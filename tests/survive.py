"""What test_survival.py runs in a process of its own: runs of several ranks, forked from here. Prints its findings.

python survive.py FOLDER JSON_OF_SETTINGS
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from runs import arguments

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from ranks import exit_codes, fork_ranks

import draftsmith.train.evaluate as evaluating


def newest_step(metrics: Path) -> int:
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def main() -> None:
    folder, base = Path(sys.argv[1]), json.loads(sys.argv[2])
    evaluation = {"prompts": folder / "held_out.txt", "max_new_tokens": 6, "repeats": 1, "time_share": None}
    log = folder / "log"
    findings: dict[str, Any] = {}

    def command(name: str, **parts: dict[str, Any]) -> list[str]:
        return ["train", "medusa", *arguments(base, folder / name, **parts)]

    def signalled(num_ranks: int, rank: int, number: int) -> list[int]:
        """Exit codes when one rank gets a signal after three more steps."""
        metrics = folder / "chain" / "metrics.jsonl"
        before = newest_step(metrics)
        pids = fork_ranks(command("chain", run=json.loads(sys.argv[3])), num_ranks, log)
        while newest_step(metrics) < before + 3:
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
    (folder / "findings.json").write_text(json.dumps(findings))


if __name__ == "__main__":
    main()
