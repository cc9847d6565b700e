"""Predicted speedups: the data of the page's panel, from measured costs, and how good the predictions are.

A round of draft length K emits 1 + r1 + r1 r2 + ... + r1...rK tokens, r being the chances that a drafted token is
accepted when all before it were; r1 counts the rounds without a draft, too. It costs draft(K) + verify(K) + host steps
of plain decoding. Their ratio is the speedup. templates/panel.js computes it for acceptance and costs that its sliders
change; at the measured ones it shows what `speedups` gives here, which a test compares.
"""

import shlex
from dataclasses import astuple, dataclass
from functools import partial
from statistics import linear_regression, mean, median

from matplotlib.figure import Figure

from draftsmith.data.console import shell_path
from draftsmith.inference.measuring.results import Interval, Result
from draftsmith.inference.planning.best_draft import acceptance_length, rates_of_rounds
from draftsmith.inference.planning.costs import GOAL, Costs, DraftChances
from draftsmith.inference.planning.predictions import context_of, predicted_speedup
from draftsmith.inference.planning.roofline import RoundCosts
from draftsmith.models.errors import printable
from draftsmith.recipes.pages.figures import INK, LineStyle, Plot, label, legend, line_styles
from draftsmith.recipes.pages.tables import Section, Table, count, draft_text, speedup_text, table_of
from draftsmith.recipes.report_data.contents import ReportData
from draftsmith.recipes.report_data.measured import MeasuredDrafter

ASSUMED_RATE = 0.7  # of acceptance at each depth, where a plan knows none
REACH = 2  # times the longest draft and the largest batch that were measured is as far as the panel goes


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured speedup."""

    batch_size: int
    draft_length: int
    speedup: float
    speedup_ci95: Interval


@dataclass(frozen=True)
class Profile:
    """The figures from which a drafter's speedup follows, and the speedups that were measured."""

    name: str
    basis: str  # where the costs are from
    known: int  # the longest draft length that the costs were measured at
    known_batch: int  # the largest batch size, likewise
    rates: list[float]  # conditional acceptance rates by position, the first of all rounds, as far as measured
    costs: list[RoundCosts]  # by batch size, rising
    measured: list[MeasuredPoint]


def speedups(profile: Profile, costs: RoundCosts) -> list[float]:
    """Return the predicted speedup at draft length 1, 2, ...; behind the measured positions the last rate goes on."""
    longest = len(costs.draft) - 1
    rates = profile.rates + profile.rates[-1:] * longest
    return [
        acceptance_length(rates, length) / (costs.draft[length] + costs.verify[length] + costs.host)
        for length in range(1, longest + 1)
    ]


def what_if(profiles: list[Profile]) -> Section:
    return Section(
        "what-if",
        "What if",
        "Speedup = tokens a round / (draft + verification + host), in plain steps. The sliders start at what was "
        "measured.",
        folded=[prediction_table(profile) for profile in profiles],
    )


def prediction_table(profile: Profile) -> Table:
    """Return the predicted speedup by draft length and batch size, as the panel shows it before a slider is moved."""
    columns = {f"batch size {costs.batch_size}": speedups(profile, costs) for costs in profile.costs}
    rows = [
        {"draft length": str(length), **{name: f"{values[length - 1]:.2f}×" for name, values in columns.items()}}
        for length in range(1, len(profile.costs[0].draft))
    ]
    return table_of(f"Predicted speedup of {profile.name}", rows, profile.basis, words=("draft length",))


# --- profiles from what was measured


def profiles_of(data: ReportData) -> list[Profile]:
    """Return one for each drafter that was measured with chains; the one that the report leads with comes first.

    Where none was measured, they are those of plans.
    """
    if not data.drafters:
        return planned_profiles(data)

    def fastest(drafter: MeasuredDrafter) -> float:
        rows = drafter.sound_results(data.setting, data.setting.batch_size)
        return max((row.speed.speedup for row in rows), default=0.0)

    ranked = sorted(data.drafters, key=fastest, reverse=True)
    return [profile_of(data, drafter) for drafter in ranked if chains(data, drafter)]


def chains(data: ReportData, drafter: MeasuredDrafter) -> list[Result]:
    """Return its sound results with chains, all but draft length and batch size as at the leading setting."""
    rows = drafter.sound_results(data.setting)
    return [row for row in rows if row.setting.is_chain and row.acceptance.num_drafts]


