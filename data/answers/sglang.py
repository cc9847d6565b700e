"""Texts for an SGLang: its own /generate, which takes and gives token ids, and counts the drafts of each request."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, StrictInt

from draftsmith.data.answers.with_images import Name, One, read_answer
from draftsmith.data.http import Server
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Natural
from draftsmith.models.storage.typed_json import from_json

PATH = "/generate"
Likely = tuple[FiniteFloat, StrictInt, Any]  # the log-probability of a token, its id and its text


@dataclass
class FinishReason:
    """The reason that SGLang ended a text for. `matched`: the token that did, which `output_ids` may lack, or text."""

    type: Name
    matched: Any = None


@dataclass
class GeneratedInfo:
    """Facts that SGLang tells of a text. Of drafts it tells nothing where none was verified."""

    finish_reason: FinishReason
    input_token_logprobs: list[tuple[Any, StrictInt, Any]] | None = None  # with the ids of the prompt
    spec_verify_ct: Natural = 0  # rounds
    spec_num_proposed_drafts: Natural = 0  # tokens of all drafts; of a tree, its nodes
    spec_num_correct_drafts: Natural = 0  # accepted tokens; those behind the end of the text are among them
    spec_correct_drafts_histogram: list[Natural] = field(default_factory=list)  # rounds by their accepted tokens


@dataclass
class Generated:
    """SGLang's answer at /generate."""

    output_ids: list[StrictInt]
    meta_info: GeneratedInfo


@dataclass
class RatedInfo:
    """Facts that SGLang tells of a text of one token, with the likeliest tokens in its place."""

    output_top_logprobs: Annotated[list[Annotated[list[Likely], Field(min_length=2)]], One]


@dataclass
class Rated:
    """The answer at /generate where the likeliest tokens are asked for, too."""

    meta_info: RatedInfo


def ending_of(generated: Generated) -> tuple[list[int], str]:
    """Return the token ids of an answer, its end of text included, and why it ended."""
    new_ids, reason = generated.output_ids, generated.meta_info.finish_reason
    if reason.type == "stop" and type(reason.matched) is int and new_ids[-1:] != [reason.matched]:
        new_ids = [*new_ids, reason.matched]
    return new_ids, reason.type


def tokenised(server: Server, text: str) -> list[int] | None:
    """Return a text as SGLang's tokenizer writes it; None where the server is none."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"text": text, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    try:
        generated = from_json(Generated, server.ask(PATH, body, lambda answer: answer))
    except UserError:
        return None
    read = generated.meta_info.input_token_logprobs or []
    return [token for _, token, _ in read] if generated.output_ids else None


def top_two_gap(server: Server, text: list[int]) -> float:
    """Return how far apart SGLang holds the log-probabilities of the two likeliest tokens behind a text."""
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": text, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}

    def read(answer: Any) -> float:
        (likeliest,) = read_answer(Rated, answer).meta_info.output_top_logprobs
        first, second = sorted((logprob for logprob, _, _ in likeliest), reverse=True)[:2]
        return first - second

    return server.ask(PATH, body, read)
