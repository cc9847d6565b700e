"""The device's side of decoding: a fixed number of rows, each with one request's text, cache and state.

`BatchEngine.open_rows` puts prompts into free rows, and `read_prompts` reads them in parts, with rounds of other rows
in between; `read_to_end` reads all that is left. A round is `verify(draft())`: the drafter proposes, the target reads
the draft in one pass, a verification rule accepts, and the engine commits. On a GPU nothing in a round depends on
values that the host would have to wait for: shapes are fixed, ends of texts and length limits are decided here, and the
host gets one small tensor, the record of what happened.

Shapes: B rows, b rows that are being admitted, M slots a row, N drafted tokens, D nodes on the longest path of a draft,
P tokens of the longest prompt, H hidden width, V vocabulary.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.inference.decoding import round_steps
from draftsmith.inference.decoding.graphs import CALLS_TO_RECORD, RecordedCalls, can_be_recorded
from draftsmith.inference.decoding.round_steps import Ends, ends_a_text
from draftsmith.inference.decoding.schedule import AnySchedule, Confident
from draftsmith.inference.verification import acceptance_rules
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.drafter_parts.base import Drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft, chain
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.sampling.drawing import cut, uniforms
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream, sample
from draftsmith.models.sampling.trees import Chain, Shape
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import chain_window
from draftsmith.models.target.target import Features, Target

PREFILL_CHUNK = 512  # prompt tokens a row that the target reads at once


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of decoding a batch of requests; `resolve_settings` makes those that fit a drafter."""

    max_new_tokens: int = 128
    sampling: Sampling = Sampling()
    shape: Shape = Chain(4)
    verification_mode: acceptance_rules.VerificationMode = "greedy"
    seed: int = 0
    stop_at_eos: bool = True
    synthetic_rates: tuple[float, ...] = ()  # conditional acceptance rates by depth, for verification mode synthetic
    schedule: AnySchedule | None = None  # the shape is then a chain of its longest draft length


RECORD_HEAD = 4  # numbers before the tokens in a record's line: emitted, drafted, accepted, and whether finished
RoundKind = tuple[int, int]  # nodes of a draft, columns of the last pass that a plain step reads; each has its graph


@dataclass
class PromptReading:
    """Prompts that are being read into rows, as far as they are read."""

    rows: Tensor  # [b] int64
    token_ids: Tensor  # [b, P + 1] int64, with room for the first token of each answer
    lengths: Tensor  # [b] int64, of the prompts
    limits: Tensor  # [b] int64, tokens that the answers get at most
    num_read: int = 0  # tokens of each prompt, padding among them
    newest: Features | None = None  # [b, 1, ...] of the last token of each prompt that was read to its end


class Owner(Protocol):
    """Whoever decodes on an engine."""

    def running(self) -> bool: ...


