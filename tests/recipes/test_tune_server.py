"""`draftsmith tune-server`: the choice from what was measured, and the whole command with a server that is made up."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.models.storage.reading import read_typed
from draftsmith.recipes.bench.results import Acceptance, BenchLoad, BenchRun, BenchStage, Latencies
from draftsmith.recipes.bench.runner import Bench
from draftsmith.recipes.bench.server_tuning import (
    Candidate,
    Measured,
    ServerTuning,
    choose,
    expected_tpot_ms,
    fastest_over_all,
    most_promising,
)
from draftsmith.recipes.cli.main import main
from draftsmith.train.engine import restarted

FAKE = Path(__file__).parents[1] / "helpers" / "fake_vllm.py"
NONE = Latencies(None, None, None)


def stage(tpots: list[float], clients: int = 1, rates: list[float] | None = None) -> BenchStage:
    """Return the stage of so many runs, whose tokens a second follow from their milliseconds a token."""
    acceptance = None if rates is None else Acceptance(10, 10 * len(rates), 1, rates, 1 + sum(rates))
    runs = [BenchRun(1.0, 1000 / tpot, 1.0, tpot, 1.0, 1.0) for tpot in tpots]
    load = BenchLoad("concurrency", float(clients))
    return BenchStage("s", load, 9, 0, [], 9, 9, 0.0, NONE, NONE, NONE, NONE, 1.0, None, acceptance, runs)


def measured(draft_length: int, *stages: BenchStage) -> Measured:
    return Measured(Candidate(draft_length), 1.0, list(stages))


# --- what is worth a start


def test_the_time_of_a_token_between_two_draft_lengths() -> None:
    """Rounds last 10 + 2 K ms here, so that each length's time is known."""
    rates = [0.8, 0.6, 0.4, 0.0, 0.0]
    short = measured(1, stage([12 / 1.8] * 3, rates=rates[:1]))
    long = measured(5, stage([20 / 2.8] * 3, rates=rates))
    found = expected_tpot_ms(short, long, 0)
    for length in range(1, 6):
        assert found[length] == pytest.approx((10 + 2 * length) / (1 + sum(rates[:length])))
    assert most_promising(short, long) == [3]  # 16 / 2.8, before 14 / 2.4 and 18 / 2.8


def test_each_load_may_have_its_own_length_and_measured_ones_are_not_started_again() -> None:
    rates = [0.8, 0.6, 0.4, 0.0, 0.0]
    short = measured(1, stage([12 / 1.8] * 3, rates=rates[:1]), stage([20 / 1.8] * 3, 8, rates[:1]))
    long = measured(5, stage([20 / 2.8] * 3, rates=rates), stage([100 / 2.8] * 3, 8, rates))
    assert most_promising(short, long) == [3]  # at 8 clients the shortest is best
    silent = measured(5, stage([5.0] * 3), stage([5.0] * 3, 8))
    assert most_promising(short, silent) == []


# --- the choice

PLAIN = measured(0, stage([10, 10.1, 9.9]), stage([10, 10.1, 9.9], 8))


@pytest.mark.parametrize(
    ("times", "can_change", "expected"),
    [
        (([5, 5.1, 4.9], [20, 20, 20]), True, Candidate(3, schedule=Schedule(((1, 3), (8, 0))))),
        (([5, 5.1, 4.9], [8, 8.1, 7.9]), True, Candidate(3)),
        (([20, 20, 20], [20, 20, 20]), True, Candidate(0)),
        (([9.9, 3, 20], [20, 20, 20]), True, Candidate(0)),  # not shown
        (([20, 20, 20], [5, 5.1, 4.9]), True, Candidate(3, schedule=Schedule(((1, 0), (8, 3))))),
        (([5, 5.1, 4.9], [20, 20, 20]), False, Candidate(3)),
        (([20, 20, 20], [20, 20, 20]), False, Candidate(0)),
    ],
)
def test_what_is_served(times: tuple[list[float], list[float]], can_change: bool, expected: Candidate) -> None:
    """A length is drafted where it is shown to gain, from as many clients on as were measured."""
    one = measured(3, stage(times[0]), stage(times[1], 8))
    slow = measured(5, stage([30, 30, 30]), stage([30, 30, 30], 8))
    assert choose(PLAIN, [slow, one], [1, 8], can_change) == expected


def test_the_fastest_over_all_loads() -> None:
    even = measured(2, stage([6, 6, 6]), stage([6, 6, 6], 8))
    uneven = measured(4, stage([4, 4, 4]), stage([12, 12, 12], 8))
    assert fastest_over_all(PLAIN, [uneven, even]) is even


# --- the whole


RATES = [0.9, 0.8, 0.7, 0.05, 0.02, 0.01, 0.0, 0.0]  # of acceptance by position


