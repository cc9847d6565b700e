"""Texts that processes take together (`run.processes_per_text`): every number of a run is that of one process."""

import os
import random
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import arguments, base_of, final_weights, make_config, of_the_run
from streamed_runs import NUM_SAMPLES, two_servers, write_settings

import draftsmith.recipes
from draftsmith.data.samples.folder import write_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.losses.chain_loss import CHUNK_ELEMENTS
from draftsmith.train import train
from draftsmith.train.hardware.estimates import LOGIT_COPIES, estimate
from draftsmith.train.hardware.teams import check_teams
from draftsmith.train.run_folder.learning_curve import learning_curve
from draftsmith.train.run_folder.tracking import read_metrics

AS_GPUS = Path(__file__).parents[1] / "helpers" / "as_gpus.py"
LAUNCH = Path(draftsmith.recipes.__file__).parent / "launch"
TOLERANCE = 1e-4
# Rows of several samples, and of several lengths; each step has two micro-batches at least.
SETTINGS = {
    "data.held_out_prompts": 2,
    "data.max_length": 96,
    "data.tokens_per_micro_batch": 192,
    "run.steps": 9,
    "run.checkpoint_every": 9,
    "optimizer.learning_rate": 1e-3,
}
SHORT = "short"  # folder of samples beside the others
STORED = {"data.features": "stored", "data.features_dtype": "float32"}
WHOLE_VOCABULARY = {"drafter.draft_vocab_size": None}
Run = tuple[str, dict[str, Any]]  # family, and settings over SETTINGS


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random texts of very different lengths, of which the target wrote the last two thirds; and of two or three."""
    folder = tmp_path_factory.mktemp("data")
    base = {**base_of(tiny_target_dir, tiny_target, folder), **SETTINGS}
    shutil.copytree(folder / "samples", folder / SHORT)
    chance = random.Random(0)
    for name, longest in (("samples", 90), (SHORT, 4)):
        samples = []
        for prompt in range(48):
            length = chance.randrange(min(8, longest // 2), longest)
            ids = [chance.randrange(3, tiny_target.vocab_size) for _ in range(length)]
            samples.append(Sample(ids, [Span(max(1, length // 3), length)], prompt_index=prompt))
        write_samples(folder / name, [samples], iter)
    return base


def in_teams(
    python: str, base: dict[str, Any], folder: Path, runs: dict[str, Run], processes: int, config: str = "cpu"
) -> None:
    """Train all runs in teams of two, in the same processes."""
    words: list[str] = []
    for name, (kind, changes) in runs.items():
        settings = {**base, **changes, "run.processes_per_text": 2}
        given = [word for word in arguments(settings, folder / name) if not word.startswith("run.device")]
        words += [*(["--then"] if words else []), kind, *given]
    command = [python, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / f"{config}.yaml")]
    command += ["--num_processes", str(processes), "--main_process_port", "0", str(AS_GPUS), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    assert "2 processes a text" in " ".join(found.stdout.split())


def numbers(run: Path) -> list[dict[str, Any]]:
    """All that a run tells of its steps, and then of its held-out samples."""
    points = [asdict(point) for point in learning_curve(run)]
    return [*map(of_the_run, read_metrics(run)), *points]


def assert_same_run(found: Path, alone: Path) -> None:
    for one, expected in zip(numbers(found), numbers(alone), strict=True):
        assert one == pytest.approx(expected, rel=TOLERANCE, abs=1e-9)
    weights = final_weights(alone)
    for name, weight in final_weights(found).items():
        torch.testing.assert_close(weight, weights[name], atol=1e-4, rtol=1e-4)


def check(python: str, base: dict[str, Any], folder: Path, runs: dict[str, Run], processes: int, **how: Any) -> None:
    in_teams(python, base, folder, runs, processes, **how)
    for name, (kind, changes) in runs.items():
        alone = {**base, **changes, "run.target_placement": "replicated"}
        run = train(make_config(kind, alone, folder / f"{name}-alone"))
        assert_same_run(folder / name, run)
        assert learning_curve(run)


def short_texts(base: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run whose micro-batches are a text of two or three tokens for each of two teams.

    The drafter starts at random. Where it starts as the target, all moments agree to 1e-6 of their size, but queries
    have nothing to learn in such texts, and AdamW makes whole steps of what rounding leaves in their gradients.
    """
    at_random = {"drafter.starting_layers": "random", "drafter.feature_norm": "none", "drafter.norm_output": False}
    samples = Path(base["data.samples"]).parent / SHORT
    one_each = {"data.batch_size": 2, "data.tokens_per_micro_batch": 3, "data.max_length": 3}
    return {**WHOLE_VOCABULARY, **at_random, **one_each, "data.samples": samples}


