"""The learning curve of a run: its drafter, step by step, on samples that are not trained on."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from draftsmith.train.run_folder.tracking import Tracker, read_metrics

PREFIX, FORECAST = "held_out_", "forecast_"  # of the names in metrics.jsonl


@dataclass(frozen=True)
class CurvePoint:
    """The drafter on the held-out samples after so many steps."""

    step: int
    loss: float  # mean over their trained tokens
    acceptance_length: float  # that greedy decoding would have if all of it followed these texts


@dataclass(frozen=True)
class Forecast:
    """The end of a run as its first steps foretell it, and what twice the steps would bring; intervals are of 90 %."""

    step: int  # after which it is made
    num_steps: int  # of the run
    acceptance_length: float  # at the end
    low: float
    high: float
    gain: float  # of acceptance length, with twice the steps
    gain_low: float
    gain_high: float
    noise: float  # standard deviation of a point of the curve
    known: bool  # whether some of the runs that it goes by were not so far by then, and some farther

    @property
    def text(self) -> str:
        """The end in words."""
        return f"{self.acceptance_length:.2f} [{self.low:.2f}, {self.high:.2f}]"


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


def log_forecast(forecast: Forecast, tracker: Tracker) -> None:
    """Append a forecast to metrics.jsonl."""
    values = asdict(forecast)
    tracker.log(values.pop("step"), {FORECAST + name: value for name, value in values.items()})


def newest_forecast(run: Path) -> Forecast | None:
    """Return the newest forecast in a run's metrics.jsonl. Raises `UserError` where the file is damaged."""
    _, *names = (field.name for field in fields(Forecast))
    found = [line for line in read_metrics(run) if all(FORECAST + name in line for name in names)]
    return Forecast(found[-1]["step"], *(found[-1][FORECAST + name] for name in names)) if found else None
