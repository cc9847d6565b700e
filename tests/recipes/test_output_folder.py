"""What commands write: one launch a folder, all or nothing, and the same command again succeeds.

A fault is set at every change on the disk in turn, as a full disk and as a kill (`disk_faults`).
"""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from disk_faults import Contents, Killed, contents, failing_disk, recorded_changes, restore
from reports import evaluation as evaluation_content
from reports import result
from rich.console import Console

from draftsmith.data.answers.journal import Journal, merge_journals
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.processes import locked
from draftsmith.data.samples.folder import INDEX, read_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.results import Evaluation, read_evaluation, upgraded
from draftsmith.inference.measuring.spans import Span
from draftsmith.inference.planning.costs import Costs
from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import from_json
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.evaluation import comparison
from draftsmith.recipes.evaluation.comparison import refuse_others, write_evaluations
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.reports.report import build_report
from draftsmith.recipes.serving.export_command import export
from draftsmith.train.run_folder.checkpoint import Progress, checkpoints, damage, save_checkpoint

MOST_CHANGES = 200


def after_every_fault(folder: Path, kills: bool, act: Callable[[], Any], check: Callable[[], Any]) -> int:
    """Let the change of each number fail in turn while `act` works in the folder, and `check` what is left.

    Returns how many changes `act` makes. An error is one of the user's, in one line.
    """
    for number in range(1, MOST_CHANGES):
        with failing_disk(folder, number, kills) as disk:
            try:
                act()
            except Killed:
                assert kills
            except UserError as error:
                assert "No space left" in str(error), error  # noqa: PT017
                assert "\n" not in str(error), error  # noqa: PT017
        check()
        if not disk.has_failed:
            return number
    raise AssertionError("it changes the disk without end")


def names(folder: Path) -> set[str] | None:
    """The files in a folder, hidden ones left out; None where there is no folder."""
    return {path.name for path in folder.iterdir() if path.name[0] != "."} if folder.is_dir() else None


@pytest.fixture
def checkpoint(tiny_target: Target, tmp_path: Path) -> Path:
    drafter_class = DRAFTERS["medusa"]
    save_drafter(drafter_class.from_target(drafter_class.config_class(kind="medusa"), tiny_target), tmp_path / "medusa")
    return tmp_path / "medusa"


# --- one process a folder


