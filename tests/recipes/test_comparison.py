"""`accelerate launch -m draftsmith.inference`: processes share the prompts; the first writes what all have counted."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import draftsmith.recipes
from draftsmith.inference.measuring.certify import CertifySettings
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import Target
from draftsmith.recipes.cli import evaluate
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.evaluation.comparison import (
    EvaluationOptions,
    certify_measured,
    evaluate_side_by_side,
    evaluation_paths,
)

LAUNCH = Path(draftsmith.recipes.__file__).parent / "launch"
COUNTED = ("num_rounds", "num_drafts", "num_accepted_tokens", "num_emitted_tokens", "acceptance_histogram", "lossless")


def test_two_processes_count_what_one_does(python: str, tiny_target: Target, tmp_path: Path) -> None:
    """The acceptance of all prompts, the speed of some; one table, one file, and as many files as drafters."""
    texts = [f"strike {'the iron ' * (i % 5)}{i}" for i in range(20)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = ["--target", tiny_target.name, "--drafter", "ngram", "--prompts", str(tmp_path / "p.jsonl")]
    words += ["--batch-size", "3", "2", "--max-new-tokens", "12", "--repeats", "2", "--device", "cpu"]
    assert main(["evaluate", *words, "--out", str(tmp_path / "alone")]) == 0
    start = [python, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "cpu.yaml")]
    start += ["--main_process_port", "0", "-m", "draftsmith.inference", *words, "--out", str(tmp_path / "shared")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("repeats of each setting") == 1
    alone, shared = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("alone", "shared"))
    assert alone["seconds"] > 0
    for one, pooled in zip(alone["results"], shared["results"], strict=True):
        assert {name: pooled[name] for name in COUNTED} == {name: one[name] for name in COUNTED}
        assert one["num_accepted_tokens"] > 0
        assert (one["num_prompts"], one["timed_prompts"]) == (20, 20)
        assert (pooled["num_prompts"], pooled["repeats"]) == (20, 2)
    assert [row["timed_prompts"] for row in shared["results"]] == [12, 10]  # of 7 and 10 batches 4 and 5


def test_a_certificate_is_not_shared_by_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is refused before anything is loaded: there is no such target."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--target", "/no/target", "--drafter", "ngram", "--prompts", "p.txt", "--out", str(tmp_path)]
    assert main(["evaluate", *words, "--certify"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --certify cannot be shared by 2 processes")


def test_some_of_what_was_measured_is_certified_later(tiny_target: Target, tmp_path: Path) -> None:
    """All else in the folder stays as it is, and what has a certificate is not certified again."""
    prompts, settings = PromptSet("p", [[5, 6, 7, 5, 6]] * 2), CertifySettings(max_new_tokens=8, num_texts=2)
    grid, options = [MeasureSettings(max_new_tokens=8, repeats=1)], EvaluationOptions(sample_texts=True)
    names, out = ["ngram", "suffix"], tmp_path / "out"
    measured = evaluate_side_by_side(tiny_target, names, [prompts], grid, out, options)
    samples = (out / "samples.json").read_bytes()
    ngram, suffix = certify_measured(tiny_target, names, ["ngram"], prompts, settings, out)
    assert ngram.certificate
    assert (replace(ngram, certificate=None), suffix) == tuple(measured)
    assert [read_evaluation(path) for path in evaluation_paths(out, names)] == [ngram, suffix]
    assert (out / "samples.json").read_bytes() == samples
    assert "Certificate of losslessness, ngram" in (out / "evaluation.md").read_text()
    later = replace(settings, draft_length=2)
    assert certify_measured(tiny_target, names, names, prompts, later, out)[0].certificate == ngram.certificate


def test_a_certificate_decodes_no_more_than_prompts_leave_room_for(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tmp_path: Path
) -> None:
    """Its own 64 tokens did not fit behind prompts that were checked for --max-new-tokens, when all was measured."""
    (tmp_path / "p.txt").write_text("strike the iron\n")
    words = ["--target", tiny_target.name, "--drafter", "ngram", "--prompts", str(tmp_path / "p.txt"), "--certify"]
    asked: list[int] = []
    monkeypatch.setattr(
        evaluate, "evaluate_side_by_side", lambda *args: asked.append(args[-1].certify.max_new_tokens) or []
    )
    for count in ("12", "100"):
        assert main(["evaluate", *words, "--max-new-tokens", count, "--out", str(tmp_path / "out")]) == 0
    assert asked == [12, 64]
