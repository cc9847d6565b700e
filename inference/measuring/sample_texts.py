"""Texts that a drafter and its target write together, round by round, to be read in a report.

Shapes: B rows (here 1), N drafted tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.decoder import SpeculativeDecoder, check_sampling, resolve_settings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.decoding.graphs import RecordedCalls
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models import Drafter, Target
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft
from draftsmith.models.sampling.drawing import cut
from draftsmith.models.sampling.trees import parents_or_chain

NUM_TEXTS, MAX_NEW_TOKENS = 3, 96


@dataclass(frozen=True)
class SamplePiece:
    """A piece of a round's text."""

    text: str
    accepted: bool  # drafted and accepted; else it is the target's own


@dataclass(frozen=True)
class DraftedToken:
    """A token that was drafted, accepted or not."""

    text: str
    target_probability: float  # p of the token, behind the text and the drafted tokens before it; greedy: unscaled
    drafter_probability: float | None  # q, by which it was drawn; None: it was not drawn by chance


@dataclass(frozen=True)
class SampleRound:
    """The tokens that one round of a text emitted, and those that it drafted."""

    text: str
    num_tokens: int
    num_accepted: int
    pieces: list[SamplePiece]
    drafted: list[DraftedToken] = field(default_factory=list)


@dataclass(frozen=True)
class SampleText:
    """A text of samples.json, which holds a list of them."""

    prompt: str
    drafter: str
    temperature: float
    rounds: list[SampleRound]


class WatchedEngine(BatchEngine):
    """An engine of one row that keeps what its last round drafted. On a GPU its rounds are not recorded."""

    def __init__(self, target: Target, drafter: Drafter, settings: GenerationSettings, num_slots: int) -> None:
        super().__init__(target, drafter, settings, 1, num_slots)
        self.recorded = RecordedCalls(target.device, False)
        self.drafted: list[tuple[int, float, float | None]] = []  # tokens, with p and q as in `DraftedToken`

    def _accept(self, state: DecodingState, logits: Tensor, draft: Draft) -> Verified:
        sampling = self.settings.sampling
        ids = draft.tokens[0]  # [N]
        columns = parents_or_chain(draft.parents, draft.tokens)[0] + 1  # [N] of the parents, which tokens stand behind
        behind = logits[0, columns]  # [N, V]
        p = _of_tokens(behind.float() if sampling.greedy else cut(behind, sampling), ids)
        q: list[float | None] = [None] * len(ids)
        if draft.logits is not None:
            q = [*_of_tokens(draft.logits[0, columns], ids)]
        self.drafted = [drafted for drafted in zip(ids.tolist(), p, q, strict=True) if drafted[0] != NO_TOKEN]
        return super()._accept(state, logits, draft)


def _of_tokens(logits: Tensor, token_ids: Tensor) -> list[float]:
    """Return the probability of each of the tokens [N] by its row of logits [N, V]."""
    return logits.softmax(-1).gather(1, token_ids.clamp(min=0)[:, None])[:, 0].tolist()


def sample_texts(
    target: Target, drafter: Drafter, name: str, prompts: PromptSet, grid: Sequence[MeasureSettings]
) -> list[SampleText]:
    """Return answers to the first prompts, each at the next temperature of the grid, by chains or drafters' own shapes.

    There are none without a tokenizer.
    """
    if target.tokenizer is None:
        return []
    decoder = SpeculativeDecoder(target, drafter)
    first_of_each = list({settings.temperature: settings for settings in reversed(grid)}.values())[::-1]
    texts = []
    for i, prompt in enumerate(prompts.token_ids[:NUM_TEXTS]):
        drafter.forget()  # no text helps with another
        settings = first_of_each[i % len(first_of_each)]
        rounds = _decode(decoder, prompt, settings)
        texts.append(SampleText(decoder.text(prompt), name, settings.temperature, rounds))
    return texts


def _decode(decoder: SpeculativeDecoder, prompt: list[int], measured: MeasureSettings) -> list[SampleRound]:
    tokenizer = decoder.target.tokenizer
    assert tokenizer is not None
    sampling = check_sampling(measured.temperature, measured.top_p, 0)
    num_tokens = min(MAX_NEW_TOKENS, measured.max_new_tokens)
    settings = resolve_settings(decoder.drafter, sampling, num_tokens, measured.draft_length, seed=measured.seed)
    num_slots = len(prompt) + num_tokens + settings.shape.num_nodes + 1
    engine = WatchedEngine(decoder.target, decoder.drafter, settings, num_slots)
    return [
        SampleRound(
            "".join(piece.text for piece in round.pieces),
            round.num_tokens,
            round.num_accepted,
            [SamplePiece(piece.text, piece.drafted) for piece in round.pieces],
            [DraftedToken(str(tokenizer.decode([token])), p, q) for token, p, q in engine.drafted],
        )
        for round in decoder.stream_rounds(Generation(engine, [prompt], lag=0))
    ]
