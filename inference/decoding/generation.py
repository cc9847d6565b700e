"""The host's side of decoding: a queue of requests goes through a fixed number of rows.

A row that is done takes the next request, so that texts of very different lengths keep the batch full. On a GPU the
host runs one round ahead: it reads what happened in a round while the next one is computed.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.inference.decoding.batch_engine import RECORD_HEAD, BatchEngine, PromptReading
from draftsmith.inference.decoding.clock import PhaseClock
from draftsmith.inference.decoding.counters import Round, Stats
from draftsmith.inference.decoding.schedule import DraftLengths
from draftsmith.models import Drafter
from draftsmith.models.errors import out_of_memory

LESS_MEMORY = "lower the batch size, the draft length or the number of new tokens"
FAR = 2  # times the length of the longest text of a training
ADMIT_SHARE = 8  # new requests wait until an eighth of the rows is free


@dataclass
class Request:
    """A prompt and what was generated for it. Times are in seconds, as the generation tells time."""

    place: int  # among the requests of a generation
    prompt: list[int]
    request_id: int  # key of its noise
    max_new_tokens: int
    stats: Stats
    added: float  # when it began to wait
    token_ids: list[int] = field(default_factory=list)  # that were generated
    rounds: list[Round] = field(default_factory=list)  # after the prompt's
    admitted: float = 0.0
    first_token: float = 0.0
    first_round: float = 0.0  # end of the first round after reading the prompt; 0: there was none
    newest_token: float = 0.0
    longest_pause: float = 0.0  # between two times at which it got tokens
    finished: float = 0.0


@dataclass
class Emission:
    """The tokens that one round, or reading the prompt, added to a request."""

    request: int  # its place
    token_ids: list[int]
    num_accepted: int  # of these tokens, from the left, those that the drafter had proposed


@dataclass(frozen=True)
class Admission:
    """When waiting requests are given rows, and how their prompts are read."""

    chunk: int | None = None  # prompt tokens, of all rows, that are read between two rounds; None: all, others waiting
    most_wait: float = 0.0  # seconds that a request waits, at most, for others to be read with it


@dataclass
class _Reading:
    """Requests whose prompts are being read, with their rows."""

    rows: list[int]
    requests: list[Request]
    prompts: PromptReading


class Generation:
    """Decodes a list of prompts, and those added later. Call `step` while `running`."""

    def __init__(
        self,
        engine: BatchEngine,
        prompts: Sequence[list[int]] = (),
        request_ids: Sequence[int] | None = None,
        lag: int | None = None,
        now: Callable[[], float] = time.perf_counter,
        admission: Admission = Admission(),
    ) -> None:
        """Take all rows of the engine, whatever they held.

        `request_ids` key the noise of requests; by default they are the places of the prompts. `lag`: rounds that the
        host is ahead of what it has read; by default 1 on a GPU and 0 on a CPU. `now` tells the time in seconds.
        `admission`: when waiting requests get rows, and whether others decode while their prompts are read.
        """
        self.engine, self._now, self._admission = engine, now, admission
        on_gpu = engine.target.device.type == "cuda"
        self.lag = int(on_gpu) if lag is None else lag
        self.requests: list[Request] = []
        self.clock = PhaseClock(engine.target.device)
        self._waiting: deque[Request] = deque()
        self._running: list[Request | None] = [None] * engine.num_rows  # the request in each row
        self._reading: _Reading | None = None
        self._unread: deque[_Unread] = deque()
        self._draft_lengths = DraftLengths(engine.settings.schedule, engine.settings.shape.depth)
        for place, prompt in enumerate(prompts):
            request_id = place if request_ids is None else request_ids[place]
            self._enqueue(prompt, request_id, engine.settings.max_new_tokens)
        engine.take(self)

    def add(self, prompt: list[int], request_id: int, max_new_tokens: int) -> None:
        """Add a request, at any time and from any thread. The engine must have room for it."""
        assert len(prompt) + max_new_tokens + self.engine.settings.shape.num_nodes < self.engine.num_slots
        with self.engine.target.turn():
            self._enqueue(prompt, request_id, max_new_tokens)

    def _enqueue(self, prompt: list[int], request_id: int, max_new_tokens: int) -> None:
        stats = Stats(self.engine.settings.shape.depth)
        request = Request(len(self.requests), prompt, request_id, max_new_tokens, stats, self._now())
        self.requests.append(request)
        self._waiting.append(request)

    def running(self) -> bool:
        """Return whether a request waits or is in a row."""
        return bool(self._waiting) or self.num_running > 0

    @property
    def num_running(self) -> int:
        """Number of requests that are in rows, those waiting not counted."""
        return sum(request is not None for request in self._running)

    @property
    def num_finished(self) -> int:
        return len(self.requests) - len(self._waiting) - self.num_running

    def step(self) -> list[Emission]:
        """Read prompts into free rows where requests wait, else run one round; return what has happened by now.

        Where only a part of the prompts is read, a round of the other rows follows it.

        Raises `UserError` where memory runs out.
        """
        with self.engine.target.turn(), out_of_memory(LESS_MEMORY):
            return self._step()

    def _step(self) -> list[Emission]:
        assert self.engine.owner() is self, "another generation has taken the engine"
        if self._reading is None and self._waiting and (rows := self._free_rows()):
            self._reading = self._open_rows(rows)
        if self._reading is not None and self._read_prompts(self._reading):
            return self._read(0)
        running = self._decoding()
        draft_length = self._draft_lengths.next(len(running))
        self.clock.mark(None)
        draft = self.engine.draft(draft_length)
        self.clock.mark("draft")
        record = self.engine.verify(draft)
        self.clock.mark("verify")
        self._unread.append(_Unread(record, [(row, row, request) for row, request in running], draft_length))
        return self._read(self.lag)

    def _free_rows(self) -> list[int]:
        """Return the rows to admit to now: all free ones, once they are enough to be worth a pass of the target.

        While others run and a row would stay free, the request that waits longest waits for others to come.
        """
        free = [row for row, request in enumerate(self._running) if request is None]
        enough = min(len(self._waiting), -(-len(self._running) // ADMIT_SHARE))
        is_early = self._now() - self._waiting[0].added < self._admission.most_wait
        if len(free) < enough or (is_early and len(self._waiting) < len(free) < len(self._running)):
            return []
        return free[: len(self._waiting)]

    def _open_rows(self, rows: list[int]) -> _Reading:
        requests = [self._waiting.popleft() for _ in rows]
        now = self._now()
        for row, request in zip(rows, requests, strict=True):
            self._running[row], request.admitted = request, now
        prompts = self.engine.open_rows(
            rows,
            [request.prompt for request in requests],
            [request.request_id for request in requests],
            [request.max_new_tokens for request in requests],
        )
        return _Reading(rows, requests, prompts)

    def _decoding(self) -> list[tuple[int, Request]]:
        """Return the requests whose prompts are read, with their rows."""
        reading = self._reading.rows if self._reading else []
        return [
            (row, request) for row, request in enumerate(self._running) if request is not None and row not in reading
        ]

    def _read_prompts(self, reading: _Reading) -> bool:
        """Read on, to the end where nobody is to be kept waiting; return whether the prompts are read."""
        self.clock.mark(None)
        chunk = self._admission.chunk
        if chunk is None or not self._decoding():
            record: Tensor | None = self.engine.read_to_end(reading.prompts)
        else:
            record = self.engine.read_prompts(reading.prompts, max(1, chunk // len(reading.rows)))
        self.clock.mark("prefill")
        if record is None:
            return False
        places = zip(range(len(reading.rows)), reading.rows, reading.requests, strict=True)
        self._unread.append(_Unread(record, list(places)))
        self._reading = None
        return True

    def _read(self, lag: int) -> list[Emission]:
        """Read all but the newest `lag` records."""
        emissions = []
        while len(self._unread) > lag:
            unread = self._unread.popleft()
            lines = unread.lines()
            # a request may have finished in a round before
            places = [(line, row, request) for line, row, request in unread.places if self._running[row] is request]
            emissions += [self._book(row, request, lines[line]) for line, row, request in places]
            self._draft_lengths.finish_round(unread.draft_length, [lines[line][2] for line, _, _ in places])
        return emissions

    def _book(self, row: int, request: Request, line: list[int]) -> Emission:
        """Add what one line of a record says to its request."""
        num_emitted, num_drafted, num_accepted, finished = line[:RECORD_HEAD]
        now = self._now()
        if request.token_ids:
            request.stats.count_round(num_drafted, num_accepted)
            request.rounds.append(Round(len(request.token_ids), num_drafted, num_accepted))
            request.first_round = request.first_round or now
            request.longest_pause = max(request.longest_pause, now - request.newest_token)
        else:
            request.first_token = now
        request.newest_token = now
        token_ids = line[RECORD_HEAD : RECORD_HEAD + num_emitted]
        request.token_ids += token_ids
        request.stats.num_emitted_tokens += num_emitted
        if finished:
            request.finished = now
            self._running[row] = None
            self.engine.drafter.remember(request.prompt + request.token_ids)
        return Emission(request.place, token_ids, min(num_accepted, num_emitted))


class _Unread:
    """A record on its way to the host."""

    def __init__(self, record: Tensor, places: list[tuple[int, int, Request]], draft_length: int = 0) -> None:
        """`places`: a line of the record, the row that it is about, and the request that was in that row."""
        self.places, self.draft_length = places, draft_length
        on_gpu = record.device.type == "cuda"
        self._record = torch.empty(record.shape, dtype=record.dtype, pin_memory=on_gpu)
        self._record.copy_(record, non_blocking=True)  # a recorded round writes over what it returned before
        self._arrived = torch.cuda.Event() if on_gpu else None
        if self._arrived is not None:
            self._arrived.record()

    def lines(self) -> list[list[int]]:
        """Return the lines of the record. Waits until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._record.tolist()


def warn_of_length(drafter: Drafter, num_tokens: int) -> None:
    """Warn once where texts are so much longer than those of the training that fewer drafts may be accepted."""
    trained = drafter.trained_length
    if drafter.attends_to_text and trained is not None and num_tokens > FAR * trained:
        warnings.warn(
            f"this drafter was trained on texts of at most {trained} tokens, and decodes some of more than {FAR} times "
            "that, in which fewer drafts may be accepted: train it on texts as long as yours (prepare longer ones, and "
            "raise data.max_length if it is set), or use one that reads the last hidden state alone, such as medusa",
            stacklevel=2,
        )
