"""A request to a server with OpenAI's interface, and the times that its user waited."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from draftsmith.data.http import PassingError, Server
from draftsmith.data.prompts.prompt_formats import Prompt, text_of
from draftsmith.data.samples.images import with_data_urls
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import JsonObject

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LARGEST_ANSWER = 1 << 26  # bytes of all events of an answer


@dataclass(frozen=True)
class ServerRequest:
    """A request to a server: the path, and the body without the model."""

    path: str
    body: JsonObject

    @property
    def num_characters(self) -> int:
        """Characters of the prompt; 0 for token ids."""
        if "messages" in self.body:
            return sum(len(text_of(message)) for message in self.body["messages"])
        return len(self.body["prompt"]) if isinstance(self.body["prompt"], str) else 0


@dataclass(frozen=True)
class Reply:
    """An answer, in seconds since the run began; `failure` says in a line why there is none."""

    due: float  # when it should have been sent
    sent: float
    first_token: float
    finished: float
    gaps: tuple[float, ...]  # seconds between the events that brought text
    num_prompt_tokens: int
    num_output_tokens: int
    failure: str = ""

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from sending to the first text."""
        return 1000 * (self.first_token - self.sent)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds for each token after the first; None for a single token."""
        later = self.num_output_tokens - 1
        return 1000 * (self.finished - self.first_token) / later if later > 0 else None

    @property
    def e2e_ms(self) -> float:
        """Milliseconds from sending to the last text."""
        return 1000 * (self.finished - self.sent)


def request_of(
    prompt: Prompt | list[int], max_new_tokens: int, temperature: float, is_exact: bool, seed: int
) -> ServerRequest:
    """Return the request for an answer to a prompt, or to token ids.

    An `is_exact` answer goes on behind its end of text, up to the last token. Sampling has a seed for each request, so
    that a server gives the same request the same answer.
    """
    body: JsonObject = {
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if is_exact:
        body["ignore_eos"] = True  # vLLM and SGLang know it
    if isinstance(prompt, Prompt) and prompt.messages is not None:
        body["messages"] = with_data_urls(prompt.messages, prompt.where)
        if prompt.tools is not None:
            body["tools"] = prompt.tools
        return ServerRequest(CHATS, body)
    body["prompt"] = prompt.text if isinstance(prompt, Prompt) else prompt
    return ServerRequest(COMPLETIONS, body)


async def ask(server: Server, model: str, request: ServerRequest, due: float, start: float) -> Reply:
    """Send a request and follow its answer; `due` counts from `start`, the beginning of the run on `time.perf_counter`.

    Raises `UserError` where the server refuses the request. What may pass, an overload or a lost connection, is a
    failed reply.
    """
    answer = StreamedAnswer(time.perf_counter() - start)

    async def receive() -> None:
        async for event in server.events(request.path, {**request.body, "model": model}):
            answer.follow(event, time.perf_counter() - start)

    failure = ""
    try:
        await asyncio.wait_for(receive(), server.timeout)
    except asyncio.TimeoutError:
        failure = f"no whole answer within {server.timeout:g} s"
    except PassingError as error:
        failure = first_line(error)
    if not failure and answer.first_token is None:
        failure = "an answer without text"
    if not failure and answer.num_output_tokens == 0:
        raise UserError(
            f"{server.name}{request.path} does not say how many tokens an answer had, though it was asked to "
            '("stream_options": {"include_usage": true}): give a server that does, such as vLLM or SGLang'
        )
    first = answer.sent if answer.first_token is None else answer.first_token
    return Reply(
        due,
        answer.sent,
        first,
        max(first, answer.last_text),
        tuple(answer.gaps),
        answer.num_prompt_tokens,
        answer.num_output_tokens,
        failure,
    )


class StreamedAnswer:
    """An answer, as far as its events have told it."""

    def __init__(self, sent: float) -> None:
        self.sent = self.last_text = sent
        self.first_token: float | None = None
        self.gaps: list[float] = []
        self.num_prompt_tokens = self.num_output_tokens = 0

    def follow(self, event: Any, now: float) -> None:
        """Take in an event that arrived at a time. Raises `PassingError` for one that tells a failure."""
        if not isinstance(event, dict):
            raise PassingError("an event that is no object")
        if event.get("error") is not None:
            raise PassingError(f"an error in the midst of an answer: {' '.join(str(event['error']).split())[:200]}")
        usage, choices = event.get("usage"), event.get("choices")
        if isinstance(usage, dict):
            self.num_prompt_tokens = _tokens(usage.get("prompt_tokens"))
            self.num_output_tokens = _tokens(usage.get("completion_tokens"))
        if isinstance(choices, list) and any(map(_brings_text, choices)):
            if self.first_token is None:
                self.first_token = now
            else:
                self.gaps.append(now - self.last_text)
            self.last_text = now


def _brings_text(choice: Any) -> bool:
    """Return whether a part of an answer holds text, thoughts or a call of a tool."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        names = ("content", "reasoning_content", "reasoning", "tool_calls")
        return any(delta.get(name) for name in names)
    return bool(choice.get("text")) or choice.get("finish_reason") is not None


def _tokens(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else 0
