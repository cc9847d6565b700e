"""Requests to a model server, which answers in JSON.

A failure that may pass (too many requests, overload, a time-out, a lost connection) is asked again after waits that
double. Redirects are not followed, so that prompts and the user's key reach no server but the one that the user named.
"""

import os
import random
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from draftsmith.models.errors import UserError, first_line

ATTEMPTS = 8
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before an attempt, doubling, times a random factor of 0.5 to 1
PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP states that may be gone at the next attempt
API_KEY = "OPENAI_API_KEY"  # environment variable whose value is sent as the bearer token

T = TypeVar("T")


class PassingError(Exception):
    """A failure that is worth another attempt, after `wait` seconds at least."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Server:
    """The model server at `url`; any number of threads may ask it at once.

    `name` is what messages call it, such as the setting that gave the URL, and `mend` what to do where it is silent.
    `timeout`: seconds for an answer to begin. Once `stopped` is set, no request is sent again.
    """

    def __init__(self, url: str, name: str, mend: str, timeout: float) -> None:
        self.name, self.mend, self.stopped = name, mend, threading.Event()
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{name} is no URL: give http://HOST:PORT, such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        key = os.environ.get(API_KEY)
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=timeout,
                limits=httpx.Limits(max_connections=None),
                follow_redirects=False,
                verify=ssl.create_default_context(),  # trusts what the system trusts
            )
        except (httpx.InvalidURL, ValueError, ImportError) as error:  # the last two of proxies that httpx cannot use
            raise UserError(f"{name} cannot be asked: {first_line(error)}") from None

    def text(self, path: str) -> str:
        """Return the page at a path. Raises `UserError` where the server is silent or refuses."""
        return self._once(lambda: self._send(path, None).text)

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a GET, or to a POST of `body`, in one attempt. Raises `UserError`, as `text` does."""
        return self._once(lambda: self._send_json(path, body))

    def ask(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the answer to a POST; it raises `PassingError` to have the request sent again.

        Raises `UserError` where the server refuses, or where every attempt fails.
        """
        reason = ""
        for attempt in range(ATTEMPTS):
            try:
                return read(self._send_json(path, body))
            except PassingError as error:
                reason = first_line(error)
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)
                if self.stopped.wait(max(wait, error.wait) if attempt + 1 < ATTEMPTS else 0):
                    break
        raise UserError(
            f"{self.name} failed {ATTEMPTS} times in a row, at last with: {reason}; what is written is kept: "
            "see to the server and give the same command again"
        )

    def _once(self, send: Callable[[], T]) -> T:
        try:
            return send()
        except PassingError as error:
            raise UserError(f"{self.name}: no model server answers there ({first_line(error)}); {self.mend}") from None

    def _send_json(self, path: str, body: dict[str, Any] | None) -> Any:
        response = self._send(path, body)
        try:
            return response.json()
        except ValueError:
            raise PassingError(f"an answer that is no JSON: {shortened(response)}") from None

    def _send(self, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Return the answer to one request. Raises `PassingError` or `UserError` where it is no success."""
        try:
            response = self._client.request("GET" if body is None else "POST", path, json=body)
        except httpx.HTTPError as error:
            raise PassingError(f"{type(error).__name__}: {first_line(error)}") from None
        if response.is_success:
            return response
        if response.status_code in PASSING:
            after = response.headers.get("Retry-After", "")
            raise PassingError(f"HTTP {response.status_code}", float(after) if after.isdigit() else 0.0)
        if response.has_redirect_location:
            location = response.headers["Location"]
            raise UserError(f"{self.name}{path} redirects to {location}, which is not followed: give the final URL")
        raise UserError(f"{self.name}{path} refuses: HTTP {response.status_code}: {shortened(response)}")


def shortened(response: httpx.Response) -> str:
    """Return the beginning of what a server said, in one line."""
    return " ".join(response.text.split())[:300]