def profile_of(data: ReportData, drafter: MeasuredDrafter) -> Profile:
    """Return a profile with the costs of costs.json where there are some, else with those of the measured rounds."""
    rows = chains(data, drafter)
    longest = max(rows, key=lambda row: (row.setting.draft_length, -row.setting.batch_size))
    length, counts = longest.setting.draft_length, longest.acceptance
    rates = rates_of_rounds(counts.conditional_acceptance_rates, counts.num_drafts, counts.num_rounds)
    sizes = {row.setting.batch_size for row in rows}
    known, known_batch = length, max(sizes)
    if fitted := data.costs_for(drafter):
        known = max([length, *(times.draft_length for times in fitted.fitted_on)])
        known_batch = max([known_batch, *(times.batch for times in fitted.fitted_on)])
        sizes |= {times.batch for times in fitted.fitted_on} | powers_of_two(REACH * known_batch)
        context = context_of(longest, fitted)
        fitted = costs_in_rounds_of(fitted, longest)
        costs = [fitted_costs(fitted, size, context, REACH * known) for size in sorted(sizes)]
        basis = fitted_text(fitted, context)
    else:
        by_size = [[row for row in rows if row.setting.batch_size == size] for size in sorted(sizes)]
        costs = [measured_costs(same, REACH * known) for same in by_size]
        basis = basis_text(rows)
    return Profile(
        drafter.name,
        basis,
        known,
        known_batch,
        [rate for rate in rates if rate is not None],
        costs,
        [
            MeasuredPoint(row.setting.batch_size, row.setting.draft_length, row.speed.speedup, row.speed.speedup_ci95)
            for row in rows
        ],
    )


def planned_profiles(data: ReportData) -> list[Profile]:
    """Return one for each planned drafter and each acceptance that is known for it, else for an assumed one."""
    profiles = []
    for plan in data.extras.get("plan", []):
        for drafter in plan.drafters:
            acceptances = [(entry.acceptance.where, entry.acceptance.rates) for entry in drafter.expected]
            for costs in [costs for costs in data.costs if costs.drafter == drafter.drafter and costs.fitted_on]:
                for where, rates in acceptances or [(f"rate {ASSUMED_RATE:g}, assumed", [ASSUMED_RATE])]:
                    name = f"{drafter.drafter}, accepting as {where}"
                    profiles.append(planned_profile(name, costs, [rate or 0.0 for rate in rates], plan.context))
    return profiles


def planned_profile(name: str, fitted: Costs, rates: list[float], context: int) -> Profile:
    known = max(times.draft_length for times in fitted.fitted_on)
    known_batch = max(times.batch for times in fitted.fitted_on)
    sizes = sorted({times.batch for times in fitted.fitted_on} | powers_of_two(REACH * known_batch))
    costs = [fitted_costs(fitted, size, context, REACH * known) for size in sizes]
    return Profile(name, fitted_text(fitted, context), known, known_batch, rates, costs, [])


def powers_of_two(most: int) -> set[int]:
    return {1 << power for power in range(most.bit_length())}


def fitted_costs(fitted: Costs, batch_size: int, context: int, longest: int) -> RoundCosts:
    """Return costs of costs.json at a batch size and a context, in plain steps."""
    place = batch_size, context
    plain, lengths = fitted.plain(*place), range(longest + 1)
    draft = [fitted.draft(length, *place) / plain for length in lengths]
    verify = [fitted.verify(length, *place) / plain for length in lengths]
    return RoundCosts(batch_size, draft, verify, fitted.host / plain)


def costs_in_rounds_of(fitted: Costs, row: Result) -> Costs:
    """Return the costs of a drafter whose drafts are as frequent and as long as in this row."""
    return fitted.drafting_with(DraftChances.of(row.acceptance))


def fitted_text(fitted: Costs, context: int) -> str:
    error = fitted.held_out
    return (
        f"Costs are those of costs.json, measured on {printable(fitted.device)}, at a context of {context} tokens; at "
        f"{count(error.settings, 'setting')} left out of the fit the predicted speedup was off by "
        f"{100 * error.median_error:.1f} % in the median. Longer drafts and larger batches go on along the fitted "
        "curve, and acceptance at its last rate."
    )


def measured_costs(rows: list[Result], longest: int) -> RoundCosts:
    """Return straight lines over the draft length through the rounds of one batch size.

    A result's cost is split as its milliseconds are.
    """
    lengths = [row.setting.draft_length for row in rows]
    phases = [row.speed.milliseconds_per_round for row in rows]
    steps = [row.steps_a_round / phase.total for row, phase in zip(rows, phases, strict=True)]  # a millisecond
    draft, verify, host = (
        [step * part for step, part in zip(steps, parts, strict=True)]
        for parts in zip(*map(astuple, phases), strict=True)
    )
    return RoundCosts(
        rows[0].setting.batch_size, line(lengths, draft, 0.0, longest), line(lengths, verify, 1.0, longest), mean(host)
    )


