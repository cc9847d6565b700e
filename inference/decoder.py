"""The speculative decoder: texts or token ids in, texts, token ids and counters out."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.inference.clock import wall_clock
from draftsmith.inference.generation import Generation, GenerationSettings
from draftsmith.inference.stats import Stats
from draftsmith.inference.verify import VerificationMode
from draftsmith.models import Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling import Sampling
from draftsmith.models.trees import Chain, DynamicTree, Shape, StaticTree


@dataclass
class OutputStats:
    requests: list[Stats]

    @property
    def total(self) -> Stats:
        return functools.reduce(Stats.__add__, self.requests)


@dataclass
class Timing:
    """Of one batch, in seconds; phases in milliseconds over all rounds."""

    total: float
    to_first_token: float
    phases: dict[str, float]  # draft, verify, host


@dataclass
class Output:
    token_ids: list[list[int]]  # what was generated, the prompt not among it
    texts: list[str]
    stats: OutputStats
    timing: Timing


@dataclass
class Piece:
    """Text that one round added."""

    text: str
    drafted: bool  # proposed by the drafter and accepted; else the target's own token


@dataclass
class StreamedRound:
    """What one round of a single request emitted."""

    pieces: list[Piece]
    num_tokens: int
    num_accepted: int  # of them, tokens that the drafter had proposed


class SpeculativeDecoder:
    """A target and a drafter that decode batches of ragged prompts together."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> "SpeculativeDecoder":
        """Load both. `drafter` is a checkpoint directory, a Hub name, `ngram` or `none`."""
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
        tree: StaticTree | DynamicTree | None = None,
        verification_mode: VerificationMode | None = None,
        seed: int = 0,
        stop_at_eos: bool = True,
        request_ids: list[int] | None = None,
    ) -> Output:
        """Decode all prompts as one batch.

        Temperature 0 is greedy. `verification_mode` None takes `greedy` at temperature 0, else `probabilistic` where
        the drafter has probabilities and `one_hot` where it has not. A request's noise is keyed by `seed` and its id
        (by default its place in `prompts`). Drafts have the shape of `tree`, or are chains of `draft_length`.

        Raises `UserError` for empty prompts, prompts that leave no room in the target's context, and settings that
        the drafter cannot follow.
        """
        sampling = check_sampling(temperature, top_p, top_k)
        mode = resolve_mode(verification_mode, sampling, self.drafter)
        shape = tree or Chain(0 if self.drafter.max_draft_length == 0 else draft_length)
        check_shape(shape, self.drafter)
        settings = GenerationSettings(max_new_tokens, sampling, shape, mode, seed, stop_at_eos)
        token_ids = [self.encode(prompt) for prompt in prompts]
        self.check_prompts(token_ids, max_new_tokens)

        start = wall_clock(self.target.device)
        generation = Generation(
            self.target, self.drafter, token_ids, settings, request_ids or list(range(len(token_ids)))
        )
        generation.prefill()
        first = wall_clock(self.target.device)
        while generation.running():
            generation.round()
        new_ids, stats = generation.outputs()
        end = wall_clock(self.target.device)

        phases = {"draft": 0.0, "verify": 0.0, **generation.phase_milliseconds()}
        phases["host"] = max(0.0, (end - first) * 1000 - sum(phases.values()))
        timing = Timing(end - start, first - start, phases)
        return Output(new_ids, [self.decode(ids) for ids in new_ids], OutputStats(stats), timing)

    def stream(
        self, prompt: str | list[int], max_new_tokens: int, sampling: Sampling, draft_length: int, seed: int
    ) -> Iterator[StreamedRound]:
        """Decode one prompt and yield what reading the prompt, then each round, adds."""
        mode = resolve_mode(None, sampling, self.drafter)
        shape = Chain(0 if self.drafter.max_draft_length == 0 else draft_length)
        check_shape(shape, self.drafter)
        token_ids = self.encode(prompt)
        self.check_prompts([token_ids], max_new_tokens)
        settings = GenerationSettings(max_new_tokens, sampling, shape, mode, seed)
        generation = Generation(self.target, self.drafter, [token_ids], settings, [0])
        generation.prefill()
        drafted = [False]  # of each new token: the first is the target's own
        num_told = num_written = 0  # tokens in earlier rounds, characters in earlier pieces
        while True:
            done = not generation.running()
            new_ids = generation.outputs()[0][0]
            pieces = self._pieces(new_ids, drafted, num_told, num_written, done)
            num_written += sum(len(piece.text) for piece in pieces)
            yield StreamedRound(pieces, len(new_ids) - num_told, sum(drafted[num_told:]))
            if done:
                return
            num_told = len(new_ids)
            emitted = generation.round()
            num_emitted, num_accepted = int(emitted.num_emitted[0]), int(emitted.num_accepted[0])
            drafted += [i < num_accepted for i in range(num_emitted)]

    def _pieces(self, ids: list[int], drafted: list[bool], start: int, num_written: int, done: bool) -> list[Piece]:
        """The text of tokens from `start` on in runs of one origin; half a character waits for its other bytes."""
        pieces = []
        for end in range(start + 1, len(ids) + 1):
            if end < len(ids) and drafted[end] == drafted[end - 1]:
                continue
            text = self.decode(ids[:end])
            if text.endswith("\N{REPLACEMENT CHARACTER}") and not (done and end == len(ids)):
                continue
            pieces.append(Piece(text[num_written:], drafted[end - 1]))
            num_written = len(text)
        return pieces

    def encode(self, prompt: str | list[int]) -> list[int]:
        return self.target.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def decode(self, token_ids: list[int]) -> str:
        if self.target.tokenizer is None:
            return ""
        return str(self.target.tokenizer.decode(token_ids, skip_special_tokens=True))

    def check_prompts(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Refuse what cannot be decoded, naming the prompt by its number from 1."""
        if not prompts:
            raise UserError("no prompts: give at least one")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens {max_new_tokens}: give at least 1")
        for number, prompt in enumerate(prompts, 1):
            if not prompt:
                raise UserError(f"prompt {number} is empty: give at least one token")
            if len(prompt) + max_new_tokens > self.target.context:
                raise UserError(
                    f"prompt {number} has {len(prompt)} tokens, which with {max_new_tokens} new ones exceeds the "
                    f"target's context of {self.target.context}: shorten it or lower max_new_tokens"
                )


def check_sampling(temperature: float, top_p: float, top_k: int) -> Sampling:
    if temperature < 0:
        raise UserError(f"temperature {temperature}: give 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p {top_p}: give more than 0 and at most 1")
    if top_k < 0:
        raise UserError(f"top_k {top_k}: give 0 (off) or more")
    if temperature == 0 and (top_p < 1 or top_k):
        raise UserError("top_p and top_k have no effect at temperature 0: leave them out or raise the temperature")
    return Sampling(temperature, top_p, top_k)


def resolve_mode(mode: VerificationMode | None, sampling: Sampling, drafter: Drafter) -> VerificationMode:
    """The verification mode to use, or `UserError` where the one asked for does not fit."""
    if sampling.greedy:
        if mode not in (None, "greedy"):
            raise UserError(f"verification_mode {mode} needs a temperature above 0")
        return "greedy"
    if mode is None:
        return "probabilistic" if drafter.can_sample else "one_hot"
    if mode == "greedy":
        raise UserError("verification_mode greedy needs temperature 0")
    if mode == "probabilistic" and not drafter.can_sample:
        raise UserError(f"verification_mode probabilistic: {drafter.kind} has no probabilities; use one_hot")
    if mode not in ("one_hot", "probabilistic"):
        raise UserError(f"verification_mode {mode!r}: give greedy, one_hot or probabilistic")
    return mode


def check_shape(shape: Shape, drafter: Drafter) -> None:
    """Refuse drafts that the drafter cannot make."""
    if not isinstance(shape, Chain) and not drafter.can_branch:
        raise UserError(f"tree: {drafter.kind} drafts chains only; leave it out and set draft_length")
    name = "draft_length" if isinstance(shape, Chain) else "tree: depth"
    most = drafter.max_draft_length
    if shape.depth < 0 or (most is not None and shape.depth > most):
        raise UserError(f"{name} {shape.depth}: this {drafter.kind} drafter drafts up to {most} tokens in a row")
    if shape.depth == 0 and most != 0:
        raise UserError(f"{name} 0: give at least 1, or the drafter none")
