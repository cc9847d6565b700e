"""Gives the files of hidden states that a vLLM on this machine writes to trainers on other machines, over HTTP.

    python -m draftsmith.data.features.file_service FOLDER [--host ADDRESS] [--port 8001] [--keep SECONDS]

A POST to /NAME waits until vLLM has written the file NAME of the folder, answers with it and its SHA-256, and removes
it when all of it is sent. Only files are given and removed that vLLM wrote, beside which it leaves a file to lock.
Those that nobody asked for in time, because their trainer died, are removed, too. Where the environment has
OPENAI_API_KEY, that key is asked for.

Only the standard library is imported, so that this file alone may be copied to the machine of the server.
"""

import argparse
import base64
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import stat
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, BinaryIO

NAME = re.compile(r"\w[\w.-]{0,199}\.safetensors", re.ASCII)
API_KEY = "OPENAI_API_KEY"
WAIT = 60.0  # seconds that a file may take to be written
STALLED = 60.0  # seconds in which a trainer takes nothing, after which the connection ends
LARGEST_BODY = 1 << 10  # bytes of a request, which are read and mean nothing
PIECE = 1 << 20


def lock_of(path: Path) -> Path:
    """Return the file that vLLM locks while it writes another."""
    return Path(f"{path}.lock")


def wait_until_written(path: Path, seconds: float) -> None:
    """Return when vLLM has unlocked a file.

    Raises `TimeoutError` where it does not in time, and other `OSError` where there is no such file with its lock.
    """
    end = time.monotonic() + seconds
    check_regular(lock_of(path))
    with open(lock_of(path)) as file:
        while not is_free(file):
            if time.monotonic() > end:
                raise TimeoutError(f"{path} is still being written after {seconds:g} s")
            time.sleep(0.005)
    check_regular(path)


def check_regular(path: Path) -> None:
    """Refuse a path where it is a link, a folder or a pipe, which may lead anywhere."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is no regular file")


def is_free(lock: IO[str]) -> bool:
    """Return whether vLLM holds a lock no more."""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file with its lock."""
    for taken in (path, lock_of(path)):
        taken.unlink(missing_ok=True)


class FileService(ThreadingHTTPServer):
    """The service of a folder; each file is given once."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, host: str, port: int, keep: float) -> None:
        super().__init__((host, port), _Request)
        self.folder, self.keep, self.key = folder, keep, os.environ.get(API_KEY, "")
        self._cleaned_at = 0.0

    def service_actions(self) -> None:
        """Remove from time to time what nobody asked for. The server calls it twice a second."""
        if time.monotonic() - self._cleaned_at < min(60.0, self.keep):
            return
        self._cleaned_at = time.monotonic()
        for lock in self.folder.glob("*.safetensors.lock"):
            with contextlib.suppress(OSError), open(lock) as file:
                if time.time() - lock.stat().st_mtime > self.keep and is_free(file):
                    remove(lock.with_suffix(""))


class _Request(BaseHTTPRequestHandler):
    server: FileService
    timeout = STALLED

    def log_message(self, *_: object) -> None:
        """Print nothing: a line for each file would be all."""

    def do_POST(self) -> None:
        """Give a file, or say in a line why not."""
        length, given = self.headers.get("Content-Length", "0"), self.headers.get("Authorization", "")
        if not (length.isdecimal() and int(length) <= LARGEST_BODY):
            return self.say(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "send nothing")
        self.rfile.read(int(length))  # or the connection ends before the answer is read
        if self.server.key and not hmac.compare_digest(given.encode(), f"Bearer {self.server.key}".encode()):
            return self.say(HTTPStatus.UNAUTHORIZED, f"set {API_KEY} to the key that this service has")
        if not NAME.fullmatch(self.path[1:]):
            return self.say(HTTPStatus.NOT_FOUND, "give /NAME of a file that vLLM wrote")
        path = self.server.folder / self.path[1:]
        try:
            wait_until_written(path, WAIT)
            file = open(path, "rb")  # noqa: SIM115 (closed below)
        except FileNotFoundError:
            text = f"{path} is not there: is its folder the server's shared_storage_path?"
            return self.say(HTTPStatus.SERVICE_UNAVAILABLE, text)
        except OSError as error:
            return self.say(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        with file, contextlib.suppress(OSError):  # of a trainer that went away: the file stays until its time is over
            self.send(file)
            remove(path)

    def send(self, file: BinaryIO) -> None:
        """Send a file with its length and its hash."""
        digest, size = hashlib.sha256(), os.fstat(file.fileno()).st_size
        while piece := file.read(PIECE):
            digest.update(piece)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(size))
        self.send_header("Repr-Digest", f"sha-256=:{base64.b64encode(digest.digest()).decode()}:")  # RFC 9530
        self.end_headers()
        file.seek(0)
        self.connection.sendfile(file)

    def say(self, status: HTTPStatus, text: str) -> None:
        """Answer with a line of text."""
        content = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser(description="Give the hidden states that a vLLM writes here to other machines.")
    parser.add_argument("folder", type=Path, help="shared_storage_path of the vLLM")
    parser.add_argument("--host", default="127.0.0.1", help="address of this machine that trainers reach (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8001, help="(8001)")
    parser.add_argument("--keep", type=float, default=600.0, help="seconds before what nobody asked for goes (600)")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    with FileService(args.folder, args.host, args.port, args.keep) as service:
        print(f"{args.folder} is given at http://{args.host}:{service.server_port}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            service.serve_forever()


if __name__ == "__main__":
    main()
