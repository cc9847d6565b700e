"""A forecast of the end of a run from the first tenth of its learning curve, and of what twice the steps would bring.

A tenth of a run is too little to fit a curve to: it is the warm-up and little more, and what the decay of the learning
rate brings is still to come. But runs are alike in how the tokens that are accepted in a round rise from there to the
end, on a logarithmic scale. So a line through finished runs gives the forecast, and their distances from it give the
interval.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from draftsmith.train.run_folder.learning_curve import CurvePoint, Forecast

Floats = NDArray[np.float64]

LEAST_POINTS = 3  # in the half octave before a tenth of the steps
LEVELS = (np.arange(100) + 0.5) / 100  # of probability: values at these stand for a distribution


@dataclass(frozen=True)
class FinishedRun:
    """The tokens accepted in a round by a finished run on its held-out samples: acceptance lengths less 1."""

    tenth: float  # after a tenth of the steps, as `accepted_after` gives it
    fifth: float  # after a fifth
    end: float


# The runs `FINISHED` of benchmarks/learning_curves.py, which prints these lines.
FINISHED_RUNS = [
    FinishedRun(tenth=0.162, fifth=0.302, end=0.522),  # medusa-200x8-cosine-0
    FinishedRun(tenth=0.171, fifth=0.31, end=0.669),  # eagle3-200x8-cosine-0
    FinishedRun(tenth=0.268, fifth=0.364, end=0.771),  # hydra-200x8-cosine-0
    FinishedRun(tenth=0.038, fifth=0.068, end=0.175),  # dflash-200x8-cosine-0
    FinishedRun(tenth=0.133, fifth=0.277, end=0.687),  # eagle-200x8-cosine-0
    FinishedRun(tenth=0.21, fifth=0.371, end=0.685),  # mlp_speculator-200x8-cosine-0
    FinishedRun(tenth=0.293, fifth=0.33, end=0.56),  # medusa-600x2-cosine-0
]


def forecast(points: list[CurvePoint], num_steps: int, finished: list[FinishedRun]) -> Forecast | None:
    """Return the forecast of a run of `num_steps` steps by its points of the first tenth.

    Twice the steps bring a tenth of the run to where a fifth is now, and finished runs tell how much higher that is.
    None where there are too few points, or nothing is accepted.
    """
    tenth = num_steps // 10
    accepted = accepted_after(tenth, points)
    if accepted is None:
        return None
    tenths, fifths, ends = (np.log([getattr(run, name) for run in finished]) for name in ("tenth", "fifth", "end"))
    now = math.log(accepted)
    end = np.exp(foretold(tenths, ends, now))  # [100]
    growth = np.polyfit(tenths, ends, 1)[0] * foretold(tenths, fifths - tenths, now)  # [100]
    gain = np.outer(end, np.expm1(growth))  # [100, 100]
    return Forecast(tenth, num_steps, *quantiles(1 + end), *quantiles(gain), noise_of(newest(points, tenth)))


def newest(points: list[CurvePoint], step: int) -> list[CurvePoint]:
    """Return the points of half an octave up to a step."""
    return [point for point in points if step / math.sqrt(2) < point.step <= step]


def accepted_after(step: int, points: list[CurvePoint]) -> float | None:
    """Return the tokens accepted in a round after so many steps, as the mean of half an octave of points.

    None where these are too few, or nothing is accepted.
    """
    accepted = [point.acceptance_length - 1 for point in newest(points, step)]
    return sum(accepted) / len(accepted) if len(accepted) >= LEAST_POINTS and sum(accepted) > 0 else None


def noise_of(points: list[CurvePoint]) -> float:
    """Return the standard deviation of acceptance lengths from a line over the logarithm of the steps."""
    steps, lengths = (np.array(values) for values in zip(*((p.step, p.acceptance_length) for p in points), strict=True))
    line = np.polynomial.Polynomial.fit(np.log(steps), lengths, 1)
    return math.sqrt(np.sum((lengths - line(np.log(steps))) ** 2) / (len(points) - 2))


def foretold(known: Floats, unknown: Floats, value: float) -> Floats:
    """Return the distribution of what is unknown beside a known value [100], by a line through pairs of both [N].

    It is Student's, of N - 2 degrees of freedom, and as wide as a new pair is uncertain: the prediction interval of
    simple linear regression.
    """
    slope, intercept = np.polyfit(known, unknown, 1)
    degrees, centred = len(known) - 2, known - known.mean()
    variance = np.sum((unknown - intercept - slope * known) ** 2) / degrees
    leverage = (value - known.mean()) ** 2 / np.sum(centred**2)
    scale = math.sqrt(variance * (1 + 1 / len(known) + leverage))
    return intercept + slope * value + scale * stdtrit(degrees, LEVELS)


def quantiles(values: Floats) -> tuple[float, float, float]:
    """Return the median, and the limits of the 90 % interval, of values that are equally likely."""
    median, low, high = np.quantile(values, [0.5, 0.05, 0.95]).tolist()
    return median, low, high


def forecast_text(found: Forecast) -> str:
    """Return a line on what a run will reach, and whether a longer one pays."""
    pays = found.gain_low > 2 * found.noise
    return (
        f"forecast by step {found.step}: on held-out samples the acceptance length will be {found.text} at the end, "
        f"step {found.num_steps} (90 % interval); twice the steps would bring {found.gain:.2f} [{found.gain_low:.2f}, "
        f"{found.gain_high:.2f}] more, " + ("which pays" if pays else "which may be no more than noise")
    )


def outcome_text(found: Forecast, reached: float) -> str:
    """Return a line on what came of a forecast."""
    within = "within" if found.low <= reached <= found.high else "outside of"
    return (
        f"the acceptance length on held-out samples is {reached:.2f}, {within} the forecast of step {found.step}: "
        f"{found.text}"
    )
