"""`draftsmith watch`: acceptance and latency of running servers, beside what was measured at export and before."""

import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from rich.console import Console

from draftsmith.data.http import Server
from draftsmith.inference.planning.costs import Costs
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import write_whole
from draftsmith.models.storage.reading import read_typed
from draftsmith.recipes.configs.server_settings import WatchSettings
from draftsmith.recipes.watching.alerts import Alerts
from draftsmith.recipes.watching.change import Change, ChangeTest
from draftsmith.recipes.watching.history import History
from draftsmith.recipes.watching.page import MOST_SHOWN, Series, watch_page
from draftsmith.recipes.watching.readings import MEND, Reading, read
from draftsmith.recipes.watching.reference import (
    LEAST_DRAFTS,
    RETRAIN,
    Reference,
    describe,
    drift_of,
    judgement,
    read_reference,
)
from draftsmith.train.engine.vllm_counters import Counters

EXIT_ALERT = 3
POOLED = (1, 30)  # looks that are judged together


class AcceptanceFell(UserError):
    """Acceptance of a server has fallen, as the exit code says."""

    exit_code = EXIT_ALERT


@dataclass
class WatchedServer:
    """A server that is watched, and what is known of it."""

    url: str
    server: Server
    against: Path | None
    newest: Reading | None = None  # its metrics at the last look
    pools: list["Pool"] = field(default_factory=lambda: [Pool(size) for size in POOLED])
    alerts: list[str] = field(default_factory=list)
    retrains: bool = False  # whether the newest reading said so, which is told when it begins

    def reference(self, reading: Reading) -> Reference | None:
        """Return what was measured at export for drafts as long as the server's; None where there is nothing."""
        positions = len(reading.counters.accepted_per_position)
        return read_reference(self.against, positions) if self.against and positions else None

    def judge(self, reading: Reading, reference: Reference | None) -> list[str]:
        """Return the alerts that a reading gives: a change, or traffic that costs more than it may."""
        alerts = []
        if change := self.add(reading):
            alerts.append(change_text(change))
        if reference and reading.counters.num_drafts >= LEAST_DRAFTS:
            said = judgement(reading.counters, reference)
            began = said.startswith(RETRAIN) and not self.retrains
            self.retrains = said.startswith(RETRAIN)
            alerts += [said] if began else []
        self.alerts += alerts
        return alerts

    def add(self, reading: Reading) -> Change | None:
        """Take a reading into the tests of changes; return the change that one of them finds."""
        changes = [pool.add(reading) for pool in self.pools]
        return next((change for change in changes if change), None)


@dataclass
class Pool:
    """Looks that are judged together by a test: few show a large fall at once, many a small one among noise."""

    size: int  # looks
    test: ChangeTest = field(default_factory=ChangeTest)
    counters: Counters = field(default_factory=Counters)
    accepted: list[float] = field(default_factory=list)  # of an SGLang, by look
    looks: int = 0

    def add(self, reading: Reading) -> Change | None:
        """Take a reading; judge the pool where it is full and has enough drafts."""
        self.looks += 1
        self.counters += reading.counters
        if reading.accepted is not None:
            self.accepted.append(reading.accepted)
        counters, accepted = self.counters, self.accepted
        if self.looks < self.size or (counters.num_drafts < LEAST_DRAFTS and not accepted):
            return None
        self.counters, self.accepted, self.looks = Counters(), [], 0
        if counters.num_drafts:
            return self.test.add(reading.time, counters.mean_acceptance_length, counters.standard_error)
        return self.test.add(reading.time, sum(accepted) / len(accepted), 0.0)


def change_text(change: Change) -> str:
    """Return a change in words."""
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(change.since))
    return f"acceptance length has fallen from {change.before:.2f} to {change.after:.2f} since {since}"


