"""Features that servers compute ahead of what reads them, each text by whichever server is free.

Shapes: B rows, T tokens, H hidden width, A number of layers that a drafter reads.
"""

import math
import mmap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from draftsmith.data import http
from draftsmith.data.features.endpoint import FeatureServer
from draftsmith.data.features.kept import KeptFeatures
from draftsmith.data.http import NoAnswer, PassingError, wait_after
from draftsmith.data.samples.batches import MicroBatch
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.target.target import Features

REQUESTS = 32  # at a time, of each server
AHEAD_BYTES = 2 << 30  # of features that a process holds before they are read
MOST_STEPS_AHEAD = 16

T = TypeVar("T")


class _Stopped(Exception):
    """Nobody waits for the text any more."""


@dataclass
class _Work:
    """The work of one server."""

    server: FeatureServer
    num_open: int = 0  # texts that it was asked for and has not given
    num_failures: int = 0  # since it last gave one
    rests_until: float = 0.0  # time before which it is not asked, after a failure
    checked: bool = False  # since it was last away
    check: threading.Lock = field(default_factory=threading.Lock)


class StreamedFeatures:
    """A `FeatureSource` of a plan's samples, which servers compute when they are asked for, or ahead of that.

    A text that a server fails to give is asked of the next one, and that server rests for seconds that double. One that
    was away is checked again when it is back. Whose answer it is changes no state but for rounding.
    With `kept`, set before the first text, what is kept of earlier epochs is not asked for.

    Raises `UserError` where a server is not one of this target, and where a text fails as often as a request may.
    """

    kept: KeptFeatures | None = None

    def __init__(self, servers: Sequence[FeatureServer], target: Target) -> None:
        self.target = target
        self._servers = [_Work(server) for server in servers]
        self._changed = threading.Condition()
        self._stopped = False
        self._pool = ThreadPoolExecutor(REQUESTS * len(servers), "features")
        self._ahead: dict[str, list[Tensor]] = defaultdict(list)
        for work in self._servers:
            self._asked([work], lambda server: None)

    @torch.no_grad()
    def __call__(self, micro_batch: MicroBatch, batch: Batch) -> Features:
        ahead = self._ahead.pop(str(micro_batch), [])
        states = ahead.pop() if ahead else self._load(micro_batch, batch)
        if ahead:
            self._ahead[str(micro_batch)] = ahead
        states = states.to(self.target.device, self.target.dtype, non_blocking=True)
        layers = states[:, :, :-1].flatten(2) if states.shape[2] > 1 else None
        last = states[:, :, -1]
        return Features(last if self.kept else self.target.final_norm(last), layers)

    def read_ahead(self, micro_batch: MicroBatch, batch: Batch, pin_memory: bool) -> None:
        """Fetch what will be asked for; any number of threads may do so at once."""
        states = self._load(micro_batch, batch)
        self._ahead[str(micro_batch)].append(states.pin_memory() if pin_memory else states)

    def stop(self) -> None:
        """Ask the servers no more: texts that are waited for fail."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.kept:
            self.kept.stop()

    def _load(self, micro_batch: MicroBatch, batch: Batch) -> Tensor:
        """Return the states of a micro-batch, [B, T, A + 1, H], zeros in the padding."""
        texts = [[self._pool.submit(self._read, index) for index in row] for row in micro_batch]
        states: Tensor | None = None
        for number, row in enumerate(texts):
            start = 0
            for text in row:
                read = text.result()  # [tokens of the sample, A + 1, H]
                if states is None:
                    states = zeros_in_own_memory((*batch.token_ids.shape, *read.shape[1:]), read.dtype)
                states[number, start : start + len(read)] = read
                start += len(read)
        assert states is not None
        return states

    def _read(self, index: int) -> Tensor:
        """Return the states of a sample, [T, A + 1, H]; the last one is normed where they may be kept."""
        if self.kept and (kept := self.kept.read(index)) is not None:
            return kept
        states = self._asked(self._servers, lambda server: server.read_sample(index))
        return self.kept.keep(index, states) if self.kept else states

    def _asked(self, servers: list[_Work], ask: Callable[[FeatureServer], T]) -> T:
        """Return what a server answers, the one with the fewest open requests of those that do not rest."""
        num_attempts = http.ATTEMPTS * len(servers)
        for _ in range(num_attempts):
            work = self._begin(servers)
            try:
                with work.check:
                    if not work.checked:
                        work.server.check()
                        work.checked = True
                answer = ask(work.server)
                work.num_failures = 0
                return answer
            except PassingError as error:
                reason = first_line(error)
                self._rest(work, error)
            finally:
                self._end(work)
        raise UserError(
            f"{work.server.name} failed {num_attempts} times in a row, at last with: {reason}; what is written is "
            "kept: see to the server and give the same command again"
        )

    def _begin(self, servers: list[_Work]) -> _Work:
        """Return a server for a request, when one is there that does not rest."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if awake := [work for work in servers if work.rests_until <= now]:
                    chosen = min(awake, key=lambda work: work.num_open)
                    chosen.num_open += 1
                    return chosen
                self._changed.wait(min(work.rests_until for work in servers) - now)
        raise _Stopped

    def _end(self, work: _Work) -> None:
        with self._changed:
            work.num_open -= 1
            self._changed.notify_all()

    def _rest(self, work: _Work, error: PassingError) -> None:
        """Let a server rest after a failure. Requests that failed together count once."""
        work.server.endpoint.server.tell(first_line(error))
        with self._changed:
            now = time.monotonic()
            if work.rests_until <= now:
                work.rests_until = now + wait_after(error, work.num_failures)
                work.num_failures += 1
            if isinstance(error, NoAnswer):
                work.checked = False


def zeros_in_own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in pages of their own, which go back to the system when they are freed.

    What malloc has of several threads it keeps for tensors of other sizes, so that it grows for hundreds of steps.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def steps_ahead(bytes_per_step: float) -> int:
    """Return the number of steps whose features are fetched ahead: as many as `AHEAD_BYTES` hold, one at least."""
    return int(min(MOST_STEPS_AHEAD, max(1, AHEAD_BYTES // bytes_per_step)))
