"""Checkpoints that are written while training goes on are those of a run that waits for them."""

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import base_of, make_config

from draftsmith.models import Target
from draftsmith.models.drafters.medusa import Medusa
from draftsmith.models.errors import UserError
from draftsmith.train import train
from draftsmith.train.inputs.features import RunFeatures
from draftsmith.train.process.signals import Stopped
from draftsmith.train.run_folder import checkpoint as checkpointing
from draftsmith.train.run_folder import checkpoint_writer
from draftsmith.train.run_folder.checkpoint import MANIFEST, PROGRESS, TRAINER, checkpoints, damage
from draftsmith.train.run_folder.tracking import read_metrics

STEPS, EVERY = 6, 2
RUN = {"steps": STEPS, "checkpoint_every": EVERY}
PATIENCE = 20.0  # seconds, after which a test fails that would wait for ever


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


def checksums(run: Path) -> list[dict[str, str]]:
    """The checksums of the files of each checkpoint, but for the time that it took."""
    found = [json.loads((checkpoint / TRAINER / MANIFEST).read_text()) for checkpoint in checkpoints(run)]
    return [{name: digest for name, digest in files.items() if Path(name).name != PROGRESS} for files in found]


def in_step(number: int, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something during the step of this number, counted from 1."""
    loss = Medusa.loss

    def acting(self: Medusa, *args: Any) -> Any:
        if self.progress == (number - 1) / STEPS:
            act()
        return loss(self, *args)

    monkeypatch.setattr(Medusa, "loss", acting)


def before_manifest(act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something when the files of a checkpoint are written, and nothing of it is there yet."""
    manifest = checkpointing.manifest
    monkeypatch.setattr(checkpointing, "manifest", lambda folder: (act(), manifest(folder))[1])


def test_training_goes_on_and_changes_nothing_of_a_checkpoint(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first checkpoint is written when two more steps have been made: it holds the weights of its own step."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "FREE_SHARE", 0.0)
        waiting = train(make_config("medusa", base, tmp_path / "waiting", run=RUN))
    assert " ".join(capsys.readouterr().err.split()).count("training waits for its checkpoints: a copy of one") == 1

    two_more = threading.Event()
    before_manifest(lambda: two_more.wait(PATIENCE) or pytest.fail("training waited"), monkeypatch)
    in_step(EVERY + 2, two_more.set, monkeypatch)
    beside = train(make_config("medusa", base, tmp_path / "beside", run=RUN))
    assert "waits" not in capsys.readouterr().err
    assert checksums(beside) == checksums(waiting)
    assert len({str(files) for files in checksums(beside)}) == len(checkpoints(beside)) == STEPS / EVERY


def test_a_signal_waits_for_the_checkpoint_before(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_manifest(lambda: time.sleep(0.5), monkeypatch)
    in_step(EVERY + 1, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    with pytest.raises(Stopped, match="SIGTERM; step-000003 is saved"):
        train(make_config("medusa", base, tmp_path, run=RUN))
    assert [checkpoint.name for checkpoint in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    assert not any(map(damage, checkpoints(tmp_path)))


def test_an_error_of_a_step_waits_for_the_checkpoint_before(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise UserError("no more")

    before_manifest(lambda: time.sleep(0.5), monkeypatch)
    in_step(EVERY + 1, fail, monkeypatch)
    with pytest.raises(UserError, match="no more"):
        train(make_config("medusa", base, tmp_path, run=RUN))
    assert [checkpoint.name for checkpoint in checkpoints(tmp_path)] == ["step-000002"]


def test_a_failed_write_ends_the_run_at_once(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only at the next checkpoint, which may be an hour away."""
    failed = threading.Event()

    def full() -> None:
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before_manifest(full, monkeypatch)
    in_step(4, lambda: (failed.wait(PATIENCE), time.sleep(0.5)), monkeypatch)  # the thread has to end
    with pytest.raises(UserError, match=r"step-000003 cannot be written \(.*No space left .* goes on from the start"):
        train(make_config("medusa", base, tmp_path, run={"steps": STEPS, "checkpoint_every": 3}))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_source_that_does_not_stop_leaves_no_checkpoint_half_written(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: RunFeatures) -> None:
        raise RuntimeError("does not stop")

    closed = []
    monkeypatch.setattr(RunFeatures, "stop", fail)
    monkeypatch.setattr(checkpoint_writer.CheckpointWriter, "close", lambda self: closed.append(self))
    with pytest.raises(RuntimeError, match="does not stop"):
        train(make_config("medusa", base, tmp_path / "run", run={"steps": 1, "checkpoint_every": 1}))
    assert closed
