"""Texts that a drafter and its target write together, round by round, to be read in a report."""

from dataclasses import dataclass

from draftsmith.inference.decoding.decoder import SpeculativeDecoder, check_sampling
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import Drafter, Target

NUM_TEXTS, MAX_NEW_TOKENS = 3, 96


@dataclass(frozen=True)
class SamplePiece:
    """A piece of a round's text."""

    text: str
    accepted: bool  # drafted and accepted; else it is the target's own


@dataclass(frozen=True)
class SampleRound:
    """The tokens that one round of a text emitted."""

    text: str
    num_tokens: int
    num_accepted: int
    pieces: list[SamplePiece]


@dataclass(frozen=True)
class SampleText:
    """A text of samples.json, which holds a list of them."""

    prompt: str
    drafter: str
    temperature: float
    rounds: list[SampleRound]


def sample_texts(
    target: Target, drafter: Drafter, name: str, prompts: PromptSet, settings: MeasureSettings
) -> list[SampleText]:
    """Return answers to the first prompts, with chains as long as the drafts of the settings.

    There are none without a tokenizer.
    """
    if target.tokenizer is None:
        return []
    decoder = SpeculativeDecoder(target, drafter)
    sampling = check_sampling(settings.temperature, settings.top_p, 0)
    num_tokens = min(MAX_NEW_TOKENS, settings.max_new_tokens)
    texts = []
    for prompt in prompts.token_ids[:NUM_TEXTS]:
        drafter.forget()  # no text helps with another
        rounds = [
            SampleRound(
                "".join(piece.text for piece in round.pieces),
                round.num_tokens,
                round.num_accepted,
                [SamplePiece(piece.text, piece.drafted) for piece in round.pieces],
            )
            for round in decoder.stream(prompt, num_tokens, sampling, settings.draft_length, settings.seed)
        ]
        texts.append(SampleText(decoder.text(prompt), name, settings.temperature, rounds))
    return texts
