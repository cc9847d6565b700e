"""Runs and drafters as they were measured, which of them stand side by side, and under what names."""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from draftsmith.inference.measuring.results import Environment, Evaluation, Result, Setting
from draftsmith.inference.measuring.sample_texts import SampleText
from draftsmith.train.run_folder.checkpoint import checkpoint_step
from draftsmith.train.run_folder.run_folder import place_of_best
from draftsmith.train.run_folder.stored_run import LoggedStep

FREE = ("batch_size", "draft_length", "tree_nodes")  # in which the settings differ that a report compares


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
    if plus and (first in ("ngram", "suffix") or checkpoint_names(first)[1]):  # else the plus is of a folder's name
        name, note = checkpoint_names(second)
        return f"{checkpoint_names(first)[0]}+{name}", note
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
