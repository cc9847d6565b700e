"""A mixture of sources: a .yaml file that can be given wherever a source of prompts can.

num_prompts: 10000          # in all; left out, as many as the weights allow without taking a prompt twice
sources:
  - source: chat.jsonl      # as on the command line
    weight: 3               # share of the mixture's prompts; on all sources or on none
    domain: chat
  - source: openai/gsm8k/main:question:train
    weight: 1
    chat: true              # texts are put through the chat template, as a user's turn
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict

from draftsmith.data.bad_rows import BadRows
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.sources import read_source, source_name
from draftsmith.data.prompts.splits import deduplicate, prompt_hash
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Count, Name, Positive, checked
from draftsmith.models.storage.reading import read_yaml


@dataclass
class MixtureSource:
    """A source of a mixture, as its file describes it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    source: Name
    weight: Positive | None = None
    domain: str | None = None  # of all its prompts; None: by their column "domain", else the source's name
    domain_column: str = "domain"
    chat: bool = False  # texts become the user's turn of a chat


@dataclass
class Mixture:
    """The content of a mixture's file."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    sources: list[MixtureSource]
    num_prompts: Count | None = None


def read_mixture(path: Path, bad: BadRows | None = None) -> list[Prompt]:
    """Return the prompts of a mixture, source after source, without duplicates.

    The hashes of a source's prompts decide which of them are taken, so that a smaller mixture is part of a larger one.
    Raises `UserError` for a file that is no mixture, and for a mixture that its sources cannot fill.
    """
    mixture = load_mixture(path)
    all_prompts = {part.source: _read_part(part, bad) for part in mixture.sources}
    unique = set(map(id, deduplicate([prompt for prompts in all_prompts.values() for prompt in prompts])))
    sources = {name: [prompt for prompt in prompts if id(prompt) in unique] for name, prompts in all_prompts.items()}
    for name, prompts in sources.items():
        if not prompts:
            raise UserError(f"{path}: all prompts of {name} stand in the sources before it: leave it out")
    counts = _counts(mixture, [len(prompts) for prompts in sources.values()], path)
    return [prompt for prompts, count in zip(sources.values(), counts, strict=True) for prompt in _pick(prompts, count)]


def load_mixture(path: Path) -> Mixture:
    """Return the checked content of a mixture's file."""
    try:
        mixture = checked(Mixture, read_yaml(path))
    except UserError as error:
        raise UserError(f"mixture {path}: {error}") from None
    names = [part.source for part in mixture.sources]
    if not names or len(set(names)) < len(names):
        raise UserError(f"mixture {path}: give `sources`, each once")
    weights = [part.weight for part in mixture.sources if part.weight is not None]
    if len(weights) not in (0, len(names)):
        raise UserError(f"mixture {path}: give every source a weight, or none of them")
    if mixture.num_prompts is not None and mixture.num_prompts < len(names):
        raise UserError(f"mixture {path}: num_prompts {mixture.num_prompts}: give at least one for each source")
    return mixture


def _read_part(part: MixtureSource, bad: BadRows | None) -> list[Prompt]:
    """Return all prompts of a source with the domain and form that the mixture gives them."""
    if part.domain is not None and part.domain_column != "domain":
        raise UserError(f"mixture: {part.source} has both domain and domain_column: give one")
    name = source_name(part.source)
    prompts = []
    for prompt in read_source(part.source, part.domain_column, bad):
        prompt = replace(prompt, domain=part.domain if part.domain is not None else prompt.domain or name)
        if part.chat and prompt.text is not None:
            prompt = replace(prompt, text=None, messages=[{"role": "user", "content": prompt.text}])
        prompts.append(prompt)
    return prompts


def _counts(mixture: Mixture, sizes: list[int], path: Path) -> list[int]:
    """Return the number of prompts to take from each source, in all as many as are asked for.

    One of each comes first. Each further one is of the source that is furthest behind its share, whatever the total is.
    """
    weights = [size if part.weight is None else part.weight for part, size in zip(mixture.sources, sizes, strict=True)]
    shares = [weight / sum(weights) for weight in weights]
    room = [size / share for size, share in zip(sizes, shares, strict=True)]
    most = max(len(sizes), int(min(room) + 1e-6))
    total = mixture.num_prompts or most
    if total > most:
        scarce = mixture.sources[room.index(min(room))].source
        raise UserError(
            f"mixture {path}: num_prompts {total} is more than the {most} that these weights allow, "
            f"for {scarce} has {min(zip(room, sizes, strict=True))[1]} prompts: lower it, or that source's weight"
        )
    turns = [(np.arange(size) + 0.5) / weight for size, weight in zip(sizes, weights, strict=True)]
    for own in turns:
        own[0] = 0
    owners = np.repeat(np.arange(len(sizes)), sizes)
    taken = owners[np.argsort(np.concatenate(turns), kind="stable")[:total]]
    return np.bincount(taken, minlength=len(sizes)).tolist()


def _pick(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Return the `count` prompts with the lowest hashes, in their order."""
    chosen = set(sorted(map(prompt_hash, prompts))[:count])
    return [prompt for prompt in prompts if prompt_hash(prompt) in chosen]
