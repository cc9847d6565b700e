"""Requests to a model server, which answers in JSON.

A failure that may pass (too many requests, overload, a time-out, a lost connection) is asked again after waits that
double. Redirects are not followed, so that prompts and the user's key reach no server but the one that the user named.
What a server sends is bounded in size, and in time from the first byte sent to the last one read: a server that never
ends costs that much and no more.
"""

import asyncio
import base64
import hashlib
import json
import os
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from functools import cache
from typing import Any, NoReturn, TypeVar

import httpx

from draftsmith.data.progress import notice
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import parse_json

ATTEMPTS = 8
TIMEOUTS = 2  # times the time-out: the seconds for the answers of all attempts together
TOLD_REASONS = 3  # why requests are sent again: many differ only in the name of a file
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before an attempt, doubling, times a random factor of 0.5 to 1
LONGEST_ASKED_WAIT = 120.0  # seconds that are waited where a server asks for that many or more
PAGE_TIMEOUT = 30.0  # seconds for a page to arrive, which a server does not compute
LARGEST_PAGE = 1 << 22  # bytes; of the metrics of a vLLM with 32 engines, for example
PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP states that may be gone at the next attempt
IDLE_SECONDS = 2.0  # for which a connection is kept for the next request; servers close theirs after 5 and more
SHOWN = 200  # characters of what a server said that a message holds
API_KEY = "OPENAI_API_KEY"  # environment variable whose value is sent as the bearer token
FORM = "give http://HOST:PORT, such as http://localhost:8000"

T = TypeVar("T")


