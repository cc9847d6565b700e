"""Streamed features that are kept on the disk: asked for once, and the same run whatever the disk holds."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from states_server import HiddenStatesServer
from streamed_runs import NUM_SAMPLES, config_of, losses, two_servers, write_settings

from draftsmith.data.features import kept, writer
from draftsmith.data.features.kept import KeptFeatures
from draftsmith.data.features.stored import Contents
from draftsmith.data.processes import locked
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import read_samples
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.train import train
from draftsmith.train.loop import TrainingRun

GIGABYTE = 1.0  # far more than all features of these runs take
EPOCH = 3  # steps


@pytest.fixture(scope="module")
def target(make_target_dir: Callable[..., Path]) -> Target:
    return Target.from_pretrained(make_target_dir(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def settings(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = write_settings(target, tmp_path_factory.mktemp("data"))
    return {**settings, "data.held_out_prompts": 0, "data.features_dtype": "float32"}


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for every few samples; an epoch ends before the next one is asked for, though the run is so small."""
    monkeypatch.setattr(kept, "SHARD_BYTES", 1 << 13)
    monkeypatch.setattr("draftsmith.train.inputs.features.steps_ahead", lambda num_bytes: 1)


@pytest.fixture
def server(target: Target, tmp_path: Path) -> Iterator[HiddenStatesServer]:
    with two_servers(target, tmp_path) as servers:
        yield servers[0]


@pytest.fixture
def run(settings: dict[str, Any], server: HiddenStatesServer, tmp_path: Path) -> Callable[..., tuple[int, list[float]]]:
    """Call it for a run; it returns how many texts the server was asked for, those of its check too, and the losses."""

    def run(name: str, gigabytes: float = GIGABYTE, steps: int = 3 * EPOCH, **changes: Any) -> tuple[int, list[float]]:
        before = len(server.asked)
        folder = {"data.features_dir": tmp_path / "store"}
        changes = {**settings, "data.features_kept_gb": gigabytes, **folder, **changes}
        found = losses(train(config_of(changes, tmp_path / name, server.url, steps=steps)))
        return len(server.asked) - before, found

    return run


def files(store: Path) -> list[Path]:
    return sorted(store.glob("kept-*.safetensors"))


