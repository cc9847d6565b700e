"""Runs survive signals, kills and damage, or end in one line: full disks, lost processes, numbers not finite."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import arguments, base_of, final_weights, make_config
from safetensors import SafetensorError

from draftsmith.data.prefetch import prefetched
from draftsmith.models import Target
from draftsmith.models.checkpoints import DrafterFiles
from draftsmith.models.drafters.medusa import Medusa
from draftsmith.models.errors import UserError
from draftsmith.models.storage.files import require_writable
from draftsmith.train import loop, train
from draftsmith.train.process.faults import in_one_line
from draftsmith.train.process.signals import Stopped
from draftsmith.train.process.stages import Stages, watched
from draftsmith.train.run_folder import checkpoint as checkpointing
from draftsmith.train.run_folder import tracking
from draftsmith.train.run_folder.checkpoint import (
    WEIGHTS,
    checkpoint_name,
    checkpoint_step,
    checkpoints,
    damage,
    resumable,
    rotate,
)
from draftsmith.train.run_folder.tracking import read_metrics

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
RUN = {"steps": 6, "checkpoint_every": 2}
CHAIN = {"steps": 60, "checkpoint_every": 60, "log_every": 1}


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    torch.set_num_threads(1)
    return train(make_config("medusa", base, tmp_path_factory.mktemp("whole"), run=RUN))


def assert_same_end(run: Path, whole: Path) -> None:
    expected = final_weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(run).items())
    assert [line["loss"] for line in read_metrics(run)] == [line["loss"] for line in read_metrics(whole)]


# --- several processes


def test_processes_look_at_a_folder_at_once(tmp_path: Path) -> None:
    """All of a run's processes check its folder when they start."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(require_writable, [tmp_path] * 2000))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def findings(
    python: str, base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("survive")
    (folder / "held_out.txt").write_text("".join(f"heat the iron {i} times\n" for i in range(11)))
    program = str(ROOT / "tests" / "helpers" / "survive.py")
    command = [python, program, str(folder), json.dumps(base), json.dumps(CHAIN)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    log = (folder / "log").read_text() if (folder / "log").is_file() else ""
    assert done.returncode == 0, done.stderr + log
    return folder, {**json.loads((folder / "findings.json").read_text()), "log": log}


def test_interrupted_run_goes_on_with_other_processes(findings: Any, base: dict[str, Any], tmp_path: Path) -> None:
    """Two processes, then one, then two: stopped, stopped, killed, and let through; it ends as if run at once by one.

    SIGTERM on one rank: all save the same step and exit with 128 + 15. SIGKILL on one: the other ends with one line.
    Sums over ranks round otherwise than those of one process.
    """
    folder, found = findings
    stopped = 128 + signal.SIGTERM
    assert found["chain"] == [[stopped, stopped], [stopped], [-signal.SIGKILL, 2], [0, 0]], found["log"]
    assert found["log"].count("stopped by SIGTERM; step-0000") == 3
    assert found["log"].count("error: process 1 of 2 lost another at step") == 1
    whole = train(make_config("medusa", base, tmp_path, run=CHAIN))
    expected = final_weights(whole)
    for name, weight in final_weights(folder / "chain").items():
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-4)
    lines = [(line["step"], line["loss"]) for line in read_metrics(folder / "chain")]
    assert lines == [(line["step"], pytest.approx(line["loss"], rel=1e-4)) for line in read_metrics(whole)]
    assert len(checkpoints(folder / "chain")) == 3


def test_a_stuck_collective_is_told_with_rank_and_place(findings: Any) -> None:
    """One rank sleeps: both say where they are, the one that waits gives up, the other then finds itself alone."""
    folder, found = findings
    log = (folder / "stuck.log").read_text()
    assert found["stuck"] == [2, 2], log
    told = " ".join(log.split())
    for rank, place in (
        (0, "in [a-z_]+, from draftsmith.train.step:"),
        (1, "in asleep, from draftsmith.models.drafter_parts.training_interface:"),
    ):
        assert re.search(rf"process {rank} of 2 has been at step 3, drafter, for [2-4] s: {place}\d+", told), told
    assert "error: process 0 of 2 waited run.timeout for another at step 3, drafter (" in told
    assert "error: process 1 of 2 lost another at step 3, drafter (" in told
    assert "Traceback" not in told


