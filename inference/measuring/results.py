"""The types of what is measured on a drafter, and the file that holds it: evaluation.json is one `Evaluation`.

The fields have the names and the order of the file; docs/measurement.md explains them.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PlainValidator

from draftsmith.inference.decoding.counters import Counted, DraftLength, Interval, PairedDifference, Stats, interval
from draftsmith.inference.decoding.schedule import AnySchedule, schedule_from_json
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.verification.acceptance_rules import LOSSY, VerificationMode
from draftsmith.models.ranges import Natural, NonNegative, Positive, Share
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.reading import read_json
from draftsmith.models.storage.typed_json import flat, from_json, optional, to_json, with_flat_parts

# --- the parts of a row


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The setting that a row was measured at. Rows may stand side by side where their settings are equal."""

    prompt_set: str
    num_prompts: Natural
    temperature: NonNegative
    top_p: Share
    verification_mode: VerificationMode = field(compare=False)  # follows from the drafter where nobody chose it
    batch_size: Annotated[Natural, Field(ge=1)]
    draft_length: DraftLength  # tokens on the longest path of a draft
    tree_nodes: Natural | None  # None: a chain
    schedule: Annotated[AnySchedule, PlainValidator(schedule_from_json)] | None = optional(compare=False)
    max_new_tokens: Natural

    @property
    def is_chain(self) -> bool:
        """Whether all drafts are chains of `draft_length` tokens: no trees, and none that a schedule shortens."""
        return self.tree_nodes is None and self.schedule is None

    def differs_only_in(self, other: "Setting", *names: str) -> bool:
        """Return whether two settings are equal once these fields of them are."""
        return replace(self, **{name: getattr(other, name) for name in names}) == other


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a latency in milliseconds."""

    p50: NonNegative
    p95: NonNegative
    p99: NonNegative


@dataclass(frozen=True)
class Phases:
    """Mean milliseconds of a round in drafting, in the target's pass with its verification, and on the host."""

    draft: NonNegative
    verify: NonNegative
    host: NonNegative

    @property
    def total(self) -> float:
        """Milliseconds of a whole round."""
        return self.draft + self.verify + self.host


