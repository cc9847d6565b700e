"""Acceptance of a running server, beside what was measured when the drafter was exported."""

import math
from dataclasses import dataclass
from operator import mul
from pathlib import Path

from draftsmith.inference.measuring.results import Result, read_evaluation
from draftsmith.models.errors import UserError
from draftsmith.train.engine.vllm_counters import Counters

TOLERANCE = 0.1  # share of the extra tokens of a round that traffic may cost before retraining is worth a thought
NORMAL_QUANTILE = 1.96  # of a 95 % interval
RETRAIN = "retrain"  # the judgement that is an alert begins so
LEAST_DRAFTS = 200  # below which nothing is said about drift


@dataclass
class Reference:
    """Acceptance that was measured from the exported directory."""

    per_position_acceptance_rates: list[float]
    temperature: float
    standard_error: float  # of its acceptance length, over prompts

    def range_at(self, mean_draft_length: float) -> tuple[float, float]:
        """Return the lowest and highest acceptance length that agree with it at a mean number of drafted tokens.

        A server with a schedule drafts now more, now fewer, and counts only the sum. Each further token adds less than
        the one before it, so that the mean gains most where all drafts are of about its length, and least where they
        are of one token and of all. The two meet where all drafts are of all tokens, or all of one.
        """
        first, *later = self.per_position_acceptance_rates
        beyond = max(0.0, mean_draft_length - 1)  # the first token is always drafted
        alike = [min(1.0, max(0.0, beyond - position)) for position in range(len(later))]
        apart = [min(1.0, beyond / len(later))] * len(later) if later else []
        low, high = (1 + first + sum(map(mul, shares, later)) for shares in (apart, alike))
        return low, high


def read_reference(directory: Path, draft_length: int) -> Reference:
    """Return the coldest row of DIRECTORY/evaluation.json for that draft length, at the smallest batch size.

    A longer draft answers for a shorter one, because rates of a position do not hang on what comes behind it.
    """
    path = directory / "evaluation.json"
    if not path.is_file():
        raise UserError(f"--against {directory}: it holds no evaluation.json: export it with --prompts")
    chains = [result for result in read_evaluation(path).results if result.setting.is_chain]
    results = [result for result in chains if result.setting.draft_length >= draft_length]
    if not results:
        raise UserError(f"--against {directory}: nothing was measured there with {draft_length} or more draft tokens")
    settings = [result.setting for result in results]
    order = [(setting.temperature, setting.draft_length, setting.batch_size) for setting in settings]
    result = results[order.index(min(order))]
    rates = result.acceptance.per_position_acceptance_rates[:draft_length]
    return Reference(rates, result.setting.temperature, standard_error_of(result))


def standard_error_of(result: Result) -> float:
    """Return the standard error of the acceptance length: of the interval over prompts, else of the drafts alone.

    That of the longest drafts stands for shorter ones, whose error is smaller.
    """
    if interval := result.mean_acceptance_length_ci95:
        return (interval[1] - interval[0]) / (2 * NORMAL_QUANTILE)
    counts = result.acceptance
    drafts, tokens, accepted = counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens
    per_position = tuple(round(rate * drafts) for rate in counts.per_position_acceptance_rates)
    return Counters(round(drafts), round(tokens), round(accepted), per_position).standard_error


def drift_of(counters: Counters, reference: Reference) -> float:
    """Return how far the acceptance length lies outside of what was measured, for as many tokens as were drafted."""
    low, high = reference.range_at(counters.mean_draft_length)
    return counters.mean_acceptance_length - min(max(counters.mean_acceptance_length, low), high)


def judgement(counters: Counters, reference: Reference) -> str:
    """Return what the drift means: chance, better, or worse by so much that retraining should be thought of.

    Chance is two standard errors of the difference: those of the traffic and of the reference together.
    """
    if counters.num_drafts < LEAST_DRAFTS:
        return f"{counters.num_drafts} drafts: too few to judge"
    drift, error = drift_of(counters, reference), 2 * math.hypot(counters.standard_error, reference.standard_error)
    gain = reference.range_at(counters.mean_draft_length)[0] - 1
    if drift + error < -TOLERANCE * gain:
        return f"{RETRAIN}: this traffic is accepted clearly less than was measured at export (train on its prompts)"
    if abs(drift) <= error:
        if reference.standard_error > counters.standard_error and error > TOLERANCE * gain:
            return (
                f"as measured, as far as its reference of +- {2 * reference.standard_error:.2f} tells (more --prompts)"
            )
        return "as measured"
    return "better than measured" if drift > 0 else "slightly below what was measured"


def describe(counters: Counters, reference: Reference | None) -> str:
    """Return one reading, in a line or two."""
    if not counters.num_drafts:
        return "no drafts"
    rates = " ".join(f"{rate:.2f}" for rate in counters.per_position_acceptance_rates)
    text = (
        f"acceptance length {counters.mean_acceptance_length:.2f} +- {2 * counters.standard_error:.2f}  "
        f"by position {rates}  ({counters.num_drafts} drafts of {counters.mean_draft_length:.1f} tokens)"
    )
    if reference is None:
        return text
    low, high = (f"{length:.2f}" for length in reference.range_at(counters.mean_draft_length))
    measured = f"measured {low if low == high else f'{low} to {high}'} at temperature {reference.temperature:g}"
    drift = round(drift_of(counters, reference), 2) + 0.0  # which is never -0.0
    return f"{text}\n  {measured}, drift {drift:+.2f}: {judgement(counters, reference)}"
