"""What runs have measured, read back from their folders."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.models.errors import UserError
from draftsmith.train.checkpoint import checkpoint_step, checkpoints
from draftsmith.train.tracking import read_metrics
from draftsmith.train.vocabulary import read_vocabulary, vocabulary_text

Result = dict[str, Any]  # a row of `results` in evaluation.json


@dataclass
class Checkpoint:
    """A checkpoint that was evaluated."""

    step: int
    results: list[Result]
    baselines: dict[str, list[Result]]  # training-free drafters, measured in the same process
    certificate: dict[str, Any] | None  # of losslessness, where one was asked for
    environment: dict[str, Any]  # that it was measured in


@dataclass
class Run:
    """A run with at least one evaluated checkpoint."""

    name: str
    kind: str
    target: str
    config: str  # text of config.yaml
    environment: dict[str, Any]
    vocabulary: str  # what its draft vocabulary is and costs; empty where it is the target's
    metrics: list[dict[str, Any]]
    checkpoints: list[Checkpoint]  # oldest first

    @property
    def best(self) -> Checkpoint:
        """By the speedup at the first setting, as the link `best` in the run's folder."""
        return max(self.checkpoints, key=lambda checkpoint: checkpoint.results[0]["speedup"])

    @property
    def first_result(self) -> Result:
        """The best checkpoint at the first setting."""
        return self.best.results[0]


@dataclass
class Contender:
    """A drafter as it stands in the comparison."""

    name: str
    note: str  # which checkpoint, or beside which it was measured
    trained: bool
    results: list[Result]
    environment: dict[str, Any]  # that it was measured in
    certificate: dict[str, Any] | None = None


def read_contenders(folder: Path, runs: list[Run]) -> list[Contender]:
    """What stands side by side, trained drafters first, the fastest of them on top.

    These are the drafters that were compared in one process, where the folder holds such a `comparison/`; else the best
    checkpoint of each run and the baselines that were measured beside the fastest.
    """
    paths = sorted((folder / "comparison").glob("*/evaluation.json"))
    if paths:
        found = [compared(json.loads(path.read_text())) for path in paths]
    else:
        beside = f"measured beside {runs[0].name}, step {runs[0].best.step}"
        found = [
            Contender(
                run.name, f"step {run.best.step}", True, run.best.results, run.best.environment, run.best.certificate
            )
            for run in runs
        ]
        found += [
            Contender(name, beside, False, results, runs[0].best.environment)
            for name, results in runs[0].best.baselines.items()
        ]
    return sorted(found, key=lambda one: (not one.trained, -one.results[0]["speedup"]))


def compared(content: dict[str, Any]) -> Contender:
    """A drafter from the content of its evaluation.json."""
    trained = content["drafter"] != content["drafter_kind"]
    name, note = checkpoint_names(Path(content["drafter"])) if trained else (content["drafter"], "")
    return Contender(name, note, trained, content["results"], content["environment"], content.get("certificate"))


def conditions(environment: dict[str, Any]) -> dict[str, str]:
    """What the speed of decoding hangs on besides the drafter, as text by name."""
    versions = environment["versions"]
    return {
        "device": environment["device"],
        "dtype": environment["dtype"],
        "threads": f"{environment['num_threads']} CPU threads",
        "target": f"target {environment['target_fingerprint']}",
        **{name: f"{name} {versions.get(name)}" for name in ("torch", "transformers", "triton")},
    }


def same_conditions(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether times that were measured in two environments may stand side by side."""
    return conditions(one) == conditions(other)


def told_apart(environments: list[dict[str, Any]]) -> list[str]:
    """Of each environment the conditions in which not all agree, as text; nothing where all do."""
    found = [conditions(environment) for environment in environments]
    differing = [name for name in found[0] if len({one[name] for one in found}) > 1]
    return [", ".join(one[name] for name in differing) for one in found]


def checkpoint_names(path: Path) -> tuple[str, str]:
    """Name of the run and "step N" or "best" where the path is that of a run's checkpoint; else its last part."""
    if path.name == "best":
        return path.absolute().parent.name, "best"
    if path.parent.name == "checkpoints":
        return path.parent.parent.name, f"step {checkpoint_step(path)}"
    return path.name, ""


def read_runs(folder: Path) -> list[Run]:
    """The evaluated runs in a folder that is one run or holds several, the fastest first.

    Raises `UserError` where there is none.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the folder of a run, such as runs/NAME")
    configs = [folder / "config.yaml"] if (folder / "config.yaml").is_file() else sorted(folder.glob("*/config.yaml"))
    if not configs:
        raise UserError(f"{folder} holds no run: give a folder with a config.yaml, or one that holds such folders")
    runs = [run for run in (_read_run(config.parent) for config in configs) if run.checkpoints]
    if not runs:
        raise UserError(f"no checkpoint in {folder} has been evaluated yet: train with evaluation.prompts set")
    return sorted(runs, key=lambda run: run.first_result["speedup"], reverse=True)


def _read_run(folder: Path) -> Run:
    config = (folder / "config.yaml").read_text()
    content = yaml.safe_load(config)
    return Run(
        name=folder.resolve().name,
        kind=content["drafter"]["kind"],
        target=content["target"],
        config=config,
        environment=json.loads((folder / "environment.json").read_text()),
        vocabulary=vocabulary_text(vocabulary) if (vocabulary := read_vocabulary(folder)) else "",
        metrics=read_metrics(folder),
        checkpoints=[_read_checkpoint(path) for path in checkpoints(folder) if (path / "evaluation.json").is_file()],
    )


def _read_checkpoint(folder: Path) -> Checkpoint:
    baselines = {
        path.name.removeprefix("evaluation.").removesuffix(".json"): json.loads(path.read_text())["results"]
        for path in sorted(folder.glob("evaluation.*.json"))
    }
    content = json.loads((folder / "evaluation.json").read_text())
    return Checkpoint(
        checkpoint_step(folder), content["results"], baselines, content.get("certificate"), content["environment"]
    )
