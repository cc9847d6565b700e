"""Texts with images for a server: vLLM's /inference/v1/generate, from 0.32 on and with --enable-scale-out.

Token ids go out in which each image stands as the chat template writes it, mostly as one token, and the images beside
them. vLLM puts each image's placeholder tokens there and tells all ids that the target read. So neither prompts nor
answers are tokenised again, as they would be at /v1/chat/completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, StrictInt

from draftsmith.data.http import Server
from draftsmith.data.samples.images import Image
from draftsmith.models.errors import UserError

PATH = "/inference/v1/generate"
OPTION = "--enable-scale-out"  # of `vllm serve`, without which it has no such path
TOO_LONG = "maximum context length"  # in vLLM's refusal of a text with more tokens than its --max-model-len
Name = Annotated[str, Field(max_length=1000)]
One = Field(min_length=1, max_length=1)


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
class Answer:
    """What a server wrote, and the text before it as the target read it."""

    new_ids: list[int]
    read_ids: list[int]


def request_with_images(
    model: str, token_ids: list[int], images: Sequence[Image], sampling_params: dict[str, Any]
) -> dict[str, Any]:
    """Return the body of a request. `sampling_params`: fields of vLLM's SamplingParams."""
    parts = [{"type": "image_url", "url": image.url} for image in images]
    asked = {"token_ids": token_ids, "content_parts": parts, "sampling_params": sampling_params}
    return {"model": model, **asked, "return_token_ids": True}


def check_takes_images(server: Server, model: str, end_of_text: int) -> None:
    """Raise `UserError` for a server without that path."""
    try:
        server.json(PATH, request_with_images(model, [end_of_text], [], {"max_tokens": 1}))
    except UserError as error:
        raise UserError(
            f"{server.name} does not take token ids with images ({error}): serve with vLLM 0.32 or later and {OPTION}"
        ) from None
