"""Requests to a server: the key reaches the one that the user named, and every failure is one line."""

import asyncio
import gzip
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from raw_server import RawServer

from draftsmith.data import http
from draftsmith.data.http import API_KEY, Server
from draftsmith.models.errors import UserError

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body


class RecordingServer:
    """A server that gives one reply to everything, and keeps path and Authorization header of what it is asked."""

    def __init__(self, reply: Reply) -> None:
        self.asked: list[tuple[str, str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.asked.append((self.path, self.headers["Authorization"]))
                status, headers, body = reply
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., RecordingServer]]:
    servers = []

    def make(status: int = 200, headers: dict[str, str] | None = None, body: bytes = b"{}") -> RecordingServer:
        servers.append(RecordingServer((status, headers or {}, body)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def connect(server: RecordingServer) -> Server:
    return Server(server.url, "--endpoint", "start one", 5.0)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_is_not_sent_where_a_server_redirects(
    status: int, make_server: Callable[..., RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and a key are for the server that the user named: no other port or host sees even a request."""
    monkeypatch.setenv(API_KEY, "secret")
    other = make_server()
    named = make_server(status, {"Location": f"{other.url}/v1/completions"})
    with pytest.raises(UserError, match=f"redirects to {other.url}/v1/completions, which is not followed"):
        connect(named).json("/v1/models")
    with pytest.raises(UserError, match="is not followed"):
        connect(named).ask("/v1/completions", {"prompt": [1]}, lambda answer: answer)
    assert named.asked == [("/v1/models", "Bearer secret"), ("/v1/completions", "Bearer secret")]
    assert not other.asked


def test_without_a_key_none_is_sent(
    make_server: Callable[..., RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    server = make_server()
    assert connect(server).json("/v1/models") == {}
    assert server.asked == [("/v1/models", None)]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>", "no model server answers there .an answer that is no JSON: <html>.; start one"),
        (503, b"", "no model server answers there .HTTP 503.; start one"),
        (500, b"out of\nmemory, key", "no model server answers there .HTTP 500: out of memory, key.; start one"),
        (401, b"no\nkey", "/v1/models refuses: HTTP 401: no key"),
    ],
)
def test_a_failure_is_one_line(
    status: int, body: bytes, message: str, make_server: Callable[..., RecordingServer]
) -> None:
    server = make_server(status, body=body)
    with pytest.raises(UserError, match=message):
        connect(server).json("/v1/models")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "http://", "http://:8000", "http:/h", "ftp://h", "http://local host:8", "http://h/\n"),
        *("http://h:0", "http://h:70000", "http://h:-1", "http://h:abc", f"http://h:{'9' * 5000}", "http://::1:8000"),
        *("http://[::1", "http://999.1.1.1", "http://xn--a", "http://\ud800", "http://h?key=1", "http://h#f"),
        f"http://{'a' * 70000}",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UserError, match="give http://HOST:PORT") as refused:
        Server(url, "--endpoint", "start one", 5.0)
    assert len(str(refused.value)) < 1000


def test_a_password_in_an_address_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the password of the server, nor that of a proxy, nor a key that cannot be sent."""
    messages = []
    for url in ("http://me:secret@localhost:8000", "http://me:sec/ret@localhost:x"):
        with pytest.raises(UserError) as refused:
            Server(url, "--endpoint", "start one", 5.0)
        messages.append(str(refused.value))
    wrong = {"ALL_PROXY": "gopher://me:secret@localhost:70", "HTTP_PROXY": "http://me:sec/ret@x:y", API_KEY: "secret\n"}
    for name, value in {**wrong, "NO_PROXY": "http://me:sec@[::1", "SSLKEYLOGFILE": "/nowhere/secret"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(UserError, match=name) as refused:
                Server("http://localhost", "--endpoint", "start one", 5.0)
        messages.append(str(refused.value))
    assert not [message for message in messages if "sec" in message]


def test_a_key_that_a_server_repeats_is_not_shown(
    make_server: Callable[..., RecordingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "secret")
    with pytest.raises(UserError, match=rf"wrong key \[{API_KEY}\]"):
        connect(make_server(401, body=b"wrong key secret")).json("/v1/models")


HEAD = b"HTTP/1.1 200 OK\r\n"
BOMB = gzip.compress(bytes(1 << 26))


def dripping(part: bytes) -> Iterator[bytes]:
    while True:
        time.sleep(0.02)
        yield part


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda: [HEAD, b"\r\n", *itertools.repeat(b" " * 65536, 1000)], "answers with more than"),
        (lambda: [HEAD, b"Content-Length: 4000000000\r\n\r\n", *itertools.repeat(b"[" * 65536, 1000)], "more than"),
        (lambda: [HEAD, b"Content-Encoding: gzip\r\n\r\n", BOMB], "no JSON"),
        (lambda: [HEAD, *itertools.repeat(b"X: " + b"x" * 1000 + b"\r\n", 10_000)], "RemoteProtocolError"),
        (lambda: itertools.chain([HEAD, b"\r\n"], dripping(b" ")), "no whole answer within 0.3 s"),
        (lambda: itertools.chain([HEAD], dripping(b"x")), "no whole answer within 0.3 s"),
        (lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"), "no whole answer within 0.3 s"),
        (lambda: dripping(b""), "no whole answer within 0.3 s"),
        (lambda: [], "RemoteProtocolError"),
        (lambda: [b"\x00\xff" * 100], "RemoteProtocolError"),
        (lambda: [b"HTTP/9.9 abc\r\n\r\n"], "RemoteProtocolError"),
        (lambda: [HEAD, b"Content-Length: -5\r\n\r\n"], "RemoteProtocolError"),
        (lambda: [HEAD, b"Content-Length: 50\r\n\r\n{}"], "RemoteProtocolError"),
        (lambda: [HEAD, b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"], "RemoteProtocolError"),
        (lambda: [b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n"], "RemoteProtocolError|redirects to"),
        (lambda: [HEAD, b"Content-Type: text/html; charset=zlib\r\n\r\n\xff"], "no JSON"),
        (lambda: [HEAD, b"\r\n", b"[" * 100_000], "no JSON"),
        (lambda: [HEAD, b"\r\n", b"9" * 5000], "no JSON"),
        (lambda: [HEAD, b"\r\n", b"NaN"], "no JSON"),
    ],
)
def test_an_answer_without_end_or_sense_is_one_line(
    parts: Callable[[], Iterable[bytes]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size and time of whatever a server sends are bounded, by the whole and not by the part."""
    seconds = 0.3 if "within" in message else 10
    monkeypatch.setattr(http, "PAGE_TIMEOUT", seconds)
    server = RawServer(parts)
    start = time.perf_counter()
    with pytest.raises(UserError, match=message) as refused:
        Server(server.url, "--endpoint", "start one", seconds).json("/v1/models")
    assert time.perf_counter() - start < 9
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    server.close()


def test_answers_that_take_too_long_are_not_waited_for_at_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that drips without an end costs twice the time-out, and not eight times."""
    server = RawServer(lambda: itertools.chain([HEAD, b"\r\n"], dripping(b" ")))
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    with pytest.raises(UserError, match="failed 2 times in a row, at last with: no whole answer within (1|0)"):
        Server(server.url, "--endpoint", "start one", 1.0).ask("/v1/completions", {}, lambda answer: answer)
    assert server.num_asked == 2
    server.close()


def test_tls_where_none_is_spoken(make_server: Callable[..., RecordingServer]) -> None:
    url = make_server().url.replace("http://", "https://")
    with pytest.raises(UserError, match="no model server answers there .ConnectError"):
        Server(url, "--endpoint", "start one", 5.0).json("/v1/models")


def test_a_server_that_never_shakes_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS, too, is within the deadline."""
    monkeypatch.setattr(http, "PAGE_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match="no whole answer within 0.3 s"):
            Server(url, "--endpoint", "start one", 5.0).json("/v1/models")


@pytest.mark.parametrize(
    ("asked", "waited"),
    [("3", 3), ("86400", 120), ("9" * 400, 120), ("-5", 0), ("nan", 0), ("²", 0), ("Wed, 21 Oct 2099", 0)],
)
def test_a_wait_that_a_server_asks_for_is_kept_within_bounds(
    asked: str,
    waited: float,
    make_server: Callable[..., RecordingServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    server = connect(make_server(429, {"Retry-After": asked.encode().decode("latin-1")}))
    waits: list[float] = []
    monkeypatch.setattr(server.stopped, "wait", lambda seconds: waits.append(seconds))
    with pytest.raises(UserError, match="HTTP 429" + (".* of which 120 are waited" if waited == 120 else "")):
        server.ask("/v1/completions", {}, lambda answer: answer)
    assert waits == [waited] * (http.ATTEMPTS - 1)
    assert capsys.readouterr().err.count("is asked again") == 1


def test_reasons_that_differ_each_time_are_told_a_few_times(
    make_server: Callable[..., RecordingServer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the file of each answer, of which a run has a million."""
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    server, numbers = connect(make_server()), itertools.count()

    def unread(answer: object) -> None:
        raise http.PassingError(f"{next(numbers)}.safetensors is damaged")

    with pytest.raises(UserError, match=f"at last with: {http.ATTEMPTS - 1}.safetensors"):
        server.ask("/v1/completions", {}, unread)
    assert capsys.readouterr().err.count("is asked again") == http.TOLD_REASONS


def test_a_server_may_be_asked_where_a_loop_runs(make_server: Callable[..., RecordingServer]) -> None:
    """In a notebook one always does."""

    async def ask() -> object:
        return connect(make_server()).json("/v1/models")

    assert asyncio.run(ask()) == {}
