"""Hidden states that come from another machine: each file once, whole, and from no address but those that are given."""

import fcntl
import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from states_server import HiddenStatesServer
from streamed_runs import config_of, losses, two_servers, write_settings

from draftsmith.data import http as requests
from draftsmith.data.features import file_service
from draftsmith.data.features.file_service import FileService
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.train import train


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(requests, "LONGEST_WAIT", 0.05)


@pytest.fixture
def services() -> Iterator[Callable[[Path], FileService]]:
    """Call it for a service of a folder."""
    started: list[FileService] = []

    def start(folder: Path, keep: float = 600.0) -> FileService:
        service = FileService(folder, "127.0.0.1", 0, keep)
        threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        started.append(service)
        return service

    yield start
    for service in started:
        service.shutdown()
        service.server_close()


def url_of(service: FileService) -> str:
    return f"http://127.0.0.1:{service.server_port}"


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    file_service.lock_of(path).touch()
    return path


def ask(service: FileService, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.server_port, timeout=10)
    connection.request("POST", path, b"{}", headers or {})
    response = connection.getresponse()
    return response.status, response.read()


# --- a run


@pytest.fixture(scope="module")
def target(make_target_dir: Callable[..., Path]) -> Target:
    return Target.from_pretrained(make_target_dir(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def settings(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_settings(target, tmp_path_factory.mktemp("data"))


@pytest.fixture
def servers(target: Target, tmp_path: Path) -> Iterator[list[HiddenStatesServer]]:
    """Two servers, whose folders nobody here sees under the names that they have on their machines."""

    def elsewhere(answer: dict) -> dict:
        name = Path(answer["kv_transfer_params"]["hidden_states_path"]).name
        return {**answer, "kv_transfer_params": {"hidden_states_path": f"/of/another/machine/{name}"}}

    with two_servers(target, tmp_path) as servers:
        for server in servers:
            server.change = elsewhere
        yield servers


def test_a_run_through_services_is_that_of_the_target_beside_the_drafter(
    settings: dict[str, Any],
    servers: list[HiddenStatesServer],
    services: Callable[[Path], FileService],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where answers are cut or altered on the way, which length and hash show: such a text is asked for again."""
    expected = losses(train(config_of(settings, tmp_path / "own")))
    send, numbers = file_service._Request.send, iter(range(10**6))

    class Altered:
        """A connection that passes on half of a file, or a file with one other bit."""

        def __init__(self, connection: Any, number: int) -> None:
            self.connection, self.number = connection, number

        def sendfile(self, file: BinaryIO) -> None:
            content = bytearray(file.read())
            content[-1] ^= 1
            self.connection.sendall(content[: len(content) // 2] if self.number % 2 else content)

    def altering(request: Any, file: BinaryIO) -> None:
        if (number := next(numbers)) in (3, 20, 41, 44):
            request.connection = Altered(request.connection, number)
        send(request, file)

    monkeypatch.setattr(file_service._Request, "send", altering)
    files = [url_of(services(server.folder)) for server in servers]
    config = config_of(
        settings, tmp_path / "run", *(server.url for server in servers), **{"data.features_files": files}
    )
    assert losses(train(config)) == pytest.approx(expected, rel=1e-5)
    assert next(numbers) > 44
    assert all(server.asked and not list(server.folder.iterdir()) for server in servers)


def test_a_folder_that_is_not_the_servers_ends_the_run(
    settings: dict[str, Any],
    servers: list[HiddenStatesServer],
    services: Callable[[Path], FileService],
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    changes = {"data.features_files": [url_of(services(tmp_path / "other"))]}
    with pytest.raises(UserError, match=r"HTTP 503: .* is not there: is its folder the server's shared_storage_path\?"):
        train(config_of(settings, tmp_path / "run", servers[0].url, **changes))
    with pytest.raises(UserError, match="data.features_files: 1 for 2 servers"):
        train(config_of(settings, tmp_path / "run", servers[0].url, servers[1].url, **changes))


@pytest.mark.parametrize(
    "path", ["/x/..", "http://127.0.0.1:1/a%2fb.safetensors", "/x/.a.safetensors", "/x/a?b.safetensors"]
)
def test_a_server_cannot_send_us_elsewhere(
    path: str,
    settings: dict[str, Any],
    servers: list[HiddenStatesServer],
    services: Callable[[Path], FileService],
    tmp_path: Path,
) -> None:
    """Of what it names, only a plain name of a file is asked for, and of nobody but the service that the user gave."""
    servers[0].change = lambda answer: {**answer, "kv_transfer_params": {"hidden_states_path": path}}
    changes = {"data.features_files": url_of(services(servers[0].folder))}
    with pytest.raises(UserError, match="is no name of such a file"):
        train(config_of(settings, tmp_path / "run", servers[0].url, **changes))


# --- the service alone


def test_a_file_is_given_once_and_when_it_is_written(services: Callable[[Path], FileService], tmp_path: Path) -> None:
    service = services(tmp_path)
    path = write(tmp_path, "1.safetensors", b"half")
    with open(file_service.lock_of(path), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answers: list[tuple[int, bytes]] = []
        asking = threading.Thread(target=lambda: answers.append(ask(service, "/1.safetensors")))
        asking.start()
        time.sleep(0.1)
        assert not answers
        path.write_bytes(b"whole")
    asking.join()
    assert answers == [(200, b"whole")]
    while list(tmp_path.iterdir()):  # it is removed behind the last byte
        time.sleep(0.01)
    assert ask(service, "/1.safetensors")[0] == 503


def test_files_that_vllm_did_not_write_stay(services: Callable[[Path], FileService], tmp_path: Path) -> None:
    """They have no lock beside them, or are links out of the folder; and no path leads out of it."""
    folder = tmp_path / "states"
    folder.mkdir()
    write(tmp_path, "weights.safetensors", b"weights")
    (folder / "model.safetensors").write_bytes(b"model")
    (folder / "link.safetensors").symlink_to(tmp_path / "weights.safetensors")
    file_service.lock_of(folder / "link.safetensors").touch()
    service = services(folder)
    for path in ("/model.safetensors", "/link.safetensors"):
        assert ask(service, path)[0] == 503
    for path in ("/../weights.safetensors", "/%2e%2e/weights.safetensors", "/config.json", "/"):
        assert ask(service, path)[0] == 404
    assert (folder / "model.safetensors").read_bytes() == b"model"
    assert (tmp_path / "weights.safetensors").read_bytes() == b"weights"


def test_what_nobody_asks_for_is_removed_in_time(services: Callable[[Path], FileService], tmp_path: Path) -> None:
    old, new = write(tmp_path, "old.safetensors", b"1"), write(tmp_path, "new.safetensors", b"2")
    other = tmp_path / "model.safetensors"  # without a lock: nothing that vLLM wrote
    other.touch()
    hour_ago = time.time() - 3600
    for path in (file_service.lock_of(old), other):
        os.utime(path, (hour_ago, hour_ago))
    services(tmp_path, keep=600.0)
    end = time.monotonic() + 10
    while file_service.lock_of(old).exists() and time.monotonic() < end:  # it goes last
        time.sleep(0.01)
    assert sorted(tmp_path.iterdir()) == [other, new, file_service.lock_of(new)]


def test_the_key_is_asked_for(
    services: Callable[[Path], FileService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(file_service.API_KEY, "secret")
    service = services(tmp_path)
    write(tmp_path, "1.safetensors", b"states")
    assert ask(service, "/1.safetensors")[0] == 401
    assert ask(service, "/1.safetensors", {"Authorization": "Bearer other"})[0] == 401
    assert requests.Server(url_of(service), "S", "mend").content("/1.safetensors", {}) == b"states"
