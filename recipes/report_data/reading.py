"""The reading of what a report is made of."""

from functools import partial
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.processes import locked
from draftsmith.inference.measuring.results import Evaluation, read_evaluation
from draftsmith.inference.measuring.sample_texts import SampleText
from draftsmith.inference.planning.costs import Costs
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import COMPLETE, finish_moving, real_path
from draftsmith.models.storage.reading import read_json, read_json_object, read_text, read_typed
from draftsmith.recipes.report_data.contents import EXTRAS, ReportData
from draftsmith.recipes.report_data.measured import (
    EvaluatedCheckpoint,
    EvaluatedRun,
    MeasuredDrafter,
    compared,
    conditions,
    drafters_of_runs,
    fastest_first,
)
from draftsmith.train.run_folder.checkpoint import checkpoint_step
from draftsmith.train.run_folder.run_folder import measured_checkpoints
from draftsmith.train.run_folder.stored_run import Reader, read_config
from draftsmith.train.run_folder.vocabulary import read_vocabulary, vocabulary_text

EVALUATIONS = ("evaluation.json", "evaluation.*.json")  # of a drafter, and of what was measured beside it


def read_report_data(folder: Path) -> ReportData:
    """Read what lies in the folder of a run, of several runs, of an evaluation, or of a study.

    Files that cannot be read are left out and named in `unreadable`. Raises `UserError` where no evaluation and no
    study is left, and where another process is writing one.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the folder of a run, such as runs/NAME")
    _finish_moving(folder)
    reader, configs = Reader(), _in_folder_or_below(folder, "config.yaml")
    if configs:
        runs = [run for config in configs if (run := _read_run(config.parent, reader)) and run.checkpoints]
        runs.sort(key=lambda run: run.best.first_result.rank_key, reverse=True)
        comparison = _comparison(folder, reader)
        drafters = drafters_of_runs(runs, comparison) if runs or comparison else []
    else:
        runs, drafters = [], fastest_first(compared(_evaluations(folder, reader)))
    data = _by_conditions(runs, drafters)
    for name, kind in EXTRAS.items():
        pairs = reader.read_all(partial(_read_extra, kind), _files(folder, name))
        if pairs:
            data.extras[name], data.contents[name] = map(list, zip(*pairs, strict=True))
    data.judged = [evaluation for evaluation in _every_evaluation(folder, reader) if evaluation.judged]
    if not drafters and not data.judged and (configs or not data.studies):
        raise UserError(_nothing_text(folder, bool(configs), reader.unreadable))
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
    if pages := sorted(folder.glob("*.html")):
        return f"{folder} holds a page already, {pages[0].name}, and nothing to make a report of"
    return f"{folder} holds no run, no evaluation and no study: give the folder of a run, of runs, or an --out"


def report_data_of(evaluations: list[Evaluation]) -> ReportData:
    """Return the data of a report on evaluations alone."""
    data = _by_conditions([], fastest_first(compared([evaluation for evaluation in evaluations if evaluation.results])))
    data.judged = [evaluation for evaluation in evaluations if evaluation.judged]
    return data


def _by_conditions(runs: list[EvaluatedRun], drafters: list[MeasuredDrafter]) -> ReportData:
    """Set apart the drafters that were measured under other conditions than the first."""
    here = conditions(drafters[0].environment) if drafters else None
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
    """Read what `evaluate` has measured into a folder by draftsmith's decoder, one evaluation a drafter."""
    evaluations = reader.read_all(read_evaluation, _in_folder_or_below(folder, "evaluation.json"))
    return [evaluation for evaluation in evaluations if evaluation.results]


def _every_evaluation(folder: Path, reader: Reader) -> list[Evaluation]:
    """Read all evaluations of a folder: those of checkpoints, and what `evaluate` wrote into folders within it."""
    places = ("", "*/", "checkpoints/*/", "*/checkpoints/*/", "*/[0-9]*-*/")
    paths = [path for place in places for name in EVALUATIONS for path in sorted(folder.glob(place + name))]
    seen = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return reader.read_all(read_evaluation, list(dict.fromkeys(map(real_path, seen))))  # `best` is a link


def _comparison(folder: Path, reader: Reader) -> list[Evaluation]:
    """Read the newest folder in this one in which `evaluate` compared drafters by draftsmith's decoder.

    An export holds an evaluation, too, that of its drafter.
    """
    written = [path for path in folder.glob("*/evaluation.md") if not path.parent.name.startswith(".")]
    compared_in = [path for path in written if not (path.parent / "config.json").is_file()]
    newest_first = sorted(compared_in, key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (*newest_first, folder / "comparison/evaluation.md"):
        if evaluations := _evaluations(path.parent, reader):
            return evaluations
    return []


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
    environment = reader.read(read_json_object, folder / "environment.json")
    text = vocabulary_text(vocabulary) if vocabulary else ""
    return EvaluatedRun(
        name=real_path(folder).name,
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
    if evaluation is None or not evaluation.results:
        return None
    beside = {path: reader.read(read_evaluation, path) for path in sorted(folder.glob("evaluation.*.json"))}
    return EvaluatedCheckpoint(
        step=checkpoint_step(folder),
        evaluation=evaluation,
        baselines={
            path.name.removeprefix("evaluation.").removesuffix(".json"): baseline
            for path, baseline in beside.items()
            if baseline and baseline.results
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
