"""Features that servers compute while the drafter trains: the same run, whatever becomes of the servers on the way."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states_server import HiddenStatesServer
from streamed_runs import config_of, losses, two_servers, write_settings

from draftsmith.data import http
from draftsmith.data.features import streamed
from draftsmith.data.features.streamed import steps_ahead, zeros_in_own_memory
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.train import train


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(http, "LONGEST_WAIT", 0.05)


@pytest.fixture(scope="module")
def target(make_target_dir: Callable[..., Path]) -> Target:
    return Target.from_pretrained(make_target_dir(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def settings(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_settings(target, tmp_path_factory.mktemp("data"))


@pytest.fixture
def servers(target: Target, tmp_path: Path) -> Iterator[list[HiddenStatesServer]]:
    with two_servers(target, tmp_path) as servers:
        yield servers


def urls(servers: list[HiddenStatesServer]) -> list[str]:
    return [server.url for server in servers]


@pytest.mark.parametrize("packing", [False, True])
def test_a_streamed_run_is_that_of_the_target_beside_the_drafter(
    packing: bool, settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path
) -> None:
    """Packed rows hold several samples, each of which a server reads by itself; both servers do their part."""
    settings = {**settings, "data.packing": packing, "data.held_out_prompts": 2}
    expected = losses(train(config_of(settings, tmp_path / "own")))
    found = losses(train(config_of(settings, tmp_path / "streamed", *urls(servers))))
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(server.asked and not list(server.folder.iterdir()) for server in servers)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(train(config_of(settings, tmp_path / "whole", *urls(servers))))
    config = config_of(settings, tmp_path / "parts", *urls(servers))
    from draftsmith.train.loop import TrainingRun

    save = TrainingRun.save_and_measure
    monkeypatch.setattr(TrainingRun, "save_and_measure", lambda run, *args: save(run, *args) or "enough")
    train(config)
    monkeypatch.undo()
    assert losses(train(config)) == pytest.approx(whole, rel=1e-5)


def failing(server: HiddenStatesServer, is_down: Callable[[int], bool]) -> None:
    """Let a server answer nothing but errors to those texts, by their number, for which it is down."""
    post, numbers = server.post, itertools.count()
    server.post = lambda path, body: (503, {}) if is_down(next(numbers)) else post(path, body)  # type: ignore[method-assign]


def test_a_server_that_dies_and_comes_back_changes_nothing(
    settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path
) -> None:
    expected = losses(train(config_of(settings, tmp_path / "own")))
    failing(servers[0], lambda number: 20 <= number < 30)
    assert losses(train(config_of(settings, tmp_path / "run", *urls(servers)))) == pytest.approx(expected, rel=1e-5)


def test_a_killed_server_costs_no_sample(
    settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path
) -> None:
    """Its port is closed in the middle of the run, and the other server does its work."""
    expected = losses(train(config_of(settings, tmp_path / "own")))
    killed, other = servers
    write_states = killed.write_states

    def write_and_die(token_ids: list[int], seen_ids: list[int]) -> tuple[int, float, Path]:
        if len(killed.asked) == 22:
            killed._server.socket.close()
        return write_states(token_ids, seen_ids)

    killed.write_states = write_and_die  # type: ignore[method-assign]
    found = losses(train(config_of(settings, tmp_path / "run", killed.url, other.url)))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(killed.asked) < len(other.asked)


def test_a_server_that_comes_back_as_another_one_is_refused(
    settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was away, and gives the states of other layers since."""
    server, post = servers[0], servers[0].post
    numbers = itertools.count()

    def restarted(path: str, body: dict) -> tuple[int, dict]:
        if next(numbers) == 25:
            server.layer_ids = [2, 3, 4]
            time.sleep(0.5)
        return post(path, body)

    server.post = restarted  # type: ignore[method-assign]
    ask_once = http.Server.ask_once

    def impatient(self: http.Server, *args: Any) -> Any:
        self.timeout = 0.3
        return ask_once(self, *args)

    monkeypatch.setattr(http.Server, "ask_once", impatient)
    with pytest.raises(UserError, match="layer 1 is not what comes out of that layer"):
        train(config_of(settings, tmp_path / "run", server.url))


def test_servers_that_stay_away_end_the_run(
    settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path
) -> None:
    for server in servers:
        failing(server, lambda number: number >= 20)
    with pytest.raises(UserError, match="failed 16 times in a row, at last with: HTTP 503"):
        train(config_of(settings, tmp_path / "run", *urls(servers)))


def test_no_more_is_asked_for_than_the_steps_ahead(
    settings: dict[str, Any], servers: list[HiddenStatesServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that are faster than the drafter wait for it: two steps of four samples beside the step itself."""
    monkeypatch.setattr("draftsmith.train.inputs.features.steps_ahead", lambda num_bytes: 2)
    from draftsmith.train.loop import TrainingRun

    take_step, asked = TrainingRun.take_step, []

    def slow(run: TrainingRun, step: int, batches: Any) -> Any:
        wanted, end = 4 * min(len(asked) + 3, 6) + (asked[0] - 12 if asked else 0), time.monotonic() + 30
        while asked and len(servers[0].asked) < wanted and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3 if asked else 2.0)  # in which more would come
        asked.append(len(servers[0].asked))
        return take_step(run, step, batches)

    monkeypatch.setattr(TrainingRun, "take_step", slow)
    train(config_of(settings, tmp_path / "run", servers[0].url, steps=6))
    of_steps = [number - asked[0] for number in asked]
    assert of_steps == [0, 4, 8, 12, 12, 12]


def test_the_steps_ahead_fill_the_memory_that_they_may_take() -> None:
    assert steps_ahead(1e3) == streamed.MOST_STEPS_AHEAD
    assert steps_ahead(streamed.AHEAD_BYTES / 3) == 3
    assert steps_ahead(1e12) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.features": "streamed"}, "give data.features_endpoint=URL of a server"),
        ({"data.features_kept_gb": 1.0}, "data.features_kept_gb=1 is of streamed features"),
        ({"data.features_endpoint": "http://localhost:1"}, "streamed or stored: give data.features=streamed or"),
        (
            {"data.features": "streamed", "data.features_endpoint": "http://a", "data.features_dtype": "float32"},
            "data.features_dtype=float32 is of stored features",
        ),
        (
            {"data.features": "streamed", "data.features_endpoint": "http://a", "data.on_policy_share": 0.5},
            "the drafter's own text has no streamed features",
        ),
        ({"data.features": "streamed", "data.features_endpoint": ["ftp://a"]}, "data.features_endpoint .*is no URL"),
    ],
)
def test_settings_that_do_not_go_together(
    changes: dict[str, Any], reason: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        train(config_of(settings, tmp_path / "run", **changes))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_states_go_back_to_the_system() -> None:
    """Every second of 16 times 4 MB: malloc would keep such holes."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for dtype in (torch.float32, torch.bfloat16):
        shape = (4, (1 << 20) // dtype.itemsize)
        held = [zeros_in_own_memory(shape, dtype) for _ in range(16)]
        assert not any(states.any() for states in held)
        for states in held:
            states.fill_(1)
        before = resident()
        del held[::2], states
        assert before - resident() == pytest.approx(8 * 4 << 20, rel=0.1)
