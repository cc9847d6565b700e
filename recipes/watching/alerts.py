"""The ways of alerts besides the console: a webhook, and gauges that a Prometheus collects."""

import httpx
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from draftsmith.data.progress import warn
from draftsmith.models.errors import UserError
from draftsmith.recipes.watching.readings import Reading

SECONDS = 10.0  # for a webhook to answer
GAUGES = {
    "acceptance_length": "tokens that a draft brought between the last two looks",
    "drift": "acceptance length beside what was measured at export",
    "ttft_ms": "mean time to the first token",
    "tpot_ms": "mean time of a later token",
    "alert": "1 where acceptance has fallen",
}


class Alerts:
    """The places of alerts: `webhook` is an address that gets a POST of {"text": ...}, `port` that of the gauges."""

    def __init__(self, webhook: str | None, port: int | None) -> None:
        self.webhook = webhook
        self._gauges: dict[str, Gauge] = {}
        if port is not None:
            registry = CollectorRegistry()
            for name, what in GAUGES.items():
                self._gauges[name] = Gauge(f"draftsmith_{name}", what, ["server"], registry=registry)
            try:
                start_http_server(port, addr="127.0.0.1", registry=registry)
            except OSError as error:
                raise UserError(f"--listen {port}: {error.strerror}: give another port") from None

    def show(self, server: str, reading: Reading, drift: float | None, alert: bool) -> None:
        """Set the gauges of a server."""
        values = (reading.acceptance_length, drift, reading.ttft.milliseconds, reading.tpot.milliseconds, float(alert))
        for name, value in zip(GAUGES, values, strict=True):
            if value is not None and name in self._gauges:
                self._gauges[name].labels(server).set(value)

    def send(self, text: str) -> None:
        """Send an alert to the webhook; one that does not answer is told and forgotten."""
        if self.webhook is None:
            return
        try:
            httpx.post(self.webhook, json={"text": text}, timeout=SECONDS).raise_for_status()
        except (httpx.HTTPError, OSError) as error:
            warn(f"the webhook did not take an alert ({type(error).__name__})")  # its address may hold a secret
