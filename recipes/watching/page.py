"""A page of what is watched, which loads itself anew: acceptance and latency of each server over time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure

from draftsmith.recipes.pages.figures import COLOURS, INK, TWO_PANELS, Plot, draw_plots, label, legend
from draftsmith.recipes.pages.rendering import rendered
from draftsmith.recipes.pages.tables import Row, Section, table_of
from draftsmith.recipes.watching.readings import Reading

MOST_SHOWN = 2000  # readings of a server, the newest
LEAST_REFRESH = 5  # seconds between two loads of the page


@dataclass(frozen=True)
class Series:
    """A server as a page shows it."""

    url: str
    readings: list[Reading]  # what happened between looks, the oldest first
    measured: float | None  # acceptance length at export
    alerts: list[str]


def watch_page(servers: Sequence[Series], interval: float) -> str:
    """Return one page that needs no other file and no network, and loads itself anew after each interval."""
    fallen = [series.url for series in servers if series.alerts]
    drafted = any(reading.counters.num_drafts for series in servers for reading in series.readings)
    title = f"Acceptance has fallen at {', '.join(fallen)}" if fallen else "No fall of acceptance was found"
    plots = [
        Plot("acceptance", "Tokens that a draft brings; dotted: as measured at export.", draw_acceptance(servers)),
        Plot("latency", "Mean time to the first token, and of a later token.", draw_latency(servers), TWO_PANELS),
    ]
    section = Section(
        "servers",
        "Servers",
        "At the newest look.",
        [table_of("", map(newest_row, servers), words=("server", "at"))],
        plots,
    )
    with TemporaryDirectory() as folder:
        figures = draw_plots(plots, Path(folder))
    return rendered(
        "sections_page.html.j2",
        program="watch",
        name=", ".join(series.url for series in servers),
        title=title if fallen or drafted else "Nothing was drafted yet",
        tone="bad" if fallen else "good" if drafted else "",
        facts=[],
        text=[],
        notes=[f"{series.url}: {alert}" for series in servers for alert in series.alerts],
        sections=[section],
        figures=figures,
        refresh=max(LEAST_REFRESH, round(interval)),
    )


def newest_row(series: Series) -> Row:
    """Return what a server did between the last two looks."""
    if not series.readings:
        return {"server": series.url, "tokens a draft": "no look yet"}
    newest = series.readings[-1]
    length, ttft, tpot = newest.acceptance_length, newest.ttft.milliseconds, newest.tpot.milliseconds
    return {
        "server": series.url,
        "at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest.time)),
        "tokens a draft": "–" if length is None else f"{length:.2f}",
        "measured at export": "–" if series.measured is None else f"{series.measured:.2f}",
        "drafts": f"{newest.counters.num_drafts}",
        "TTFT, ms": "–" if ttft is None else f"{ttft:.1f}",
        "TPOT, ms": "–" if tpot is None else f"{tpot:.1f}",
        "running": f"{newest.running:.0f}",
    }


def draw_acceptance(servers: Sequence[Series]) -> Callable[[Figure], None]:
    """Return the function that draws acceptance over time, in a band of two standard errors."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for series, colour in zip(servers, cycle(COLOURS), strict=False):
            shown = [reading for reading in series.readings if reading.acceptance_length is not None]
            times = [datetime.fromtimestamp(reading.time) for reading in shown]
            lengths = [reading.acceptance_length or 0.0 for reading in shown]
            errors = [2 * reading.counters.standard_error if reading.counters.num_drafts else 0.0 for reading in shown]
            low = [length - error for length, error in zip(lengths, errors, strict=True)]
            high = [length + error for length, error in zip(lengths, errors, strict=True)]
            axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0)  # type: ignore[arg-type]
            axes.plot(times, lengths, color=colour, label=series.url)  # type: ignore[arg-type]
            if series.measured is not None:
                axes.axhline(series.measured, linestyle=":", color=colour, linewidth=1)
        label(axes, "Tokens that a draft brings", "")
        figure.autofmt_xdate()
        legend(figure)

    return draw


def draw_latency(servers: Sequence[Series]) -> Callable[[Figure], None]:
    """Return the function that draws mean latencies over time."""

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2, 1)
        for axes, name in zip(panels, ("ttft", "tpot"), strict=True):
            for series, colour in zip(servers, cycle(COLOURS), strict=False):
                shown = [(reading.time, getattr(reading, name).milliseconds) for reading in series.readings]
                known = [(datetime.fromtimestamp(at), value) for at, value in shown if value is not None]
                axes.plot([at for at, _ in known], [value for _, value in known], color=colour, label=series.url)
            label(axes, {"ttft": "Time to the first token, ms", "tpot": "Time of a later token, ms"}[name], "")
            axes.tick_params(axis="x", rotation=30, colors=INK)
        legend(figure)

    return draw
