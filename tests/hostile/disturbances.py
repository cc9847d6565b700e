"""What befalls a command from outside."""

import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

from damage import NUMBERS, TEXTS


class disk_full:
    """A limit to the size of files: writing more fails, as on a full disk."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.limits[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        signal.signal(signal.SIGXFSZ, self.handler)


class interrupted:
    """Ctrl-C after some seconds of the processor."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.handler: Any = signal.signal(signal.SIGPROF, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_PROF, self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self.handler)


# --- what a command is started with, in a process of its own


def closed_streams(random: Random) -> None:
    """Close some of stdin, stdout and stderr, or fill the place that they are written to."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        draw = random.random()
        if draw < 0.5:
            setattr(sys, name, None)  # as Python does at its start
            os.close(number)
        elif draw < 0.7 and number:
            setattr(sys, name, open("/dev/full", "w"))  # noqa: SIM115  # for the life of the process


def few_files(random: Random) -> None:
    """Allow few open files."""
    most = len(os.listdir("/proc/self/fd")) + random.choice((2, 5, 12))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def no_folder(random: Random) -> None:
    """Remove the folder that the command is started in."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)


def clock_going_back(random: Random) -> None:
    """Let the clock on the wall go back between any two readings."""
    readings = count(2e9, -random.choice((0.001, 3600.0, 1e8)))
    time.time = lambda: next(readings)


def environment(random: Random) -> None:
    """Set variables to hostile values. What runs in several processes would rightly wait for the others."""
    names = """RANK WORLD_SIZE LOCAL_RANK COLUMNS LINES TERM NO_COLOR TZ TMPDIR HOME HF_ENDPOINT
    OPENAI_API_KEY WANDB_MODE ACCELERATE_MIXED_PRECISION ACCELERATE_DYNAMO_BACKEND
    ACCELERATE_GRADIENT_ACCUMULATION_STEPS"""
    texts = [text for text in TEXTS if "\0" not in text and text.isascii() and len(text) < 1000]
    for name in random.sample(names.split(), 3):
        os.environ[name] = random.choice((*texts, *(str(number) for number in NUMBERS if number < 2)))


def little_stack(random: Random) -> None:
    """Allow threads little room for their stacks."""
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 18, 1 << 18))


STARTS: tuple[Callable[[Random], None], ...] = (
    closed_streams,
    few_files,
    no_folder,
    clock_going_back,
    environment,
    environment,
    little_stack,
)
