"""Started in the place of vLLM's interpreter: a server that answers nothing but what it was started with.

python fake_vllm.py -m vllm.entrypoints.openai.api_server --model M --port P [--speculative-config JSON] ...
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


CONFIG = json.loads(option("--speculative-config", "{}"))
PAGES = {"/v1/models": {"data": [{"id": option("--model", "")}]}, "/health": {}, "/config": CONFIG}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        text = json.dumps(PAGES[self.path]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    if "--fails" in sys.argv:
        print("ERROR 11-23 10:00:00 [core.py:1] Engine failed")
        print("torch.OutOfMemoryError: CUDA out of memory")
        sys.exit(1)
    ThreadingHTTPServer(("127.0.0.1", int(option("--port", "0"))), Handler).serve_forever(0.01)
