"""The content of plan.json: what rounds cost on a device, what acceptance pays there, and what to expect of it."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from draftsmith.inference.measuring.results import Environment
from draftsmith.models.ranges import Natural, NonNegative, Share
from draftsmith.models.typed_json import flat, optional, with_flat_parts


@dataclass(frozen=True)
class BatchCosts:
    """The costs of rounds at a batch size, and the acceptance that pays. Keys are draft lengths or tree nodes."""

    batch_size: Natural
    plain_ms: NonNegative  # of a plain step
    round_ms: dict[str, NonNegative]
    break_even_acceptance_length: dict[str, NonNegative]
    tree_break_even_acceptance_length: dict[str, NonNegative]
    highest_speedup: NonNegative  # where everything is accepted


@dataclass(frozen=True)
class Acceptance:
    """Acceptance to plan with."""

    where: str
    source: str
    rates: list[Share | None]  # conditional, by depth


@dataclass(frozen=True)
class BestDraft:
    """The best draft length at a batch size, for some acceptance."""

    batch_size: Natural
    draft_length: Natural  # 0: speculation off
    acceptance_length: NonNegative
    speedup: NonNegative


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """An acceptance, and the best drafts that it leads to by batch size."""

    acceptance: Acceptance = flat()
    by_batch_size: list[BestDraft]


@dataclass(frozen=True)
class TrainingNeeds:
    """The time and memory that training by a recipe takes, by formulae."""

    device: str
    steps: int
    samples: int
    tokens_per_sample: int
    hours: float
    gigabytes: float


@dataclass(frozen=True)
class DrafterPlan:
    """The plan for one drafter."""

    drafter: str
    drafter_kind: str
    by_batch_size: list[BatchCosts]
    tree_depths: dict[str, int]  # by number of nodes
    expected: list[Annotated[Expectation, with_flat_parts(Expectation)]]
    held_out: dict[str, float]  # errors of the fitted costs at settings that were not fitted on
    verdicts: list[str]
    training: TrainingNeeds | None = optional()  # None: no recipe is known


@dataclass(frozen=True)
class Plan:
    """The content of plan.json."""

    target: str
    context: Annotated[Natural, Field(ge=1)]
    environment: Environment
    drafters: Annotated[list[DrafterPlan], Field(min_length=1)]
