"""The forms that data sets have prompts in, each of which becomes a `Prompt`.

    {"prompt": text}                                    used as it is
    {"prompt": [...]}, {"messages": [...]}              objects with "role" and "content", as OpenAI's
    {"conversations": [...]}                            ShareGPT's "from" and "value", or "role" and "content"
    {"custom_id": ..., "body": {"messages": [...]}}     a line of an OpenAI batch

Beside these a row may hold "tools", offered to the chat template, and "domain". The content of a message is a text, or
a list of parts in OpenAI's form: {"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": ...}}.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import LONE_SURROGATE, parse_json

LONGEST_PROMPT = 1 << 22  # characters, of about a million tokens
FIELDS = ("prompt", "messages", "conversations", "body")
# ShareGPT's names of the roles; others stand for themselves.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant"), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
    "system": "system",
}


@dataclass
class Prompt:
    """A prompt: either `text` or `messages`. Lone surrogates in it are replaced and counted.

    Raises `UserError` for one that holds neither or both, or that no target could read.
    """

    text: str | None = None  # used as it is
    messages: list[dict[str, Any]] | None = None  # put through the target's chat template; answers are written anew
    tools: list[dict[str, Any]] | None = None  # offered to the template beside the messages
    domain: str = ""  # kind of traffic, carried to samples and reports
    where: str = field(default="", compare=False)  # file and line, for messages to the user
    num_replaced: int = field(default=0, compare=False)  # lone surrogates that stood in it

    def __post_init__(self) -> None:
        where = self.where or "a prompt"
        if not (isinstance(self.text, str) if self.messages is None else self.text is None and is_chat(self.messages)):
            raise UserError(f'{where}: give either a text, or messages that each have a "role" and a text as "content"')
        asked = [self.text, self.messages, self.tools, self.domain]
        try:
            written = json.dumps(asked, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{where} holds a value that JSON does not have: {first_line(error)}") from None
        if len(written) - sum(map(len, self.image_urls)) > LONGEST_PROMPT:
            raise UserError(
                f"{where} has more than {LONGEST_PROMPT:,} characters, too many for any target: leave it out"
            )
        written, number = LONE_SURROGATE.subn("\ufffd", written)
        if number:
            self.text, self.messages, self.tools, self.domain = parse_json(written, where)
            self.num_replaced += number

    @property
    def image_urls(self) -> list[str]:
        """The images of its messages in their order, as URLs or paths."""
        return image_urls(self.messages or [])


def is_chat(messages: Any) -> bool:
    """Return whether a value is a list of messages, each an object with a "role" and text or images as content."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(content := message.get("content"), str | None) or is_parts(content))
        for message in messages
    )


def is_parts(content: Any) -> bool:
    """Return whether a value is a list of texts and images in OpenAI's form."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text") if part.get("type") == "text" else _url(part), str)
        for part in content
    )


def _url(part: dict[str, Any]) -> Any:
    """Return the URL of an image, None for a part that is none."""
    image = part.get("image_url")
    return image.get("url") if part.get("type") == "image_url" and isinstance(image, dict) else None


def image_urls(messages: list[dict[str, Any]]) -> list[str]:
    """Return the URLs of the images that messages hold, in their order."""
    parts = [part for message in messages for part in message.get("content") or [] if isinstance(part, dict)]
    return [_url(part) for part in parts if part["type"] == "image_url"]


def text_of(message: dict[str, Any]) -> str:
    """Return the text of a message, without its images."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)


