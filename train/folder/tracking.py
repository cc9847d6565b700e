"""Where the numbers of a run go: metrics.jsonl, the progress bar, and wandb if asked for."""

import hashlib
import json
from pathlib import Path
from typing import Any

from draftsmith.data.answers.changed_settings import flatten
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.files import write_whole
from draftsmith.train.config import TrainConfig, contents

METRICS = "metrics.jsonl"
OF_EVALUATIONS = {"speedup", "evaluation_failed", "stopped_early"}  # each in lines of its own


class Tracker:
    """Writes one object a logged step. Only the main process makes one."""

    def __init__(self, config: TrainConfig, run: Path, first_step: int) -> None:
        self._file = run / METRICS
        self._drop_after(first_step)
        self._wandb = None
        if config.run.wandb_project:
            self._wandb = start_wandb(config, run)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        with open(self._file, "a") as file:
            file.write(as_line({"step": step, **metrics}))
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def finish(self) -> None:
        if self._wandb is not None:
            self._wandb.finish()

    def _drop_after(self, step: int) -> None:
        """Forget what an interrupted run logged beyond the checkpoint that it goes on from.

        That checkpoint's own evaluation is logged anew.
        """
        if self._file.is_file():
            kept = [line for line in read_metrics(self._file.parent) if is_kept(line, step)]
            write_whole(self._file, "".join(map(as_line, kept)))


def start_wandb(config: TrainConfig, run: Path) -> Any:
    """A wandb run of the same name; a resumed run goes on in the same one. `UserError` where wandb does not start."""
    try:
        import wandb

        return wandb.init(
            project=config.run.wandb_project,
            name=run.name,
            id=hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12],
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
    return json.dumps(metrics) + "\n"


def is_kept(line: dict[str, Any], step: int) -> bool:
    return line["step"] < step or (line["step"] == step and not OF_EVALUATIONS & line.keys())


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged; not the line that a kill has left unfinished, or that is being written."""
    path = run / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
