"""An engine that a command starts: a process that hands all requests on to a server in the process of the test.

python forwarding_engine.py PORT URL      DRAFTER in the environment is the drafter that the server takes first
"""

import json
import os
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def answer_of(path: str, body: bytes | None) -> bytes:
    with urllib.request.urlopen(sys.argv[2] + path, body) as answer:
        return bytes(answer.read())


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(answer_of(self.path, None))

    def do_POST(self) -> None:
        self.reply(answer_of(self.path, self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


answer_of("/collective_rpc", json.dumps({"method": "swap_drafter", "args": [os.environ["DRAFTER"]]}).encode())
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