def test_samples_are_asked_for_once(
    run: Callable[..., tuple[int, list[float]]], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Later epochs read them from the disk, and so does a later run in another order; the losses stay the same."""
    own = {name: value for name, value in settings.items() if name != "data.features_dtype"}
    expected = losses(train(config_of(own, tmp_path / "own", steps=3 * EPOCH)))
    number, found = run("run")
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(files(tmp_path / "store")) > 2
    assert run("other", **{"run.seed": 1})[0] == number - NUM_SAMPLES  # those that the check reads


def test_what_has_no_room_is_asked_for_again(run: Callable[..., tuple[int, list[float]]], tmp_path: Path) -> None:
    number, expected = run("whole")
    size = sum(path.stat().st_size for path in files(tmp_path / "store"))
    more, found = run("half", size / 2e9, **{"data.features_dir": tmp_path / "half_store"})
    assert found == expected
    assert 2 * 1 < more - number < 2 * NUM_SAMPLES
    assert 0.3 * size < sum(path.stat().st_size for path in files(tmp_path / "half_store")) < 0.6 * size  # with headers


def test_what_the_disk_lacks_changes_nothing(
    run: Callable[..., tuple[int, list[float]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped, and finds less on the disk when it goes on, ends with the very losses of one that was not.

    In float8 they would differ, were a sample that is asked for not rounded as one that is read.
    """
    rounded: dict[str, Any] = {"data.features_dtype": "float8_e4m3fn"}
    number, expected = run("whole", **rounded)
    save, store = TrainingRun.save_and_measure, tmp_path / "parts_store"
    rounded["data.features_dir"] = store
    monkeypatch.setattr(TrainingRun, "save_and_measure", lambda run, *args: save(run, *args) or "enough")
    run("parts", **rounded)
    monkeypatch.setattr(TrainingRun, "save_and_measure", save)
    files(store)[0].unlink()
    take_step = TrainingRun.take_step

    def remove(run: TrainingRun, step: int, batches: Any) -> Any:
        if step == EPOCH:
            for path in files(store):
                path.unlink()
        return take_step(run, step, batches)

    monkeypatch.setattr(TrainingRun, "take_step", remove)
    assert run("parts", **rounded)[1] == expected
    monkeypatch.setattr(TrainingRun, "take_step", take_step)
    assert run("again", **rounded)[0] < number  # there was room again for what was removed


@pytest.fixture
def open_kept(settings: dict[str, Any], target: Target, tmp_path: Path) -> Callable[..., KeptFeatures]:
    """Call it for what is kept in a folder."""
    plan = BatchPlan(read_samples(settings["data.samples"]), 4, 64, 64, seed=0)
    contents = Contents(None, "", (1, 2), target.hidden_size, "float32", "")
    return lambda rank=0, of=1: KeptFeatures(tmp_path / "store", contents, plan, target, 1e9, rank, of)


def states_of(kept: KeptFeatures, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(kept.store.plan.lengths[index], 3, kept.store.contents.hidden_size, generator=generator)


def test_a_kill_leaves_nothing_that_is_not_whole(open_kept: Callable[..., KeptFeatures], tmp_path: Path) -> None:
    """SIGKILL when half of the third file is written: the two before it are read, and all else is asked for."""
    pid = os.fork()
    if not pid:
        save, calls = writer.save_file, []

        def save_and_die(tensors: dict[str, torch.Tensor], path: Path, **header: Any) -> None:
            calls.append(path)
            save(tensors, path, **header)
            if len(calls) == 3:
                os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        writer.save_file = save_and_die
        try:
            child = open_kept()
            for index in child.store.plan.read:
                child.keep(index, states_of(child, index))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(list((tmp_path / "store").glob(".kept-*"))) == 1
    found = open_kept()
    assert not list((tmp_path / "store").glob(".kept-*"))
    assert found.store.problems(0, 1) == []
    read = [index for index in found.store.plan.read if found.read(index) is not None]
    assert len(found.store.shards) == 2 <= len(read) < NUM_SAMPLES
    for index in read:
        states = states_of(found, index)
        assert torch.equal(found.read(index)[:, :2], states[:, :2])
    found.stop()


def test_processes_read_what_the_others_wrote(
    open_kept: Callable[..., KeptFeatures], target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keep it no second time."""
    monkeypatch.setattr(kept, "SHARD_BYTES", 1 << 30)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        ranks.append(open_kept(rank, 2))
    first, second = ranks
    index = first.store.plan.read[-1]
    states = states_of(first, index)
    given = first.keep(index, states)
    torch.testing.assert_close(given, torch.cat([states[:, :2], target.final_norm(states[:, 2:])], 1))
    assert second.read(index) is None
    first.stop()
    found = second.read(index)
    assert found is not None
    assert torch.equal(found, given)
    second.keep(index, states)
    second.stop()
    assert len(files(tmp_path / "store")) == 1


def test_other_contents_are_refused(run: Callable[..., tuple[int, list[float]]], tmp_path: Path) -> None:
    """Features in another dtype, a folder that another run writes to, a damaged file, and an empty one."""
    run("run", steps=EPOCH)
    store = tmp_path / "store"
    with pytest.raises(UserError, match=r"holds features of another dtype \(float32, not bfloat16\)"):
        run("other", **{"data.features_dtype": "bfloat16"})
    with locked(store), pytest.raises(UserError, match="is being written by"):
        run("beside")
    content = bytearray(files(store)[0].read_bytes())
    content[-1] ^= 1
    files(store)[0].write_bytes(content)
    with pytest.raises(UserError, match="is damaged"):
        run("damaged")
    (store / "kept-.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"kept-\.safetensors is damaged"):
        run("empty")


def test_more_than_the_disk_holds_is_refused(
    run: Callable[..., tuple[int, list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(UserError, match="has 100 bytes free: give less, or data.features_dir on a larger disk"):
        run("run")
