"""metrics.jsonl of a run, and wandb if asked for."""

import hashlib
import json
from pathlib import Path
from typing import Any

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.files import real_path, write_whole, writing
from draftsmith.models.storage.reading import parse_json, read_text
from draftsmith.train.config import TrainConfig, contents

METRICS = "metrics.jsonl"
EVALUATION_KEYS = {"evaluation_seconds", "stopped_early"}  # each marks a line of an evaluation


class Tracker:
    """Writes an object for each logged step. Only the main process makes one."""

    def __init__(self, config: TrainConfig, run: Path, first_step: int) -> None:
        self._file = run / METRICS
        self._drop_after(first_step)
        self._wandb = None
        if config.run.wandb_project:
            self._wandb = start_wandb(config, run)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append a line of what was measured after a step."""
        with writing(self._file), open(self._file, "a") as file:
            file.write(as_line({"step": step, **metrics}))
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def finish(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()

    def _drop_after(self, step: int) -> None:
        """Remove what an interrupted run logged after the checkpoint that it goes on from, and of its evaluation.

        The evaluation of that checkpoint is logged anew.
        """
        if self._file.exists():
            lines = [
                line
                for line in read_metrics(self._file.parent)
                if line["step"] < step or (line["step"] == step and not EVALUATION_KEYS & line.keys())
            ]
            write_whole(self._file, "".join(map(as_line, lines)))


def start_wandb(config: TrainConfig, run: Path) -> Any:
    """Start a wandb run of the same name, or go on with it. Raises `UserError` where wandb does not start."""
    try:
        import wandb

        return wandb.init(
            project=config.run.wandb_project,
            name=run.name,
            id=hashlib.sha256(str(real_path(run)).encode()).hexdigest()[:12],
            resume="allow",
            config=flatten(contents(config)),
            dir=run,
        )
    except Exception as error:  # wandb has many of its own: no login, no network, a project that does not exist
        raise UserError(
            f"run.wandb_project={config.run.wandb_project}: wandb does not start ({first_line(error)}): run `wandb "
            "login`, set WANDB_MODE=offline, or leave it out"
        ) from None


def as_line(metrics: dict[str, Any]) -> str:
    """Return a line of metrics.jsonl."""
    return json.dumps(metrics) + "\n"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return what was logged, as `parse_metrics` reads each line."""
    return [parse_metrics(line, place) for place, line in complete_lines(run)]


def complete_lines(run: Path) -> list[tuple[str, str]]:
    """Return the place, "FILE line N", and the text of each line of metrics.jsonl.

    One that a kill has left unfinished, or that is being written, is left out.
    """
    path = run / METRICS
    lines = read_text(path).split("\n") if path.exists() else [""]
    return [(f"{path} line {number}", line) for number, line in enumerate(lines[:-1], 1)]


def parse_metrics(line: str, place: str) -> dict[str, Any]:
    """Return the metrics of a step that a line holds. Raises `UserError` that names `place` where it holds none."""
    metrics = parse_json(line, place)
    if not (
        isinstance(metrics, dict) and isinstance(metrics.get("step"), int) and all(map(is_measured, metrics.items()))
    ):
        raise UserError(f"{place} holds no metrics of a step: put it back, or remove the file")
    return metrics


def is_measured(metric: tuple[str, Any]) -> bool:
    """Return whether a name and its value may stand in a line: a number, none, or why training stopped early."""
    name, value = metric
    return value is None or isinstance(value, str if name == "stopped_early" else int | float)
