"""Texts that a drafter and its target write together, round by round, to be read in a report."""

from typing import Any

from draftsmith.inference.decoding.decoder import SpeculativeDecoder, check_sampling
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.models import Drafter, Target

NUM_TEXTS, MAX_NEW_TOKENS = 3, 96


def sample_texts(
    target: Target, drafter: Drafter, name: str, prompts: PromptSet, settings: MeasureSettings
) -> list[dict[str, Any]]:
    """What samples.json holds: the first prompts, answered with chains as long as the drafts of the settings.

    A piece of a round's text is `accepted` where it was drafted; else it is the target's own. Empty without a
    tokenizer.
    """
    if target.tokenizer is None:
        return []
    decoder = SpeculativeDecoder(target, drafter)
    sampling = check_sampling(settings.temperature, settings.top_p, 0)
    num_tokens = min(MAX_NEW_TOKENS, settings.max_new_tokens)
    found = []
    for prompt in prompts.token_ids[:NUM_TEXTS]:
        drafter.forget()  # no text helps with another
        rounds = decoder.stream(prompt, num_tokens, sampling, settings.draft_length, settings.seed)
        found.append(
            {
                "prompt": decoder.text(prompt),
                "drafter": name,
                "temperature": settings.temperature,
                "rounds": [
                    {
                        "text": "".join(piece.text for piece in round.pieces),
                        "num_tokens": round.num_tokens,
                        "num_accepted": round.num_accepted,
                        "pieces": [{"text": piece.text, "accepted": piece.drafted} for piece in round.pieces],
                    }
                    for round in rounds
                ],
            }
        )
    return found