def test_a_failing_evaluation_is_told_and_training_goes_on(findings: Any) -> None:
    """It fails on one of two ranks: neither hangs, the next checkpoint is measured on both."""
    folder, found = findings
    assert found["evaluated"] == [0, 0], found["log"]
    failed, measured = checkpoints(folder / "evaluated")
    text = (failed / "evaluation.error.txt").read_text()
    assert "process 1: RuntimeError: no luck today" in text
    assert "Traceback" in text
    assert not (failed / "evaluation.json").exists()
    assert found["log"].count("the evaluation of step-000002 failed") == 1
    lines = read_metrics(folder / "evaluated")
    assert [line["step"] for line in lines if line.get("evaluation_failed")] == [2]
    content = json.loads((measured / "evaluation.json").read_text())
    row = content["results"][0]
    assert (row["num_prompts"], row["timed_prompts"], row["lossless"]["checked"]) == (11, 8, 11)
    assert [line["step"] for line in lines if "speedup" in line] == [4]
    speeds = [(line["tokens_per_second"], line["tokens_per_second_per_device"]) for line in lines if "loss" in line]
    assert [whole / each for whole, each in speeds] == [2, 2]
    assert (folder / "evaluated" / "best").resolve() == measured.resolve()


def test_a_checkpoint_that_fails_beside_training_ends_both(findings: Any) -> None:
    """The main process alone writes it: the other one ends, too, with the same line, and none is lost."""
    folder, found = findings
    log = (folder / "full.log").read_text()
    assert found["full"] == [2, 2], log
    assert log.count("step-000002 cannot be written ([Errno 28] No space left on device") == 2, log
    assert "Traceback" not in log
    assert not list((folder / "full" / "checkpoints").iterdir())


def test_killed_processes_go_on_bit_for_bit(python: str, base: dict[str, Any]) -> None:
    """The short form of the campaign in benchmarks/sigkill.py."""
    command = [python, str(ROOT / "benchmarks" / "sigkill.py"), "--kills", "2", "--seed", "0"]
    command += ["--target", base["target"], "--samples", base["data.samples"]]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 kills" in done.stdout
    assert "bit for bit" in done.stdout


# --- signals


def test_interrupt_saves_once(base: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """SIGINT within a step: the step ends, its checkpoint is there, the old handler is back, and the run goes on."""
    loss = Medusa.loss

    def interrupted(self: Medusa, *args: Any) -> Any:
        if self.progress == 2 / 6:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, *args)

    monkeypatch.setattr(Medusa, "loss", interrupted)
    config = make_config("medusa", base, tmp_path, run=RUN)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="SIGINT; step-000003 is saved") as stopped:
        train(config)
    assert stopped.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000003"]
    monkeypatch.undo()
    assert_same_end(train(config), whole)


# --- files