@pytest.mark.parametrize(
    "command",
    [
        "evaluate --target {target} --drafter ngram --prompts {prompts} --out {out}",
        "tune --target {target} --drafter ngram --prompts {prompts} --out {out}",
        "replay --target {target} --drafter ngram --prompts {prompts} --out {out}",
        "load-test --target {target} --drafter ngram --prompts {prompts} --concurrency 1 --out {out}",
        "plan --target {target} --drafter ngram --out {out}",
        "quickstart --target {target} --out {out}",
        "auto --target {target} --traffic {prompts} --out {out}",
        "refresh --target {target} --traffic {prompts} --drafter {checkpoint} --out {out}",
        "prepare --target {target} --prompts {prompts} --out {out}",
        "export {checkpoint} --target {target} --engine vllm --out {out}",
        "train medusa target={target} data.samples={samples} run.dir={out}",
    ],
)
def test_a_folder_in_use_is_refused(
    command: str, checkpoint: Path, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is decoded or trained, with the process that holds it."""
    (tmp_path / "prompts.txt").write_text("heat the iron\nstrike it\n")
    (tmp_path / "samples").mkdir()
    for name in (INDEX, "prepared.json"):
        (tmp_path / "samples" / name).touch()
    where = {"target": tiny_target.name, "prompts": tmp_path / "prompts.txt", "checkpoint": checkpoint}
    where["samples"], out = tmp_path / "samples", tmp_path / "out"
    with locked(out):
        assert main([word.format(**where, out=out) for word in command.split()]) == 2
    assert f"{out} is being written by process " in capsys.readouterr().err
    assert not out.exists()


# --- what was measured before


def test_a_checkpoint_keeps_its_own_measurement(
    checkpoint: Path, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`best` rests on it."""
    (checkpoint / "evaluation.json").write_text("of training")
    (tmp_path / "prompts.txt").write_text("heat the iron\n")
    for command in ("evaluate", "tune"):
        words = f"{command} --target {tiny_target.name} --drafter ngram --prompts {tmp_path / 'prompts.txt'} --out"
        assert main([*words.split(), str(checkpoint)]) == 2
        assert "holds a model, " in (told := capsys.readouterr().err)
        assert f"--out {tmp_path / 'evaluation'}" in told
    assert (checkpoint / "evaluation.json").read_text() == "of training"


def test_a_run_keeps_its_own_evaluations(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "prompts.txt").write_text("heat the iron\n")
    words = f"evaluate --target {tiny_target.name} --drafter ngram --prompts {tmp_path / 'prompts.txt'} --out"
    assert main([*words.split(), str(tmp_path / "run")]) == 2
    assert f"is a run with evaluations of its own: give a folder in it, as {tmp_path / 'run' / 'evaluation'}" in (
        capsys.readouterr().err
    )


def typed_evaluation(drafter: str, keep: float) -> Evaluation:
    return from_json(Evaluation, upgraded(evaluation_content([result(keep, 1.0)], drafter, drafter)))


def test_drafters_of_two_evaluations_never_stand_side_by_side(tmp_path: Path) -> None:
    """A report would show them as if they had been measured together."""
    write_evaluations([typed_evaluation("a", 0.5), typed_evaluation("b", 0.6)], {}, None, tmp_path)
    refuse_others(tmp_path, ["a", "b"], "evaluation.json", "an evaluation")
    for drafters in (["a"], ["a", "c"], ["b", "a"]):
        with pytest.raises(UserError, match="an evaluation of other drafters lies in"):
            refuse_others(tmp_path, drafters, "evaluation.json", "an evaluation")


# --- all or nothing


@pytest.mark.parametrize("kills", [False, True])
def test_an_export_is_absent_or_whole(kills: bool, checkpoint: Path, tiny_target: Target, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = ExportSettings(target=tiny_target.name, checkpoint=str(checkpoint), engine="vllm", out=out)
    whole = {"README.md", "config.json", "model.safetensors", "serve_vllm.sh", "serve_vllm_plugin.sh", "vllm_medusa.py"}

    def check() -> None:
        assert names(out) in (None, whole)
        if out.exists():
            assert (out / "serve_vllm.sh").read_text().endswith("\n")
            for path in out.iterdir():
                path.unlink()
            out.rmdir()

    assert after_every_fault(tmp_path, kills, lambda: export(settings, tiny_target, Console(quiet=True)), check) > 20
    assert names(tmp_path) == {"medusa"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kills", [False, True])
def test_an_evaluation_of_several_drafters_is_absent_or_whole(kills: bool, tmp_path: Path) -> None:
    evaluations = [typed_evaluation("a", 0.5), typed_evaluation("b", 0.6)]
    out = tmp_path / "out"

    def check() -> None:
        assert names(out) in (None, {"1-a", "2-b", "evaluation.md"})

    assert after_every_fault(tmp_path, kills, lambda: write_evaluations(evaluations, {}, None, out), check) > 10
    refuse_others(out, ["a", "b"], "evaluation.json", "an evaluation")


@pytest.mark.parametrize("kills", [False, True])
def test_a_report_is_of_one_evaluation(kills: bool, tmp_path: Path) -> None:
    """Never of some files of an earlier one and some of the newer, whatever ended the writing of the newer."""
    evaluations = [typed_evaluation("a", 0.5), typed_evaluation("b", 0.6)]
    out, numbers = tmp_path / "out", itertools.count()
    found: list[float | None] = []

    def write_newer() -> None:
        number = float(next(numbers))
        write_evaluations([replace(evaluation, seconds=number) for evaluation in evaluations], {}, None, out)

    def check() -> None:
        seconds = [drafter.evaluation.seconds for drafter in read_report_data(out).drafters]
        assert len(seconds) == 2
        assert len(set(seconds)) == 1
        found.append(seconds[0])

    write_newer()
    assert after_every_fault(tmp_path, kills, write_newer, check) > 20
    assert found == sorted(found)
    assert 0.0 in found


def test_costs_and_texts_of_an_earlier_evaluation_go(tmp_path: Path) -> None:
    """The report would predict speeds with them, and show them, beside results that they are not of."""
    evaluations = [typed_evaluation("a", 0.5), typed_evaluation("b", 0.6)]
    costs = {name: Costs("cpu", "t", name, "medusa", {"step: pass": 1.0}, {"pass": 9.0}, 1.0) for name in "ab"}

    def written() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json"))

    write_evaluations(evaluations, costs, [], tmp_path)
    whole = ["1-a/costs.json", "1-a/evaluation.json", "2-b/costs.json", "2-b/evaluation.json", "samples.json"]
    assert written() == whole
    predicted = [read_evaluation(tmp_path / name / "evaluation.json").results[0] for name in ("1-a", "2-b")]
    for row in predicted:
        assert row.predicted_speedup == pytest.approx(10 * row.tokens_a_round / 14)
    write_evaluations(evaluations, {"b": costs["b"]}, None, tmp_path)
    assert written() == whole[1:-1]
    assert read_evaluation(tmp_path / "1-a/evaluation.json").results[0].predicted_speedup is None


MEASUREMENTS = {
    "evaluate": "--certify --repeats 1",
    "tune": "--repeats 1",
    "load-test": "--repeats 1 --concurrency 1 --requests 10",
}


@pytest.mark.parametrize("command", MEASUREMENTS)
def test_a_measurement_killed_at_any_change_is_absent_or_whole(
    command: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command then writes all of it. The report is written behind it, of what is there."""
    monkeypatch.setattr(comparison, "costs_beside", lambda *_: None)  # else measured where the time is enough
    (tmp_path / "prompts.txt").write_text("heat the iron\nstrike it\n")
    words = f"{command} --target {tiny_target.name} --drafter ngram --prompts {tmp_path / 'prompts.txt'}"
    words += f" --max-new-tokens 3 {MEASUREMENTS[command]} --out {tmp_path / 'out'}"

    def visible(state: Contents) -> set[str]:
        parts = {name: Path(name).parts for name in state if not re.search(r"/(figures|report\.)", name)}
        return {name for name in parts if not any(part[0] == "." for part in parts[name])}

    before = visible(contents(tmp_path))
    with recorded_changes(tmp_path) as states:
        assert main(words.split()) == 0
    whole = visible(contents(tmp_path))
    assert all(visible(state) in (before, whole) for state in states)
    assert whole > before
    half = next(state for state in reversed(states) if visible(state) == before)
    assert len(half) > len(before)  # in a hidden folder
    restore(tmp_path, half)
    assert main(words.split()) == 0
    assert visible(contents(tmp_path)) == whole


@pytest.mark.parametrize("kills", [False, True])
def test_answers_are_merged_whole(kills: bool, tmp_path: Path) -> None:
    """The journals stay until all samples are written, and index.json, which says so, is there last."""
    samples = [Sample([1, 2, 3, index], [Span(1, 4)], prompt_index=index) for index in range(6)]
    (tmp_path / "prepared.json").write_text("{}")

    def write_journals() -> None:
        for rank in (0, 1):
            journal = Journal(tmp_path, rank, "run")
            for index in range(rank, 6, 2):
                journal.append(index, [samples[index]])
            journal.close()

    def check() -> None:
        if (tmp_path / INDEX).is_file():
            assert list(read_samples(tmp_path)) == samples
            (tmp_path / INDEX).unlink()
            write_journals()
        assert len(list(tmp_path.glob("answers-*"))) == 2

    write_journals()
    assert after_every_fault(tmp_path, kills, lambda: merge_journals(tmp_path, "run"), check) > 6


@pytest.mark.parametrize("kills", [False, True])
def test_a_checkpoint_is_absent_or_whole(kills: bool, tiny_target: Target, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    drafter = DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), tiny_target)
    optimizer = torch.optim.AdamW(drafter.parameters())
    steps = iter(range(1, MOST_CHANGES))

    def check() -> None:
        assert all(damage(checkpoint) is None for checkpoint in checkpoints(tmp_path))

    (tmp_path / "checkpoints").mkdir()
    number = after_every_fault(
        tmp_path,
        kills,
        lambda: save_checkpoint(accelerator, drafter, optimizer, tmp_path, Progress(next(steps), 1.0)),
        check,
    )
    assert len(checkpoints(tmp_path)) >= 1
    assert number > 5


@pytest.mark.parametrize("number", [1, 4, 13])
def test_a_report_is_of_whole_files(number: int, tmp_path: Path) -> None:
    write_evaluations([typed_evaluation("a", 0.5), typed_evaluation("b", 0.6)], {}, None, tmp_path / "out")
    with failing_disk(tmp_path, number, kills=True), pytest.raises(Killed):
        build_report(tmp_path / "out")
    for path in (tmp_path / "out").rglob("[!.]*"):
        beginning = path.read_bytes()[:8] if path.is_file() else b""
        assert path.suffix != ".png" or (beginning == b"\x89PNG\r\n\x1a\n" and path.read_bytes()[-8:-4] == b"IEND")
        assert path.name != "report.json" or json.loads(path.read_text())
    assert build_report(tmp_path / "out").is_file()


# --- the same command again


def test_a_wrong_seed_costs_nothing(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as no answer is written, a folder takes other settings; after that it says which it has."""
    source, out = tmp_path / "prompts.txt", tmp_path / "out"
    source.write_text("".join(f"strike {number}\n" for number in range(40)))
    wrong = PrepareSettings(max_new_tokens=4, seed=1, held_out_share=0.2)
    right = PrepareSettings(max_new_tokens=4, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.data.answers.prepare.Journal", lambda *_: pytest.fail("stopped here"))
        with pytest.raises(pytest.fail.Exception):
            prepare(tiny_target, str(source), out, wrong)
    assert (out / "held_out.jsonl").is_file()
    prepare(tiny_target, str(source), out, right)
    assert names(out) == {"prepared.json", INDEX, "samples-00000.arrow"}  # nothing of the wrong ones
    with pytest.raises(UserError, match=r"settings.seed 2 -> 1.*: give the same again"):
        prepare(tiny_target, str(source), out, wrong)
