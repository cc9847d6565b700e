"""Runs on clusters: the scripts in recipes/launch, and what becomes of a run when a machine is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import arguments, base_of, make_config
from torch.distributed.elastic.utils.distributed import get_free_port

import draftsmith.recipes
from draftsmith.models import Target
from draftsmith.recipes.configs.recipes import recipe_named
from draftsmith.train import train
from draftsmith.train.config import resolve
from draftsmith.train.run_folder.checkpoint import checkpoint_step, checkpoints
from draftsmith.train.run_folder.tracking import read_metrics

ROOT = Path(__file__).parents[2]
LAUNCH = Path(draftsmith.recipes.__file__).parent / "launch"
RUN = {"steps": 60, "checkpoint_every": 5, "log_every": 1}
TOLERANCE = 1e-4

SRUN = """#!/bin/bash
shift
nodes=()
for node in 0 1; do
    SLURM_NODEID=$node "$@" &
    nodes+=($!)
done
trap 'kill -TERM "${nodes[@]}"' TERM
code=0
for node in "${nodes[@]}"; do
    while kill -0 "$node" 2>/dev/null; do wait "$node" || code=$?; done
done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$CALLS"; fi
"""


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def expected(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that nothing stops."""
    return losses(train(make_config("eagle3", base, tmp_path_factory.mktemp("one"), run=RUN)))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if "loss" in line]


def words(base: dict[str, Any], run: Path) -> list[str]:
    settings = [key for key in arguments(base, run, run=RUN) if not key.startswith("run.device")]
    return ["eagle3", "drafter.draft_vocab_size=null", *settings]


def started(command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    """A program in a group of its own, on a machine without GPUs."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(command, env={**variables, **environment}, cwd=ROOT, start_new_session=True)


def wait_for_step(run: Path, step: int) -> None:
    end = time.monotonic() + 200
    while not ((run / "metrics.jsonl").is_file() and len(losses(run)) >= step):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.long
def test_a_slurm_job_goes_back_into_the_queue_and_on(
    base: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    """Before its time is over Slurm signals the script, which saves a checkpoint and asks for another turn."""
    tools, run = tmp_path / "tools", tmp_path / "run"
    tools.mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    environment = {
        **slurm,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
    }
    command = ["bash", str(LAUNCH / "slurm.sh"), *words(base, run)]
    job = started(command, **environment, MAIN_PORT=str(get_free_port()))
    wait_for_step(run, 7)
    job.send_signal(signal.SIGTERM)
    assert job.wait(200) != 0
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    saved = checkpoint_step(checkpoints(run)[-1])
    assert 7 <= saved < RUN["steps"]
    assert started(command, **environment, MAIN_PORT=str(get_free_port())).wait(300) == 0
    assert losses(run) == pytest.approx(expected, rel=TOLERANCE)
    assert (tmp_path / "calls").read_text() == "requeue 7\n"


@pytest.mark.long
def test_a_lost_machine_leaves_the_others_at_work(base: dict[str, Any], expected: list[float], tmp_path: Path) -> None:
    """Both of its processes are killed; torchrun starts the other machine's anew, which goes on from a checkpoint."""
    job = job_of_kubernetes()["spec"]["template"]["spec"]["containers"][0]["command"]
    given = {"--nproc-per-node": "1", "--rdzv-endpoint": f"127.0.0.1:{get_free_port()}"}
    options = [f"{name}={given.get(name, value)}" for name, _, value in (word.partition("=") for word in job[1:-2])]
    command = [sys.executable, "-m", "torch.distributed.run", *options, *job[-2:], *words(base, tmp_path)]
    machines = [started(command) for _ in range(2)]
    wait_for_step(tmp_path, 7)
    os.killpg(machines[1].pid, signal.SIGKILL)
    assert machines[0].wait(400) == 0
    machines[1].wait()
    assert losses(tmp_path) == pytest.approx(expected, rel=TOLERANCE)


def job_of_kubernetes() -> dict[str, Any]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    return job


def test_the_job_of_kubernetes_is_a_run_that_draftsmith_takes() -> None:
    job = job_of_kubernetes()
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][0] == "torchrun"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    recipe, *settings = container["args"]
    config = resolve(recipe_named(recipe), overrides=settings)
    folders = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {f"/{Path(path).parts[1]}" for path in (config.data.samples, config.run.dir)} < folders
    assert config.data.batch_size % 16 == 0


def test_the_script_of_slurm_is_read_by_bash() -> None:
    assert subprocess.run(["bash", "-n", str(LAUNCH / "slurm.sh")]).returncode == 0
