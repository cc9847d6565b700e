"""A server that sends any bytes, however wrong, to whoever connects."""

import socketserver
import threading
from collections.abc import Callable, Iterable


class RawServer:
    """Reads the head of each request, sends the parts one by one, and hangs up; each connection is counted."""

    def __init__(self, parts: Callable[[], Iterable[bytes]]) -> None:
        self.num_asked = 0
        raw = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                raw.num_asked += 1
                try:
                    while self.rfile.readline(1 << 16).strip():
                        pass
                    for part in parts():
                        self.wfile.write(part)
                except OSError:  # the client hung up, as it should
                    pass

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