@dataclass(frozen=True)
class FirstTokenParts:
    """Medians in milliseconds of what passes until the second round; None where it was not measured."""

    tokenise: NonNegative | None = None
    prefill: NonNegative | None = None
    first_decode: NonNegative | None = None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Times of a drafter beside plain decoding, in one process. Speeds are in tokens per second."""

    baseline_tokens_per_second: Positive
    tokens_per_second: Positive
    speedup: Positive  # from prompt to last token
    speedup_ci95: Interval
    repeats: Natural
    decode_tokens_per_second: NonNegative | None  # without reading the prompts; None where nothing came after that
    baseline_decode_tokens_per_second: NonNegative | None
    decode_speedup: NonNegative | None
    throughput_tokens_per_second: NonNegative | None  # over everything that was timed; None in older files
    ttft_ms: Percentiles  # time to the first token
    ttft_parts_ms: FirstTokenParts
    tpot_ms: Percentiles  # time per later token
    baseline_tpot_ms: Percentiles
    milliseconds_per_round: Phases
    baseline_milliseconds_per_round: Phases  # its total is a plain step
    bandwidth_floor_share: NonNegative | None  # share of the memory's bandwidth that is used; None where unknown
    step_cost_ratio: NonNegative  # acceptance length / speedup


@dataclass(frozen=True)
class Difference:
    """The first difference of an output from plain decoding, and what the target holds of the two tokens."""

    request: Natural  # place among the prompts
    position: Natural  # in the answer, from 0
    plain_token: int | None  # None: the answer had ended
    speculative_token: int | None
    top_two_gap: float  # between the target's two highest logits there, in the dtype of the run
    top_two_gap_fp32: float
    token_gap_fp32: float | None  # between the two tokens
    share_gap_fp32: float | None  # sampled: how far the uniform number lies outside the share of one of them
    near_tie_gap: float  # the largest that counts as a near tie: of token_gap_fp32, where sampled of share_gap_fp32
    near_tie: bool


@dataclass(frozen=True)
class LosslessCheck:
    """Counts of requests whose output was compared with plain decoding."""

    checked: Natural = 0
    identical: Natural = 0
    near_tie_divergences: Natural = 0  # first difference between two tokens that the target holds equally likely
    divergences: Natural = 0  # any other first difference: a bug
    first_differences: list[Difference] = field(default_factory=list)  # of all outputs that are not identical

    def __add__(self, other: "LosslessCheck") -> "LosslessCheck":
        return LosslessCheck(
            self.checked + other.checked,
            self.identical + other.identical,
            self.near_tie_divergences + other.near_tie_divergences,
            self.divergences + other.divergences,
            self.first_differences + other.first_differences,
        )


@dataclass(frozen=True, kw_only=True)
class DomainResult:
    """Acceptance on the prompts of one domain, or in the spans of one kind.

    A domain has a speedup where every batch is a single prompt; a kind of span has none.
    """

    num_prompts: Natural
    num_drafts: int | float
    num_draft_tokens: int | float
    num_accepted_tokens: int | float
    num_emitted_tokens: int
    mean_acceptance_length: NonNegative
    mean_acceptance_length_ci95: Interval
    draft_acceptance_rate: float
    num_rounds: Counted | None = optional()
    acceptance_histogram: list[Counted] | None = optional()  # drafts by accepted tokens
    speedup: NonNegative | None = optional()
    speedup_ci95: Interval = optional(beside="speedup")
    timed_prompts: Natural | None = optional()

    @property
    def counters(self) -> Stats:
        """Return its counters; files of before have neither rounds nor a histogram."""
        return Stats(
            len(self.acceptance_histogram or [0]) - 1,
            self.num_drafts,
            self.num_draft_tokens,
            self.num_accepted_tokens,
            self.num_emitted_tokens,
            self.num_rounds or 0,
            list(self.acceptance_histogram or []),
        )

    @classmethod
    def of(cls, num_prompts: int, total: Stats, length_ci95: Interval) -> "DomainResult":
        """Return the acceptance of so many prompts from their counters and the interval of their acceptance length."""
        return cls(
            num_prompts=num_prompts,
            num_drafts=total.num_drafts,
            num_draft_tokens=total.num_draft_tokens,
            num_accepted_tokens=total.num_accepted_tokens,
            num_emitted_tokens=total.num_emitted_tokens,
            mean_acceptance_length=total.mean_acceptance_length,
            mean_acceptance_length_ci95=length_ci95,
            draft_acceptance_rate=total.draft_acceptance_rate,
            num_rounds=total.num_rounds,
            acceptance_histogram=list(total.acceptance_histogram),
        )


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """The speed of one way in which transformers decodes, beside ours."""

    num_emitted_tokens: Natural
    tokens_per_second: NonNegative
    speedup_over_plain: NonNegative
    speedup_over_plain_ci95: Interval
    identical: Natural | None  # outputs equal to plain decoding's; None where they were sampled


@dataclass(frozen=True)
class TeacherForced:
    """The acceptance that a training pass over the texts that the decoder wrote predicts."""

    mean_acceptance_length: NonNegative
    conditional_acceptance_rates: list[Share | None]
    per_position_acceptance_rates: list[Share]


@dataclass(frozen=True)
class TeacherForcedGap(PairedDifference):
    """The decoder's acceptance length less the one that training predicts, with its interval over prompts."""

    flagged: bool  # larger than chance and rounding explain


@dataclass(frozen=True)
class CalibrationBin:
    """Drafted tokens of like confidence."""

    confidence: Share  # mean
    accepted: Share
    count: NonNegative  # expected number


@dataclass(frozen=True)
class Finding:
    """A cause of low acceptance, what was measured of it, and how to mend it."""

    cause: str
    measured: dict[str, Any]
    evidence: str
    mend: str
    cost: float | None  # tokens a round that it costs; None where that is unknown


@dataclass(frozen=True)
class RequestCounts:
    """The tokens and rounds of one request."""

    prompt_tokens: Natural
    num_tokens: Natural  # of its answer, the first one included
    num_rounds: Natural  # after reading the prompt


