"""Leaving out prompts that equal others, and holding some out of training.

Both are decided by the prompt's normalised text alone: the same prompt is never answered twice, and it is held out in
every run and from every source or in none.
"""

import hashlib
import json
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.data.prompts.prompt_formats import Prompt, image_urls, text_of
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole

HASH_DIGITS = 16
HELD_OUT = "held_out.jsonl"  # beside the samples


def normalise(text: str) -> str:
    """Return a text in Unicode's compatibility form, case folded, each run of blanks one space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def prompt_hash(prompt: Prompt) -> str:
    """Return 16 hex digits of all that the target is asked: texts, system and tool messages, tools; not of answers."""
    turns = [[message["role"], _asked_text(message)] for message in _asked(prompt)]
    return _hash(json.dumps([turns, prompt.tools], sort_keys=True))


def opening_hash(prompt: Prompt) -> str:
    """Return 16 hex digits of the text or the first user turn.

    The split goes by it: a conversation stays on the side of every shorter or longer one with the same beginning, of
    the same question under another system message, and of the same question as a bare text.
    """
    texts = [_asked_text(message) for message in _asked(prompt) if message["role"] == "user"]
    return _hash(texts[0] if texts else normalise(json.dumps(prompt.messages)))


def _asked(prompt: Prompt) -> list[dict]:
    """Return the messages that are no answers; a bare text as one of the user."""
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    return [message for message in messages if message["role"] != "assistant"]


def _asked_text(message: dict) -> str:
    """Return the normalised text of a message, and behind it the URLs of its images."""
    return "\n".join([normalise(text_of(message)), *image_urls([message])])


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def deduplicate(prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts that equal no earlier one after normalisation."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt_hash(prompt), prompt)
    return list(first.values())


@dataclass
class Split:
    """Prompts to train on, and prompts held out for evaluation."""

    train: list[Prompt]
    held_out: list[Prompt]


def split_prompts(prompts: list[Prompt], held_out_share: float) -> Split:
    """Hold out about `held_out_share` of the prompts; a larger share holds out all that a smaller one does.

    Of few prompts, the one that a larger share would hold out first is held out at least, and the last one is not.
    Raises `UserError` for a share outside 0..1 and where one side is left empty, as all begin alike.
    """
    if not 0 <= held_out_share < 1:
        raise UserError(f"held_out_share {held_out_share}: give a number from 0 up to, but not including, 1")
    hashes = [int(opening_hash(prompt), 16) for prompt in prompts]
    limit = held_out_share * 16**HASH_DIGITS
    if held_out_share and prompts:
        limit = min(max(limit, min(hashes) + 1), max(hashes))
    split = Split([], [])
    for prompt, hash in zip(prompts, hashes, strict=True):
        (split.held_out if hash < limit else split.train).append(prompt)
    if not split.train or (held_out_share and not split.held_out):
        raise UserError(
            f"held_out_share {held_out_share} of {len(prompts)} prompts leaves {len(split.train)} to train on and "
            f"{len(split.held_out)} held out: give prompts that begin differently"
        )
    return split


def write_prompts(path: Path, prompts: list[Prompt]) -> None:
    """Write a .jsonl that `read_prompts` reads back to the same prompts, whole or not at all."""
    rows = []
    for prompt in prompts:
        fields = {"prompt" if name == "text" else name: value for name, value in asdict(prompt).items()}
        rows.append({name: value for name, value in fields.items() if value and name != "where"})
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
