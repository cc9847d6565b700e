"""A server in a thread that answers as no server should."""

import contextlib
import gzip
import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

from damage import damaged_bytes, damaged_json, hostile_text, hostile_value, json_text
from judge import Place

from draftsmith.data import http
from draftsmith.data.answers import endpoint

MODELS = {"data": [{"id": "served", "max_model_len": 100}]}
ANSWER = {"choices": [{"text": "", "finish_reason": "length", "token_ids": [5, 6, 7, 8], "prompt_token_ids": [0, 1]}]}
BLOCK = b"x" * (1 << 20)
Send = Callable[[bytes], None]


class HostileServer:
    """One for a process. `behave` chooses what all requests are answered with until it is called again."""

    _shared: "HostileServer | None" = None

    @classmethod
    def shared(cls) -> "HostileServer":
        cls._shared = cls._shared or cls()
        return cls._shared

    def __init__(self) -> None:
        self.leaked = False
        self.answer: Callable[[str, Send], None] = lambda path, send: None
        self.url, self.other_url = self._start(self._behaved), self._start(self._listened)

    def _start(self, reply: Callable[[bytes, Send], None]) -> str:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    self.request.settimeout(5)
                    reply(self.request.recv(65536), self.request.sendall)

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    def _behaved(self, request: bytes, send: Send) -> None:
        words = request.split(b" ")
        self.answer(words[1].decode("latin-1") if len(words) > 1 else "/", send)

    def _listened(self, request: bytes, send: Send) -> None:
        self.leaked = self.leaked or b"authorization" in request.lower()
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    def behave(self, random: Random, place: Place) -> str:
        """Choose an answer; returns what it is, for people."""
        metrics = (place.material / "metrics.txt").read_text()
        damaged = damaged_metrics(random, metrics)
        answers = {"/v1/models": MODELS, "/v1/completions": ANSWER}

        def body_of(path: str) -> bytes:
            return metrics.encode() if path.startswith("/metrics") else json_text(answers.get(path, ANSWER)).encode()

        def wrong_body(path: str) -> bytes:
            if path.startswith("/metrics"):
                return damaged
            if kept_models and path == "/v1/models":
                return body_of(path)
            return wrong_answer

        kept_models = random.random() < 0.7
        wrong_answer = (
            json_text(damaged_json(random, ANSWER)).encode("utf-8", "surrogatepass")
            if random.random() < 0.7
            else damaged_bytes(random, json_text(hostile_value(random)).encode("utf-8", "surrogatepass"))
        )
        name = random.choice(list(BEHAVIOURS)) if random.random() < 0.6 else "wrong body"
        status, text = (
            random.choice((200, 204, 301, 400, 401, 404, 418, 429, 500, 503, 999, 0, -1)),
            hostile_text(random),
        )
        self.leaked = False

        def answer(path: str, send: Send) -> None:
            if name == "wrong body":
                send(head(200, len(wrong_body(path))) + wrong_body(path))
            else:
                BEHAVIOURS[name](send, body_of(path), status, text, self.other_url)

        self.answer = answer
        return f"{name} {status} {text[:20]!r} {wrong_answer[:200]!r}"


WAITS = ((http, "FIRST_WAIT", 0.001), (http, "LONGEST_WAIT", 0.001), (http, "LONGEST_ASKED_WAIT", 0.001))
PATIENCE = (*WAITS, (http, "PAGE_TIMEOUT", 0.5), (endpoint, "TIMEOUT", 0.5))


@contextlib.contextmanager
def quick_client(patience: tuple[tuple[Any, str, float], ...] = PATIENCE) -> Iterator[None]:
    """Give the client a key to leak, and little patience."""
    os.environ[http.API_KEY] = "secret"
    with contextlib.ExitStack() as stack:
        for module, name, seconds in patience:
            stack.enter_context(mock.patch.object(module, name, seconds))
        yield


def damaged_metrics(random: Random, text: str) -> bytes:
    old = random.choice(("1000.0", "600.0", '"0"', '"1"', 'position="1"'))
    new = random.choice(("NaN", "1e400", "-5", '"200000000"', '"-1"', '"x"', "9" * 5000, hostile_text(random)))
    content = text.replace(old, new).encode("utf-8", "surrogatepass")
    return damaged_bytes(random, content) if random.random() < 0.3 else content


def head(status: int, length: Any, *lines: str) -> bytes:
    told = "".join(f"{line}\r\n" for line in lines)
    return f"HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {length}\r\n{told}\r\n".encode(
        "utf-8", "replace"
    )


def endless(send: Send) -> None:
    send(head(200, 1 << 40))
    while True:
        send(BLOCK)


def drip(send: Send, start: bytes) -> None:
    send(start)
    while True:
        send(b"x")
        time.sleep(0.05)


def told_gzip(send: Send, content: bytes) -> None:
    send(head(200, len(content), "Content-Encoding: gzip") + content)


BEHAVIOURS: dict[str, Callable[[Send, bytes, int, str, str], None]] = {
    "status": lambda send, body, status, text, other: send(head(status, len(body)) + body),
    "status and text": lambda send, body, status, text, other: send(
        head(status, len(text.encode("utf-8", "replace"))) + text.encode("utf-8", "replace")
    ),
    "redirect": lambda send, body, status, text, other: send(head(302, 0, f"Location: {other}/v1/models")),
    "redirect to text": lambda send, body, status, text, other: send(head(307, 0, f"Location: {text}")),
    "retry after": lambda send, body, status, text, other: send(head(429, 0, f"Retry-After: {10**6 * abs(status)}")),
    "retry after text": lambda send, body, status, text, other: send(head(503, 0, "Retry-After: ²")),
    "breaks off": lambda send, body, status, text, other: send(head(200, len(body) + 100) + body),
    "silent": lambda send, body, status, text, other: None,
    "no HTTP": lambda send, body, status, text, other: send(text.encode("utf-8", "replace") + b"\r\n\r\n"),
    "endless body": lambda send, body, status, text, other: endless(send),
    "endless head": lambda send, body, status, text, other: send(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200_000),
    "long header": lambda send, body, status, text, other: send(head(200, 0, "A: " + "b" * (1 << 22))),
    "wrong length": lambda send, body, status, text, other: send(head(200, "-5") + body),
    "no length": lambda send, body, status, text, other: send(head(200, text.strip() or "x") + body),
    "bad chunks": lambda send, body, status, text, other: send(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n" + body
    ),
    "bomb": lambda send, body, status, text, other: told_gzip(send, gzip.compress(bytes(64 << 20))),
    "no gzip": lambda send, body, status, text, other: told_gzip(send, body),
    "many 100s": lambda send, body, status, text, other: send(b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000),
    "dripping body": lambda send, body, status, text, other: drip(send, head(200, 10**6)),
    "dripping head": lambda send, body, status, text, other: drip(send, b"HTTP/1.1 200 OK\r\nA: "),
    "deep": lambda send, body, status, text, other: send(head(200, 200_000) + b"[" * 200_000),
    "long": lambda send, body, status, text, other: send(
        head(200, len(many := json.dumps({"data": [MODELS["data"][0]] * 10_000}).encode())) + many
    ),
}
