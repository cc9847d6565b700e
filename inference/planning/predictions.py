"""The speedup that costs predict for a measured row, from the rounds that its requests took.

What is predicted is the time of the rounds. Reading the prompts takes as long as it was measured, with the drafter and
without it: no cost of a round tells it, and it is part of the speedup.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import Evaluation, RequestCounts, Result
from draftsmith.inference.planning.costs import Costs, DraftChances
from draftsmith.inference.planning.fixed_batches import RequestProfile, batch_milliseconds


def with_predictions(evaluation: Evaluation, costs: Costs | None) -> Evaluation:
    """Return the evaluation of a drafter with what its costs predict in each row; unchanged without costs."""
    if costs is None:
        return evaluation
    return replace(evaluation, results=[with_prediction(row, costs) for row in evaluation.results])


def with_prediction(row: Result, costs: Costs) -> Result:
    """Return the row with the speedup that the costs predict and its interval; unchanged where they cannot tell."""
    speedup = predicted_speedup(row, costs)
    if speedup is None:
        return row
    return replace(row, predicted_speedup=speedup, predicted_speedup_ci95=costs.interval(speedup))


def predicted_speedup(row: Result, costs: Costs) -> float | None:
    """Return the speedup from prompt to last token; None where nothing was drafted, and for drafts without costs.

    Files of before do not tell their requests: their rows are predicted from the mean of their rounds, without reading
    the prompts.
    """
    setting, counts = row.setting, row.acceptance
    if not counts.num_drafts or not is_known(row, costs):
        return None
    requests, size = row.requests or [], setting.batch_size
    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    chances = DraftChances.of(counts)
    if isinstance(setting.schedule, Schedule):  # it tells of each round how long the draft is, if there is one
        num_asked = sum(num_rounds_to_draft(batch, setting.schedule) for batch in batches) or counts.num_rounds
        chances = DraftChances(min(1.0, counts.num_drafts / num_asked))
    fitted = costs.drafting_with(chances)
    if not requests:
        place = setting.draft_length, setting.batch_size, context_of(row, costs), setting.tree_nodes
        return fitted.speedup(row.tokens_a_round, *place)
    shape = setting.schedule if isinstance(setting.schedule, Schedule) else setting.draft_length
    drafted, plain = 0.0, 0.0
    for batch in batches:
        own, beside = (
            [profile(one, one.num_rounds) for one in batch],
            [profile(one, one.num_tokens - 1) for one in batch],
        )
        drafted += batch_milliseconds(fitted, shape, own, costs.drops_columns, setting.tree_nodes)
        plain += batch_milliseconds(costs, 0, beside, costs.drops_columns)
    return whole_speedup(row, plain / drafted) if drafted and plain else None


def num_rounds_to_draft(batch: Sequence[RequestCounts], schedule: Schedule) -> int:
    """Return the rounds of a batch's requests that the schedule does not make plain."""
    running = [sum(one.num_rounds > number for one in batch) for number in range(max(one.num_rounds for one in batch))]
    return sum(size for size in running if schedule.draft_length(size))


def is_known(row: Result, costs: Costs) -> bool:
    """Return whether the costs tell of such drafts: chains, schedules of chains, and trees where some were timed."""
    schedule = row.setting.schedule
    if schedule is not None and not isinstance(schedule, Schedule):
        return False
    return row.setting.tree_nodes is None or any(times.tree for times in costs.fitted_on)


def context_of(row: Result, costs: Costs) -> int:
    """Return the tokens that a request of the row has half way through, within the contexts of the fit."""
    tokens = row.setting.max_new_tokens
    if row.requests:
        tokens = round(fmean(one.prompt_tokens + one.num_tokens / 2 for one in row.requests))
    contexts = [times.context for times in costs.fitted_on] or [tokens]
    return min(max(tokens, min(contexts)), max(contexts))


def profile(request: RequestCounts, num_rounds: int) -> RequestProfile:
    """Return a request as it is decoded in so many rounds; its first token is that of reading the prompt."""
    return RequestProfile(request.prompt_tokens, request.num_tokens - 1, num_rounds)


def whole_speedup(row: Result, rounds_speedup: float) -> float:
    """Return the speedup of whole answers where that of the rounds is given, and reading the prompt takes its time."""
    speed = row.speed
    if not speed.decode_tokens_per_second or not speed.baseline_decode_tokens_per_second or not row.requests:
        return rounds_speedup
    tokens = sum(one.num_tokens for one in row.requests)
    later = tokens - len(row.requests)  # tokens after the first ones
    rounds = later / speed.baseline_decode_tokens_per_second  # seconds, of plain decoding
    reading = max(0.0, tokens / speed.baseline_tokens_per_second - rounds)
    own_reading = max(0.0, tokens / speed.tokens_per_second - later / speed.decode_tokens_per_second)
    return (reading + rounds) / (own_reading + rounds / rounds_speedup)
