"""auto.json: all that a search found and decided so far."""

from dataclasses import dataclass

from draftsmith.recipes.auto.budget import AutoPlan
from draftsmith.recipes.auto.race import Rung
from draftsmith.recipes.auto.score import Score
from draftsmith.recipes.auto.traffic import AnswerSummary, TrafficSummary
from draftsmith.recipes.auto.tuned_drafts import TunedDrafts


@dataclass(frozen=True)
class AutoState:
    """The content of auto.json, which each stage writes when it is done."""

    asked: str  # the settings, in words
    target_fingerprint: str | None
    traffic: TrafficSummary
    plan: AutoPlan
    needed_rates: dict[str, float | None]  # acceptance rate from which on a kind pays, as `needed_rate` gives it
    lookups: list[Score]
    probes: list[Score]  # of kinds, before the first rung
    rungs: list[Rung]
    answers: AnswerSummary | None = None
    over: str | None = None  # why the race ended before the last rung
    final: Score | None = None  # the winner after its last training
    cascade: Score | None = None  # the better lookup before the winner
    tuned: TunedDrafts | None = None  # the winner's drafts that are no chains, where no engine is named

    @property
    def finalists(self) -> list[Score]:
        """The scores of those that are measured at the end: the winner and its cascade, if any, and the lookups."""
        return [score for score in (self.final, self.cascade) if score] + self.lookups

    @property
    def newest_scores(self) -> dict[str, Score]:
        """The score of each kind after the newest rung that it was in, or of its probe."""
        contenders = [contender for rung in self.rungs for contender in rung.contenders]
        return {score.name: score for score in [*self.probes, *(contender.score for contender in contenders)]}

    @property
    def payable(self) -> list[str]:
        """The kinds that could pay if they learnt enough."""
        return [kind for kind, rate in self.needed_rates.items() if rate is not None]
