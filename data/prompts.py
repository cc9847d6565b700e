"""Prompts from files and Hub datasets.

A prompt file is .jsonl (`{"prompt": text}` or `{"messages": [...]}`) or .txt (one prompt a line). Anything else is a
Hub dataset, written NAME:COLUMN or NAME:COLUMN:SPLIT.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.target import Target


@dataclass
class Prompt:
    """One of `text` and `messages`."""

    text: str | None = None  # used as it is
    messages: list[dict[str, Any]] | None = None  # put through the target's chat template; answers are written anew
    tools: list[dict[str, Any]] | None = None  # offered to the template beside the messages
    domain: str = ""  # kind of traffic, carried to samples and reports
    where: str = field(default="", compare=False)  # file and line, for messages to the user


def read_prompts(source: str) -> list[Prompt]:
    """All prompts of a file or Hub dataset. Raises `UserError` naming the line that is wrong."""
    path = Path(source)
    if path.suffix in (".jsonl", ".txt"):
        if not path.is_file():
            raise UserError(f"no prompts file {source}")
        try:
            lines = path.read_text("utf-8-sig").split("\n")  # JSON text may hold other line separators
        except UnicodeDecodeError as error:
            raise UserError(f"{source} is not UTF-8 text: {error}") from None
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        if path.suffix == ".txt":
            prompts = [Prompt(text=line, where=f"{source} line {number}") for number, line in numbered]
        else:
            prompts = [_parse_line(line, f"{source} line {number}") for number, line in numbered]
    else:
        prompts = _hub_prompts(source)
    if not prompts:
        raise UserError(f"{source} holds no prompts")
    return prompts


def _parse_line(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    return _from_row(row, where)


def _from_row(row: Any, where: str) -> Prompt:
    if isinstance(row, dict):
        if isinstance(row.get("prompt"), str) and row["prompt"]:
            return Prompt(text=row["prompt"], where=where)
        messages = row.get("messages")
        if isinstance(messages, list) and messages and all(map(_is_message, messages)):
            return Prompt(messages=messages, where=where)
    raise UserError(f'{where} has neither a "prompt" text nor "messages", a list of objects with a "role"')


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _hub_prompts(source: str) -> list[Prompt]:
    name, _, rest = source.partition(":")
    column, _, split = rest.partition(":")
    if not column:
        raise UserError(f"prompts {source!r}: give a .jsonl or .txt file, or a Hub dataset as NAME:COLUMN[:SPLIT]")
    from datasets import exceptions, load_dataset

    try:
        rows = load_dataset(name, split=split or "train")
    except (exceptions.DatasetNotFoundError, OSError, ValueError) as error:
        raise UserError(f"Hub dataset {name!r} does not load: {str(error).splitlines()[0]}") from None
    if column not in rows.column_names:
        raise UserError(f"Hub dataset {name!r} has no column {column!r}; it has {', '.join(rows.column_names)}")
    key = "prompt" if isinstance(rows[0][column], str) else "messages"
    return [_from_row({key: value}, f"{source} row {number}") for number, value in enumerate(rows[column], 1)]


def encode_prompts(prompts: list[Prompt], target: Target) -> list[list[int]]:
    """Token ids of each prompt, a chat opened for the answer. Raises `UserError` for one the target cannot take."""
    encoded: list[list[int]] = []
    for number, prompt in enumerate(prompts, 1):
        if prompt.text is not None:
            encoded.append(target.encode(prompt.text))
            continue
        tokenizer = target.tokenizer
        assert tokenizer is not None
        if not tokenizer.chat_template:
            reason = f"{target.name} has no chat template"
            raise UserError(f'prompt {number} has "messages", but {reason}: give "prompt" texts')
        template = cast(Any, tokenizer).apply_chat_template  # typed for every form of its output
        try:
            encoded.append(template(prompt.messages, add_generation_prompt=True, return_dict=True)["input_ids"])
        except TemplateError as error:
            raise UserError(f"prompt {number}: the chat template refuses it: {first_line(error)}") from None
    return encoded


def check_lengths(encoded: list[list[int]], max_new_tokens: int, target: Target, source: str) -> None:
    """Refuse prompts that are empty or leave no room for `max_new_tokens` in the target's context."""
    for number, ids in enumerate(encoded, 1):
        if not ids:
            raise UserError(f"{source}: prompt {number} is empty after tokenisation")
        if len(ids) + max_new_tokens > target.context:
            raise UserError(
                f"{source}: prompt {number} has {len(ids)} tokens, which with {max_new_tokens} new ones exceeds the "
                f"target's context of {target.context}: shorten it or lower max_new_tokens"
            )