class PassingError(Exception):
    """A failure that is worth another attempt, after `wait` seconds at least."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class NoAnswer(PassingError):
    """A server that is not there, or says nothing in time."""


class Server:
    """The model server at `url`; any number of threads may ask it at once.

    `setting` is where the user gave the URL, and `mend` what to do where the server is silent; messages name both.
    `timeout`: seconds for a whole answer. `largest`: bytes that it may have. Once `stopped` is set, no request is sent
    again.
    """

    def __init__(
        self, url: str, setting: str, mend: str, timeout: float = PAGE_TIMEOUT, largest: int = LARGEST_PAGE
    ) -> None:
        self.url = checked_url(url, setting)
        self.name, self.mend = f"{setting} {self.url}", mend
        self.timeout, self.largest = timeout, largest
        self.stopped = threading.Event()
        self._reasons: set[str] = set()  # for another attempt, of which the user knows
        self._key = os.environ.get(API_KEY, "")
        if not (self._key.isascii() and self._key.isprintable()):
            raise UserError(f"the key in {API_KEY} holds a line break or a letter that is no ASCII: set it anew")
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                timeout=None,  # `_send` has one for all
                limits=httpx.Limits(
                    max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS
                ),
                follow_redirects=False,
                verify=ssl.create_default_context(),  # trusts what the system trusts
            )
        except (httpx.InvalidURL, ValueError, ImportError, OSError):  # their texts may hold a proxy's password
            raise UserError(
                f"{self.name} cannot be asked: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY or SSLKEYLOGFILE names "
                "what cannot be used: mend or unset it"
            ) from None

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Return the page at a path, or the answer to a POST of `body`, in one attempt.

        Raises `UserError` where the server is silent or refuses.
        """
        return self._once(lambda: self._send_text(path, body, self.timeout if body is not None else None))

    def json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the same where it is JSON. Raises `UserError`, as `text` does."""
        return self._once(lambda: self._send_json(path, body, self.timeout if body is not None else None))

    def ask(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the answer to a POST; it raises `PassingError` to have the request sent again.

        Raises `UserError` where the server refuses, where every attempt fails, and where they take too long together.
        """
        reason, seconds_left = "", TIMEOUTS * self.timeout
        for attempt in range(ATTEMPTS):
            start = time.monotonic()
            try:
                return read(self._send_json(path, body, min(self.timeout, seconds_left)))
            except PassingError as error:
                reason = first_line(error)
                seconds_left -= time.monotonic() - start
                wait = wait_after(error, attempt)
                if attempt + 1 == ATTEMPTS or seconds_left <= 0 or self.stopped.is_set():
                    break
                self.tell(reason)
                if self.stopped.wait(wait):
                    break
        raise UserError(
            f"{self.name} failed {attempt + 1} times in a row, at last with: {reason}; what is written is kept: "
            "see to the server and give the same command again"
        )

    def ask_once(self, path: str, body: dict[str, Any], read: Callable[[Any], T]) -> T:
        """Return what `read` makes of the answer to a POST. Raises `PassingError` where it may succeed another time."""
        return read(self._send_json(path, body, self.timeout))

    def content(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the answer to a POST, of which the server tells the SHA-256.

        Raises `PassingError` where it may succeed another time, as where it arrives otherwise than it was sent.
        """
        response, content = self._send(path, body, self.timeout)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        told, found = response.headers.get("Repr-Digest"), f"sha-256=:{digest}:"  # RFC 9530
        if told != found:
            raise PassingError(f"{self.name}{path} arrives with Repr-Digest {found} and was sent with {told}")
        return content

    def tell(self, reason: str) -> None:
        """Tell the user once why a request is sent again."""
        if reason not in self._reasons and len(self._reasons) < TOLD_REASONS:
            self._reasons.add(reason)
            notice(f"{self.name}: {reason}; it is asked again, up to {ATTEMPTS} times")

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """Yield the JSON of each event of a streamed answer to a POST, sent once. The caller limits its time.

        Raises `PassingError` or `UserError` where the server refuses, is silent or sends no such events.
        """
        try:
            async with self._client.stream("POST", path, content=json.dumps(body).encode()) as response:
                if not response.is_success:
                    await self._refuse(path, response)
                async for line in self._lines(path, response):
                    if not line.startswith("data:"):
                        continue
                    text = line.removeprefix("data:").strip()
                    if text == "[DONE]":
                        return
                    yield parse_json(text, f"{self.name}{path}")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise PassingError(f"{type(error).__name__}: {self._shown(first_line(error))}") from None

    async def _lines(self, path: str, response: httpx.Response) -> AsyncIterator[str]:
        """Yield the lines of an answer as they arrive. Raises `UserError` where all of them are too large."""
        num_bytes, begun = 0, b""
        async for part in response.aiter_raw():
            num_bytes += len(part)
            self._check_size(path, num_bytes)
            *lines, begun = (begun + part).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace")

    async def _refuse(self, path: str, response: httpx.Response) -> NoReturn:
        """Raise `PassingError` or `UserError` for an answer that is no success, with the beginning of what it says."""
        received = bytearray()
        async for part in response.aiter_raw():
            received += part
            if len(received) > SHOWN:
                break
        raise self._refusal(path, response, received.decode("utf-8", "replace"))

    def _once(self, send: Callable[[], T]) -> T:
        try:
            return send()
        except PassingError as error:
            raise UserError(f"{self.name}: no model server answers there ({first_line(error)}); {self.mend}") from None

    def _send_json(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        text = self._send_text(path, body, seconds)
        try:
            return parse_json(text, "the answer")
        except UserError as error:
            raise PassingError(f"an answer that is no JSON: {self._shown(text) or error}") from None

    def _send_text(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> str:
        return self._send(path, body, seconds)[1].decode("utf-8", "replace")

    def _send(
        self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> tuple[httpx.Response, bytes]:
        """Return head and content of the answer to a GET, or to a POST of `body`.

        It is whole within some seconds (`PAGE_TIMEOUT`). Raises `PassingError` or `UserError` for no success.
        """
        seconds = PAGE_TIMEOUT if seconds is None else seconds
        receiving = asyncio.wait_for(self._receive(path, body), seconds)
        try:
            response, content = run_in_loop(receiving)
        except asyncio.TimeoutError:
            raise NoAnswer(f"no whole answer within {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(f"{type(error).__name__}: {self._shown(first_line(error))}") from None
        if response.is_success:
            return response, content
        raise self._refusal(path, response, content.decode("utf-8", "replace"))

    def _refusal(self, path: str, response: httpx.Response, text: str) -> PassingError | UserError:
        """Return the failure that an answer is which is no success."""
        if response.status_code in PASSING:
            return _asked_later(response, self._shown(text))
        if response.has_redirect_location:
            location = self._shown(response.headers["Location"])
            return UserError(f"{self.name}{path} redirects to {location}, which is not followed: give the final URL")
        return UserError(f"{self.name}{path} refuses: HTTP {response.status_code}: {self._shown(text)}")

    async def _receive(self, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response, bytes]:
        """Return head and content of what the server sends. Raises `UserError` where that is too large."""
        content = None if body is None else json.dumps(body).encode()
        received = bytearray()
        async with self._client.stream("GET" if body is None else "POST", path, content=content) as response:
            async for part in response.aiter_raw():  # never unpacked, which no request allows: a kilobyte may be a bomb
                received += part
                self._check_size(path, len(received))
            return response, bytes(received)

    def _check_size(self, path: str, num_bytes: int) -> None:
        if num_bytes > self.largest:
            raise UserError(f"{self.name}{path} answers with more than {self.largest:,} bytes; {self.mend}")

    def _shown(self, text: str) -> str:
        """Return the beginning of what a server said, in one line and without the key."""
        hidden = text.replace(self._key, f"[{API_KEY}]") if self._key else text
        return " ".join(hidden.split())[:SHOWN]


def wait_after(error: PassingError, num_failures: int) -> float:
    """Return the seconds to wait after a failure that so many others came before."""
    return max(error.wait, min(LONGEST_WAIT, FIRST_WAIT * 2**num_failures) * random.uniform(0.5, 1))


def run_in_loop(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that runs in the loop of all requests; an interrupt cancels it."""
    future = asyncio.run_coroutine_threadsafe(work, _event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, in a thread of its own, in which all requests are sent: there alone do they have a deadline."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _asked_later(response: httpx.Response, said: str) -> PassingError:
    """Return the failure of a server that asks for another attempt, after the wait that it asks for."""
    after = response.headers.get("Retry-After", "")
    asked = float(after) if after.isascii() and after.isdigit() else 0.0
    reason = f"HTTP {response.status_code}" + (f": {said}" if said else "")
    if asked <= LONGEST_ASKED_WAIT:
        return PassingError(reason, asked)
    kept = f"asks to wait {asked:g} s, of which {LONGEST_ASKED_WAIT:g} are waited"
    return PassingError(f"{reason}, and it {kept}", LONGEST_ASKED_WAIT)


def named_urls(values: Iterable[str], setting: str) -> dict[str, str]:
    """Return the addresses of several servers, each given as NAME=URL, by their names.

    Raises `UserError` for one without a name or with that of another, and for what is no address.
    """
    urls: dict[str, str] = {}
    for value in values:
        name, _, url = value.partition("=")
        if not (name.replace("_", "").replace("-", "").isalnum() and url) or name in urls:
            raise UserError(f"{setting} {value[:SHOWN]!r}: give NAME=URL, each with a name of its own")
        urls[name] = checked_url(url, f"{setting} {name}")
    return urls


def checked_url(url: str, setting: str) -> str:
    """Return the address of a server, without what its pages add to it. Raises `UserError` for what is no address."""
    if "@" in url:
        raise UserError(f"{setting}: the URL holds a name or password, which files would keep: give a key in {API_KEY}")
    try:
        parsed = httpx.URL(url)
        host = parsed.host
    except (httpx.InvalidURL, ValueError) as error:
        raise UserError(f"{setting} {url[:SHOWN]} is no URL ({first_line(error)[:SHOWN]}): {FORM}") from None
    if parsed.scheme not in ("http", "https") or not host or any(map(str.isspace, url)):
        raise UserError(f"{setting} {url[:SHOWN]!r} is no URL: {FORM}")
    if parsed.port is not None and not 1 <= parsed.port < 1 << 16:
        raise UserError(f"{setting} {url}: there is no port {parsed.port}: {FORM}")
    if parsed.query or parsed.fragment:
        raise UserError(f"{setting}: the URL goes on after its path: {FORM}")
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
