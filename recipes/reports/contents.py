"""What runs have measured, read back from their folders."""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from draftsmith.inference.verification.acceptance_rules import LOSSY
from draftsmith.models.errors import UserError
from draftsmith.train.folder.checkpoint import checkpoint_step, checkpoints
from draftsmith.train.folder.run_folder import worth
from draftsmith.train.folder.tracking import read_metrics
from draftsmith.train.folder.vocabulary import read_vocabulary, vocabulary_text

Result = dict[str, Any]  # a row of `results` in evaluation.json
DRAFT = ("draft_length", "tree_nodes")  # what a round drafts
SETTING = ("prompt_set", "num_prompts", "temperature", "top_p", "batch_size", *DRAFT, "max_new_tokens")
EXTRAS = ("costs", "choice", "load", "plan")  # NAME.json that other commands write


@dataclass
class Checkpoint:
    """A checkpoint that was evaluated."""

    step: int
    results: list[Result]
    baselines: dict[str, list[Result]]  # training-free drafters, measured in the same process
    certificate: dict[str, Any] | None  # of losslessness, where one was asked for
    environment: dict[str, Any]  # that it was measured in
    samples: list[dict[str, Any]]  # of texts


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
        """That of the link `best` in the run's folder, where a run that goes on has not moved it since."""
        return max(self.checkpoints, key=lambda checkpoint: worth(checkpoint.results[0]))

    @property
    def first_result(self) -> Result:
        """The best checkpoint at the first setting."""
        return self.best.results[0]


@dataclass
class Contender:
    """A drafter as it stands in the comparison."""

    name: str  # no two of a report share it
    drafter: str  # as it was given; RUN/best where it was measured in training
    kind: str
    note: str  # which checkpoint, or beside which it was measured
    trained: bool
    target: str
    results: list[Result]
    environment: dict[str, Any]  # that it was measured in
    certificate: dict[str, Any] | None = None

    def at(self, setting: Result) -> Result | None:
        """Its row at the setting of another row."""
        return next((row for row in self.results if same_but(row, setting)), None)


@dataclass
class Measured:
    """Everything that a report is made of."""

    runs: list[Run]  # the fastest first; none in the folder that `evaluate` wrote
    contenders: list[Contender]
    elsewhere: list[Contender]  # measured under other conditions than the first: in no figure and no ratio with it
    extras: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # contents of EXTRAS by name
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def alike_runs(self) -> list[Run]:
        """The runs whose best checkpoint was measured under the same conditions as the contenders."""
        return [run for run in self.runs if same_conditions(run.best.environment, self.contenders[0].environment)]

    @property
    def target(self) -> str:
        return self.runs[0].target if self.runs else self.contenders[0].target

    @property
    def leading(self) -> Result:
        """The row that the report leads with: the fastest sound one at the first temperature and smallest batch size.

        Where none is sound, the fastest.
        """
        first = self.contenders[0].results[0]
        rows = [row for one in self.contenders for row in one.results if same_but(row, first, "batch_size", *DRAFT)]
        smallest = min(row["batch_size"] for row in rows)
        rows = [row for row in rows if row["batch_size"] == smallest]
        return max(rows, key=lambda row: (is_sound(row) and row["num_drafts"] > 0, row["speedup"]))

    @property
    def leader(self) -> Contender:
        """Whose row the report leads with."""
        leading = self.leading
        return next(one for one in self.contenders if any(row is leading for row in one.results))

    def extra_of(self, name: str, contender: Contender) -> dict[str, Any] | None:
        """The content of the NAME.json that was written for a contender."""
        contents = self.extras.get(name, [])
        own = [one for one in contents if self.contender_of(one["drafter"]) is contender]
        return max(own, key=lambda one: one["drafter"] == contender.drafter, default=None)

    def contender_of(self, drafter: str) -> Contender | None:
        """Whom a NAME.json is about: the same drafter, else the one that has its name, as another step of its run."""
        same = [one for one in self.contenders if one.drafter == drafter]
        named = [one for one in self.contenders if one.name == drafter_name(drafter)]
        return next(iter(same + named), None)

    def name_of(self, drafter: str) -> str:
        """What the report calls the drafter of a NAME.json."""
        contender = self.contender_of(drafter)
        return contender.name if contender else drafter_name(drafter)

    def leaders(self) -> list[tuple[Contender, Result]]:
        """Each contender with its row at the leading setting, where it has one."""
        rows = [(one, one.at(self.leading)) for one in self.contenders]
        return [(one, row) for one, row in rows if row is not None]


def is_sound(row: Result) -> bool:
    """Its output is what the target alone would write, as far as was looked; else its speed does not count."""
    return row["lossless"]["divergences"] == 0 and row["verification_mode"] not in LOSSY


def tokens_a_round(row: Result) -> float:
    """Of all rounds, those without a draft among them, which the acceptance length leaves out."""
    return 1 + row["num_accepted_tokens"] / row["num_rounds"]


def steps_a_round(row: Result) -> float:
    """What any round costs, in steps of plain decoding, reading the prompt included."""
    return tokens_a_round(row) / row["speedup"]


def plain_step_ms(row: Result) -> float:
    """What a round of plain decoding takes, timed like the drafter's own rounds."""
    phases = row.get("baseline_milliseconds_per_round")
    return float(sum(phases.values()) if phases else row["baseline_tpot_ms"]["p50"])  # as older evaluations have it


def same_but(row: Result, other: Result, *free: str) -> bool:
    """Whether two rows share their setting, but for the fields in `free`."""
    return all(row[name] == other[name] for name in SETTING if name not in free)


