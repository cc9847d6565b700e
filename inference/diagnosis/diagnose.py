"""Why a drafter's acceptance is low: each cause is a measurement or an experiment on texts that the target wrote.

The cost of a cause is in tokens a round: the acceptance length that the recorded texts would have without the cause,
replayed round by round, less the one that they have. A cause is reported where its cost is at least `LEAST_COST` and
the paired interval over prompts lies above 0. What may be wrong with the wiring is in miswiring.py, and what else costs
acceptance in weaknesses.py; docs/diagnosis.md says what was tested.
"""

import numpy as np

from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.diagnosis.miswiring import other_identity, other_map, other_template, other_wiring
from draftsmith.inference.diagnosis.replayed_drafter import Reference, ReplayedDrafter
from draftsmith.inference.diagnosis.weaknesses import (
    LOW_FIRST,
    decay,
    domain_shift,
    less_than_before,
    outside_vocabulary,
    uncertain_target,
)
from draftsmith.inference.measuring.results import Finding
from draftsmith.inference.replay.replay import Recording, replay
from draftsmith.models import Drafter, Target

LOW_FALL = 0.5  # acceptance is low where a later token's conditional rate is below this share of the first one's
LEAST_ROUNDS = 20  # rounds that must have reached a depth, for its rate to say anything


def is_low(stats: Stats) -> bool:
    """Return whether few first tokens are accepted, or later ones less than half as often as first ones."""
    first, *later = stats.conditional_acceptance_rates
    reached = np.cumsum(stats.acceptance_histogram[::-1])[::-1][1:]  # rounds that accepted at least 1, 2, ...
    falls = (
        rate < LOW_FALL * (first or 0)
        for rate, rounds in zip(later, reached, strict=False)
        if rate is not None and rounds >= LEAST_ROUNDS
    )
    return first is not None and (first < LOW_FIRST or any(falls))


def diagnose(
    target: Target,
    drafter: Drafter,
    recording: Recording,
    draft_length: int,
    domains: list[str] | None = None,
    reference: Reference | None = None,
) -> list[Finding]:
    """Return the causes that the evidence points to, the costliest first; empty where nothing wrong was found.

    `domains` are those of the prompts. The drafter is in evaluation mode and can be replayed.
    """
    traces = replay(target, recording, {"drafter": drafter}, draft_length)["drafter"]
    replayed = ReplayedDrafter(target, drafter, recording, draft_length, traces, domains or [], reference)
    wiring = [*other_identity(replayed), *other_wiring(replayed), *other_map(replayed)]
    causes = [*wiring, *other_template(replayed), *decay(replayed), *uncertain_target(replayed)]
    causes += domain_shift(replayed)
    if not any(finding.cause == "missing d2t" for finding in wiring):
        causes += outside_vocabulary(replayed)
    if not any(finding.cost for finding in causes):
        causes += less_than_before(replayed)
    return sorted(causes, key=lambda finding: -(finding.cost or 0))
