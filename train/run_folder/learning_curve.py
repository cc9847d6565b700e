"""The learning curve of a run: its drafter, step by step, on samples that are not trained on."""

from dataclasses import asdict, dataclass
from pathlib import Path

from draftsmith.train.run_folder.tracking import Tracker, read_metrics

PREFIX = "held_out_"  # of the names in metrics.jsonl


@dataclass(frozen=True)
class CurvePoint:
    """The drafter on the held-out samples after so many steps."""

    step: int
    loss: float  # mean over their trained tokens
    acceptance_length: float  # that greedy decoding would have if all of it followed these texts


def log_point(point: CurvePoint, tracker: Tracker) -> None:
    """Append a point to metrics.jsonl."""
    values = asdict(point)
    tracker.log(values.pop("step"), {PREFIX + name: value for name, value in values.items()})


def learning_curve(run: Path) -> list[CurvePoint]:
    """Return the points of a run's metrics.jsonl, oldest first. Raises `UserError` where the file is damaged."""
    return [
        CurvePoint(line["step"], line[f"{PREFIX}loss"], line[f"{PREFIX}acceptance_length"])
        for line in read_metrics(run)
        if f"{PREFIX}loss" in line
    ]