# --- a row and its file


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row of evaluation.json: a drafter at one setting."""

    setting: Setting = flat()
    acceptance: Stats = flat()
    mean_acceptance_length_ci95: Interval  # None where several processes counted, too
    speed: Speed = flat()
    lossless: LosslessCheck
    domains: dict[str, DomainResult] | None = optional()
    spans: dict[str, DomainResult] | None = optional()  # thinking, answer, tool_call, code; where there are several
    baselines: dict[str, BaselineResult] | None = optional()
    teacher_forced: TeacherForced | None = optional()
    teacher_forced_gap: TeacherForcedGap | None = optional()
    calibration: list[list[CalibrationBin]] | None = optional()  # of each depth the bins that are not empty
    calibration_error: list[float | None] | None = optional()
    timed_prompts: int | None = optional()  # where several processes may have counted: the prompts that were timed
    diagnosis: list[Finding] | None = optional()  # None: acceptance is not low
    requests: list[RequestCounts] | None = optional()  # those that were timed, in the order of their batches
    predicted_speedup: Positive | None = optional()  # by the costs of rounds; None where they are not known
    predicted_speedup_ci95: Interval = optional(beside="predicted_speedup")

    def __post_init__(self) -> None:
        """Refuse figures that cannot be of one measurement, for what is made of them would fail or mislead."""
        counts, speed, forced = self.acceptance, self.speed, self.teacher_forced
        phases = (speed.milliseconds_per_round, speed.baseline_milliseconds_per_round)
        if counts.num_drafts and not (counts.num_drafts <= counts.num_rounds and min(part.total for part in phases)):
            raise ValueError("drafts are counted or timed without rounds")
        if counts.num_accepted_tokens > counts.num_draft_tokens or (counts.num_drafts and not counts.draft_length):
            raise ValueError("more tokens are accepted than drafted")
        if forced and len(forced.conditional_acceptance_rates) != self.setting.draft_length:
            raise ValueError("teacher_forced has another number of rates than draft_length")

    @property
    def is_sound(self) -> bool:
        """Whether the output is the target's own, as far as was looked: else its speed does not count."""
        return self.lossless.divergences == 0 and self.setting.verification_mode not in LOSSY

    @property
    def pays(self) -> bool:
        """Whether it is shown to be faster than plain decoding: sound, with the interval of its speedup above 1."""
        return self.is_sound and self.speed.speedup_ci95 is not None and self.speed.speedup_ci95[0] > 1

    @property
    def rank_key(self) -> tuple[bool, float]:
        """The key by which drafters are ranked: one without divergences first, then the speedup."""
        return self.lossless.divergences == 0, self.speed.speedup

    @property
    def tokens_a_round(self) -> float:
        """Tokens that a round emits, rounds without a draft counted, which the acceptance length leaves out."""
        return 1 + self.acceptance.num_accepted_tokens / max(1, self.acceptance.num_rounds)

    def is_shown_to_emit_more(self, other: "Result") -> bool:
        """Return whether it emits more tokens a round than another row, with 95 % confidence over their prompts.

        Both rows hold the requests of the same prompts.
        """
        (tokens, rounds), (other_tokens, other_rounds) = (
            np.array([(request.num_tokens - 1, request.num_rounds) for request in row.requests or []]).T
            for row in (self, other)
        )

        def difference(picks: np.ndarray) -> np.ndarray:
            own, others = rounds[picks].sum(1), other_rounds[picks].sum(1)
            return tokens[picks].sum(1) / np.maximum(own, 1) - other_tokens[picks].sum(1) / np.maximum(others, 1)

        found = interval(difference, len(tokens))
        return found is not None and found[0] > 0

    @property
    def steps_a_round(self) -> float:
        """The cost of a round in steps of plain decoding, reading the prompt included."""
        return self.tokens_a_round / self.speed.speedup

    @property
    def plain_step_ms(self) -> float:
        """Milliseconds of a round of plain decoding, timed like the drafter's own rounds."""
        return self.speed.baseline_milliseconds_per_round.total


