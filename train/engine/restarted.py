"""A serving engine that a command of the user's starts anew for each drafter, where a running one takes no other.

The command stands in the environment, not among a run's settings: what a settings file says is never executed.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.http import Server
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import real_path
from draftsmith.train.engine.engine_errors import root_cause

COMMAND = "DRAFTSMITH_ENGINE_COMMAND"  # variable with the command for a shell
DRAFTER = "DRAFTER"  # variable in which the command finds the drafter's folder
ENGINE_LOG = "engine.log"  # name of the file of what it prints
START_SECONDS = 3600.0  # until the engine must answer
STOP_SECONDS = 60.0  # until it is killed
LOOK_SECONDS = 0.5  # between two looks at whether it answers
LONGEST_CAUSE = 300  # characters of its log that a message shows


@dataclass(frozen=True)
class EngineCommand:
    """A command that starts an engine."""

    words: list[str]
    environment: dict[str, str]
    name: str  # of the setting that says so, for messages


@contextlib.contextmanager
def started_engine(
    command: str, drafter: Path, server: Server, log: Path, on_wait: Callable[[], None]
) -> Iterator[float]:
    """Start an engine with a drafter by the user's command; see `started`."""
    environment = {**os.environ, DRAFTER: str(real_path(drafter))}
    with started(EngineCommand(["sh", "-c", command], environment, COMMAND), server, log, on_wait) as seconds:
        yield seconds


@contextlib.contextmanager
def started(command: EngineCommand, server: Server, log: Path, on_wait: Callable[[], None]) -> Iterator[float]:
    """Start an engine, yield the seconds until it answered, and end it with all of its processes.

    What it prints is added to `log`. `on_wait` is called while it starts. Raises `UserError` where something answers at
    its address already, and where it ends or does not answer in time.
    """
    if is_there(server):
        raise UserError(f"{server.name} answers before `{command.name}` starts an engine there: end what runs there")
    log.parent.mkdir(parents=True, exist_ok=True)
    start, log_start = time.perf_counter(), log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            command.words,
            env=command.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not is_there(server):
            seconds = time.perf_counter() - start
            if process.poll() is not None or seconds > START_SECONDS:
                ended = "ended" if process.poll() is not None else f"did not answer in {START_SECONDS:.0f} s"
                cause = cause_in(log, log_start)
                raise UserError(f"the engine that {command.name} starts {ended}: {cause} ({log} has all of it)")
            on_wait()
            time.sleep(LOOK_SECONDS)
        yield time.perf_counter() - start
    finally:
        end(process)


def is_there(server: Server) -> bool:
    """Return whether a server answers that it is ready."""
    try:
        server.text("/health")
    except UserError:
        return False
    return True


def cause_in(log: Path, start: int) -> str:
    """Return the error that an engine died of, in a line that is not too long. Its log begins at byte `start`."""
    return root_cause(log.read_bytes()[start:].decode("utf-8", "replace"), "")[:LONGEST_CAUSE]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: asked first, killed if that does not help."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