def test_two_processes_take_each_text_together(python: str, base: dict[str, Any], tmp_path: Path) -> None:
    """EAGLE-3 with the target beside it, on packed rows; EAGLE-1 with noise, from a store, in batches of tokens.

    A step that reads a text of two tokens leaves the first of two members without a slot.
    """
    in_tokens = {"data.batch_unit": "tokens", "data.batch_size": 300}
    stored = {**STORED, "data.features_dir": tmp_path / "features"}
    runs: dict[str, Run] = {
        "eagle3": ("eagle3", {"data.packing": True, "drafter.draft_vocab_size": 200}),
        "eagle": ("eagle", {**stored, **in_tokens, "drafter.noise": 0.2}),
        "short": ("eagle3", short_texts(base)),
    }
    check(python, base, tmp_path, runs, 2)


@pytest.mark.long
@pytest.mark.parametrize("config", ["cpu", "fsdp2", "zero2"])
def test_two_teams_of_two(config: str, python: str, base: dict[str, Any], tmp_path: Path) -> None:
    """Noise, and batches in tokens, hang on the number of teams: they are left out."""
    deep = {"drafter.num_layers": 2, "drafter.recompute": True}
    placed = {"run.target_placement": "sharded"} if config == "fsdp2" else {}
    runs: dict[str, Run] = {
        "packed": ("eagle3", {**placed, "data.packing": True, **WHOLE_VOCABULARY}),
        "deep": ("eagle3", {**deep, **WHOLE_VOCABULARY}),
        "eagle": ("eagle", {"drafter.noise": 0.0}),
        "short": ("eagle3", short_texts(base)),
    }
    check(python, base, tmp_path, runs, 4, config=config)


@pytest.mark.long
def test_servers_are_asked_once_by_a_team(python: str, tiny_target: Target, tmp_path: Path) -> None:
    """Streamed features of one epoch, which the first run keeps for the second."""
    base = {**write_settings(tiny_target, tmp_path), "run.steps": 3, "run.log_every": 1, "data.packing": True}
    streamed = {"data.features": "streamed", "data.features_kept_gb": 1, "data.features_dtype": "float32"}
    asked = []
    with two_servers(tiny_target, tmp_path) as servers:
        streamed["data.features_endpoint"] = [server.url for server in servers]
        for name in ("first", "second"):  # the second asks for checks of its servers alone
            in_teams(python, {**base, **streamed}, tmp_path, {name: ("eagle3", WHOLE_VOCABULARY)}, 2)
            asked.append(sum("logprobs" in body for server in servers for body in server.asked))
    alone = train(make_config("eagle3", base, tmp_path / "alone"))
    for name in ("first", "second"):
        assert_same_run(tmp_path / name, alone)
    assert asked[0] - (asked[1] - asked[0]) == NUM_SAMPLES


def test_the_estimate_divides_what_the_layers_keep(base: dict[str, Any], tiny_target: Target, tmp_path: Path) -> None:
    """Three layers' states and the last one stay whole; all else of a token falls to a quarter."""
    config = make_config("eagle3", base, tmp_path)
    states = 4 * tiny_target.hidden_size * config.data.tokens_per_micro_batch * 2

    def kept_by_layers(size: int) -> float:
        config.run.processes_per_text = size
        found = estimate(config, tiny_target.config, 1, on_gpu=False)
        return found.working_bytes - LOGIT_COPIES * CHUNK_ELEMENTS * 4 - states

    assert kept_by_layers(4) == pytest.approx(kept_by_layers(1) / 4)
    assert kept_by_layers(1) > states


@pytest.mark.parametrize(
    ("kind", "size", "processes", "layout", "told"),
    [
        ("dflash", 2, 2, "DDP", "only drafters of the kinds eagle and eagle3 divide a text, not dflash: leave it out"),
        ("eagle3", 2, 3, "DDP", "makes no teams of the 3 processes of this machine: start a multiple of 2"),
        ("eagle3", 2, 2, "ZeRO-3", "under ZeRO-3 processes could wait for each other forever; start with "),
        ("eagle3", 2, 1, "one process", "makes no teams of the 1 processes of this machine: start a multiple of 2"),
    ],
)
def test_what_makes_no_team_is_refused(
    kind: str, size: int, processes: int, layout: str, told: str, base: dict[str, Any], tmp_path: Path
) -> None:
    config = make_config(kind, base, tmp_path, run={"processes_per_text": size})
    with pytest.raises(UserError, match=f"run.processes_per_text={size}:? {told}"):
        check_teams(config, processes, layout)


def test_a_machine_has_whole_teams(base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six processes on two machines, three on each: a team of two would have one on either side."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    config = make_config("eagle3", base, tmp_path, run={"processes_per_text": 2})
    with pytest.raises(UserError, match="makes no teams of the 3 processes of this machine"):
        check_teams(config, 6, "DDP")