@pytest.mark.parametrize("file", ["model.safetensors", "trainer/exp_avg.safetensors", "trainer/manifest.json"])
def test_damaged_checkpoint_is_set_aside(
    file: str, base: dict[str, Any], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A truncated file: the run says so and goes on from the checkpoint before, to the same end."""
    config = make_config("medusa", base, tmp_path, run=RUN)
    train(config)
    damaged = checkpoints(tmp_path)[-1] / file
    damaged.write_bytes(damaged.read_bytes()[:-7])
    train(config)
    told = " ".join(capsys.readouterr().err.split())
    assert "step-000006 is damaged" in told
    assert "goes on from step-000004" in told
    assert_same_end(tmp_path, whole)
    assert damage(checkpoints(tmp_path)[-1]) is None
    assert not (tmp_path / "checkpoints" / "damaged-step-000006" / file).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("content", ["7", "null", "[]", '{"config.json": 7}', '{"config.json": ["0"]}'])
def test_a_manifest_of_anything_else_is_damage(content: str, whole: Path, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(checkpoints(whole)[-1], tmp_path / "step-000006")
    assert damage(checkpoint) is None
    (checkpoint / "trainer" / "manifest.json").write_text(content)
    assert "manifest.json" in (damage(checkpoint) or "")


def test_an_unfinished_line_of_metrics_is_not_read(base: dict[str, Any], whole: Path, tmp_path: Path) -> None:
    config = make_config("medusa", base, tmp_path, run=RUN)
    train(config)
    content = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(content[:-7])
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    (checkpoints(tmp_path)[-1] / WEIGHTS).unlink()
    assert_same_end(train(config), whole)


@pytest.mark.parametrize("line", ["[]", '{"loss": 1}', '{"step": 2, "loss": {}}', '{"step": "2"}', "{"])
def test_a_line_that_is_no_metrics_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 0.5, "stopped_early": "all is learnt"}}\n{line}\n')
    with pytest.raises(UserError, match="metrics.jsonl line 2"):
        read_metrics(tmp_path)


def test_truncated_samples_end_in_one_line(base: dict[str, Any], tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    shutil.copytree(base["data.samples"], samples)
    file = samples / "samples-00000.arrow"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(UserError, match="samples-00000.arrow was changed since .*: remove index.json"):
        train(make_config("medusa", {**base, "data.samples": samples}, tmp_path / "run", run=RUN))


def test_no_whole_checkpoint_is_an_error(base: dict[str, Any], tmp_path: Path) -> None:
    config = make_config("medusa", base, tmp_path, run={"steps": 2})
    train(config)
    (checkpoints(tmp_path)[-1] / "trainer" / "progress.json").unlink()
    with pytest.raises(UserError, match="there is no other to go on from"):
        train(config)


def test_an_older_training_state_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    """Whole, but of files that only an older draftsmith reads."""
    config = make_config("medusa", base, tmp_path, run={"steps": 2})
    train(config)
    checkpoint = checkpoints(tmp_path)[-1]
    (checkpoint / "trainer" / "weight.safetensors").rename(checkpoint / "trainer" / "optimizer.bin")
    (checkpoint / "trainer" / "manifest.json").write_text(json.dumps(checkpointing.manifest(checkpoint)))
    with pytest.raises(UserError, match="is that of an older draftsmith: .* init_from="):
        train(config)


@pytest.mark.parametrize(("owner", "where"), [(DrafterFiles, "write"), (checkpointing, "manifest")])
def test_full_disk_ends_in_one_line(
    owner: Any, where: str, base: dict[str, Any], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the second checkpoint is written: the first stays, nothing half written does, and the run can go on."""
    original = getattr(owner, where)

    def full(*args: Any) -> Any:
        if (tmp_path / "checkpoints" / checkpoint_name(2)).exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args)

    monkeypatch.setattr(owner, where, full)
    config = make_config("medusa", base, tmp_path, run=RUN)
    with pytest.raises(UserError, match=r"No space left on device; .* free\).*goes on from step-000002") as error:
        train(config)
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    monkeypatch.undo()
    assert_same_end(train(config), whole)


