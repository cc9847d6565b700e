"""The data of the report's interactive panel, and the formula that the panel computes, in Python.

A round of draft length K emits 1 + r1 + r1 r2 + ... + r1...rK tokens, r being the chances that a drafted token is
accepted when all before it were; r1 counts the rounds without a draft, too. It costs draft(K) + verify(K) + host steps
of plain decoding. Their ratio is the speedup. page/panel.js holds the same functions; a test compares both.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.inference.planning.choice import rates_of_rounds
from draftsmith.inference.planning.costs import Costs
from draftsmith.recipes.reports.contents import DRAFT, Contender, Measured, Result, steps_a_round, tokens_a_round
from draftsmith.recipes.reports.curves import settings_but
from draftsmith.recipes.reports.summary import count
from draftsmith.recipes.reports.tables import Table, table_of

REACH = 2  # times the longest measured draft length is as far as the panel goes


@dataclass
class RoundCosts:
    """What a round costs at one batch size, in steps of plain decoding, by draft length from 0 on."""

    batch_size: int
    draft: list[float]
    verify: list[float]
    host: float


@dataclass
class Profile:
    """What a drafter's speedup follows from, and the speedups that were measured."""

    name: str
    basis: str  # where the costs are from
    known: int  # the longest draft length that the costs were measured at
    rates: list[float]  # conditional acceptance rates by position, the first of all rounds, as far as measured
    costs: list[RoundCosts]  # by batch size, rising
    measured: list[dict[str, Any]]  # batch_size, draft_length, speedup, speedup_ci95

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Point:
    """A measured row and its speedup as predicted from costs."""

    name: str  # of the drafter
    row: Result
    predicted: float

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted / self.row["speedup"] - 1


@dataclass(frozen=True)
class Change:
    """Where the panel's sliders stand; the defaults are what was measured."""

    first_rate: float | None = None  # chance that the first drafted token is accepted; the others follow
    draft_scale: float = 1.0
    verify_scale: float = 1.0


# --- the formula


def acceptance_length(rates: list[float], draft_length: int) -> float:
    """Tokens a round emits; behind the measured positions the last rate goes on."""
    total, survival = 1.0, 1.0
    for i in range(draft_length):
        survival *= rates[min(i, len(rates) - 1)]
        total += survival
    return total


def changed_rates(rates: list[float], first: float | None) -> list[float]:
    """All rates to the power that takes the first one to `first`: 0 stays 0, 1 stays 1."""
    if first is None:
        return rates
    power = math.log(within(first)) / math.log(within(rates[0]))
    return [rate**power for rate in rates]


def within(rate: float) -> float:
    """Off 0 and 1, where the logarithm is of no use."""
    return min(max(rate, 0.001), 0.999)


def round_cost(costs: RoundCosts, draft_length: int, change: Change) -> float:
    """Steps of plain decoding."""
    draft, verify = costs.draft[draft_length], costs.verify[draft_length]
    return change.draft_scale * draft + change.verify_scale * verify + costs.host


def speedups(profile: Profile, costs: RoundCosts, change: Change | None = None) -> list[float]:
    """The predicted speedup at draft length 1, 2, ..."""
    change = change or Change()
    rates = changed_rates(profile.rates, change.first_rate)
    return [
        acceptance_length(rates, length) / round_cost(costs, length, change) for length in range(1, len(costs.draft))
    ]


# --- from what was measured


def profiles(measured: Measured) -> list[Profile]:
    """One for each drafter that was measured with chains; the one that the report leads with comes first."""
    leading = measured.leading
    ranked = sorted(measured.contenders, key=lambda one: -fastest(one, leading))
    found = [profile_of(one, costs_of(measured, one), leading) for one in ranked]
    return [profile for profile in found if profile]


def costs_of(measured: Measured, contender: Contender) -> Costs | None:
    """Its fitted costs: those of its own costs.json, else those of another drafter of its kind in the folder."""
    of_kind = [content for content in measured.extras.get("costs", []) if content["drafter_kind"] == contender.kind]
    content = measured.extra_of("costs", contender) or next(iter(of_kind), None)
    return Costs.from_json(content) if content else None


def fastest(contender: Contender, leading: Result) -> float:
    return max((row["speedup"] for row in settings_but(contender, leading, *DRAFT)), default=0.0)


