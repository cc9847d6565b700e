"""The types of what a serving engine measured on a drafter: `judged` in evaluation.json.

The engine counts its drafts, and the client's clock takes the times. Such a row never stands beside one of draftsmith's
own decoder, whose times, rules and kernels are others. docs/serving.md explains the fields.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from draftsmith.inference.decoding.counters import DraftLength, Interval, Stats
from draftsmith.models.ranges import Natural, NonNegative, Positive, Share
from draftsmith.models.storage.typed_json import flat, optional


@dataclass(frozen=True)
class Judge:
    """The engine that measured."""

    engine: str  # with its version, such as "vllm 0.32.0"
    url: str = field(compare=False)  # an engine that was started anew at another address judges alike

    @property
    def text(self) -> str:
        return f"{self.engine} at {self.url}"


@dataclass(frozen=True, kw_only=True)
class JudgedSetting:
    """The setting of a judged row. Only rows of equal settings, and so of one judge, are compared."""

    judge: Judge
    prompt_set: str
    num_prompts: Natural = field(compare=False)  # a share of the time may have left some out
    temperature: NonNegative
    top_p: Share
    batch_size: Annotated[Natural, Field(ge=1)]  # requests that were sent together
    draft_length: DraftLength
    max_new_tokens: Natural


@dataclass(frozen=True, kw_only=True)
class JudgedSpeed:
    """Speeds in tokens per second by the client's clock, from sending a batch to its last answer."""

    tokens_per_second: Positive
    baseline_tokens_per_second: Positive | None  # of the plain server; None where there is none
    speedup: Positive | None
    speedup_ci95: Interval  # over batches
    repeats: Natural


@dataclass(frozen=True)
class TextDifference:
    """The first difference of an answer from the plain server's."""

    request: Natural  # place among the prompts
    position: Natural  # in the answer, from 0
    plain_token: int | None  # None: the answer had ended
    speculative_token: int | None
    top_two_gap: NonNegative  # between the plain server's two highest log-probabilities there; near 0 is a tie


@dataclass(frozen=True)
class ComparedTexts:
    """Greedy answers beside those of the plain server."""

    checked: Natural
    identical: Natural
    first_differences: list[TextDifference]


@dataclass(frozen=True, kw_only=True)
class JudgedResult:
    """A row of `judged` in evaluation.json: a drafter at one setting, measured by an engine.

    The engine does not tell rounds without a draft: `num_rounds` counts those with one.
    """

    setting: JudgedSetting = flat()
    acceptance: Stats = flat()
    mean_acceptance_length_ci95: Interval  # over batches
    speed: JudgedSpeed = flat()
    texts: ComparedTexts | None = optional()  # None: without a plain server, or sampled
    swap_seconds: NonNegative | None = optional()  # None: the engine was started with this drafter
    start_seconds: NonNegative | None = optional()  # until the engine answered; None: draftsmith did not start it

    @property
    def is_sound(self) -> bool:
        """Whether its speed counts: always, since the engine answers for its own verification; `texts` show it."""
        return True
