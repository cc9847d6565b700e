"""An engine that a command starts anew for each drafter: what it counts, how it ends, and what is said of failures.

The command starts a process that hands requests on to a stand-in in the process of the test.
"""

import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import DRAFT_LENGTH, FakeEngine
from runs import base_of, make_config, write_held_out

from draftsmith.data.http import Server
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import DRAFTERS, Target, load_drafter, save_drafter
from draftsmith.models.drafter_configs import EagleConfig
from draftsmith.models.errors import UserError
from draftsmith.recipes.cli.main import main
from draftsmith.train import train
from draftsmith.train.engine import restarted
from draftsmith.train.engine.restarted import COMMAND, ENGINE_LOG, is_there, started_engine
from draftsmith.train.run_folder.checkpoint import checkpoints

SCRIPT = Path(__file__).parents[1] / "helpers" / "forwarding_engine.py"
PROMPT = "heat the iron"


def server_at(url: str) -> Server:
    return Server(url, "--engine", "mend it")


@pytest.fixture
def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def engine(tiny_target: Target, free_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """The stand-in behind the address, of which the command makes the engine."""
    monkeypatch.setattr(restarted, "LOOK_SECONDS", 0.02)
    engine = FakeEngine(tiny_target, "ngram")
    words = [sys.executable, str(SCRIPT), free_url.rpartition(":")[2], engine.url]
    monkeypatch.setenv(COMMAND, shlex.join(words))
    yield engine
    engine.close()


def test_each_drafter_has_an_engine_of_its_own(
    engine: FakeEngine, tiny_target: Target, tiny_target_dir: Path, free_url: str, tmp_path: Path
) -> None:
    """Two kinds, which no swap could change; each is counted as draftsmith counts it, and nothing runs afterwards."""
    torch.manual_seed(0)
    for kind in ("medusa", "draft_model"):
        drafter = DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), tiny_target)
        save_drafter(drafter, tmp_path / kind)
    (tmp_path / "prompts.txt").write_text(PROMPT + "\n")
    words = ["evaluate", "--engine", free_url, "--target", str(tiny_target_dir), "--max-new-tokens", "8"]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "--repeats", "1", "--out", str(tmp_path / "out")]
    words += ["--drafter", str(tmp_path / "medusa"), "--drafter", str(tmp_path / "draft_model")]
    assert main(words) == 0
    assert not is_there(server_at(free_url))
    assert (tmp_path / "out" / ENGINE_LOG).is_file()
    files = sorted((tmp_path / "out").glob("*/evaluation.json"))
    assert len(files) == 2
    for file in files:
        evaluation = read_evaluation(file)
        (row,) = evaluation.judged
        assert row.start_seconds
        assert row.swap_seconds is None
        decoder = SpeculativeDecoder(tiny_target, load_drafter(evaluation.drafter, tiny_target))
        output = decoder.generate([tiny_target.encode(PROMPT)], 8, draft_length=DRAFT_LENGTH)
        expected = output.stats.total
        assert replace(row.acceptance, num_rounds=expected.num_rounds) == expected


@pytest.mark.parametrize(("word", "refused"), [("sglang", False), ("", True)])
def test_an_sglang_gets_its_own_export(
    word: str,
    refused: bool,
    engine: FakeEngine,
    tiny_target: Target,
    tiny_target_dir: Path,
    free_url: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """EAGLE-1's config names another class for it; a command that hides that it starts an SGLang is refused."""
    engine.form, engine.models[0]["owned_by"] = "sglang", "sglang"
    monkeypatch.setenv(COMMAND, f"{os.environ[COMMAND]} {word}")
    torch.manual_seed(0)
    save_drafter(DRAFTERS["eagle"].from_target(EagleConfig(), tiny_target), tmp_path / "drafter")
    (tmp_path / "prompts.txt").write_text(PROMPT + "\n")
    words = ["evaluate", "--engine", free_url, "--target", str(tiny_target_dir), "--max-new-tokens", "8"]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "--repeats", "1", "--out", str(tmp_path / "out")]
    assert main([*words, "--drafter", str(tmp_path / "drafter")]) == (2 if refused else 0)
    if refused:
        assert "let the word sglang stand in the command" in capsys.readouterr().err
        return
    assert engine.architectures == ["LlamaForCausalLMEagle"]
    (row,) = read_evaluation(tmp_path / "out" / "evaluation.json").judged
    assert row.start_seconds
    assert row.setting.judge.engine == "SGLang 0.5.23"
    decoder = SpeculativeDecoder(tiny_target, load_drafter(tmp_path / "drafter", tiny_target))
    expected = decoder.generate([tiny_target.encode(PROMPT)], 8, draft_length=DRAFT_LENGTH).stats.total
    assert replace(row.acceptance, num_rounds=expected.num_rounds) == expected


def test_a_run_starts_an_engine_for_each_checkpoint(
    engine: FakeEngine, tiny_target: Target, free_url: str, tmp_path: Path
) -> None:
    base: dict[str, Any] = base_of(Path(tiny_target.name), tiny_target, tmp_path)
    evaluation = {"engine": free_url, "prompts": str(write_held_out(tmp_path)), "num_prompts": 2, "max_new_tokens": 8}
    evaluation |= {"draft_length": DRAFT_LENGTH, "repeats": 1}
    run_config = {"steps": 2, "checkpoint_every": 1, "device": "cpu"}
    run = train(make_config("medusa", base, tmp_path / "run", run=run_config, evaluation=evaluation))
    for checkpoint in checkpoints(run):
        (row,) = read_evaluation(checkpoint / "evaluation.json").judged
        assert row.start_seconds
    assert not is_there(server_at(free_url))
    assert (run / ENGINE_LOG).is_file()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo loading; echo no memory left; exit 3", r"ended: no memory left \(.*engine.log has all of it"),
        ("exit 0", "ended: no message"),
        ("sleep 99 & sleep 99", "did not answer in 0 s"),
    ],
)
def test_an_engine_that_does_not_start(
    command: str, reason: str, free_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = "sleep" in command
    monkeypatch.setattr(restarted, "START_SECONDS", 0.2 if hangs else 30.0)
    monkeypatch.setattr(restarted, "LOOK_SECONDS", 0.05)
    waits: list[int] = []
    start = started_engine(command, tmp_path, server_at(free_url), tmp_path / "engine.log", lambda: waits.append(1))
    (tmp_path / "engine.log").write_text("ValueError: of an earlier start\n")
    with pytest.raises(UserError, match=reason), start:
        pass
    assert not hangs or len(waits) <= 5


def test_all_processes_end_and_an_interrupt_ends_them_too(free_url: str, tmp_path: Path) -> None:
    """A process that the command left in the background, too."""

    def interrupted() -> None:
        if (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt

    command = f"sleep 99 & echo $! > {tmp_path}/pid; wait"
    start = started_engine(command, tmp_path, server_at(free_url), tmp_path / "engine.log", interrupted)
    with pytest.raises(KeyboardInterrupt), start:
        pass
    state = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/stat")
    for _ in range(100):  # a process that is killed ends when it is scheduled next
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(state.read_text())


def test_what_answers_already_is_no_new_engine(engine: FakeEngine, tmp_path: Path) -> None:
    start = started_engine("true", tmp_path, server_at(engine.url), tmp_path / "engine.log", lambda: None)
    with pytest.raises(UserError, match="answers before .* end what runs there"), start:
        pass
