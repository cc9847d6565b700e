"""Requests to a server: the key reaches the one that the user named, and every failure is one line."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

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
    return Server(server.url, f"--endpoint {server.url}", "start one", 5.0)


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


def test_what_no_client_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a bad URL nor a bad proxy in the environment ends in a traceback."""
    with pytest.raises(UserError, match="cannot be asked"):
        Server("http://[::1", "--endpoint http://[::1", "start one", 5.0)
    monkeypatch.setenv("ALL_PROXY", "gopher://localhost:70")
    with pytest.raises(UserError, match="cannot be asked"):
        Server("http://localhost", "--endpoint http://localhost", "start one", 5.0)
