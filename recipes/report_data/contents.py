"""Everything that a report is made of, from the folder of a run, of several runs, of an evaluation, or of a study."""

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import Field

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import Environment, Evaluation, Interval, Result, Setting
from draftsmith.inference.measuring.sample_texts import SampleText
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.plans import Plan
from draftsmith.inference.planning.tuning import PredictedDraft
from draftsmith.inference.traffic.load_test import LoadTest
from draftsmith.models.ranges import Natural, NonNegative
from draftsmith.recipes.report_data.measured import (
    FREE,
    DrafterResult,
    EvaluatedRun,
    MeasuredDrafter,
    checkpoint_names,
    conditions,
)


@dataclass(frozen=True)
class Choice:
    """The part of choice.json that the report shows."""

    drafter: str
    draft_length: int
    tree: list[list[int]] | None
    fitted_on: str
    predicted: list[PredictedDraft]
    schedule: Schedule


@dataclass(frozen=True)
class ReplayedDraft:
    """The part of a row of replay.json that the report shows."""

    drafter: str
    prompt_set: str
    temperature: NonNegative
    verification_mode: str
    draft_length: Natural
    tree_nodes: Natural | None  # None: a chain
    mean_acceptance_length: NonNegative
    mean_acceptance_length_ci95: Interval


@dataclass(frozen=True)
class Replay:
    """The part of replay.json that the report shows."""

    target: str
    environment: Environment
    results: Annotated[list[ReplayedDraft], Field(min_length=1)]


STUDIES: dict[str, type] = {"load": LoadTest, "plan": Plan, "replay": Replay}  # NAME.json that say enough for a page
EXTRAS = {"choice": Choice, **STUDIES}  # NAME.json that other commands write
Written = TypeVar("Written", Choice, Costs)  # the content of a file that a command wrote for one drafter


@dataclass
class ReportData:
    """Everything that a report is made of."""

    runs: list[EvaluatedRun]  # the fastest first; none in the folder that `evaluate` wrote
    drafters: list[MeasuredDrafter]  # trained ones first, the fastest of them on top; none beside a study alone
    elsewhere: list[MeasuredDrafter]  # measured under other conditions: in no figure and no ratio with them
    costs: list[Costs] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)  # values of the files of EXTRAS by name
    contents: dict[str, list[Any]] = field(default_factory=dict)  # and what stands in these files
    samples: list[SampleText] = field(default_factory=list)
    judged: list[Evaluation] = field(default_factory=list)  # by an engine: in tables of their own
    unreadable: list[str] = field(default_factory=list)  # why files of the folder are left out

    @property
    def all_drafters(self) -> list[MeasuredDrafter]:
        return self.drafters + self.elsewhere

    @property
    def comparable_runs(self) -> list[EvaluatedRun]:
        """The runs whose best checkpoint was measured under the same conditions as the drafters."""
        here = conditions(self.drafters[0].environment)
        return [run for run in self.runs if conditions(run.best.evaluation.environment) == here]

    @property
    def studies(self) -> list[Evaluation | LoadTest | Plan | Replay]:
        """Judged evaluations, load tests, plans and replays of the folder."""
        return [*self.judged, *(study for name in STUDIES for study in self.extras.get(name, []))]

    @property
    def target(self) -> str:
        if self.runs:
            return self.runs[0].target
        return self.drafters[0].evaluation.target if self.drafters else self.studies[0].target

    @property
    def environment(self) -> Environment:
        """The environment of the measurement that the report leads with, else of the first study."""
        return self.drafters[0].environment if self.drafters else self.studies[0].environment

    @property
    def leader(self) -> DrafterResult:
        """The drafter and result that the report leads with: the fastest one that is shown to pay.

        The temperature is that of the first result, the batch size the smallest. Where none is shown to pay, it is the
        fastest sound one; where no result is sound, the fastest one.
        """
        first = self.drafters[0].results[0].setting
        rows = [
            (drafter, row)
            for drafter in self.drafters
            for row in drafter.results
            if row.setting.differs_only_in(first, *FREE)
        ]
        smallest = min(row.setting.batch_size for _, row in rows)
        rows = [(drafter, row) for drafter, row in rows if row.setting.batch_size == smallest]

        def rank(pair: DrafterResult) -> tuple[bool, bool, float]:
            _, row = pair
            drafts = row.acceptance.num_drafts > 0
            return row.is_sound and drafts, row.pays and drafts, row.speed.speedup

        return max(rows, key=rank)

    @property
    def setting(self) -> Setting:
        """The setting that the report leads with."""
        return self.leader[1].setting

    def at_leading_setting(self) -> list[DrafterResult]:
        """Return each drafter with its result at the leading setting, where it has one.

        Settings of other schedules or trees count as equal: the leading row itself goes first, or one of its schedule.
        """
        _, leading = self.leader

        def nearness(row: Result) -> tuple[bool, bool]:
            return row is leading, row.setting.schedule == leading.setting.schedule

        rows = [
            (drafter, [row for row in drafter.results if row.setting == leading.setting]) for drafter in self.drafters
        ]
        return [(drafter, max(same, key=nearness)) for drafter, same in rows if same]

    def choice_for(self, drafter: MeasuredDrafter) -> Choice | None:
        return self._written_for(drafter, self.extras.get("choice", []))

    def costs_for(self, drafter: MeasuredDrafter) -> Costs | None:
        """Return the costs of its own costs.json, else those of another drafter of its kind in the folder."""
        of_kind = [costs for costs in self.costs if costs.drafter_kind == drafter.kind]
        return self._written_for(drafter, self.costs) or next(iter(of_kind), None)

    def _written_for(self, drafter: MeasuredDrafter, contents: list[Written]) -> Written | None:
        own = [content for content in contents if self.find(content.drafter) is drafter]
        return max(own, key=lambda content: content.drafter == drafter.evaluation.drafter, default=None)

    def find(self, drafter: str) -> MeasuredDrafter | None:
        """Return the drafter that a file is about: the same one, else one of its name, as another step of its run."""
        same = [measured for measured in self.drafters if measured.evaluation.drafter == drafter]
        named = [measured for measured in self.drafters if measured.name == checkpoint_names(drafter)[0]]
        return next(iter(same + named), None)

    def name_of(self, drafter: str) -> str:
        """Return what the report calls the drafter that a file is about."""
        measured = self.find(drafter)
        return measured.name if measured else checkpoint_names(drafter)[0]