@dataclass(frozen=True)
class ChiSquareTest:
    """A test whether sampled tokens are drawn from the target's distribution."""

    num_tokens: int
    chi_square: float
    degrees: int  # of freedom
    p_value: float


@dataclass(frozen=True)
class Certificate:
    """The checks of certify.py whether a drafter leaves the target's output as it is."""

    greedy: dict[str, LosslessCheck]  # by batch size
    sampled: dict[str, ChiSquareTest]  # by verification mode; that of the lossy one is the control
    passed: bool
    control_found: bool  # the test finds the lossy mode, as it must


@dataclass(frozen=True)
class Environment:
    """The environment that a figure depends on besides the drafter."""

    versions: dict[str, str | None]  # of Python and of packages
    device: str
    num_threads: Natural
    dtype: str
    target_fingerprint: str | None
    git_commit: str | None
    command: str
    quantisation: str | None = optional()  # in which the target's files hold its weights; None: plain


@dataclass(frozen=True)
class EvaluationCost:
    """The time that an evaluation after a checkpoint took, and what it was spent on."""

    seconds: float
    training_seconds: float  # of the run, up to that checkpoint
    num_prompts: int
    repeats: int
    time_share: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The content of evaluation.json: a drafter at every setting, as draftsmith's decoder or an engine measured it."""

    target: str
    drafter: str  # as it was given: a checkpoint, a name on the Hub, or a training-free drafter
    drafter_kind: str
    environment: Environment
    results: list[Annotated[Result, with_flat_parts(Result)]]  # of draftsmith's decoder
    judged: list[Annotated[JudgedResult, with_flat_parts(JudgedResult)]] | None = optional()  # of an engine
    certificate: Certificate | None = optional()
    seconds: NonNegative | None = optional()  # that the whole comparison took, all its drafters
    cost: EvaluationCost | None = optional()

    def __post_init__(self) -> None:
        """Refuse an evaluation without rows, and one with rows of both kinds."""
        if bool(self.results) == bool(self.judged):
            raise ValueError("an evaluation has either results or judged rows")

    @property
    def first(self) -> Result | JudgedResult:
        """The row at its first setting."""
        return (self.judged or self.results)[0]

    @property
    def best(self) -> Result:
        """The row of the setting at which it is fastest; of draftsmith's decoder."""
        return max(self.results, key=lambda row: row.rank_key)


def read_evaluation(path: Path) -> Evaluation:
    """Read an evaluation.json, also of an older version. Raises `UserError` for a file that is none."""
    content = read_json(path)
    with suppress(TypeError, KeyError, AttributeError):  # of a content that is none, whose fault `from_json` names
        content = upgraded(content)
    return from_json(Evaluation, content, f"{path} holds no evaluation")


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write evaluation.json whole or not at all."""
    write_json(path, to_json(evaluation))


# --- older files

ADDED_LATER: dict[str, Any] = {  # fields of a row with their value where an older version did not measure them
    "mean_acceptance_length_ci95": None,
    "decode_tokens_per_second": None,
    "baseline_decode_tokens_per_second": None,
    "decode_speedup": None,
    "throughput_tokens_per_second": None,
    "ttft_parts_ms": {},
    "bandwidth_floor_share": None,
}


def upgraded(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of an evaluation.json of any version with the fields of today."""
    return {**content, "results": [_upgraded_row(row) for row in content["results"]]}


def _upgraded_row(row: dict[str, Any]) -> dict[str, Any]:
    plain_step = {"draft": 0.0, "verify": row["baseline_tpot_ms"]["p50"], "host": 0.0}
    rounds = row["num_drafts"] or row["num_emitted_tokens"] - row["num_prompts"]  # the prompt gives one token
    differences = [{"share_gap_fp32": None, **entry} for entry in row["lossless"].get("first_differences", [])]
    return {
        **ADDED_LATER,
        "baseline_milliseconds_per_round": plain_step,
        "num_rounds": rounds,
        **row,
        "lossless": {**row["lossless"], "first_differences": differences},
    }
