"""A Python that has imported torch and what training needs: a program starts in it by a fork, not in ten seconds.

The path that `warm_python` yields stands in the place of `sys.executable` in commands, also in those that accelerate
and torch make for the processes that they start. The program has its own standard streams, environment and folder, and
ends with the process that was started: that one is a client, which passes signals on and returns the exit code.

Programs of one warm Python share its hash seed, which programs of their own would not: where processes must agree
whatever that is, one test has to start them with `sys.executable`.
"""

import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

STREAMS = (0, 1, 2)
LONGEST_START = 120.0  # seconds


class Program(NamedTuple):
    words: list[str]  # as behind `python`: `-m` and a module or a file, and its arguments; with or without -u
    environment: dict[str, str]
    folder: str
    python: str  # path of the warm Python, for programs that this one starts


@contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    """Keep a warm Python whose files lie in an empty folder; yield its path. Programs wait until it is warm."""
    path, address = folder / "python", folder / "socket"
    client = shlex.join([sys.executable, "-S", "-E", __file__, "--start", str(address), str(path)])
    path.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    path.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, __file__, "--serve", str(address)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        yield str(path)
    finally:
        server.kill()
        server.wait()


def start(address: str, python: str, words: list[str]) -> None:
    """Run a program in the server and end as it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        connect(server, address)
        socket.send_fds(server, [b"x"], STREAMS)
        answers = server.makefile("rw")
        print(json.dumps(Program(words, dict(os.environ), os.getcwd(), python)), file=answers, flush=True)
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(answers.readline())
    if code < 0:
        with suppress(OSError):  # of SIGKILL, which has no other handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def connect(server: socket.socket, address: str) -> None:
    """Connect as soon as the warm Python listens."""
    end = time.monotonic() + LONGEST_START
    while True:
        try:
            return server.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def next_program(address: str) -> Program:
    """Wait for clients; return in a process of its own for each of them."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for programs
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            client, _ = listener.accept()
            if not os.fork():
                break
            client.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return forked_for(client)


def forked_for(client: socket.socket) -> Program:
    """Return in the process of the program; the process before it tells the client how it ends, and ends with it."""
    _, streams, *_ = socket.recv_fds(client, 1, len(STREAMS))
    lines = client.makefile("rw")
    program = Program(*json.loads(lines.readline()))
    pid = os.fork()
    if not pid:
        for number, stream in zip(STREAMS, streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        return program
    for stream in (*STREAMS, *streams):
        os.close(stream)
    print(pid, file=lines, flush=True)
    ended = os.pidfd_open(pid)
    if ended not in select.select([client, ended], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # as its client was
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):
        print(code, file=lines, flush=True)
    os._exit(0)


def run(program: Program) -> None:
    """Do what Python does with these words."""
    os.environ.clear()
    os.environ.update(program.environment)
    os.chdir(program.folder)
    sys.executable = program.python
    words = program.words[program.words[0] == "-u" :]
    if words[0] == "-m":
        sys.path[0], sys.argv = program.folder, words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(words[0]).parent), words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--start":
        start(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
        import ranks  # noqa: F401  (imports what training needs)
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")  # the first call compiles a thousand patterns
        run(next_program(sys.argv[2]))
