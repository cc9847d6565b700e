"""The speculative decoder: texts or token ids in, texts, token ids and counters out."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.counters import Round, Stats, total_of
from draftsmith.inference.decoding.generation import LESS_MEMORY, Generation, warn_of_length
from draftsmith.inference.decoding.schedule import AnySchedule, Confident
from draftsmith.inference.verification.acceptance_rules import SAMPLED_DRAFTS, VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError, out_of_memory, real_number, shown, whole_number
from draftsmith.models.ranges import LEAST_TEMPERATURE
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DDTree, DynamicTree, Shape, Tree
from draftsmith.models.target.chat_template import has_template, opened_question

SLOT_BLOCK = 64  # slots of a row are a multiple of it, so that an engine also fits texts of similar length


@dataclass
class OutputStats:
    """The counters of each request, and their total."""

    requests: list[Stats]

    @property
    def total(self) -> Stats:
        return total_of(self.requests)


@dataclass
class RequestTimes:
    """The times of one request, in seconds since its batch was given to the decoder."""

    first_token: float
    first_round: float | None  # end of the round after it; None where the text ended with its first token
    finished: float


@dataclass
class Timing:
    """The times of one batch in seconds, and of its phases in milliseconds over all rounds."""

    total: float
    to_first_token: float
    phases: dict[str, float]  # prefill, draft, verify, host
    requests: list[RequestTimes]


@dataclass
class Output:
    """The texts that were generated for a list of prompts, with counters and times."""

    token_ids: list[list[int]]  # without the prompts
    texts: list[str]
    stats: OutputStats
    timing: Timing
    rounds: list[list[Round]] = field(default_factory=list)  # of each prompt; empty where a serving engine decoded


@dataclass
class Piece:
    """A part of the text that one round added."""

    text: str
    drafted: bool  # proposed by the drafter and accepted; else the target's own token


@dataclass
class StreamedRound:
    """The text that one round of a single request added."""

    pieces: list[Piece]
    num_tokens: int
    num_accepted: int  # of these tokens, those that the drafter had proposed


class SpeculativeDecoder:
    """A target and a drafter that decode batches of prompts of any lengths together.

    Any thread may call it. Decoders that share a target take turns. `generate` and `decode` keep their turn until they
    return; a stream, or a generation that `start` returned, takes a turn for each round. Between its rounds it keeps
    only its batch engine, and other calls get engines of their own. What a suffix drafter remembers depends on the
    order of the calls, which changes what is drafted, and not which texts come out.
    """

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter
        self._engine: BatchEngine | None = None  # that of the last call

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "SpeculativeDecoder":
        """Load a target and a drafter; `drafter` is what `load_drafter` takes, such as a directory or `ngram`."""
        loaded = Target.from_pretrained(target, device, dtype)
        return cls(loaded, load_drafter(drafter, loaded))

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        draft_length: int = 4,
        tree: Tree | None = None,
        verification_mode: VerificationMode | None = None,
        seed: int = 0,
        stop_at_eos: bool = True,
        request_ids: list[int] | None = None,
        batch_size: int | None = None,
        schedule: AnySchedule | None = None,
        chat: bool = True,
    ) -> Output:
        """Decode all prompts, `batch_size` (by default all) at a time: a row that is done takes the next prompt.

        Temperature 0 is greedy decoding. Without a `verification_mode` it is `greedy` at temperature 0, else
        `probabilistic` where the drafter has probabilities and `one_hot` where it has none. The noise of a request is
        keyed by `seed` and its id (by default its place in `prompts`). Drafts have the shape of `tree`, or are chains
        of the length that `schedule` gives to each round, or of `draft_length`. A text goes through the target's chat
        template, where it has one, as the user's only turn; with `chat` false it is continued as it stands.

        Raises `UserError` for arguments of another type, for empty prompts, for prompts that leave no room in the
        target's context, for settings that the drafter cannot follow, and where memory runs out.
        """
        if batch_size is not None:
            batch_size = whole_number("batch_size", batch_size, 1)
        if schedule is not None and tree is not None:
            raise UserError("schedule: it sets the length of chains; leave out the tree")
        if tree is not None and not isinstance(tree, Tree):
            raise UserError(f"tree {shown(tree)}: give a StaticTree, a DynamicTree or a DDTree")
        if schedule is not None and not isinstance(schedule, AnySchedule):
            raise UserError(f"schedule {shown(schedule)}: give a Schedule, an Adaptive or a Confident one")
        draft_length = whole_number("draft_length", draft_length)
        settings = resolve_settings(
            self.drafter,
            Sampling(temperature, top_p, top_k),
            max_new_tokens,
            schedule or tree or draft_length,
            verification_mode,
            seed,
            stop_at_eos,
        )
        with self.target.turn():
            token_ids = self.token_ids(prompts, settings.max_new_tokens, chat)
            if request_ids is not None:
                request_ids = whole_numbers("request_ids", request_ids)
                if len(request_ids) != len(prompts):
                    raise UserError(f"request_ids: {len(request_ids)} for {len(prompts)} prompts: give one for each")
            return self.decode(token_ids, settings, request_ids, batch_size)

    def decode(
        self,
        prompts: list[list[int]],
        settings: GenerationSettings,
        request_ids: list[int] | None = None,
        batch_size: int | None = None,
    ) -> Output:
        """Decode prompts, given as token ids, as `generate` does, with settings that `resolve_settings` made."""
        with self.target.turn():
            return self.decode_on(self._engine_for_prompts(prompts, settings, batch_size), prompts, request_ids)

    def decode_on(self, engine: BatchEngine, prompts: list[list[int]], request_ids: list[int] | None = None) -> Output:
        """Decode prompts on an engine that `engine_for` returned and whose rows have slots for each of them."""
        with self.target.turn():
            start = time.perf_counter()
            generation = Generation(engine, prompts, request_ids)
            generation.step()
            first = time.perf_counter()
            while generation.running():
                generation.step()
            end = time.perf_counter()

        phases = {"draft": 0.0, "verify": 0.0, **generation.clock.milliseconds()}
        phases["host"] = max(0.0, (end - start) * 1000 - sum(phases.values()))
        requests = generation.requests
        times = [
            RequestTimes(
                request.first_token - start,
                request.first_round - start if request.first_round else None,
                request.finished - start,
            )
            for request in requests
        ]
        return Output(
            [request.token_ids for request in requests],
            [self.text(request.token_ids) for request in requests],
            OutputStats([request.stats for request in requests]),
            Timing(end - start, first - start, phases, times),
            [request.rounds for request in requests],
        )

    def start(
        self,
        prompts: list[list[int]],
        settings: GenerationSettings,
        request_ids: list[int] | None = None,
        batch_size: int | None = None,
    ) -> Generation:
        """Return a generation of prompts that fit the target's context; the caller steps it."""
        with self.target.turn():
            return Generation(self._engine_for_prompts(prompts, settings, batch_size), prompts, request_ids)

    def _engine_for_prompts(
        self, prompts: list[list[int]], settings: GenerationSettings, batch_size: int | None
    ) -> BatchEngine:
        return self.engine_for(settings, min(len(prompts), batch_size or len(prompts)), max(map(len, prompts)))

    def engine_for(self, settings: GenerationSettings, num_rows: int, longest_prompt: int) -> BatchEngine:
        """Return an engine of `num_rows` rows, each with slots for a prompt of `longest_prompt` tokens and its answer.

        It is the last call's engine where that fits, since on a GPU it holds recorded rounds; else a new one. Raises
        `UserError` for drafts beyond the target's context, and where memory runs out.
        """
        self._check_fits(settings.shape)
        warn_of_length(self.drafter, longest_prompt + settings.max_new_tokens)
        needed = longest_prompt + settings.max_new_tokens + settings.shape.num_nodes + 1
        with self.target.turn(), out_of_memory(LESS_MEMORY):
            if self._engine is None or not self._engine.follow(settings, num_rows, needed):
                self._engine = None  # frees it before the new one is made
                num_slots = -(-needed // SLOT_BLOCK) * SLOT_BLOCK
                self._engine = BatchEngine(self.target, self.drafter, settings, num_rows, num_slots)
            return self._engine

    def _check_fits(self, shape: Shape) -> None:
        """Raise `UserError` for drafts beyond the target's context, and for trees wider than the vocabulary."""
        if shape.depth >= self.target.context:
            raise UserError(
                f"draft_length: {shape.depth} tokens in a row do not fit into the target's context of "
                f"{self.target.context}: draft fewer"
            )
        ids = self.drafter.draft_to_target()
        num_tokens = self.target.vocab_size if ids is None else len(ids)
        if not isinstance(shape, Chain) and shape.width > num_tokens:
            raise UserError(f"tree: {shape.width} children of a node, of {num_tokens} tokens: give fewer")

    def stream(
        self,
        prompt: str | list[int],
        max_new_tokens: int,
        sampling: Sampling,
        draft: int | AnySchedule,
        seed: int,
        chat: bool = True,
    ) -> Iterator[StreamedRound]:
        """Decode one prompt; yield the tokens that reading the prompt adds, then those of each round.

        `chat` is as in `generate`, and `draft` as in `resolve_settings`. Raises `UserError` as `generate` does.
        """
        settings = resolve_settings(self.drafter, sampling, max_new_tokens, draft, seed=seed)
        with self.target.turn():
            token_ids = self.token_ids([prompt], settings.max_new_tokens, chat)
            generation = Generation(self.engine_for(settings, 1, len(token_ids[0])), token_ids, lag=0)
        return self.stream_rounds(generation)

    def stream_rounds(self, generation: Generation) -> Iterator[StreamedRound]:
        """Run a generation of one request, whose lag is 0, as `stream` does."""
        new_ids: list[int] = []
        drafted: list[bool] = []  # whether each new token was proposed by the drafter
        num_written = 0  # characters in earlier pieces
        while generation.running():
            with self.target.turn():
                (emission,) = generation.step()
                num_known = len(new_ids)
                new_ids += emission.token_ids
                drafted += [i < emission.num_accepted for i in range(len(emission.token_ids))]
                pieces = self._pieces(new_ids, drafted, num_known, num_written, done=not generation.running())
            num_written += sum(len(piece.text) for piece in pieces)
            yield StreamedRound(pieces, len(emission.token_ids), emission.num_accepted)

    def _pieces(self, ids: list[int], drafted: list[bool], start: int, num_written: int, done: bool) -> list[Piece]:
        """Return the text of the tokens from `start` on, in pieces that are either drafted or the target's own.

        `num_written` characters of the text are already written. A token that ends within a character is kept back
        until the rest of that character follows.
        """
        pieces = []
        for end in range(start + 1, len(ids) + 1):
            if end < len(ids) and drafted[end] == drafted[end - 1]:
                continue
            text = self.text(ids[:end])
            if text.endswith("\N{REPLACEMENT CHARACTER}") and not (done and end == len(ids)):
                continue
            pieces.append(Piece(text[num_written:], drafted[end - 1]))
            num_written = len(text)
        return pieces

    def text(self, token_ids: list[int]) -> str:
        """Return the text of tokens without special tokens; an empty one where the target has no tokenizer."""
        if self.target.tokenizer is None:
            return ""
        return str(self.target.tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_ids(
        self, prompts: Sequence[str | Sequence[int]], max_new_tokens: int, chat: bool = True
    ) -> list[list[int]]:
        """Return the token ids of prompts. Raises `UserError` for one that cannot be decoded, by its number from 1.

        Token ids may be a list or tuple, an array or a tensor.
        """
        if not isinstance(prompts, list | tuple) or any(isinstance(prompt, Integral) for prompt in prompts):
            raise UserError("prompts: give a list of prompts, also of a single one")
        if not prompts:
            raise UserError("no prompts: give at least one")
        return [self._token_ids(f"prompt {i}", prompt, max_new_tokens, chat) for i, prompt in enumerate(prompts, 1)]

    def _token_ids(self, name: str, prompt: str | Sequence[int], max_new_tokens: int, chat: bool) -> list[int]:
        if isinstance(prompt, str):
            tokenizer = self.target.tokenizer
            if tokenizer is None:
                raise UserError(f"{name} is a text, and the target has no tokenizer: give token ids")
            if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
                raise UserError(f"{name} holds a half of a character (a lone surrogate): remove it")
            in_chat = chat and has_template(tokenizer)
            ids = opened_question(self.target, prompt) if in_chat else self.target.encode(prompt)
        else:
            ids = whole_numbers(name, prompt)
        if not ids:
            raise UserError(f"{name} is empty: give at least one token")
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            last = self.target.vocab_size - 1
            raise UserError(f"{name} has token ids from {min(ids)} to {max(ids)}: the target knows 0 to {last}")
        if len(ids) + max_new_tokens > self.target.context:
            raise UserError(
                f"{name} has {len(ids)} tokens, which with {max_new_tokens} new ones exceeds the target's context of "
                f"{self.target.context}: shorten it or lower max_new_tokens"
            )
        return ids


# --- checks of arguments


def whole_numbers(name: str, values: Any) -> list[int]:
    """Return a list, tuple, array or tensor of whole numbers as a list. Raises `UserError` for anything else."""
    numbers = values.tolist() if isinstance(values, np.ndarray | torch.Tensor) else values
    if not isinstance(numbers, list | tuple):
        raise UserError(f"{name} {shown(values)}: give a list of whole numbers")
    return [whole_number(f"{name}:", number) for number in numbers]


def check_sampling(temperature: float, top_p: float, top_k: int) -> Sampling:
    """Return the sampling of these settings. Raises `UserError` for values out of range, or without an effect."""
    temperature, top_p = real_number("temperature", temperature), real_number("top_p", top_p)
    top_k = whole_number("top_k", top_k)
    if temperature != 0 and not temperature >= LEAST_TEMPERATURE:
        raise UserError(f"temperature {temperature}: give 0 (greedy), or {LEAST_TEMPERATURE} or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p {top_p}: give more than 0 and at most 1")
    if top_k < 0:
        raise UserError(f"top_k {top_k}: give 0 (off) or more")
    if temperature == 0 and (top_p < 1 or top_k):
        raise UserError("top_p and top_k have no effect at temperature 0: leave them out or raise the temperature")
    return Sampling(temperature, top_p, top_k)


def resolve_settings(
    drafter: Drafter,
    sampling: Sampling,
    max_new_tokens: int,
    draft: int | Shape | AnySchedule = 4,
    verification_mode: VerificationMode | None = None,
    seed: int = 0,
    stop_at_eos: bool = True,
    synthetic_rates: tuple[float, ...] = (),
) -> GenerationSettings:
    """Return the settings that `SpeculativeDecoder.start` takes.

    `draft` is the length of a chain, a schedule of lengths, or a tree. With a drafter that proposes nothing, decoding
    is plain whatever the draft and the mode are. Raises `UserError` for wrong types and numbers, and for what the
    drafter cannot do.
    """
    if not isinstance(sampling, Sampling):
        raise UserError(f"sampling {shown(sampling)}: give a Sampling")
    sampling = check_sampling(sampling.temperature, sampling.top_p, sampling.top_k)
    max_new_tokens, seed = whole_number("max_new_tokens", max_new_tokens, 1), whole_number("seed", seed)
    if not isinstance(stop_at_eos, bool):
        raise UserError(f"stop_at_eos {shown(stop_at_eos)}: give True or False")
    schedule = draft if isinstance(draft, AnySchedule) else None
    length = draft.longest if isinstance(draft, AnySchedule) else draft
    shape = length if isinstance(length, Shape) else Chain(whole_number("draft_length", length))
    if drafter.max_draft_length == 0:
        schedule, shape, verification_mode, synthetic_rates = None, Chain(0), None, ()
    check_shape(shape, drafter)
    shape = drafter.own_shape(shape.depth) if isinstance(shape, Chain) else shape
    if schedule and not isinstance(shape, Chain):
        raise UserError(f"schedule: {drafter.kind} drafts no chains; leave it out and set draft_length")
    if isinstance(schedule, Confident) and not drafter.knows_confidence:
        raise UserError(f"confident schedule: {drafter.kind} has no probabilities; leave it out and set draft_length")
    mode = resolve_mode(verification_mode, sampling, drafter, shape)
    if bool(synthetic_rates) != (mode == "synthetic"):
        raise UserError("synthetic acceptance needs both verification_mode synthetic and its rates")
    if not all(0 <= real_number("synthetic acceptance", rate) <= 1 for rate in synthetic_rates):
        raise UserError(f"synthetic acceptance {shown(synthetic_rates)}: give rates from 0 to 1")
    return GenerationSettings(max_new_tokens, sampling, shape, mode, seed, stop_at_eos, synthetic_rates, schedule)


def resolve_mode(mode: VerificationMode | None, sampling: Sampling, drafter: Drafter, shape: Shape) -> VerificationMode:
    """Return the verification mode to use. Raises `UserError` where the one asked for does not fit."""
    is_chain = isinstance(shape, Chain)
    if mode is None:
        sampled = "probabilistic" if drafter.can_sample and is_chain else "one_hot"
        return "greedy" if sampling.greedy else sampled  # type: ignore[return-value]
    if not isinstance(mode, str) or mode not in get_args(VerificationMode):
        raise UserError(f"verification_mode {shown(mode)}: give one of {', '.join(get_args(VerificationMode))}")
    if mode in SAMPLED_DRAFTS and not drafter.can_sample:
        raise UserError(f"verification_mode {mode}: {drafter.kind} has no probabilities; use one_hot")
    if mode in ("probabilistic", "block") and not is_chain:
        raise UserError(f"verification_mode {mode} verifies chains: leave out the tree, or use without_replacement")
    if mode == "without_replacement" and isinstance(shape, DynamicTree | DDTree):
        raise UserError(
            "verification_mode without_replacement: a tree that grows anew each round keeps the likeliest of its "
            "nodes, which are no sample; give a static tree, or use one_hot"
        )
    if mode != "synthetic" and sampling.greedy != (mode == "greedy"):
        raise UserError(f"verification_mode {mode} needs a temperature {'of 0' if mode == 'greedy' else 'above 0'}")
    return mode


def check_shape(shape: Shape, drafter: Drafter) -> None:
    """Raise `UserError` for a shape of drafts that the drafter cannot make."""
    if not isinstance(shape, Chain) and not drafter.can_branch:
        raise UserError(f"tree: {drafter.kind} drafts chains only; leave it out and set draft_length")
    if isinstance(shape, DDTree) and not drafter.independent_depths:
        raise UserError(
            f"tree NODES,DEPTH: what {drafter.kind} drafts at a depth hangs on what it drafted before; give "
            "NODES,DEPTH,WIDTH"
        )
    name = "draft_length" if isinstance(shape, Chain) else "tree: depth"
    most = drafter.max_draft_length
    if most is not None and shape.depth > most:
        raise UserError(f"{name} {shape.depth}: this {drafter.kind} drafter drafts up to {most} tokens in a row")
    if shape.depth < 1 and most != 0:
        raise UserError(f"{name} {shape.depth}: give at least 1, or the drafter none")
