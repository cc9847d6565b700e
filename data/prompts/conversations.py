"""Chats through the target's template: opened for an answer, or whole with the spans of their answers.

A whole conversation is off-policy: the target did not write its answers. It has to look, token by token, like what the
target meets when it serves: each answer must follow the very tokens of the turn opened for it, and must stay as it is
when later turns follow. Both are verified; a template that rewrites history is refused.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonprefix
from typing import Any, TypeVar, cast

from draftsmith.data.prompts.checks import check_not_rendered
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.models.errors import UserError
from draftsmith.models.target.chat_template import apply_template, rendered, rendered_ids
from draftsmith.models.target.target import Target

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN_TOKENS = 8  # of a difference, in messages

T = TypeVar("T")


@dataclass
class Chat:
    """A conversation with the target whose tokenizer renders it."""

    prompt: Prompt
    target: Target

    def token_ids(self, num_messages: int, opened: bool = False) -> list[int]:
        """Return the token ids of the first messages; `opened` adds the beginning of the answer that follows them."""
        return self._rendered_by(rendered_ids, num_messages, opened)

    def text(self, num_messages: int, opened: bool = False) -> str:
        """Return the text of the first messages; `opened` adds the beginning of the answer that follows them."""
        return self._rendered_by(rendered, num_messages, opened)

    def marked(self, num_messages: int) -> list[tuple[int, int]]:
        """Return the spans [start, end) of tokens between the template's generation marks."""
        mark = partial(apply_template, return_dict=True, return_assistant_tokens_mask=True)
        output = self._rendered_by(mark, num_messages)
        mask = [0, *output["assistant_masks"], 0]
        edges = [i for i in range(len(mask) - 1) if mask[i] != mask[i + 1]]
        return list(zip(edges[::2], edges[1::2], strict=True))

    def _rendered_by(self, render: Callable[..., T], num_messages: int, *options: bool) -> T:
        assert self.target.tokenizer is not None
        where = self.prompt.where or "the prompt"
        if not self.target.tokenizer.chat_template:
            reason = f"{self.target.name} has no chat template"
            raise UserError(f'{where} has "messages", but {reason}: give "prompt" texts')
        assert self.prompt.messages is not None
        try:
            return render(self.target, template_form(self.prompt.messages[:num_messages]), self.prompt.tools, *options)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def template_form(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: an image is a part of the type "image", wherever it comes from."""
    image = {"type": "image"}
    return [
        {**message, "content": [part if "text" in part else image for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def check_images_written(prompt: Prompt, target: Target) -> None:
    """Refuse a prompt whose images leave no trace in the chat template: there is no place for what a tower makes."""
    if not prompt.image_urls:
        return
    assert prompt.messages is not None
    texts = [
        {**message, "content": [part for part in message["content"] if "text" in part]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt.messages
    ]
    whole, without = (Chat(replace(prompt, messages=own), target).text(len(texts)) for own in (prompt.messages, texts))
    if whole == without:
        raise UserError(
            f"{prompt.where or 'the prompt'} holds images, for which the chat template of {target.name} writes "
            "nothing: give a target that reads images, with the template that its model card names"
        )


def opened_chat(prompt: Prompt, target: Target) -> list[int]:
    """Return the token ids of a conversation up to its last turn that is no answer, opened for the answer to it."""
    assert prompt.messages is not None
    others = [i for i, message in enumerate(prompt.messages) if message["role"] != "assistant"]
    return Chat(prompt, target).token_ids(others[-1] + 1 if others else 0, opened=True)


def encode_conversation(prompt: Prompt, target: Target) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the token ids of a conversation up to its last answer, and the spans [start, end) of its answers.

    Raises `UserError`, naming file and line, for a conversation without an answer and for one that the target would
    never meet in this form: history that the template rewrites, tokens that reach over the beginning of an answer.
    """
    check_not_rendered(prompt, target)
    if prompt.image_urls:
        raise UserError(
            f"{prompt.where or 'the prompt'} holds images, and only a server knows which tokens the target reads for "
            "them: let it answer anew, with --endpoint and without --as-given"
        )
    chat = Chat(prompt, target)
    turns = [i for i, message in enumerate(prompt.messages or []) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise UserError(
            f"{prompt.where or 'the prompt'} has no answer that follows a user's turn: leave it out, or let the target "
            "answer"
        )
    num_messages = turns[-1] + 1
    token_ids = chat.token_ids(num_messages)
    spans = [_verified_span(chat, turn, num_messages, token_ids) for turn in turns]
    assert target.tokenizer is not None
    if GENERATION_MARK.search(str(target.tokenizer.chat_template)):
        spans = _marked_spans(chat, num_messages, token_ids, spans)
    return token_ids, spans


def _verified_span(chat: Chat, turn: int, num_messages: int, token_ids: list[int]) -> tuple[int, int]:
    """Return the span of an answer: from the turn opened for it to its end of text, or else to the end of the turn."""
    opening, through = chat.token_ids(turn, opened=True), chat.token_ids(turn + 1)
    if through[: len(opening)] != opening:
        raise _refusal(chat, turn, opening, through, chat.text(turn, opened=True), chat.text(turn + 1))
    start, end = len(opening), len(through)
    end = next((i + 1 for i in range(start, end) if through[i] in chat.target.eos_token_ids), end)
    if token_ids[:end] != through[:end]:
        raise _refusal(chat, turn, through[:end], token_ids, chat.text(turn + 1), chat.text(num_messages))
    return start, end


def _refusal(chat: Chat, turn: int, before: list[int], after: list[int], text: str, later_text: str) -> UserError:
    """Return an error that says why a rendering does not go on as it began: the template, or the tokens at the seam."""
    where = f"{chat.prompt.where or 'the prompt'}, message {turn + 1}"
    decode, same = cast(Any, chat.target.tokenizer).decode, len(commonprefix([before, after]))
    first, second = (decode(ids[same : same + SHOWN_TOKENS]) for ids in (before, after))
    if later_text.startswith(text):
        return UserError(
            f"{where}: the tokenizer joins the end of a turn and what follows ({first!r} becomes {second!r}), so that "
            "the target never meets these tokens: take the blanks from the beginning and the end of the answer"
        )
    reason = " (thinking is stripped from earlier turns)" if "think" in first and "think" not in second else ""
    return UserError(
        f"{where}: the chat template of {chat.target.name} rewrites history{reason}: {first!r} becomes {second!r} when "
        "the conversation goes on, so that the answer would be trained on in a form the target never writes: "
        "let the target answer the turns anew, or give conversations with one answer"
    )


def _marked_spans(
    chat: Chat, num_messages: int, token_ids: list[int], turns: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the spans that the template marks, each with the end of text behind it, which the target writes too.

    Marks may leave out the beginning of a turn. Raises `UserError` where they reach beyond the verified turns, or
    leave out a whole one: the mark of one family in the template of another.
    """
    eos = [[token] for token in chat.target.eos_token_ids]
    marked = chat.marked(num_messages)
    spans = [(start, end + (token_ids[end : end + 1] in eos)) for start, end in marked]
    inside = [[span for span in spans if start <= span[0] and span[1] <= end] for start, end in turns]
    if sum(map(len, inside)) < len(spans) or not all(inside):
        raise UserError(
            f"{chat.prompt.where or 'the prompt'}: the generation marks in the chat template of {chat.target.name} "
            f"cover tokens {spans}, and the answers are {turns}: mend the template, or take the marks out of it"
        )
    return spans
