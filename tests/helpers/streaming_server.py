"""A server with OpenAI's interface that streams answers of known lengths, in the process of the test."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StreamingServer:
    """Answers each request with as many tokens as it asks for, two in each event, and counts what it was asked.

    `trouble` is the status of every answer, or the name of what is wrong with it: "cut", "error" or "no usage". With
    `speculates` it has vLLM's counters: each request drafts ten times three tokens, of which one is accepted.
    """

    def __init__(self, trouble: int | str = "", speculates: bool = False) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._running = 0
        lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.whole(200, json.dumps({"data": [{"id": "served"}]}))
                elif speculates:
                    self.whole(200, fake.metrics())
                else:
                    self.whole(404, "{}")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    fake.asked.append((self.path, body))
                    fake.keys.append(self.headers.get("Authorization"))
                    fake._running += 1
                    fake.most_at_once = max(fake.most_at_once, fake._running)
                try:
                    if isinstance(trouble, int):
                        self.whole(trouble, "{}")
                    else:
                        self.stream(body)
                finally:
                    with lock:
                        fake._running -= 1

            def whole(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for event in fake.events(body, trouble):
                    self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
                    self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def metrics(self) -> str:
        counts = {"drafts": 10, "draft_tokens": 30, "accepted_tokens": 10}
        lines = [f"vllm:spec_decode_num_{name}_total {number * len(self.asked)}" for name, number in counts.items()]
        return "\n".join(
            [*(line for name in counts for line in [f"# TYPE vllm:spec_decode_num_{name} counter"]), *lines]
        )

    @staticmethod
    def events(body: dict[str, Any], trouble: int | str) -> list[Any]:
        """Return the events of an answer."""
        is_chat = "messages" in body
        number = (body["max_tokens"] + 1) // 2
        parts: list[Any] = [
            {"choices": [{"delta": {"content": "ab"}} if is_chat else {"text": "ab", "finish_reason": None}]}
            for _ in range(number)
        ]
        if is_chat:
            parts.insert(0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if trouble == "error":
            return [*parts[:1], {"error": {"message": "out of blocks"}}]
        if trouble != "no usage":
            parts.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}})
        return parts[:1] if trouble == "cut" else [*parts, "[DONE]"]
