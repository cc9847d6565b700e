"""Measures the costs of a drafter that was just evaluated, where a limit of time allows it."""

from collections.abc import Callable

from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import Result
from draftsmith.inference.planning.cost_measurement import (
    LEAST_VISITS,
    CostRange,
    longest_context,
    measure_costs,
)
from draftsmith.inference.planning.costs import Costs
from draftsmith.models import Drafter, Target
from draftsmith.models.sampling.trees import Chain

MOST_SECONDS = 30.0


def costs_beside(
    target: Target,
    drafter: Drafter,
    name: str,
    rows: list[Result],
    prompts: PromptSet,
    seconds: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Costs | None:
    """Measure costs up to the batch size, draft length and tree of measured rows, in about `seconds` at most.

    `on_progress` gets the share of the work that is done. Returns None where nothing was drafted, where drafts have a
    shape of their own, where the target's context is too short, and where the time is too short for the least number of
    rounds, each as slow as in the slowest of the rows.
    """
    drafted = [row for row in rows if row.acceptance.num_drafts]
    if not drafted or not isinstance(drafter.own_shape(1), Chain):
        return None
    longest = max(row.setting.draft_length for row in drafted)
    nodes = max(row.setting.tree_nodes or 0 for row in drafted)
    room = longest_context(target, longest, nodes)
    context = min(typical_context(prompts, drafted[0].setting.max_new_tokens), room)
    if context < 1:
        return None
    batch = max(row.setting.batch_size for row in drafted)
    reach = CostRange(batch, context, longest, nodes, min(MOST_SECONDS, seconds))
    round_seconds = max(row.speed.milliseconds_per_round.total for row in drafted) / 1000
    rounds = LEAST_VISITS * sum(setting.visit.rounds for part in reach.settings(drafter) for setting in part)
    if rounds * round_seconds > seconds:
        return None
    return measure_costs(target, drafter, reach, name, on_progress)


def typical_context(prompts: PromptSet, max_new_tokens: int) -> int:
    """Return the mean number of tokens that a request has half way through its answer."""
    return round(sum(map(len, prompts.token_ids)) / len(prompts.token_ids) + max_new_tokens / 2)