def line(lengths: list[int], costs: list[float], at_zero: float, longest: int) -> list[float]:
    """Return the least-squares line at 0 to `longest`; through `at_zero` where a single length leaves its slope open.

    It never falls, and is never negative.
    """
    if len(set(lengths)) == 1:
        lengths, costs = [*lengths, *[0] * len(lengths)], [*costs, *[at_zero] * len(costs)]
    slope = max(0.0, linear_regression(lengths, costs).slope)
    return [max(0.0, mean(costs) + slope * (length - mean(lengths))) for length in range(longest + 1)]


def basis_text(rows: list[Result]) -> str:
    lengths = sorted({row.setting.draft_length for row in rows})
    if len(lengths) == 1:
        return (
            f"Rounds were measured at draft length {lengths[0]} only: that the cost of drafting grows in proportion to "
            "the length, and that of verification from one plain step, is an assumption."
        )
    return (
        f"Costs are straight lines through the rounds measured at draft lengths {', '.join(map(str, lengths))}; "
        "longer drafts are extrapolated."
    )


# --- how good the predictions are


@dataclass(frozen=True)
class Prediction:
    """The speedup that costs.json and the tokens of its rounds predict for a measured result."""

    drafter: str
    row: Result
    predicted: float

    @property
    def error(self) -> float:
        """The relative error."""
        return self.predicted / self.row.speed.speedup - 1


def cost_model(data: ReportData) -> Section:
    """Show what costs.json predicts beside what was measured."""
    predictions = predictions_of(data)
    if not predictions:
        drafts = data.leader[1].acceptance.num_drafts
        return Section("cost-model", "Cost model", notes=[unmeasured_costs_text(data)] if drafts else [])
    rows = [
        {
            "drafter": prediction.drafter,
            "draft": draft_text(prediction.row.setting),
            "batch size": str(prediction.row.setting.batch_size),
            "predicted": f"{prediction.predicted:.2f}×",
            "measured": speedup_text(prediction.row),
            "error": f"{100 * prediction.error:+.1f} %",
        }
        for prediction in predictions
    ]
    errors = [abs(prediction.error) for prediction in predictions]
    near = sum(error <= GOAL for error in errors)
    return Section(
        "cost-model",
        "Cost model",
        f"From measured costs and the tokens of a round the speedup is predicted within {100 * GOAL:.0f} % in {near} "
        f"of {count(len(errors), 'setting')}; the median error is {100 * median(errors):.1f} %.",
        folded=[table_of("Predicted and measured speedup", rows, words=("drafter", "draft"))],
        plots=[
            Plot(
                "predicted_speedup",
                "Below the line a drafter was slower than predicted. Costs were measured apart from these texts.",
                partial(draw_predicted_speedup, predictions, line_styles(data)),
            )
        ],
    )


def unmeasured_costs_text(data: ReportData) -> str:
    target, drafter = map(shell_path, (data.target, data.leader[0].evaluation.drafter))
    words = ["plan", "--target", target, "--drafter", drafter, "--out", "FOLDER/plan"]
    return (
        f"The costs of a round were not measured here: draftsmith {shlex.join(words)}, FOLDER being that of this "
        "report, does so in half a minute. Then draftsmith report FOLDER sets what they predict beside what was "
        "measured."
    )


def predictions_of(data: ReportData) -> list[Prediction]:
    """Return the prediction for each measured result whose drafter has a costs.json that tells of such drafts."""
    predictions = []
    for drafter in data.drafters:
        if fitted := data.costs_for(drafter):
            for row in drafter.sound_results(data.setting):
                if (speedup := row.predicted_speedup or predicted_speedup(row, fitted)) is not None:
                    predictions.append(Prediction(drafter.name, row, speedup))
    return predictions


def draw_predicted_speedup(predictions: list[Prediction], styles: dict[str, LineStyle], figure: Figure) -> None:
    axes = figure.subplots()
    top = 1.08 * max(max(prediction.predicted, prediction.row.speed.speedup) for prediction in predictions)
    for name in dict.fromkeys(prediction.drafter for prediction in predictions):
        own = [prediction for prediction in predictions if prediction.drafter == name]
        measured = [prediction.row.speed.speedup for prediction in own]
        predicted = [prediction.predicted for prediction in own]
        axes.plot(predicted, measured, "o", color=styles[name].colour, label=styles[name].label, alpha=0.85)
    axes.plot([0, top], [0, top], color=INK, linewidth=1, label="equal")
    axes.fill_between([0, top], [0, 0.95 * top], [0, 1.05 * top], color=INK, alpha=0.1, linewidth=0, label="within 5 %")
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.set_aspect("equal")
    label(axes, "Speedup predicted from costs and as measured", "predicted", "measured")
    legend(figure)