def test_full_disk_at_a_logged_step(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: the system has a file that is always full. It comes in the place of metrics.jsonl."""

    def open_full(path: Path, mode: str) -> Any:
        return open("/dev/full", mode)

    monkeypatch.setattr(tracking, "open", open_full, raising=False)
    with pytest.raises(UserError, match="cannot write to .*metrics.jsonl: No space left") as error:
        train(make_config("medusa", base, tmp_path, run=RUN))
    assert "\n" not in str(error.value)


NAMESPACE = ["unshare", "--map-root-user", "--mount"]  # in which one may mount


def test_a_run_on_a_small_disk(base: dict[str, Any], tmp_path: Path) -> None:
    """A file system that has room for one checkpoint."""
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "x", "/tmp"]).returncode:
        pytest.skip("no file system can be mounted here")
    run = [sys.executable, "-m", "draftsmith.train", "medusa", *arguments(base, tmp_path, run=RUN)]
    script = f"""
        mount -t tmpfs -o size=1200k x {tmp_path}
        {shlex.join(run)}; code=$?
        ls -A {tmp_path}/checkpoints; exit $code
    """
    done = subprocess.run([*NAMESPACE, "sh", "-c", script], env=ENVIRONMENT, capture_output=True, text=True)
    (line,) = [line for line in done.stderr.splitlines() if "rror" in line]
    assert line.startswith(f"error: {tmp_path}/checkpoints/step-000004 cannot be written ("), line
    assert line.endswith("it goes on from step-000002"), line
    assert done.returncode == 2
    assert done.stdout.split()[-1:] == ["step-000002"]


def test_errors_in_one_line() -> None:
    """A full disk anywhere, and a process that died; what is a bug stays one."""
    stages = Stages(torch.device("cpu"))
    full = os.strerror(errno.ENOSPC)
    for error in (OSError(errno.ENOSPC, full, "index.json"), SafetensorError(f"I/O error: {full} (os error 28)")):
        with pytest.raises(UserError, match="the disk takes no more.*No space left"), in_one_line(stages, 0, 1):
            raise error
    stages.step = 7
    stages.enter("drafter")
    with pytest.raises(UserError, match="process 0 of 2 lost another at step 7, drafter"), in_one_line(stages, 0, 2):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31055")
    for num_ranks, error in ((1, RuntimeError("gloo")), (2, RuntimeError("shapes differ")), (2, OSError(5, "io"))):
        with pytest.raises(type(error)) as raised, in_one_line(stages, 0, num_ranks):
            raise error
        assert raised.value is error


def test_vanished_features_end_in_one_line(base: dict[str, Any], tmp_path: Path) -> None:
    data = {"features": "stored", "features_dtype": "float32", "features_dir": tmp_path / "features"}
    steps = {"steps": 2}
    train(make_config("eagle3", base, tmp_path / "first", data=data, run=steps))
    config = make_config("eagle3", base, tmp_path / "run", data=data, run=steps)
    original = torch.nn.Module.train  # called after the shards were checked and before the first is read

    def vanish(self: torch.nn.Module, mode: bool = True) -> Any:
        for shard in (tmp_path / "features").glob("shard-*"):
            shard.unlink()
        return original(self, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "train", vanish)
        with pytest.raises(UserError, match="cannot be read: .*stores it anew"):
            train(config)
    assert train(config)  # the same command stores it anew


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    """All keep what was measured; training states go first, and never by halves under their name."""
    for step in range(1, 7):
        checkpoint = tmp_path / "checkpoints" / checkpoint_name(step)
        (checkpoint / "trainer").mkdir(parents=True)
        (checkpoint / WEIGHTS).touch()
        (checkpoint / "evaluation.json").touch()
    best = tmp_path / "checkpoints" / checkpoint_name(2)
    rotate(tmp_path, None, best)
    assert len(resumable(tmp_path)) == 6
    rotate(tmp_path, 3, best, whole=checkpoint_name(1))
    found = checkpoints(tmp_path)
    assert [int(path.name[-1]) for path in resumable(tmp_path)] == [1, 5, 6]
    assert [int(path.name[-1]) for path in found if (path / WEIGHTS).exists()] == [1, 2, 4, 5, 6]
    assert all((path / "evaluation.json").exists() for path in found)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """A million comes after 750,000, though not as text."""
    steps = [500, 750_000, 1_000_000, 1_250_000]
    for step in steps:
        (tmp_path / "checkpoints" / checkpoint_name(step)).mkdir(parents=True)
    assert [checkpoint_step(checkpoint) for checkpoint in checkpoints(tmp_path)] == steps


# --- numbers


def poison(monkeypatch: pytest.MonkeyPatch, broken: set[float]) -> None:
    """Let the loss be NaN at these points of the training."""
    loss = Medusa.loss

    def poisoned(self: Medusa, *args: Any) -> Any:
        sums = loss(self, *args)
        total, count = sums["loss"]
        return {**sums, "loss": (total * float("nan"), count)} if self.progress in broken else sums

    monkeypatch.setattr(Medusa, "loss", poisoned)


def test_one_nonfinite_step_is_skipped_and_many_end_the_run(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = {1 / 6}
    poison(monkeypatch, broken)
    lines = read_metrics(train(make_config("medusa", base, tmp_path / "one", run=RUN)))
    assert [line["skipped_steps"] for line in lines] == [0, 1, 0, 0, 0, 0]
    assert [line["loss"] is None for line in lines] == [False, True, False, False, False, False]

    broken |= {3 / 6, 4 / 6}
    run = tmp_path / "many"
    with pytest.raises(UserError, match="not finite in 2 steps in a row, up to step 5") as error:
        train(make_config("medusa", base, run, run=RUN, optimizer={"max_nonfinite_steps": 2}))
    assert "\n" not in str(error.value)
    named = json.loads((run / "nonfinite.json").read_text())
    assert [step["step"] for step in named] == [4, 5]
    assert all(len(step["samples"]) == 16 for step in named)
    assert checkpoints(run)[-1].name == "step-000004"


def test_a_nonfinite_step_that_was_made_ends_the_run(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed makes the step within the backward pass, so that it cannot be skipped."""
    monkeypatch.setattr(loop, "steps_in_backward", lambda _: True)
    poison(monkeypatch, {3 / 6})
    with pytest.raises(UserError, match=r"not finite in step 4; .*nonfinite.json"):
        train(make_config("medusa", base, tmp_path, run=RUN))
    assert checkpoints(tmp_path)[-1].name == "step-000002"
    assert "skipped" not in capsys.readouterr().err


# --- stuck


def test_a_stuck_process_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    stages = Stages(torch.device("cpu"))
    with watched(stages, rank=1, num_ranks=2, stuck_after=1.0):
        for _ in range(40):  # moving, though for longer than the limit
            stages.enter("target")
            time.sleep(0.03)
        stages.step = 12
        stages.enter("communication")
        time.sleep(2.5)
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("process 1 of 2 has been at step 12, communication, for") in (1, 2, 3)
    assert "in test_a_stuck_process_says_where" in told
    assert "target" not in told
    assert threading.active_count() < 20


def test_storing_features_is_watched_and_stops_on_a_signal(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pass before the first step may take hours: it says where it is stuck, and SIGTERM ends it in one line."""
    features = Target.features

    def stuck_then_stopped(self: Target, *arguments: Any) -> Any:
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGTERM)
        return features(self, *arguments)

    monkeypatch.setattr(Target, "features", stuck_then_stopped)
    data, before = {"features": "stored", "features_dir": tmp_path / "features"}, signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM before it made a step; the same command") as stopped:
        train(make_config("medusa", base, tmp_path / "run", data=data, run={**RUN, "stuck_after": 1}))
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    told = capsys.readouterr().err
    assert re.search("process 0 of 1 has been at step 0, storing features, for [1-3] s: in ", told), told
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_prefetched_keeps_order_and_raises_in_its_place(num_ahead: int) -> None:
    def make(step: int) -> int:
        if step == 3:
            raise ValueError("the third")
        return step * step

    values = prefetched(make, range(5), num_ahead)
    assert [next(values) for _ in range(3)] == [0, 1, 4]
    with pytest.raises(ValueError, match="the third"):
        next(values)