def made_up_stages(bench: Bench, load: BenchLoad, on_run: Any) -> list[BenchStage]:
    """Return the stage of a server whose times follow from what it was started with.

    A step lasts 10 ms. A drafted token adds 1 ms for one client, and 20 ms for several.
    """
    [rival] = bench.rivals
    config = rival.server.json("/config")
    length, clients = config.get("num_speculative_tokens", 0), int(load.value)
    for start, _, scheduled in config.get("num_speculative_tokens_per_batch_size", []):
        length = scheduled if start <= clients else length
    tpot = (10 + (1 if clients == 1 else 20) * length) / (1 + sum(RATES[:length]))
    return [stage([tpot, 1.01 * tpot, 0.99 * tpot], clients, RATES[:length] if config else None)]


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment whose interpreter starts the server that is made up, and times that do not hang on a clock."""
    monkeypatch.setattr(restarted, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(Bench, "stages", made_up_stages)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n')
    python.chmod(0o755)
    return python.parents[1]


def words(venv: Path, target: str, drafter: str, folder: Path) -> list[str]:
    (folder / "prompts.txt").write_text("strike\nheat the iron\n")
    words = ["tune-server", str(venv), "--target", target, "--drafter", drafter, "--out", str(folder / "out")]
    return [*words, "--prompts", str(folder / "prompts.txt")]


def test_a_drafter_is_tuned(venv: Path, tiny_target: Target, tmp_path: Path) -> None:
    """It drafts for one client, and not for four, where a drafted token costs twice as much as a step."""
    torch.manual_seed(0)
    kind = DRAFTERS["eagle"]
    save_drafter(kind.from_target(kind.config_class(kind="eagle"), tiny_target), tmp_path / "eagle")
    given = words(venv, tiny_target.name, str(tmp_path / "eagle"), tmp_path)
    options = ["--concurrency", "4", "1", "--repeats", "3", "--vllm", "--max-num-seqs 8 --seed '1'"]
    assert main([*given, *options]) == 0
    out = tmp_path / "out"
    found = read_typed(ServerTuning, out / "server_tuning.json")
    assert [one.candidate.draft_length for one in found.tried[:3]] == [0, 1, 6]
    assert found.chosen.schedule is not None
    assert [one.candidate.draft_length for one in found.tried[3:]] == [3]  # 13 / 3.4 ms, the least
    assert found.chosen == Candidate(3, schedule=Schedule(((1, 3), (4, 0))))
    assert found.speculative_config is not None
    assert found.speculative_config.num_speculative_tokens_per_batch_size == [[1, 3, 3], [4, 4, 0]]
    assert (Path(str(found.speculative_config.model)) / "config.json").is_file()
    assert [one.ratio for one in found.differences] == [pytest.approx(10 / (13 / 3.4)), pytest.approx(1)]
    script = (out / "serve_vllm.sh").read_text()
    assert shlex.split(script.partition("exec ")[2])[:7] == [
        *("vllm", "serve", tiny_target.name, "--max-num-seqs", "8", "--seed", "1")
    ]
    assert subprocess.run(["sh", "-n", str(out / "serve_vllm.sh")]).returncode == 0


def test_drafts_are_as_long_as_was_asked_for(venv: Path, tiny_target: Target, tmp_path: Path) -> None:
    kind = DRAFTERS["eagle"]
    save_drafter(kind.from_target(kind.config_class(kind="eagle"), tiny_target), tmp_path / "eagle")
    given = words(venv, tiny_target.name, str(tmp_path / "eagle"), tmp_path)
    assert main([*given, "--repeats", "3", "--draft-length", "8"]) == 0
    found = read_typed(ServerTuning, tmp_path / "out" / "server_tuning.json")
    assert [one.candidate.draft_length for one in found.tried[:3]] == [0, 1, 8]


def test_lookups_are_tuned(venv: Path, tiny_target: Target, tmp_path: Path) -> None:
    given = words(venv, tiny_target.name, "ngram", tmp_path)
    assert main([*given, "--draft-length", "4", "--repeats", "3"]) == 0
    found = read_typed(ServerTuning, tmp_path / "out" / "server_tuning.json")
    assert [one.candidate.draft_length for one in found.tried[:3]] == [0, 2, 4]
    assert len({one.candidate.lookup for one in found.tried[1:]}) == 3
    assert found.speculative_config is not None
    assert found.chosen.lookup is not None
    assert (
        found.speculative_config.prompt_lookup_min,
        found.speculative_config.prompt_lookup_max,
    ) == found.chosen.lookup


def test_a_server_that_does_not_start(
    venv: Path, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own error is told, and its log is kept."""
    assert main([*words(venv, tiny_target.name, "ngram", tmp_path), "--vllm=--fails"]) == 2
    assert "OutOfMemoryError: CUDA out of memory" in capsys.readouterr().err
    assert os.listdir(tmp_path / "out") == ["engine.log"]


def run_cli(*words: str) -> int:
    """Return the exit code, whether returned or raised by argparse."""
    try:
        return main(list(words))
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--vllm", "--port 1"], "--port is set by tune-server"),
        (["--vllm=--speculative-config={}"], "--speculative-config is set by tune-server"),
        (["--vllm", "'"], "close its quotes"),
        (["--concurrency", "59"], "give at least 59"),
        (["--repeats", "2"], "--repeats"),
    ],
)
def test_mistakes(
    options: list[str], told: str, venv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*words(venv, "nowhere", "ngram", tmp_path), *options])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert told in capsys.readouterr().err
    assert json.dumps(sorted(os.listdir(tmp_path))) == '["prompts.txt", "venv"]'
