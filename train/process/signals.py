"""Pre-emption: on SIGTERM, or SIGINT once, the running step ends, a checkpoint is saved, and the run stops.

Before the first step, when there is nothing to save, it stops at once.
"""

import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
IMPATIENT_SECONDS = 3.0  # between two Ctrl-C; launchers repeat a first one that the terminal has sent already


class Stopped(KeyboardInterrupt):
    """A run has stopped on a signal with everything saved; the command line exits with 128 + the signal's number."""

    def __init__(self, number: int, checkpoint: str | None) -> None:
        where = f"; {checkpoint} is saved, and the same command goes on from it"
        if checkpoint is None:
            where = " before it made a step; the same command goes on from what is saved and stored"
        super().__init__(f"stopped by {signal.Signals(number).name}{where}")
        self.exit_code = 128 + number


class StopRequest:
    """Notes a signal until the training loop asks for it. A second SIGINT interrupts at once.

    Until `in_steps` is set, when nobody would ask for long, a signal raises `Stopped` at once.
    """

    def __init__(self) -> None:
        self.in_steps = False
        self.received: int | None = None
        self._since = 0.0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python allows handlers there only
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            if not self.in_steps:
                raise Stopped(number, None)
        elif number == signal.SIGINT and now - self._since > IMPATIENT_SECONDS:
            raise KeyboardInterrupt
