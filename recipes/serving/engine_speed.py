"""The speed that an engine's own step times promise of a drafter, beside the speed that it then had.

A request that decodes alone takes a step for each token without a drafter, and a round for each draft with one. The
speedup is then acceptance length x step / round, for any acceptance length: that of other prompts, or of a drafter that
is still in training.

vLLM can be told what to accept too (`rejection_sample_method: synthetic`), but not on a CPU, where 0.32.0 stops with
"Synthetic acceptance not supported with CPU sampling". So these times are of rounds with the drafter's own acceptance.
"""

from dataclasses import dataclass

from draftsmith.inference.decoding.decoder import OutputStats


@dataclass(frozen=True)
class TimedBatch:
    """The time that an engine took for requests that it decoded together, after their first tokens."""

    num_requests: int
    seconds: float  # of a request, on the mean
    num_tokens: int
    num_drafts: int = 0  # 0 without a drafter
    num_accepted_tokens: int = 0

    @property
    def num_steps(self) -> int:
        """Number of steps of the engine: rounds, and plain steps.

        A drafter drafts in each step of a request. A lookup does not, and then the tokens tell the steps: each brings
        one beside those that are accepted.
        """
        return max(self.num_drafts, self.num_tokens - self.num_accepted_tokens)

    @property
    def round_ms(self) -> float:
        """Milliseconds of a step."""
        return 1000 * self.seconds * self.num_requests / self.num_steps


@dataclass(frozen=True)
class EngineSpeed:
    """The speed of an engine that decodes one request at a time, at temperature 0.

    Every second prompt gave the times; acceptance length and both speedups are of the others, which the forecast has
    not seen.
    """

    plain_step_ms: float
    round_ms: float
    acceptance_length: float  # draftsmith's own, over all rounds, those without a draft, too
    measured_speedup: float  # tokens per second with the drafter over those without
    num_timed: int  # prompts that the times are of
    num_forecast: int  # prompts that the speedups are of
    forecast_speedup: float  # acceptance length x plain step / round

    def text(self) -> str:
        """Return the times and both speedups in a line."""
        return (
            f"alone: {self.plain_step_ms:.2f} ms a plain step, {self.round_ms:.2f} ms a round; speedup "
            f"{self.forecast_speedup:.2f} forecast from draftsmith's acceptance length {self.acceptance_length:.3f}, "
            f"{self.measured_speedup:.2f} measured ({self.num_forecast} prompts)"
        )


def engine_speed(plain: list[TimedBatch], drafted: list[TimedBatch], ours: OutputStats) -> EngineSpeed | None:
    """Return the speed from the same prompts, each alone, without and with the drafter, and as draftsmith decoded them.

    Returns None where there are too few prompts, or too short answers, to time.
    """
    parts = [requests[half::2] for requests in (plain, drafted) for half in (0, 1)]
    if not all(sum(request.num_tokens for request in part) for part in parts):
        return None
    plain_times, plain_rest, drafted_times, drafted_rest = parts
    plain_step_ms = 1000 * seconds_per_token(plain_times)
    num_steps = sum(request.num_steps for request in drafted_times)
    round_ms = 1000 * sum(request.seconds for request in drafted_times) / num_steps
    total = OutputStats(ours.requests[1::2]).total
    acceptance_length = 1 + total.num_accepted_tokens / max(1, total.num_rounds)
    return EngineSpeed(
        plain_step_ms,
        round_ms,
        acceptance_length,
        measured_speedup=seconds_per_token(plain_rest) / seconds_per_token(drafted_rest),
        num_timed=len(plain_times),
        num_forecast=len(plain_rest),
        forecast_speedup=acceptance_length * plain_step_ms / round_ms,
    )


def seconds_per_token(requests: list[TimedBatch]) -> float:
    """Return the mean time of a token after the first."""
    return sum(request.seconds for request in requests) / sum(request.num_tokens for request in requests)
