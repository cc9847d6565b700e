"""Everything that a report is made of, read from the folder of a run, of several runs, or of an evaluation."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from draftsmith.data.processes import locked
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.results import (
    Environment,
    Evaluation,
    Result,
    Setting,
    place_of_best,
    read_evaluation,
)
from draftsmith.inference.measuring.sample_texts import SampleText
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.tuning import PredictedDraft
from draftsmith.inference.traffic.load_test import LoadTest
from draftsmith.models.errors import UserError
from draftsmith.models.files import COMPLETE, finish_moving
from draftsmith.models.reading import read_json, read_text, read_typed
from draftsmith.train.run_folder.checkpoint import checkpoint_step
from draftsmith.train.run_folder.run_folder import measured_checkpoints
from draftsmith.train.run_folder.stored_run import LoggedStep, Reader, read_config
from draftsmith.train.run_folder.vocabulary import read_vocabulary, vocabulary_text

FREE = ("batch_size", "draft_length", "tree_nodes")  # in which the settings differ that a report compares
T = TypeVar("T")


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
class PlannedDrafter:
    """The part of a drafter in plan.json that the report shows."""

    verdicts: list[str]


@dataclass(frozen=True)
class Plan:
    """The part of plan.json that the report shows."""

    drafters: list[PlannedDrafter]


EXTRAS: dict[str, type] = {"choice": Choice, "load": LoadTest, "plan": Plan}  # NAME.json that other commands write


@dataclass
class EvaluatedCheckpoint:
    """A checkpoint that was evaluated in training."""

    step: int
    evaluation: Evaluation
    baselines: dict[str, Evaluation]  # training-free drafters, measured in the same process
    samples: list[SampleText]

    @property
    def first_result(self) -> Result:
        return self.evaluation.results[0]


@dataclass
class EvaluatedRun:
    """A run with at least one evaluated checkpoint."""

    name: str
    kind: str
    target: str
    config: str  # text of config.yaml
    environment: str  # content of environment.json, as YAML
    vocabulary: str  # what its draft vocabulary is and costs; empty where it is the target's
    metrics: list[LoggedStep]
    checkpoints: list[EvaluatedCheckpoint]  # oldest first

    @property
    def best(self) -> EvaluatedCheckpoint:
        """The checkpoint of the link `best`, where a run that goes on has not moved it since."""
        return self.checkpoints[place_of_best([checkpoint.first_result for checkpoint in self.checkpoints])]


@dataclass
class MeasuredDrafter:
    """A drafter as it stands in the comparison."""

    name: str  # no two of a report share it
    note: str  # which checkpoint, or beside which it was measured
    evaluation: Evaluation

    @property
    def label(self) -> str:
        return ", ".join(filter(None, (self.name, self.note)))

    @property
    def results(self) -> list[Result]:
        return self.evaluation.results

    @property
    def kind(self) -> str:
        return self.evaluation.drafter_kind

    @property
    def environment(self) -> Environment:
        return self.evaluation.environment

    @property
    def is_trained(self) -> bool:
        """Whether it was given as a checkpoint; a training-free drafter is given by its kind."""
        return self.evaluation.drafter != self.kind

    def sound_results(self, like: Setting, batch_size: int | None = None) -> list[Result]:
        """Return its sound results of any draft, and of one batch size or all, with settings else equal to `like`."""
        rows = [row for row in self.results if row.is_sound and row.setting.differs_only_in(like, *FREE)]
        return [row for row in rows if batch_size in (None, row.setting.batch_size)]


DrafterResult = tuple[MeasuredDrafter, Result]
Written = TypeVar("Written", Choice, Costs)  # the content of a file that a command wrote for one drafter


@dataclass
class ReportData:
    """Everything that a report is made of."""

    runs: list[EvaluatedRun]  # the fastest first; none in the folder that `evaluate` wrote
    drafters: list[MeasuredDrafter]  # trained ones first, the fastest of them on top
    elsewhere: list[MeasuredDrafter]  # measured under other conditions: in no figure and no ratio with them
    costs: list[Costs] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=dict)  # values of the files of EXTRAS by name
    contents: dict[str, list[Any]] = field(default_factory=dict)  # and what stands in these files
    samples: list[SampleText] = field(default_factory=list)
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
    def target(self) -> str:
        return self.runs[0].target if self.runs else self.drafters[0].evaluation.target

    @property
    def leader(self) -> DrafterResult:
        """The drafter and result that the report leads with: the fastest one at the smallest batch size that pays.

        The temperature is that of the first result. Where none is shown to pay, it is the fastest sound one; where no
        result is sound, the fastest one.
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
        """Return each drafter with its result at the leading setting, where it has one."""
        setting = self.setting
        rows = [(drafter, [row for row in drafter.results if row.setting == setting]) for drafter in self.drafters]
        return [(drafter, same[0]) for drafter, same in rows if same]

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


# --- reading