def run(settings: WatchSettings, console: Console) -> None:
    """Look at the servers again and again. Raises `AcceptanceFell` after the last look where acceptance has fallen."""
    history, alerts = History(settings.history), Alerts(settings.webhook, settings.listen)
    servers = [WatchedServer(url, Server(url, "watch", MEND), settings.against) for url in settings.url]
    several = len(servers) > 1
    for watched in servers:
        for reading in history.of(watched.url):
            watched.add(reading)
        watched.newest = read(watched.server)
        console.print(f"{name_of(watched, several)}since its start: {text_of(watched, watched.newest)}")
    for _ in count() if settings.readings is None else range(settings.readings):
        time.sleep(settings.interval)
        for watched in servers:
            for text in look(watched, history, alerts):
                console.print(f"{name_of(watched, several)}{text}")
        if settings.page is not None:
            shown = [series_of(watched, history) for watched in servers]
            write_whole(settings.page, watch_page(shown, settings.interval))
    if fallen := [f"{watched.url}: {alert}" for watched in servers for alert in watched.alerts[-1:]]:
        raise AcceptanceFell("; ".join(fallen))


def look(watched: WatchedServer, history: History, alerts: Alerts) -> list[str]:
    """Read a server's metrics, and return in words what happened since the last look."""
    stamp = time.strftime("%H:%M:%S")
    try:
        now = read(watched.server)
        watched.reference(now)  # raises where the server drafts more than was measured
    except UserError as error:
        return [f"{stamp}  {error}"]
    assert watched.newest is not None
    anew = "the server was started anew; " if now.counters.started_since(watched.newest.counters) else ""
    reading, watched.newest = now.since(watched.newest), now
    history.add(watched.url, reading)
    reference = watched.reference(reading)
    new_alerts = watched.judge(reading, reference)
    drift = drift_of(reading.counters, reference) if reference and reading.counters.num_drafts else None
    alerts.show(watched.url, reading, drift, bool(watched.alerts))
    for alert in new_alerts:
        alerts.send(f"{watched.url}: {alert}")
    return [f"{stamp}  {anew}{text_of(watched, reading)}", *(f"ALERT  {alert}" for alert in new_alerts)]


def series_of(watched: WatchedServer, history: History) -> Series:
    """Return what the page shows of a server."""
    readings = history.newest(watched.url, MOST_SHOWN)
    reference = watched.reference(watched.newest) if watched.newest else None
    measured = None
    if reference and watched.newest:
        measured = reference.range_at(watched.newest.counters.mean_draft_length)[0]
    return Series(watched.url, readings, measured, watched.alerts)


def name_of(watched: WatchedServer, several: bool) -> str:
    """Return what a line begins with: the server's address where there are several."""
    return f"{watched.url}  " if several else ""


def text_of(watched: WatchedServer, reading: Reading) -> str:
    """Return a reading in a line or two."""
    if reading.counters.num_drafts:
        text = describe(reading.counters, watched.reference(reading))
    elif reading.accepted is not None:
        text = f"acceptance length {reading.accepted:.2f}, as the server tells it of its newest batches"
    else:
        text = "no drafts"
    waits = [("TTFT", reading.ttft.milliseconds), ("TPOT", reading.tpot.milliseconds)]
    text += "".join(f"  {name} {value:.1f} ms" for name, value in waits if value is not None)
    return text + speedup_text(watched, reading)


def speedup_text(watched: WatchedServer, reading: Reading) -> str:
    """Return the speedup that the drafter's costs predict for what was read; nothing where there are no costs."""
    path, counters = watched.against and watched.against / "costs.json", reading.counters
    if path is None or not path.is_file() or not counters.num_drafts:
        return ""
    costs, batch = read_typed(Costs, path), max(1, round(reading.running))
    context = max((times.context for times in costs.fitted_on), default=1)
    length = max(1, round(counters.mean_draft_length))
    speedup = costs.speedup(counters.mean_acceptance_length, length, batch, context)
    return f"  about {speedup:.2f}x at batch {batch} by draftsmith's costs"
