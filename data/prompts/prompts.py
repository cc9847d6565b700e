"""Prompts: read from a source or a mixture of them, and turned into token ids."""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from draftsmith.data.bad_rows import BadRows
from draftsmith.data.progress import notice
from draftsmith.data.prompts.checks import check_bos, check_not_rendered, check_token_ids, notice_raw_texts
from draftsmith.data.prompts.conversations import opened_chat
from draftsmith.data.prompts.mixtures import read_mixture
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.sources import read_source, source_name
from draftsmith.data.prompts.splits import Split, deduplicate, split_prompts
from draftsmith.data.samples.images import read_image
from draftsmith.inference.measuring.measure import PromptSet, pick_prompts
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Target


def read_prompts(source: str | Path, bad: BadRows | None = None) -> list[Prompt]:
    """Return all prompts of a source (sources.py) or of a mixture in a .yaml file (mixtures.py).

    `bad` takes the rows that give none. Raises `UserError` naming the file and line that is wrong.
    """
    if not isinstance(source, str | Path):
        raise UserError(f"prompts {source!r}: give a file, a folder, or a Hub dataset as NAME:COLUMN[:SPLIT]")
    source = str(source)
    path = Path(source)
    return read_mixture(path, bad) if path.suffix in (".yaml", ".yml") else read_source(source, bad=bad)


def read_split(source: str, held_out_share: float, refuse_surrogates: bool, bad: BadRows) -> Split:
    """Return the prompts of a source to train on and to hold out, as `read_unique` reads them."""
    return split_prompts(read_unique(source, refuse_surrogates, bad), held_out_share)


def read_unique(source: str, refuse_surrogates: bool, bad: BadRows) -> list[Prompt]:
    """Return the different prompts of a source; `bad` takes the rows that give none.

    Duplicates are left out and lone surrogates replaced, and the user is told. Raises `UserError` for bad prompts, and
    for lone surrogates that are to be refused.
    """
    prompts = read_prompts(source, bad)
    bad.check()
    if text := replaced_text(prompts):
        if refuse_surrogates:
            raise UserError(f"{source}: {text}: mend them, or leave out --refuse-surrogates")
        notice(f"{source}: {text}; they are replaced by \ufffd")
    unique = deduplicate(prompts)
    if len(unique) < len(prompts):
        notice(f"{source}: left out {len(prompts) - len(unique)} of {len(prompts)} prompts, which equal earlier ones")
    return unique


def encode_prompts(prompts: Iterable[Prompt], target: Target, with_images: bool = False) -> list[list[int]]:
    """Return the token ids of each prompt, a chat opened for the answer. `with_images`: images may stand in them.

    Raises `UserError`, naming file and line, for one that the target cannot take or that was rendered before.
    """
    prompts = list(prompts)
    if not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UserError("prompts: give a list of `Prompt`, as `read_prompts` returns it")
    notice_raw_texts(prompts, target)
    if text := replaced_text(prompts):
        notice(f"{text}; they are replaced by \ufffd")
    encoded: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        prompt = replace(prompt, where=prompt.where or f"prompt {number}")
        check_not_rendered(prompt, target)
        if prompt.image_urls and not with_images:
            raise UserError(
                f"{prompt.where} holds images, which draftsmith's own decoder does not read: leave it out, or let an "
                "engine measure drafters on it, with `draftsmith evaluate --engine URL`"
            )
        ids = tokenise(prompt, target)
        check_bos(ids, target, prompt.where)
        check_token_ids(ids, target, prompt.where)
        encoded.append(ids)
    return encoded


def replaced_text(prompts: list[Prompt]) -> str:
    """Return in words how many lone surrogates the prompts held; empty where they held none."""
    replaced = [prompt for prompt in prompts if prompt.num_replaced]
    if not replaced:
        return ""
    count = sum(prompt.num_replaced for prompt in replaced)
    return (
        f"{count} lone surrogates (halves of characters) in {len(replaced)} prompts, the first in {replaced[0].where}"
    )


def tokenise(prompt: Prompt, target: Target) -> list[int]:
    """Return the token ids of a prompt, unchecked; those of a chat are opened for the answer."""
    return target.encode(prompt.text) if prompt.text is not None else opened_chat(prompt, target)


def tokenise_seconds(prompts: list[Prompt], target: Target) -> list[float]:
    """Return the seconds that each prompt takes to become token ids, once the tokenizer is warm."""
    times = [time.perf_counter()]
    for prompt in prompts:
        tokenise(prompt, target)
        times.append(time.perf_counter())
    return [end - start for start, end in zip(times[:-1], times[1:], strict=True)]


def read_prompt_set(
    source: str, target: Target, num_prompts: int | None, max_new_tokens: int, with_images: bool = False
) -> PromptSet:
    """Return prompts to decode, all or `num_prompts` of a source, encoded and with their domains.

    `with_images`: images may stand in them, for a server that reads them.

    Raises `UserError`, naming file and line, for one that does not fit the target.
    """
    prompts = read_prompts(source)
    if num_prompts is not None:
        prompts = pick_prompts(prompts, num_prompts)
    encoded = encode_prompts(prompts, target, with_images)
    check_lengths(prompts, encoded, max_new_tokens, target)
    name, domains = source_name(source), [prompt.domain for prompt in prompts]
    images = [[read_image(url, prompt.where).url for url in prompt.image_urls] for prompt in prompts]
    return PromptSet(name, encoded, domains, tokenise_seconds(prompts, target), images if any(images) else [])


def check_lengths(prompts: list[Prompt], encoded: list[list[int]], max_new_tokens: int, target: Target) -> None:
    """Refuse prompts that are empty or leave no room for `max_new_tokens` in the target's context."""
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True), 1):
        where = prompt.where or f"prompt {number}"
        if not ids:
            raise UserError(f"{where} is empty after tokenisation")
        if len(ids) + max_new_tokens > target.context:
            room = target.context - len(ids)
            mend = f"give max_new_tokens {room}, or shorten it" if room > 0 else "shorten it"
            raise UserError(
                f"{where} has {len(ids)} tokens, which with {max_new_tokens} new ones exceeds the "
                f"target's context of {target.context}: {mend}"
            )
