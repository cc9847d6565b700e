"""auto.json: all that a search found and decided so far."""

from dataclasses import dataclass

from draftsmith.recipes.auto.budget import AutoPlan
from draftsmith.recipes.auto.race import Rung
from draftsmith.recipes.auto.score import Score
from draftsmith.recipes.auto.traffic import TrafficSummary


@dataclass(frozen=True)
class AutoState:
    """The content of auto.json, which each stage writes when it is done."""

    asked: str  # the settings, in words
    target_fingerprint: str | None
    traffic: TrafficSummary
    plan: AutoPlan
    lookups: list[Score]
    rungs: list[Rung]
    over: str | None = None  # why the race ended before the last rung
    final: Score | None = None  # the winner after its last training
