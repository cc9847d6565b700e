"""Texts with images for a server: vLLM's /inference/v1/generate, from 0.32 on and with --enable-scale-out.

Token ids go out in which each image stands as the chat template writes it, mostly as one token, and the images beside
them. vLLM puts each image's placeholder tokens there and tells all ids that the target read. So neither prompts nor
answers are tokenised again, as they would be at /v1/chat/completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, FiniteFloat, StrictInt

from draftsmith.data.http import PassingError, Server
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import from_json

PATH = "/inference/v1/generate"
OPTION = "--enable-scale-out"  # of `vllm serve`, without which it has no such path
TOO_LONG = "maximum context length"  # in vLLM's refusal of a text with more tokens than its --max-model-len
Name = Annotated[str, Field(max_length=1000)]
One = Field(min_length=1, max_length=1)

T = TypeVar("T")


@dataclass
class ImageChoice:
    """An answer to a text with images."""

    token_ids: Annotated[list[StrictInt], Field(min_length=1)]
    finish_reason: Name | None = None


@dataclass
class ImageAnswer:
    """The answer at `PATH`."""

    choices: Annotated[list[ImageChoice], One]
    prompt_token_ids: list[StrictInt]  # as the target read them


@dataclass
class LikelyToken:
    """The log-probability of a token that might follow."""

    logprob: FiniteFloat


@dataclass
class LikelyTokens:
    """The likeliest tokens at a place."""

    top_logprobs: Annotated[list[LikelyToken], Field(min_length=2)]


@dataclass
class LikelyTokensOfText:
    """The likeliest tokens at each place of an answer of one token."""

    content: Annotated[list[LikelyTokens], One]


@dataclass
class RatedImageChoice:
    """An answer with the likeliest tokens beside each of its own."""

    logprobs: LikelyTokensOfText


@dataclass
class RatedImageAnswer:
    """The answer at `PATH` where the likeliest tokens are asked for, too."""

    choices: Annotated[list[RatedImageChoice], One]


def request_with_images(
    model: str, token_ids: list[int], images: Sequence[str], sampling_params: dict[str, Any]
) -> dict[str, Any]:
    """Return the body of a request. `images`: data: URLs. `sampling_params`: fields of vLLM's SamplingParams."""
    parts = [{"type": "image_url", "url": url} for url in images]
    asked = {"token_ids": token_ids, "content_parts": parts, "sampling_params": sampling_params}
    return {"model": model, **asked, "return_token_ids": True}


def gap_with_images(answer: Any) -> float:
    """Return how far apart the log-probabilities of the two likeliest tokens of an answer are."""
    (choice,) = read_answer(RatedImageAnswer, answer).choices
    (candidates,) = choice.logprobs.content
    first, second = sorted((candidate.logprob for candidate in candidates.top_logprobs), reverse=True)[:2]
    return first - second


def read_answer(kind: type[T], answer: Any) -> T:
    """Return the answer as a value of its type. Raises `PassingError` for what is none."""
    try:
        return from_json(kind, answer)
    except UserError as error:
        raise PassingError(f"an answer that is no completion ({error})") from None


def check_takes_images(server: Server, model: str, end_of_text: int) -> None:
    """Raise `UserError` for a server without that path."""
    try:
        server.json(PATH, request_with_images(model, [end_of_text], [], {"max_tokens": 1}))
    except UserError as error:
        raise UserError(
            f"{server.name} does not take token ids with images ({error}): serve with vLLM 0.32 or later and {OPTION}"
        ) from None
