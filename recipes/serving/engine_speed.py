"""What an engine's own step times promise of a drafter, beside what it then made of them.

A request that decodes alone takes a step for each token without a drafter, and a round for each draft with one. What
drafting is worth is then acceptance length x step / round, for any acceptance length: one of other prompts, or of a
drafter that is still in training.

vLLM can be told what to accept too (`rejection_sample_method: synthetic`), but not on a CPU, where 0.32.0 stops with
"Synthetic acceptance not supported with CPU sampling". So these times are of rounds with the drafter's own acceptance.
"""

from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.inference.decoding.decoder import OutputStats


@dataclass(frozen=True)
class TimedRequest:
    """A request that an engine decoded alone, behind its first token."""

    seconds: float
    num_tokens: int
    num_drafts: int  # 0 without a drafter


@dataclass(frozen=True)
class EngineSpeed:
    """Of one request at a time, temperature 0.

    Every second prompt gave the times; acceptance length and both speedups are of the others, which the forecast has
    not seen.
    """

    plain_step_ms: float
    round_ms: float
    acceptance_length: float  # draftsmith's own
    measured_speedup: float  # tokens per second with the drafter over those without
    num_timed: int  # prompts that the times are of
    num_forecast: int  # prompts that the speedups are of

    @property
    def forecast_speedup(self) -> float:
        return self.acceptance_length * self.plain_step_ms / self.round_ms

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "forecast_speedup": self.forecast_speedup}

    def text(self) -> str:
        return (
            f"alone: {self.plain_step_ms:.2f} ms a plain step, {self.round_ms:.2f} ms a round; speedup "
            f"{self.forecast_speedup:.2f} forecast from draftsmith's acceptance length {self.acceptance_length:.3f}, "
            f"{self.measured_speedup:.2f} measured ({self.num_forecast} prompts)"
        )


def engine_speed(plain: list[TimedRequest], drafted: list[TimedRequest], ours: OutputStats) -> EngineSpeed | None:
    """From the same prompts without and with the drafter, and as we decoded them; None: too few or short to time."""
    parts = [part[half::2] for part in (plain, drafted) for half in (0, 1)]
    if not all(sum(request.num_tokens for request in part) for part in parts):
        return None
    plain_times, plain_rest, drafted_times, drafted_rest = parts
    return EngineSpeed(
        plain_step_ms=1000 * seconds_per_token(plain_times),
        round_ms=1000 * sum(one.seconds for one in drafted_times) / sum(one.num_drafts for one in drafted_times),
        acceptance_length=OutputStats(ours.requests[1::2]).total.mean_acceptance_length,
        measured_speedup=seconds_per_token(plain_rest) / seconds_per_token(drafted_rest),
        num_timed=len(plain_times),
        num_forecast=len(plain_rest),
    )


def seconds_per_token(requests: list[TimedRequest]) -> float:
    return sum(one.seconds for one in requests) / sum(one.num_tokens for one in requests)