def to_prompt(row: Any, where: str, column: str = "", domain_column: str = "domain") -> Prompt | None:
    """Return the prompt of a row, from one of the known fields or from a named column.

    Returns None for a ShareGPT conversation in which no user speaks; public data sets hold some. Raises `UserError` for
    a row without a prompt, or with two of them.
    """
    name = column or _field(row, where)
    value = _value(row, name, where)
    if name == "body" and isinstance(value, dict):
        prompt = to_prompt(value, where)
    elif isinstance(value, str) and (column or name == "prompt"):
        if not value.strip():
            raise UserError(f"{where}: {name!r} is empty")
        prompt = Prompt(text=value, where=where)
    else:
        messages = to_messages(value, f"{where}: {name!r}")
        prompt = Prompt(None, messages, _tools(row.get("tools"), where), where=where) if messages else None
    if prompt is None:
        return None
    domain = row.get("domain") if domain_column == "domain" else _value(row, domain_column, where)
    return replace(prompt, where=where, domain="" if domain is None else str(domain))


def _field(row: Any, where: str) -> str:
    """Return the only known field that a row holds a prompt in."""
    present = [name for name in FIELDS if isinstance(row, dict) and row.get(name) is not None]
    if len(present) > 1:
        names = " and ".join(map(repr, present))
        raise UserError(f"{where} has {names}: name the column to read, as in SOURCE:{present[1]}")
    if not present:
        raise UserError(
            f'{where} has no "prompt" text, and neither "messages" nor "conversations", a list of objects with a '
            '"role": give one of them, or name a column as in SOURCE:COLUMN'
        )
    return present[0]


def _value(row: Any, name: str, where: str) -> Any:
    if not isinstance(row, dict) or row.get(name) is None:
        columns = f"its columns are {', '.join(map(str, row))}" if isinstance(row, dict) else "it is no object"
        raise UserError(f"{where} has nothing in a column {name!r}; {columns}")
    return row[name]


def to_messages(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return messages with "role" and "content" from a list in either form; None where no user speaks in ShareGPT's.

    A ShareGPT conversation that was cut from a longer one may begin with an answer, which is left out.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise UserError(f'{where} is not a list of objects with a "role"')
    if where.endswith("'conversations'") or any("from" in message for message in value):
        messages = [_from_sharegpt(message, where) for message in value]
        spoken = [number for number, message in enumerate(messages) if message["role"] == "user"]
        system = [message for message in messages[:1] if message["role"] == "system"]
        return [*system, *messages[spoken[0] :]] if spoken else None
    if not value or not all(isinstance(message.get("role"), str) for message in value):
        raise UserError(f'{where} is not a list of objects with a "role"')
    return [_plain_content(message, where) for message in value]


def _from_sharegpt(message: dict[str, Any], where: str) -> dict[str, Any]:
    if isinstance(message.get("role"), str):
        return _plain_content({**message, "role": ROLES.get(message["role"], message["role"])}, where)
    role, text = message.get("from"), message.get("value")
    if not isinstance(role, str) or role not in ROLES or not isinstance(text, str):
        raise UserError(
            f'{where} has a turn with "from" {role!r} and a "value" of type {type(text).__name__}: '
            f"known are texts from {', '.join(ROLES)}"
        )
    return {"role": ROLES[role], "content": text}


def _plain_content(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message with its content as one text, joined by line breaks as vLLM joins it; images stay parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    parts = [_part(part) for part in content] if isinstance(content, list) else []
    if not parts or not is_parts(parts):
        raise UserError(
            f"{where} has a message whose content is neither text nor images in OpenAI's form: draftsmith reads parts "
            'of the types "text" and "image_url"'
        )
    if image_urls([{"content": parts}]):
        if message["role"] == "assistant":
            raise UserError(f"{where} has an image in an answer, which no target writes: leave it out")
        return {**message, "content": parts}
    return {**message, "content": text_of({"content": parts})}


def _part(part: Any) -> Any:
    """Return a part of a content with its type, which some data sets leave out beside a text."""
    return {"type": "text", **part} if isinstance(part, dict) and "text" in part else part


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return tools as a list; data sets with columns of one type keep them as JSON text."""
    if isinstance(value, str):
        value = parse_json(value, f'{where}: "tools"') if value.strip() else None
    if value is not None and not (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        raise UserError(f'{where}: "tools" is not a list of objects')
    return value or None