def read_report_data(folder: Path) -> ReportData:
    """Read what lies in the folder of a run, of several runs, or of an evaluation.

    Files that cannot be read are left out and named in `unreadable`. Raises `UserError` where no evaluation is left,
    and where another process is writing one.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the folder of a run, such as runs/NAME")
    _finish_moving(folder)
    reader, configs = Reader(), _in_folder_or_below(folder, "config.yaml")
    if configs:
        runs = [run for config in configs if (run := _read_run(config.parent, reader)) and run.checkpoints]
        runs.sort(key=lambda run: run.best.first_result.rank_key, reverse=True)
        comparison = _comparison(folder, reader)
        drafters = drafters_of_runs(runs, comparison) if runs else []
    else:
        runs, drafters = [], fastest_first(compared(_evaluations(folder, reader)))
    if not drafters:
        raise UserError(_nothing_text(folder, bool(configs), reader.unreadable))
    data = _by_conditions(runs, drafters)
    for name, kind in EXTRAS.items():
        pairs = reader.read_all(partial(_read_extra, kind), _files(folder, name))
        if pairs:
            data.extras[name], data.contents[name] = map(list, zip(*pairs, strict=True))
    data.costs = reader.read_all(partial(read_typed, Costs), _files(folder, "costs"))
    samples = reader.read_all(_read_samples, _files(folder, "samples"))
    data.samples = next(iter(samples), []) or (data.runs[0].best.samples if data.runs else [])
    data.unreadable = list(dict.fromkeys(reader.unreadable))
    return data


def _finish_moving(folder: Path) -> None:
    """Move evaluations into their folders that a kill left beside: there are files of two measurements until then."""
    for complete in (folder / COMPLETE, *folder.glob(f"*/{COMPLETE}")):
        if complete.is_dir():
            with locked(complete.parent):
                finish_moving(complete.parent)


def _nothing_text(folder: Path, has_runs: bool, unreadable: list[str]) -> str:
    if unreadable:
        others = f" (and {len(unreadable) - 1} other files)" if len(unreadable) > 1 else ""
        return f"{folder} holds no evaluation that can be read: {unreadable[0]}{others}"
    if has_runs:
        return f"no checkpoint in {folder} has been evaluated yet: train with evaluation.prompts set"
    return f"{folder} holds no run and no evaluation: give the folder of a run, of runs, or of an evaluation"


def report_data_of(evaluations: list[Evaluation]) -> ReportData:
    """Return the data of a report on evaluations alone."""
    return _by_conditions([], fastest_first(compared(evaluations)))


def _by_conditions(runs: list[EvaluatedRun], drafters: list[MeasuredDrafter]) -> ReportData:
    """Set apart the drafters that were measured under other conditions than the first."""
    here = conditions(drafters[0].environment)
    return ReportData(
        runs,
        drafters=[drafter for drafter in drafters if conditions(drafter.environment) == here],
        elsewhere=[drafter for drafter in drafters if conditions(drafter.environment) != here],
    )


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files NAME.json of a folder, of the comparison in it, and of the drafters in either."""
    patterns = (f"{name}.json", f"comparison/{name}.json", f"*/{name}.json", f"comparison/*/{name}.json")
    return list(dict.fromkeys(path for pattern in patterns for path in sorted(folder.glob(pattern))))


def _evaluations(folder: Path, reader: Reader) -> list[Evaluation]:
    """Read what `evaluate` has written into a folder, one evaluation a drafter."""
    return reader.read_all(read_evaluation, _in_folder_or_below(folder, "evaluation.json"))


def _comparison(folder: Path, reader: Reader) -> list[Evaluation]:
    """Read the newest folder in this one that `evaluate` wrote, which compared its drafters in one process."""
    written = [path for path in folder.glob("*/evaluation.md") if not path.parent.name.startswith(".")]
    newest = max(written, key=lambda path: path.stat().st_mtime, default=folder / "comparison/evaluation.md")
    return _evaluations(newest.parent, reader)


def _in_folder_or_below(folder: Path, name: str) -> list[Path]:
    """Return the file of a name in a folder, else those in the folders below it."""
    own = folder / name
    return [own] if own.is_file() else sorted(folder.glob(f"*/{name}"))


def _read_run(folder: Path, reader: Reader) -> EvaluatedRun | None:
    """Return a run; None where its config cannot be read."""
    config = reader.read(read_config, folder / "config.yaml")
    if config is None:
        return None
    checkpoints = [_read_checkpoint(path, reader) for path in measured_checkpoints(folder)]
    vocabulary = reader.read(read_vocabulary, folder)
    environment = reader.read(partial(read_typed, dict[str, Any]), folder / "environment.json")
    text = vocabulary_text(vocabulary) if vocabulary else ""
    return EvaluatedRun(
        name=folder.resolve().name,
        kind=config.drafter.kind,
        target=config.target,
        config=read_text(folder / "config.yaml"),
        environment="" if environment is None else as_yaml(environment),
        vocabulary=f"{text[0].upper()}{text[1:]}." if text else "",
        metrics=reader.logged_steps(folder),
        checkpoints=[checkpoint for checkpoint in checkpoints if checkpoint is not None],
    )