def read_measured(folder: Path) -> Measured:
    """What lies in the folder of a run, of several runs, or of an evaluation.

    Raises `UserError` where nothing there was evaluated.
    """
    evaluated = [] if _configs(folder) else evaluations(folder)
    runs = [] if evaluated else read_runs(folder)
    samples = [json.loads(path.read_text()) for path in _beside(folder, "samples")]
    found = {name: [json.loads(path.read_text()) for path in _beside(folder, name)] for name in EXTRAS}
    measured = measured_of(evaluated) if evaluated else _measured(runs, read_contenders(folder, runs))
    measured.extras = {name: contents for name, contents in found.items() if contents}
    measured.samples = next(iter(samples), []) or (runs[0].best.samples if runs else [])
    return measured


def measured_of(contents: list[dict[str, Any]]) -> Measured:
    """From contents of evaluation.json files alone."""
    return _measured([], _fastest_first(compared(contents)))


def _measured(runs: list[Run], contenders: list[Contender]) -> Measured:
    alike = [same_conditions(contenders[0].environment, one.environment) for one in contenders]
    return Measured(
        runs,
        [one for one, same in zip(contenders, alike, strict=True) if same],
        [one for one, same in zip(contenders, alike, strict=True) if not same],
    )


def _beside(folder: Path, name: str) -> list[Path]:
    """Files NAME.json of a folder, of the comparison in it, or of the drafters in either."""
    patterns = (f"{name}.json", f"comparison/{name}.json", f"*/{name}.json", f"comparison/*/{name}.json")
    return list(dict.fromkeys(path for pattern in patterns for path in sorted(folder.glob(pattern))))


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """What `evaluate` has written into a folder: contents of evaluation.json, one a drafter."""
    paths = [path for path in (folder / "evaluation.json",) if path.is_file()]
    return [json.loads(path.read_text()) for path in paths or sorted(folder.glob("*/evaluation.json"))]


def read_contenders(folder: Path, runs: list[Run]) -> list[Contender]:
    """What stands side by side, trained drafters first, the fastest of them on top.

    These are the drafters that were compared in one process, where the folder holds such a `comparison/`; else the best
    checkpoint of each run and the baselines that were measured beside the fastest.
    """
    evaluated = evaluations(folder / "comparison")
    if evaluated:
        return _fastest_first(compared(evaluated))
    beside = f"measured beside {runs[0].name}, step {runs[0].best.step}"
    found = [
        Contender(
            run.name,
            f"{run.name}/best",
            run.kind,
            f"step {run.best.step}",
            True,
            run.target,
            run.best.results,
            run.best.environment,
            run.best.certificate,
        )
        for run in runs
    ]
    found += [
        Contender(name, name, name, beside, False, runs[0].target, results, runs[0].best.environment)
        for name, results in runs[0].best.baselines.items()
    ]
    return _fastest_first(named_apart(found))


def _fastest_first(contenders: list[Contender]) -> list[Contender]:
    best_first = sorted(contenders, key=lambda one: worth(one.results[0]), reverse=True)
    return sorted(best_first, key=lambda one: not one.trained)


def compared(contents: list[dict[str, Any]]) -> list[Contender]:
    """The drafters of contents of evaluation.json files that stand side by side."""
    return named_apart(list(map(_contender, contents)))


def named_apart(contenders: list[Contender]) -> list[Contender]:
    """With the step in the name where several share theirs, as steps of one run do; else with all that was given."""
    taken = Counter(one.name for one in contenders)
    found = [
        replace(one, name=f"{one.name}, {one.note}", note="") if one.note and taken[one.name] > 1 else one
        for one in contenders
    ]
    taken = Counter(one.name for one in found)
    return [replace(one, name=one.drafter, note="") if taken[one.name] > 1 else one for one in found]


def _contender(content: dict[str, Any]) -> Contender:
    """A drafter from the content of its evaluation.json."""
    trained = content["drafter"] != content["drafter_kind"]
    name, note = checkpoint_names(content["drafter"]) if trained else (content["drafter"], "")
    return Contender(
        name,
        content["drafter"],
        content["drafter_kind"],
        note,
        trained,
        content["target"],
        content["results"],
        content["environment"],
        content.get("certificate"),
    )


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


def drafter_name(drafter: str) -> str:
    """As reports call it: the run of a checkpoint, else the name that was given."""
    return checkpoint_names(drafter)[0]


def checkpoint_names(drafter: str) -> tuple[str, str]:
    """Name of the run and "step N" or "best" where the path is that of a run's checkpoint; else its last part.

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


def read_runs(folder: Path) -> list[Run]:
    """The evaluated runs in a folder that is one run or holds several, the fastest first.

    Raises `UserError` where there is none.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: give the folder of a run, such as runs/NAME")
    configs = _configs(folder)
    if not configs:
        raise UserError(
            f"{folder} holds no run and no evaluation: give the folder of a run, of runs, or of an evaluation"
        )
    runs = [run for run in (_read_run(config.parent) for config in configs) if run.checkpoints]
    if not runs:
        raise UserError(f"no checkpoint in {folder} has been evaluated yet: train with evaluation.prompts set")
    return sorted(runs, key=lambda run: worth(run.first_result), reverse=True)


def _configs(folder: Path) -> list[Path]:
    own = folder / "config.yaml"
    return [own] if own.is_file() else sorted(folder.glob("*/config.yaml"))


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
    content, samples = json.loads((folder / "evaluation.json").read_text()), folder / "samples.json"
    return Checkpoint(
        checkpoint_step(folder),
        content["results"],
        baselines,
        content.get("certificate"),
        content["environment"],
        json.loads(samples.read_text()) if samples.is_file() else [],
    )
