"""Why a drafter's acceptance is low: each cause is a measurement or an experiment on texts that the target wrote.

Every cause says what it costs, in tokens a round: the acceptance length that the recorded texts would have if the
cause were gone, replayed round by round, less the one they have. It is named where that is at least `WORTH` and its
paired interval over prompts leaves out 0. What may be wrong with the wiring is in miswiring.py, what else costs
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

LOW_FALL = 0.5  # the share of it that a later token, all before it accepted, must reach for acceptance not to be low
LEAST_ROUNDS = 20  # that reached a depth, for its rate to say anything


def is_low(stats: Stats) -> bool:
    """Whether acceptance asks for a diagnosis: few first tokens accepted, or a fall to less than half behind them."""
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
    """The causes that the evidence points to, the costliest first; empty where nothing wrong was found.

    `domains` by prompt. The drafter is in evaluation mode and can be replayed. A finding has `cause`, `measured`
    (figures), `evidence` (a sentence), `mend` and `cost`, tokens a round or None where no experiment tells.
    """
    traces = replay(target, recording, {"d": drafter}, draft_length)["d"]
    replayed = ReplayedDrafter(target, drafter, recording, draft_length, traces, domains or [], reference)
    wiring = [*other_identity(replayed), *other_wiring(replayed), *other_map(replayed)]
    found = [*wiring, *other_template(replayed), *decay(replayed), *uncertain_target(replayed), *domain_shift(replayed)]
    if not any(one.cause == "missing d2t" for one in wiring):
        found += outside_vocabulary(replayed)
    if not any(one.cost for one in found):
        found += less_than_before(replayed)
    return sorted(found, key=lambda one: -(one.cost or 0))