def _read_checkpoint(folder: Path, reader: Reader) -> EvaluatedCheckpoint | None:
    evaluation = reader.read(read_evaluation, folder / "evaluation.json")
    if evaluation is None:
        return None
    beside = {path: reader.read(read_evaluation, path) for path in sorted(folder.glob("evaluation.*.json"))}
    return EvaluatedCheckpoint(
        step=checkpoint_step(folder),
        evaluation=evaluation,
        baselines={
            path.name.removeprefix("evaluation.").removesuffix(".json"): baseline
            for path, baseline in beside.items()
            if baseline
        },
        samples=reader.read(_read_samples, folder / "samples.json") or [],
    )


def _read_samples(path: Path) -> list[SampleText]:
    return read_typed(list[SampleText], path)


def _read_extra(kind: type, path: Path) -> tuple[Any, Any]:
    """Return the value that a file holds, and its content."""
    return read_typed(kind, path), read_json(path)


def as_yaml(content: object) -> str:
    return yaml.safe_dump(content, sort_keys=False)


# --- drafters side by side


def drafters_of_runs(runs: list[EvaluatedRun], comparison: list[Evaluation]) -> list[MeasuredDrafter]:
    """Return what stands side by side, trained drafters first, the fastest of them on top.

    These are the drafters that were compared in one process, where there is such a comparison; else the best checkpoint
    of each run and the baselines that were measured beside the fastest.
    """
    if comparison:
        return fastest_first(compared(comparison))
    best = runs[0].best
    trained = [MeasuredDrafter(run.name, f"step {run.best.step}", run.best.evaluation) for run in runs]
    note = f"measured beside {runs[0].name}, step {best.step}"
    return fastest_first(
        named_apart(trained + [MeasuredDrafter(name, note, baseline) for name, baseline in best.baselines.items()])
    )


def fastest_first(drafters: list[MeasuredDrafter]) -> list[MeasuredDrafter]:
    """Return trained drafters before the others, and of each the fastest first."""
    return sorted(drafters, key=lambda drafter: (drafter.is_trained, drafter.results[0].rank_key), reverse=True)


def compared(evaluations: list[Evaluation]) -> list[MeasuredDrafter]:
    """Return the drafters of evaluations that stand side by side."""
    drafters = [MeasuredDrafter(evaluation.drafter, "", evaluation) for evaluation in evaluations]
    names = [checkpoint_names(drafter.name) if drafter.is_trained else (drafter.name, "") for drafter in drafters]
    return named_apart(
        [replace(drafter, name=name, note=note) for drafter, (name, note) in zip(drafters, names, strict=True)]
    )


def named_apart(drafters: list[MeasuredDrafter]) -> list[MeasuredDrafter]:
    """Put the step into names that several share, as steps of one run do; failing that, all that was given."""
    shared = Counter(drafter.name for drafter in drafters)
    drafters = [
        replace(drafter, name=f"{drafter.name}, {drafter.note}", note="")
        if drafter.note and shared[drafter.name] > 1
        else drafter
        for drafter in drafters
    ]
    shared = Counter(drafter.name for drafter in drafters)
    return [
        replace(drafter, name=drafter.evaluation.drafter, note="") if shared[drafter.name] > 1 else drafter
        for drafter in drafters
    ]


def checkpoint_names(drafter: str) -> tuple[str, str]:
    """Return the run's name and "step N" or "best" for the path of a run's checkpoint; else the path's last part.

    A cascade keeps what it asks first: that of `suffix+runs/eagle3/best` is suffix+eagle3.
    """
    first, plus, second = drafter.partition("+")
    if plus and first in ("ngram", "suffix"):
        name, note = checkpoint_names(second)
        return f"{first}+{name}", note
    path = Path(drafter)
    if path.name == "best":
        return path.absolute().parent.name, "best"
    if path.parent.name == "checkpoints":
        return path.parent.parent.name, f"step {checkpoint_step(path)}"
    return path.name, ""


# --- under which conditions


def conditions(environment: Environment) -> tuple[str, ...]:
    """Return as texts what the speed of decoding depends on besides the drafter. Where it differs, no ratio is told."""
    return (
        environment.device,
        environment.dtype,
        f"{environment.num_threads} CPU threads",
        f"target {environment.target_fingerprint}",
        *(f"{name} {environment.versions.get(name)}" for name in ("torch", "transformers", "triton")),
    )


def differing_conditions(drafters: list[MeasuredDrafter]) -> list[str]:
    """Return for each drafter the conditions in which not all agree, as text; nothing where all do."""
    by_condition = zip(*(conditions(drafter.environment) for drafter in drafters), strict=True)
    differing = [texts for texts in by_condition if len(set(texts)) > 1]
    return [", ".join(texts[place] for texts in differing) for place in range(len(drafters))]
