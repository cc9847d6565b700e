"""A serving engine that a command of the user's starts anew for each drafter, where a running one takes no other.

The command stands in the environment, not among a run's settings: what a settings file says is never executed.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from draftsmith.data.http import Server
from draftsmith.models.errors import UserError
from draftsmith.models.files import real_path

COMMAND = "DRAFTSMITH_ENGINE_COMMAND"  # variable with the command for a shell
DRAFTER = "DRAFTER"  # variable in which the command finds the drafter's folder
ENGINE_LOG = "engine.log"  # name of the file of what it prints
START_SECONDS = 3600.0  # until the engine must answer
STOP_SECONDS = 60.0  # until it is killed
LOOK_SECONDS = 0.5  # between two looks at whether it answers
LAST_LINE = 300  # characters of its log that a message shows


@contextlib.contextmanager
def started_engine(
    command: str, drafter: Path, server: Server, log: Path, on_wait: Callable[[], None]
) -> Iterator[float]:
    """Start an engine with a drafter, yield the seconds until it answered, and end it with all of its processes.

    What it prints is added to `log`. `on_wait` is called while it starts. Raises `UserError` where something answers at
    its address already, and where it ends or does not answer in time.
    """
    if is_there(server):
        raise UserError(f"{server.name} answers before `{COMMAND}` starts an engine there: end what runs there")
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["sh", "-c", command],
            env={**os.environ, DRAFTER: str(real_path(drafter))},
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
                raise UserError(f"the engine that {COMMAND} starts {ended}: {last_line(log)} ({log} has all of it)")
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


def last_line(log: Path) -> str:
    """Return the last line that an engine printed."""
    lines = log.read_text("utf-8", "replace").split("\n")
    return next((line.strip()[-LAST_LINE:] for line in reversed(lines) if line.strip()), "it printed nothing")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: asked first, killed if that does not help."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