class BatchEngine:
    """Decodes a batch of requests, one in each row.

    A row is free until a request is admitted to it, and again when its record says that the request is finished.
    """

    def __init__(
        self, target: Target, drafter: Drafter, settings: GenerationSettings, num_rows: int, num_slots: int
    ) -> None:
        """Allocate all tensors. The `num_slots` of a row hold a prompt, its answer and a whole draft beyond it."""
        self.target, self.drafter, self.settings = target, drafter, settings
        self.num_rows, self.num_slots = num_rows, num_slots
        self.rules, self.round_steps = rules_on(target.device), round_steps_on(target.device)
        device, depth = target.device, settings.shape.depth
        self.cache = SlotCache(num_rows, num_slots, settings.shape.num_nodes + 1)
        rates = [*settings.synthetic_rates, *[0.0] * depth][:depth]  # 0 for depths without one
        self.synthetic_rates = torch.tensor(rates, device=device)
        self.numbers = torch.arange(settings.shape.num_nodes + 1, device=device)  # 0, 1, ... of nodes and of depths
        self.eos = torch.tensor(target.eos_token_ids if settings.stop_at_eos else [], device=device)
        self.limits = torch.full((num_rows,), 2, device=device)  # [B] length at which a text is cut
        self.finished = torch.ones(num_rows, dtype=torch.bool, device=device)
        width, num_layers = target.hidden_size, len(drafter.layer_ids)
        layers = torch.zeros(num_rows, depth + 1, num_layers * width, dtype=target.dtype, device=device)
        hidden = torch.zeros(num_rows, depth + 1, width, dtype=target.dtype, device=device)
        self.state = DecodingState(
            token_ids=torch.zeros(num_rows, num_slots, dtype=torch.int64, device=device),
            lengths=torch.full((num_rows,), 2, device=device),
            features=Features(hidden, layers if num_layers else None),
            positions=torch.arange(depth + 1, device=device).repeat(num_rows, 1),
            next_ids=torch.zeros(num_rows, depth + 1, dtype=torch.int64, device=device),
            newest_column=torch.zeros(num_rows, dtype=torch.int64, device=device),
            sampling=settings.sampling,
            noise=Noise(settings.seed, torch.zeros(num_rows, dtype=torch.int64, device=device)),
            sample_drafts=settings.verification_mode in acceptance_rules.SAMPLED_DRAFTS,
            cache=drafter.new_cache(num_rows, num_slots, settings.shape),
            least_confidence=settings.schedule.least if isinstance(settings.schedule, Confident) else 0.0,
        )
        if drafter.reads_predictions:
            columns = settings.shape.num_nodes + 1
            self.state.predictions = torch.full((num_rows, columns), NO_TOKEN, device=device)
        self.owner: Callable[[], Owner | None] = lambda: None
        self._num_columns = 1  # columns of the features that the target's last pass filled
        self._num_unread = 0  # newest tokens of a row, at most, that the drafter has still to read from the text
        self.fixed_shapes = runs_kernels(device)  # a round computes all rows and slots; else no more than those in use
        # a recorded verification reads the tensors of a recorded draft: both are recorded, or neither is
        records = device.type == "cuda" and can_be_recorded(drafter) and can_be_recorded(target.model)
        self.recorded = RecordedCalls(device, records)

    def follow(self, settings: GenerationSettings, num_rows: int, num_slots: int) -> bool:
        """Take on other settings where this engine can decode with them, and return whether it can.

        Seed and length limit may differ from those before, since no recorded round holds them.
        """
        alike = replace(self.settings, seed=settings.seed, max_new_tokens=settings.max_new_tokens) == settings
        if self.in_use or not alike or self.num_rows != num_rows or self.num_slots < num_slots:
            return False
        self.settings = settings
        self.state.noise.reseed(settings.seed)
        return True

    @property
    def in_use(self) -> bool:
        """Whether a generation that is still running has taken the rows."""
        owner = self.owner()
        return owner is not None and owner.running()

    def take(self, owner: Owner) -> None:
        """Free all rows for a generation, which owns them until it ends or nothing refers to it any more."""
        assert not self.in_use
        self.owner = weakref.ref(owner)
        self.finished.fill_(True)
        self._num_unread = 0

    def warm_up(self) -> None:
        """Run each kind of round that the settings can ask for, until it is recorded."""
        schedule = self.settings.schedule
        draft_lengths = schedule.lengths if schedule else (self.settings.shape.depth,)
        for draft_length in draft_lengths:
            for _ in range(CALLS_TO_RECORD):
                self.verify(self.draft(draft_length))
                if 0 in draft_lengths:  # a plain step is recorded for each round that can come before it
                    self.verify(self.draft(0))

    def open_rows(
        self, rows: list[int], prompts: list[list[int]], request_ids: list[int], limits: list[int] | None = None
    ) -> PromptReading:
        """Put prompts into free rows, for `read_prompts` to read.

        `limits` are the numbers of tokens that requests get at most, by default that of the settings for each.
        Until they are read their rows stay free for rounds, which write behind the prompts and so spoil nothing.
        """
        device = self.target.device
        token_ids = torch.zeros(len(prompts), max(map(len, prompts)) + 1, dtype=torch.int64)
        for row, prompt in zip(token_ids, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        reading = PromptReading(
            rows=torch.tensor(rows, device=device),
            token_ids=token_ids.to(device),
            lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
            limits=torch.tensor(limits or [self.settings.max_new_tokens] * len(rows), device=device),
        )
        self.state.noise.assign(reading.rows, torch.tensor(request_ids, device=device))
        self.state.token_ids[reading.rows, : token_ids.shape[1]] = reading.token_ids
        self._place(reading)
        return reading

    def read_to_end(self, reading: PromptReading) -> Tensor:
        """Read all that is left of some prompts; return the record of their rows, int64 [b, 5]."""
        while (record := self.read_prompts(reading)) is None:
            pass
        return record

    def _place(self, reading: PromptReading) -> None:
        """Let the next round of these rows be the first one behind their prompts."""
        state, first = self.state, reading.lengths[:, None] - 1
        state.lengths[reading.rows] = reading.lengths + 1
        state.positions[reading.rows] = first + torch.arange(state.positions.shape[1], device=first.device)
        state.newest_column[reading.rows] = 0

    @torch.no_grad()
    def read_prompts(self, reading: PromptReading, most: int = PREFILL_CHUNK) -> Tensor | None:
        """Let target and drafter read up to `most` more tokens of each prompt.

        Where these were the last, each row gets its first token. Returns the record of the rows then, int64 [b, 5],
        and None before.
        """
        cache, drafter_cache = self.cache, self.state.cache
        start = reading.num_read
        reading.num_read = end = min(start + most, reading.token_ids.shape[1] - 1)
        self._limit_reading(end)
        if len(reading.rows) < self.num_rows:
            cache, drafter_cache = cache.rows(reading.rows), drafter_cache and drafter_cache.rows(reading.rows)
        num_text = (reading.lengths - start).clamp(0, end - start)
        window = chain_window(torch.full_like(reading.lengths, start), end - start, num_text)
        features = self.target.run(reading.token_ids[:, start:end], window, cache, self.drafter.layer_ids)
        self.drafter.prefill(drafter_cache, reading.token_ids, features, window)
        column = reading.lengths - 1 - start
        here = features.gather(column.clamp(0, end - start - 1)[:, None])
        reading.newest = here if reading.newest is None else here.where(column >= 0, reading.newest)
        return self._first_tokens(reading, reading.newest) if end == reading.token_ids.shape[1] - 1 else None

    def _first_tokens(self, reading: PromptReading, newest: Features) -> Tensor:
        """Give each row its first token, behind the features [b, 1, ...] of its prompt. Return their record."""
        rows, lengths, state = reading.rows, reading.lengths, self.state
        logits = self.target.logits(newest.last_hidden)
        if self.settings.sampling.greedy:
            first = logits.argmax(-1)  # [b, 1]
        else:
            coins = state.noise.uniforms(lengths[:, None], Stream.TARGET, rows=rows)
            first = sample(cut(logits, self.settings.sampling).softmax(-1), coins)
        finished = ends_a_text(first[:, 0], self.eos) | (reading.limits == 1)
        self._place(reading)
        state.token_ids[rows, lengths] = first[:, 0]
        state.next_ids[rows, 0] = first[:, 0]
        state.features.put(newest, rows)
        if state.predictions is not None:
            state.predictions[rows] = NO_TOKEN
        self.finished[rows] = finished
        self.limits[rows] = lengths + reading.limits
        head = torch.zeros(len(rows), RECORD_HEAD, dtype=torch.int64, device=first.device)
        head[:, 0], head[:, 3] = 1, finished
        return torch.cat([head, first], 1)

    def draft(self, draft_length: int | None = None) -> Draft:
        """Run the first half of a round: return a draft for every row, of the settings' shape or a shorter chain.

        Length 0 makes a plain step. The drafter's cache is filled all the same.
        """
        whole = self.settings.shape
        shape = whole if draft_length in (None, whole.depth) else Chain(draft_length)
        assert shape == whole or (isinstance(whole, Chain) and shape.depth < whole.depth)
        if shape.num_nodes and self._num_unread:
            self._catch_up()
        elif not shape.num_nodes and self.drafter.prefills_from_tokens:
            self._num_unread += 1
        kind = self._kind_of_round(shape.num_nodes)
        return self.recorded(("draft", *kind), self._propose, shape, kind[1])

    def verify(self, draft: Draft) -> Tensor:
        """Run the second half of a round: read the draft with the target, accept, and commit.

        Returns the record of the rows that were computed, int64 [B, 5 + D]: per row how many tokens were emitted,
        drafted and accepted, whether it is finished, and the tokens.
        """
        record = self.recorded(("verify", *self._kind_of_round(draft.tokens.shape[1])), self._verify, draft)
        self._num_columns = draft.depth + 1
        return record

    def _kind_of_round(self, num_nodes: int) -> RoundKind:
        """Return the kind of a round with so many drafted nodes. A plain step reads the columns of the last pass."""
        return num_nodes, 0 if num_nodes else self._num_columns

    def _num_computed(self) -> int:
        """Return how many rows, from the left, a round computes: all, or those up to the last running one."""
        if self.fixed_shapes or self.finished.all():
            return self.num_rows
        return int((~self.finished).nonzero()[-1]) + 1

    def _limit_reading(self, longest: int) -> None:
        """Let attention read no slots beyond the drafts of texts that have at most `longest` tokens.

        The kernel of a GPU skips by itself what no token sees.
        """
        if not self.fixed_shapes:
            self.cache.num_seen = min(self.num_slots, longest + self.settings.shape.num_nodes)

    @torch.no_grad()
    def _propose(self, shape: Shape, num_columns: int) -> Draft:
        state = self.state.first(self._num_computed())
        if shape.num_nodes:
            return self.drafter.propose(state, shape)
        if not self.drafter.prefills_from_tokens:
            self.drafter.read_last_pass(state, num_columns)
        return chain(state.token_ids[:, :0])

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Let the drafter read all but the newest of the tokens that were committed since it last drafted.

        These are the tokens of plain steps and of the round before. Rows that have read some of them read them again,
        which changes nothing.
        """
        state = self.state.first(self._num_computed())
        count = min(self._num_unread + self.settings.shape.depth, self.num_slots)
        first = (state.lengths - 1 - count).clamp(min=0)
        for start in range(0, count, PREFILL_CHUNK):
            window = chain_window(first + start, min(PREFILL_CHUNK, count - start))
            self.drafter.prefill(state.cache, state.token_ids, state.features, window)
        self._num_unread = 0

    @torch.no_grad()
    def _verify(self, draft: Draft) -> Tensor:
        num_computed = len(draft.tokens)
        state = self.state.first(num_computed)
        if not self.fixed_shapes and not self.finished.all():
            self._limit_reading(int(self.state.lengths[~self.finished].max()))
        cache = self.cache if num_computed == self.num_rows else self.cache.rows(slice(num_computed))
        tokens, window = self.round_steps.open_round(state.token_ids, state.lengths, draft)
        features = self.target.run(tokens, window, cache, self.drafter.layer_ids)
        logits = self.target.logits(features.last_hidden)  # [B, N + 1, V] of what follows each column of the window
        verified = self._accept(state, logits, draft)
        if state.predictions is not None:
            state.predictions.copy_(logits.argmax(-1))
        if not draft.is_chain:
            cache.keep_path(window.prefix, verified.path)
        ends = Ends(self.limits[:num_computed], self.eos, self.finished[:num_computed])
        return self.round_steps.close_round(state, ends, draft, verified, features)

    def _accept(self, state: DecodingState, logits: Tensor, draft: Draft) -> Verified:
        """Apply the verification rule of the settings to a draft and the target's logits [B, N + 1, V]."""
        mode, rules = self.settings.verification_mode, self.rules
        nodes = draft.tokens, draft.parents, draft.depth
        if mode == "greedy":
            return rules.greedy(logits, *nodes)
        coins = uniforms(state.noise, state.lengths[:, None], Stream.ACCEPT, self.numbers[: draft.tokens.shape[1]])
        if mode == "synthetic":
            return acceptance_rules.synthetic(
                logits, *nodes, self.synthetic_rates[: draft.depth], coins[:, : draft.depth]
            )
        logits = cut(logits, self.settings.sampling)
        if mode == "typical":
            return rules.typical(logits, *nodes)
        positions = state.lengths[:, None] + self.numbers[: draft.depth + 1]
        draws = uniforms(state.noise, positions, Stream.TARGET)
        if mode == "one_hot" or not draft.depth:  # without a draft, each of the modes below draws from p, too
            return rules.one_hot(logits, *nodes, draws)
        assert draft.logits is not None
        if mode == "without_replacement":
            return rules.without_replacement(logits, draft.logits, *nodes, coins, draws)
        rule = rules.block if mode == "block" else rules.probabilistic
        return rule(logits, draft.logits, draft.tokens, coins, draws)


def rules_on(device: torch.device) -> ModuleType:
    """Return the module of the verification rules: on a GPU the kernels, else their specification."""
    if not runs_kernels(device):
        return acceptance_rules
    from draftsmith.inference.verification import acceptance_kernels  # needs triton

    return acceptance_kernels


def round_steps_on(device: torch.device) -> ModuleType:
    """Return the module that opens and closes a round: on a GPU the kernels, else their plain form."""
    if not runs_kernels(device):
        return round_steps
    from draftsmith.inference.decoding import round_kernels  # needs triton

    return round_kernels
