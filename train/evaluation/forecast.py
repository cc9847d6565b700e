"""A forecast of the end of a run from the first tenth of its learning curve, and of what twice the steps would bring.

A tenth of a run is too little to fit a curve to: it is the warm-up and little more, and what the decay of the learning
rate brings is still to come. But runs are alike in how the share of the drafted tokens that is accepted rises from
there to the end, on the scale of log-odds, which ends where all of them are. So a line through finished runs gives the
forecast, and their distances from it give the interval.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, stdtrit

from draftsmith.train.run_folder.learning_curve import CurvePoint, Forecast

Floats = NDArray[np.float64]

LEAST_POINTS = 3  # in the half octave before a tenth of the steps
LEVELS = (np.arange(100) + 0.5) / 100  # of probability: values at these stand for a distribution


@dataclass(frozen=True)
class FinishedRun:
    """The share of the drafted tokens that a finished run's drafter had accepted in a round on its held-out samples."""

    tenth: float  # after a tenth of the steps, as `accepted_share` gives it
    fifth: float  # after a fifth
    end: float


# The runs `FINISHED` of benchmarks/learning_curves.py, which prints these lines.
FINISHED_RUNS = [
    FinishedRun(tenth=0.0674, fifth=0.1074, end=0.3942),  # eagle3-200x8-cosine-0
    FinishedRun(tenth=0.1099, fifth=0.1335, end=0.2523),  # eagle-200x8-cosine-0
    FinishedRun(tenth=0.046, fifth=0.0702, end=0.1532),  # p_eagle-200x8-cosine-0
    FinishedRun(tenth=0.0292, fifth=0.07, end=0.1762),  # dflash-200x8-cosine-0
    FinishedRun(tenth=0.0497, fifth=0.0695, end=0.1156),  # medusa-200x8-cosine-0
    FinishedRun(tenth=0.0913, fifth=0.1152, end=0.1998),  # hydra-200x8-cosine-0
    FinishedRun(tenth=0.0817, fifth=0.1093, end=0.1627),  # mlp_speculator-200x8-cosine-0
    FinishedRun(tenth=0.0587, fifth=0.0854, end=0.1233),  # medusa-600x2-cosine-0
    FinishedRun(tenth=0.1199, fifth=0.2666, end=0.4765),  # eagle3-600x8-cosine-0
]


def forecast(points: list[CurvePoint], depth: int, num_steps: int, finished: list[FinishedRun]) -> Forecast | None:
    """Return the forecast of a run of `num_steps` steps by its points of the first tenth.

    `depth` is the number of tokens drafted in a round. Twice the steps bring a tenth of the run to where a fifth is
    now, and finished runs tell how much higher that is. None where there are too few points, or nothing is accepted.
    """
    tenth = num_steps // 10
    share = accepted_share(tenth, points, depth)
    if share is None:
        return None
    tenths, fifths, ends = (logit([getattr(run, name) for run in finished]) for name in ("tenth", "fifth", "end"))
    now = float(logit(share))
    end = foretold(tenths, ends, now)  # [100]
    growth = np.polyfit(tenths, ends, 1)[0] * foretold(tenths, fifths - tenths, now)  # [100]
    gain = depth * (expit(np.add.outer(end, growth)) - expit(end)[:, None])  # [100, 100]
    known = bool(min(tenths) <= now <= max(tenths))
    return Forecast(
        tenth, num_steps, *quantiles(1 + depth * expit(end)), *quantiles(gain), noise_of(newest(points, tenth)), known
    )


def newest(points: list[CurvePoint], step: int) -> list[CurvePoint]:
    """Return the points of half an octave up to a step."""
    return [point for point in points if step / math.sqrt(2) < point.step <= step]


def accepted_share(step: int, points: list[CurvePoint], depth: int) -> float | None:
    """Return the share of `depth` drafted tokens accepted after so many steps, as the mean of half an octave of points.

    None where these are too few, or none or all of the tokens are accepted.
    """
    accepted = [(point.acceptance_length - 1) / depth for point in newest(points, step)]
    share = sum(accepted) / max(1, len(accepted))
    return share if len(accepted) >= LEAST_POINTS and 0 < share < 1 else None


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


def forecast_text(predicted: Forecast) -> str:
    """Return a line on what a run will reach, and whether a longer one pays."""
    pays = predicted.gain_low > 2 * predicted.noise
    return (
        f"forecast by step {predicted.step}: on held-out samples the acceptance length will be {predicted.text} at the "
        f"end, step {predicted.num_steps} (90 % interval); twice the steps would bring {predicted.gain:.2f} "
        f"[{predicted.gain_low:.2f}, {predicted.gain_high:.2f}] more, "
        + ("which pays" if pays else "which may be no more than noise")
        + ("" if predicted.known else "; the runs that it goes by were not so far by then, or farther: trust it little")
    )


def outcome_text(predicted: Forecast, reached: float) -> str:
    """Return a line on what came of a forecast."""
    within = "within" if predicted.low <= reached <= predicted.high else "outside of"
    return (
        f"the acceptance length on held-out samples is {reached:.2f}, {within} the forecast of step {predicted.step}: "
        f"{predicted.text}"
    )