def profile_of(contender: Contender, fitted: Costs | None, leading: Result) -> Profile | None:
    """With fitted costs, or those of the measured rounds; None for plain decoding, and for trees alone."""
    rows = chains(contender, leading)
    if not rows:
        return None
    longest = max(rows, key=lambda row: (row["draft_length"], -row["batch_size"]))
    counts = longest["num_drafts"], longest["num_rounds"]
    rates = [rate for rate in rates_of_rounds(longest["conditional_acceptance_rates"], *counts) if rate is not None]
    sizes = sorted({row["batch_size"] for row in rows})
    names = ("batch_size", "draft_length", "speedup", "speedup_ci95")
    points = [{name: row[name] for name in names} for row in rows]
    if fitted:
        fitted = fitted.drafting_in(longest["num_drafts"] / longest["num_rounds"])
        known = max(row.draft_length for row in fitted.fitted_on)
        context = context_of(fitted, longest)
        sizes = sorted({*sizes, *(row.batch for row in fitted.fitted_on)})
        costs = [fitted_costs(fitted, size, context, max(known, longest["draft_length"])) for size in sizes]
        return Profile(contender.name, fitted_text(fitted, context), known, rates, costs, points)
    known = longest["draft_length"]
    costs = [measured_costs([row for row in rows if row["batch_size"] == size], REACH * known) for size in sizes]
    return Profile(contender.name, basis_text(rows), known, rates, costs, points)


def chains(contender: Contender, like: Result) -> list[Result]:
    """Its sound rows with chains, all but draft length and batch size as in another row."""
    rows = settings_but(contender, like, "batch_size", *DRAFT)
    return [row for row in rows if row["tree_nodes"] is None and row["num_drafts"]]


def fitted_costs(fitted: Costs, batch_size: int, context: int, longest: int) -> RoundCosts:
    """Costs of costs.json in plain steps."""
    plain, lengths = fitted.plain(batch_size, context), range(longest + 1)
    draft = [fitted.draft(length, batch_size, context) / plain for length in lengths]
    verify = [fitted.verify(length, batch_size, context) / plain for length in lengths]
    return RoundCosts(batch_size, draft, verify, fitted.host / plain)


def context_of(fitted: Costs, row: Result) -> int:
    """Tokens in the context: as many as the row's answers may have, within the contexts that costs were measured at."""
    contexts = [row.context for row in fitted.fitted_on]
    return min(max(row["max_new_tokens"], min(contexts)), max(contexts))


def fitted_text(fitted: Costs, context: int) -> str:
    error = fitted.held_out
    return (
        f"Costs are those of costs.json, measured on {fitted.device}, at a context of {context} tokens; at "
        f"{count(error.settings, 'setting')} left out of the fit the predicted speedup was off by "
        f"{100 * error.median_error:.1f} % in the median."
    )


def predicted_points(measured: Measured) -> list[Point]:
    """Of each measured row with chains the speedup that costs.json and the tokens of its rounds predict."""
    found = []
    for contender in measured.contenders:
        fitted = costs_of(measured, contender)
        if fitted is None:
            continue
        for row in chains(contender, measured.leading):
            place = row["draft_length"], row["batch_size"], context_of(fitted, row)
            costs = fitted.drafting_in(row["num_drafts"] / row["num_rounds"])
            found.append(Point(contender.name, row, costs.speedup(tokens_a_round(row), *place)))
    return found


def measured_costs(rows: list[Result], longest: int) -> RoundCosts:
    """Straight lines over the draft length through the rounds of one batch size.

    A row's cost is split as its milliseconds are.
    """
    split = {phase: [(row["draft_length"], steps(row, phase)) for row in rows] for phase in ("draft", "verify", "host")}
    draft, verify = line(split["draft"], 0.0), line(split["verify"], 1.0)
    lengths = range(longest + 1)
    host = sum(cost for _, cost in split["host"]) / len(rows)
    return RoundCosts(rows[0]["batch_size"], [draft(length) for length in lengths], [verify(n) for n in lengths], host)


def steps(row: Result, phase: str) -> float:
    phases = row["milliseconds_per_round"]
    return steps_a_round(row) * phases[phase] / sum(phases.values())


def line(points: list[tuple[int, float]], at_zero: float) -> Callable[[int], float]:
    """The least-squares line; through `at_zero` where a single draft length leaves its slope open. It never falls."""
    if len({x for x, _ in points}) == 1:
        points = [*points, *[(0, at_zero)] * len(points)]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    return lambda x: max(0.0, mean_y + slope * (x - mean_x))


def basis_text(rows: list[Result]) -> str:
    lengths = sorted({row["draft_length"] for row in rows})
    if len(lengths) == 1:
        return (
            f"Rounds were measured at draft length {lengths[0]} only: that the cost of drafting grows in proportion to "
            "the length, and that of verification from one plain step, is an assumption."
        )
    return (
        f"Costs are straight lines through the rounds measured at draft lengths {', '.join(map(str, lengths))}; "
        "longer drafts are extrapolated."
    )


def prediction_table(profile: Profile) -> Table:
    """What the panel shows before a slider is moved: the predicted speedup by draft length and batch size."""
    columns = {f"batch size {costs.batch_size}": speedups(profile, costs) for costs in profile.costs}
    rows = [
        {"draft length": str(length), **{name: f"{values[length - 1]:.2f}×" for name, values in columns.items()}}
        for length in range(1, len(profile.costs[0].draft))
    ]
    return table_of(f"Predicted speedup of {profile.name}", rows, profile.basis, words=("draft length",))
