"""A text for training as the target wrote it: token ids kept as sampled, and the spans that it generated.

The loss mask is not stored: a sample is trained on in its `spans`. The rest, a prompt or the user's next turn, is read
and not learned.
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from draftsmith.inference.measuring.spans import Index, Span
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import AboveZero, Natural, NonNegative, checked

ImageName = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.(png|jpeg|gif|webp)$")]
FinishReason = Literal["length", "eos", "given"]


@dataclass
class Sample:
    """A text that the target read and wrote, token by token as it stood before it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    token_ids: Annotated[list[Index], Field(min_length=1)]
    spans: list[Span]  # ascending, without overlap
    finish_reason: FinishReason = "length"  # the last answer was cut; or "eos"; or "given": the target did not write it
    temperature: NonNegative = 0.0
    top_p: AboveZero = 1.0
    top_k: Natural = 0
    prompt_index: Natural = 0  # place among the prompts
    domain: str = ""  # kind of traffic, as the prompt has it
    unanswered_turns: Natural = 0  # later ones: this answer was cut, the context is full, or a tool's result is missing
    images: list[ImageName] = field(default_factory=list)  # files in the folder of images, in the order of the text
    # The text as servers take it beside the images: each stands there as the chat template writes it, mostly as one
    # token, where `token_ids` holds the placeholder tokens that the target read. Empty for a text without images.
    sent_ids: list[Index] = field(default_factory=list)

    def generated(self) -> list[int]:
        """Return the tokens that the target generated."""
        return [token for span in self.spans for token in self.token_ids[span.start : span.end]]


def loss_mask(sample: Sample) -> Tensor:
    """Return a mask [T], true where the target generated."""
    mask = torch.zeros(len(sample.token_ids), dtype=torch.bool)
    for span in sample.spans:
        mask[span.start : span.end] = True
    return mask


def sample_line(sample: Sample) -> str:
    """Return the line of samples.jsonl that holds a sample."""
    return json.dumps(vars(sample), separators=(",", ":")) + "\n"


def to_sample(content: Any, place: str) -> Sample:
    """Return the sample that a line holds. Raises `UserError` for wrong types and for spans outside of the text."""
    try:
        sample = checked(Sample, content)
    except UserError as error:
        raise UserError(f"{place} is damaged ({error})") from None
    bounds = [0, *(bound for start, end, _ in sample.spans for bound in (start, end)), len(sample.token_ids)]
    if bounds != sorted(bounds):
        raise UserError(f"{place} is damaged (its spans overlap, are out of order, or reach beyond its tokens)")
    return sample
