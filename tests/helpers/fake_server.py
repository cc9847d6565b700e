"""A server of answers that runs in the process of the test."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter


class FakeServer:
    """vLLM or SGLang as far as draftsmith talks to it, with the tiny target inside and `trouble` on request."""

    def __init__(self, target: Target, form: str) -> None:
        self.target, self.form = target, form
        self.decoder = SpeculativeDecoder(target, load_drafter("none", target))
        self.trouble: Callable[[int, dict], dict | int | None] = lambda number, answer: None
        self.models: list[dict] = [{"id": "served", "max_model_len": 100, "owned_by": form}]
        self.asked: list[dict] = []  # bodies of requests for whole answers
        self.most_at_a_time = self._running = 0
        self.pause = 0.01  # seconds of each answer, in which others may come
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, fake.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(*fake.post(self.path, body))

            def reply(self, status: int, answer: dict | str) -> None:
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def get(self, path: str) -> dict | str:
        return {"data": self.models}

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if path not in ("/v1/completions", "/generate") or (path == "/generate" and self.form != "sglang"):
            return 404, {}
        sampling = body.get("sampling_params", body)
        prompt = body.get("prompt", body.get("input_ids", body.get("text")))
        if isinstance(prompt, str):
            return 200, self.answer(path, self.target.encode(prompt), [1], "length")
        with self._lock:
            self.asked.append(body)
            number = len(self.asked)
            self._running += 1
            self.most_at_a_time = max(self.most_at_a_time, self._running)
        time.sleep(self.pause)
        with self._lock:
            self._running -= 1
            limit = sampling.get("max_tokens", sampling.get("max_new_tokens"))
            output = self.decoder.generate([prompt], limit)
            (new_ids,) = output.token_ids
        answer = self.answer(path, prompt, new_ids, "stop" if new_ids[-1] in self.target.eos_token_ids else "length")
        if path == "/generate":
            answer["meta_info"] |= self.drafted(output)
        changed = self.trouble(number, answer)
        return (changed, {"error": "trouble"}) if isinstance(changed, int) else (200, changed or answer)

    def drafted(self, output: Any) -> dict:
        """Return what an SGLang tells of its drafts, of which this one has none."""
        return {}

    def answer(self, path: str, prompt: list[int], new_ids: list[int], reason: str) -> dict:
        if path == "/generate":
            matched = {"matched": new_ids[-1]} if reason == "stop" else {}
            told = new_ids[:-1] if reason == "stop" else new_ids  # some versions leave the end of text out
            info = {
                "finish_reason": {"type": reason, **matched},
                "input_token_logprobs": [[0.0, t, None] for t in prompt],
            }
            return {"text": "", "output_ids": told, "meta_info": info}
        choice: dict[str, Any] = {"text": "", "finish_reason": reason}
        if self.form == "vllm":
            choice |= {"token_ids": new_ids, "prompt_token_ids": prompt}
        return {"choices": [choice]}
