"""The host's side of decoding: a queue of requests goes through a fixed number of rows.

A row that is done takes the next request, so that a list of texts of very different lengths keeps the batch full. On a
GPU the host runs one round ahead: it reads what happened in a round while the next one is computed.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.inference.decoding.batch_engine import RECORD_HEAD, BatchEngine
from draftsmith.inference.decoding.clock import PhaseClock
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.schedule import DraftLengths

ADMIT_SHARE = 8  # new requests wait until an eighth of the rows is free


@dataclass
class Request:
    """What was generated for one prompt."""

    stats: Stats
    token_ids: list[int] = field(default_factory=list)
    admitted: float = 0.0  # seconds, as the generation tells time
    first_token: float = 0.0
    first_round: float = 0.0  # when the first round after the prompt was read; 0 where there was none
    finished: float = 0.0


@dataclass
class Emission:
    """What one round, or reading the prompt, added to one request."""

    request: int  # place among the prompts
    token_ids: list[int]
    num_accepted: int  # of these tokens, from the left, those that the drafter had proposed


class Generation:
    """Decodes prompts: a list, and those added later. Call `step` while `running`."""

    def __init__(
        self,
        engine: BatchEngine,
        prompts: list[list[int]],
        request_ids: list[int],
        lag: int | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Takes all rows, whatever they held. `lag`: rounds that the host is ahead of what it has read; by default 1
        on a GPU and 0 on a CPU.

        `now` tells the time of what happens to a request, in seconds.
        """
        self.engine, self.prompts, self.request_ids, self._now = engine, list(prompts), list(request_ids), now
        engine.clear()
        on_gpu = engine.target.device.type == "cuda"
        self.lag = int(on_gpu) if lag is None else lag
        self.limits = [engine.settings.max_new_tokens] * len(prompts)  # of new tokens
        self.requests = [Request(Stats(engine.settings.shape.depth)) for _ in prompts]
        self.clock = PhaseClock(engine.target.device)
        self._waiting = deque(range(len(prompts)))
        self._owners: list[int | None] = [None] * engine.num_rows  # the request in each row
        self._unread: deque[_Unread] = deque()
        self._draft_lengths = DraftLengths(engine.settings.schedule, engine.settings.shape.depth)

    def add(self, prompt: list[int], request_id: int, max_new_tokens: int) -> None:
        """One more request, at any time. The engine must have room for it."""
        assert len(prompt) + max_new_tokens + self.engine.settings.shape.num_nodes < self.engine.num_slots
        self._waiting.append(len(self.prompts))
        self.prompts.append(prompt)
        self.request_ids.append(request_id)
        self.limits.append(max_new_tokens)
        self.requests.append(Request(Stats(self.engine.settings.shape.depth)))

    def running(self) -> bool:
        return bool(self._waiting) or self.num_running > 0

    @property
    def num_running(self) -> int:
        """Requests that are in rows, those waiting not among them."""
        return sum(owner is not None for owner in self._owners)

    @property
    def num_finished(self) -> int:
        return len(self.requests) - len(self._waiting) - self.num_running

    def step(self) -> list[Emission]:
        """Give free rows to waiting requests, or else run one round; then read what has happened by now."""
        if self._waiting and (rows := self._free_rows()):
            self._admit(rows)
            return self._read(0)
        running = [(row, owner) for row, owner in enumerate(self._owners) if owner is not None]
        draft_length = self._draft_lengths.next(len(running))
        self.clock.mark(None)
        draft = self.engine.draft(draft_length)
        self.clock.mark("draft")
        record = self.engine.verify(draft)
        self.clock.mark("verify")
        self._unread.append(_Unread(record, [(row, row, owner) for row, owner in running], draft_length))
        return self._read(self.lag)

    def _free_rows(self) -> list[int]:
        """Those to admit to now: all free ones, once they are enough to be worth a pass of the target."""
        free = [row for row, owner in enumerate(self._owners) if owner is None]
        enough = min(len(self._waiting), -(-len(self._owners) // ADMIT_SHARE))
        return free[: len(self._waiting)] if len(free) >= enough else []

    def _admit(self, rows: list[int]) -> None:
        taken = [self._waiting.popleft() for _ in rows]
        now = self._now()
        for row, request in zip(rows, taken, strict=True):
            self._owners[row] = request
            self.requests[request].admitted = now
        self.clock.mark(None)
        prompts, request_ids = [self.prompts[i] for i in taken], [self.request_ids[i] for i in taken]
        record = self.engine.admit(rows, prompts, request_ids, [self.limits[i] for i in taken])
        self.clock.mark("prefill")
        places = [(line, row, owner) for line, (row, owner) in enumerate(zip(rows, taken, strict=True))]
        self._unread.append(_Unread(record, places))

    def _read(self, lag: int) -> list[Emission]:
        """Read all but the newest `lag` records."""
        emissions = []
        while len(self._unread) > lag:
            unread = self._unread.popleft()
            lines = unread.lines()
            # a row may have finished in a round before
            places = [(line, row, owner) for line, row, owner in unread.places if self._owners[row] == owner]
            emissions += [self._book(row, owner, lines[line]) for line, row, owner in places]
            self._draft_lengths.finish_round(unread.draft_length, [lines[line][2] for line, _, _ in places])
        return emissions

    def _book(self, row: int, owner: int, line: list[int]) -> Emission:
        num_emitted, num_drafted, num_accepted, finished = line[:RECORD_HEAD]
        request, now = self.requests[owner], self._now()
        if request.token_ids:
            request.stats.count_round(num_drafted, num_accepted)
            request.first_round = request.first_round or now
        else:
            request.first_token = now
        token_ids = line[RECORD_HEAD : RECORD_HEAD + num_emitted]
        request.token_ids += token_ids
        request.stats.num_emitted_tokens += num_emitted
        if finished:
            request.finished = now
            self._owners[row] = None
            self.engine.drafter.remember(self.prompts[owner] + request.token_ids)
        return Emission(owner, token_ids, min(num_accepted, num_emitted))


class _Unread:
    """A record on its way to the host."""

    def __init__(self, record: Tensor, places: list[tuple[int, int, int]], draft_length: int = 0) -> None:
        """`places`: line of the record, row, and the request that was in it."""
        self.places, self.draft_length, self._record = places, draft_length, record
        self._arrived = None
        if record.device.type == "cuda":
            self._record = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
            self._record.copy_(record, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def lines(self) -> list[list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._record.tolist()
