"""The content of plan.json: what rounds cost on a device, which acceptance pays there, and what to expect.

gpu_plan.json, which says the same for a GPU that is not here, stands below.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from draftsmith.inference.measuring.results import Environment
from draftsmith.inference.planning.gpu_roofline import DrafterShape, Machine
from draftsmith.models.ranges import Count, Natural, NonNegative, Positive, Share
from draftsmith.models.storage.typed_json import flat, optional, with_flat_parts
from draftsmith.models.target.shape import TargetShape

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of bytes, which may be more than other settings are


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
    """An acceptance to plan with, and where it was measured."""

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


# --- on a GPU that is not here


@dataclass(frozen=True)
class StepTimes:
    """The times of plain steps at a context, and how many texts fit."""

    context: Count
    milliseconds: dict[str, NonNegative]  # by batch size
    bound_from: Natural | None  # batch size from which on a step computes longer than it reads
    rows_that_fit: Natural


@dataclass(frozen=True)
class Outcome:
    """The speed of decoding at a batch size, by one drafter at one acceptance, or of plain decoding."""

    batch_size: Count
    drafter: str
    accepting: str
    draft_length: Natural  # 0: plain decoding
    tokens_a_second: NonNegative  # of the whole batch
    reply_seconds: NonNegative
    dollars_per_million: NonNegative | None


@dataclass(frozen=True)
class DataFlow:
    """Bytes that move during a run, and the rate at which they must so that no GPU waits for them."""

    num_bytes: NotNegative
    rate: NotNegative  # bytes a second


@dataclass(frozen=True)
class TrainingWay:
    """A way of making the target's features for a training, and what the whole run takes with it."""

    name: str
    tokens_per_micro_batch: Count  # the recipe's, or as many as fit
    memory_bytes: NotNegative  # of each GPU
    fits: bool
    hours: NotNegative
    storing_hours: NotNegative  # of these, before the first step
    gpu_hours: NotNegative
    dollars: NotNegative | None
    stored_bytes: NotNegative  # features on disk
    disk: DataFlow  # features that are written, and read in every epoch
    network: DataFlow  # features that a server sends
    link: DataFlow  # what each GPU gets from the others: weights in pieces, gradients, sums of tensor parallelism
    bound_by: Literal["products", "disk", "network", "link"]  # what takes most of the time
    command: str
    server_command: str | None = optional()  # which starts the server


@dataclass(frozen=True)
class TrainingPlan:
    """The needs of the training of a drafter, by the way in which the features are made."""

    drafter: str
    samples: Count
    tokens_per_sample: Count
    epochs: Count
    steps: Count
    samples_bytes: NotNegative  # on disk
    features_bytes: NotNegative  # of all samples, as `data.features_dtype` keeps them
    ways: Annotated[list[TrainingWay], Field(min_length=1)]
    cheapest: str | None  # of the ways that fit; None: none fits
    cheapest_without_disk: str | None  # of those that store no features


@dataclass(frozen=True)
class GpuPlan:
    """The content of gpu_plan.json."""

    target: TargetShape
    machine: Machine
    context: Count
    reply_tokens: Count
    free_tokens: Natural  # of a pass, whose products take no longer than reading its weights
    shapes: list[DrafterShape]
    steps: list[StepTimes]
    drafters: list[DrafterPlan]
    outcomes: list[Outcome]
    price: Positive | None = optional()  # dollars an hour, of one GPU
    training: list[TrainingPlan] | None = optional()  # None: the number of samples was not given
