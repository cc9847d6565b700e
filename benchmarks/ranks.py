"""Training commands in forked processes: what costs seconds is imported once for many of them.

Fork only from a process that has computed nothing with torch: its threads do not come along.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import draftsmith.recipes.cli.train
import draftsmith.recipes.reports.report  # noqa: F401
from draftsmith.recipes.bench.started_vllm import free_port
from draftsmith.recipes.cli.main import main

LATE = ("deepspeed", "pandas", "torch._dynamo", "transformers.models.llama.modeling_llama")  # imported late, by others
for name in LATE:
    if importlib.util.find_spec(name.partition(".")[0]):
        importlib.import_module(name)


def fork(act: Callable[[], int | None], log: Path) -> int:
    """Run a function in a child whose output goes to the end of `log`; return the child's process id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = act() or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_ranks(
    command: list[str], num_ranks: int, log: Path, before: Callable[[int], None] = lambda rank: None
) -> list[int]:
    """Start `draftsmith COMMAND` on so many processes, as a launcher would; `before(rank)` is called in each."""
    port = free_port()

    def act(rank: int) -> int:
        if num_ranks > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
            where |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "ACCELERATE_USE_CPU": "true"}
            os.environ.update({name: str(value) for name, value in where.items()})
        before(rank)
        return main(command)

    return [fork(lambda rank=rank: act(rank), log) for rank in range(num_ranks)]  # type: ignore[misc]


def exit_codes(pids: list[int]) -> list[int]:
    """Wait for all, and return their exit codes; minus the signal's number for one that a signal ended."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
