"""`draftsmith export` from end to end: what lies in the folder afterwards, and that it was measured from there."""

import hashlib
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from drafters import untrained
from fake_server import FakeServer
from reports import result, write_results
from rich.console import Console
from safetensors.torch import load_file, save_file

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import OutputStats
from draftsmith.inference.decoding.schedule import Confident, Schedule
from draftsmith.inference.measuring.results import Evaluation, LosslessCheck, read_evaluation
from draftsmith.models import DRAFTERS, Target, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.command_settings import ExportSettings
from draftsmith.recipes.serving import export_command
from draftsmith.recipes.serving.engine_check import EngineReport, add_speed, check_engine
from draftsmith.recipes.serving.engine_speed import TimedBatch, engine_speed
from draftsmith.recipes.serving.export import Exported, export_checkpoint
from draftsmith.recipes.serving.export_command import export
from draftsmith.recipes.serving.model_card import (
    ServedFigures,
    metadata,
    schedule_of,
    served_result,
    training_facts,
    write_card,
)
from draftsmith.recipes.serving.serve_commands import write_scripts
from draftsmith.recipes.serving.vllm_run import EngineJob, EngineRun, SpeculativeConfig, run_environment
from draftsmith.recipes.watching.reference import read_reference
from draftsmith.train.engine.engine_errors import root_cause
from draftsmith.train.engine.vllm_counters import Counters

PROMPTS = ["heat the iron", "A draft is", "return [iron.hit()", "strikes it, and"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return str(path)


def save_checkpoint(kind: str, target: Target, directory: Path) -> str:
    torch.manual_seed(0)
    drafter_class = DRAFTERS[kind]
    save_drafter(drafter_class.from_target(drafter_class.config_class(kind=kind), target), directory)
    return str(directory)


def export_for_vllm(checkpoint: str, target: Target, out: Path, **settings: Any) -> None:
    required = {"target": target.name, "checkpoint": checkpoint, "engine": "vllm", "out": out}
    export(ExportSettings(**required, **settings), target, Console(quiet=True))


class FakeHub:
    """Records what huggingface_hub.HfApi would be asked."""

    def __init__(self) -> None:
        self.repos: list[str] = []
        self.uploaded: dict[str, set[str]] = {}

    def create_repo(self, repo_id: str, *, exist_ok: bool) -> None:
        assert exist_ok
        if "/" not in repo_id:
            raise OSError("403: not your namespace")
        self.repos.append(repo_id)

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        self.uploaded[repo_id] = {path.name for path in Path(folder_path).iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub()
    monkeypatch.setattr(export_command, "HfApi", lambda: hub)
    return hub


def test_everything_beside_the_weights(tiny_target: Target, prompts: str, tmp_path: Path, hub: FakeHub) -> None:
    checkpoint, out = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint"), tmp_path / "out"
    settings = {"prompts": prompts, "draft_length": (1, 3), "max_new_tokens": 8, "repeats": 1, "push": "me/drafter"}
    export_for_vllm(checkpoint, tiny_target, out, **settings)

    evaluation = read_evaluation(out / "evaluation.json")
    assert evaluation.drafter == str(out)  # measured from there
    assert [result.setting.draft_length for result in evaluation.results] == [1, 3]
    best = served_result(evaluation).setting.draft_length
    assert f'"num_speculative_tokens": {best}' in (out / "serve_vllm.sh").read_text()
    assert f"--speculative-num-steps {best}" in (out / "serve_sglang.sh").read_text()

    _, head, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head)["draftsmith"]["target"] == tiny_target.name
    assert yaml.safe_load(head)["draftsmith"]["draft_length"] == best
    assert "base_model" not in yaml.safe_load(head)  # a folder of this machine is none
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    for fact in (tiny_target.fingerprint(), digest, "held-out (4)", "me/drafter"):
        assert fact in text

    assert hub.repos == ["me/drafter"]
    assert hub.uploaded["me/drafter"] == {
        "README.md",
        "config.json",
        "evaluation.json",
        "evaluation.md",
        "model.safetensors",
        "serve_sglang.sh",
        "serve_vllm.sh",
    }


@pytest.mark.parametrize(("kind", "engines"), [("ngram", ["sglang", "vllm"]), ("suffix", ["vllm"])])
def test_drafters_without_weights_are_exported_as_commands(
    kind: str, engines: list[str], tiny_target: Target, prompts: str, tmp_path: Path
) -> None:
    """With what was measured of them, which a server can be watched against."""
    words = ["--engine", "vllm", "--target", tiny_target.name, "--prompts", prompts, "--device", "cpu"]
    more = ["--draft-length", "3", "--repeats", "1", "--max-new-tokens", "8", "--temperature", "1"]
    assert main(["export", kind, *words, *more, "--out", str(tmp_path / "out")]) == 0
    scripts = {path.stem.removeprefix("serve_"): path.read_text() for path in (tmp_path / "out").glob("*.sh")}
    assert sorted(scripts) == engines
    command = shlex.split(scripts["vllm"].splitlines()[-1])
    lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2} if kind == "ngram" else {}
    assert json.loads(command[-1]) == {"method": kind, "num_speculative_tokens": 3, **lookup}
    if kind == "ngram":
        words = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4"]
        assert shlex.split(scripts["sglang"].splitlines()[-1])[-4:] == words
    assert read_reference(tmp_path / "out", 3).temperature == 1.0
    assert f"# {kind} drafter for" in (tmp_path / "out/README.md").read_text()


def test_the_hub_refuses(tiny_target: Target, tmp_path: Path, hub: FakeHub) -> None:
    checkpoint = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint")
    with pytest.raises(UserError, match="--push nobody: 403"):
        export_for_vllm(checkpoint, tiny_target, tmp_path / "out", push="nobody")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"check": "venv"}, "--check needs --prompts"),
        ({"draft_length": (2, 3)}, "several --draft-length need --prompts"),
        ({"prompts": "prompts.jsonl"}, "no prompts file"),
    ],
)
def test_refused_before_anything_is_written(
    settings: dict[str, Any], message: str, tiny_target: Target, tmp_path: Path
) -> None:
    checkpoint = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint")
    with pytest.raises(UserError, match=message):
        export_for_vllm(checkpoint, tiny_target, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "name"), [("medusa", "me/eagle-medusa-7b"), ("draft_model", "eagle3-lab/draft"), ("eagle3", "me/eagle-3")]
)
def test_name_on_the_hub_is_no_trap(kind: str, name: str, tiny_target: Target, tmp_path: Path, hub: FakeHub) -> None:
    """The written command names the Hub's repository, from which vLLM reads a method as from a path."""
    checkpoint = save_checkpoint(kind, tiny_target, tmp_path / "checkpoint")
    with pytest.raises(UserError, match=f"--push {name}: vLLM would take the drafter for 'eagle"):
        export_for_vllm(checkpoint, tiny_target, tmp_path / "out", push=name)
    assert not (tmp_path / "out").exists()
    assert not hub.repos


def test_changed_target_is_asked_for(tiny_target: Target, tmp_path: Path) -> None:
    """A drafter that was trained along with its target fits no other."""
    checkpoint = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint")
    (tmp_path / "checkpoint/target").mkdir()
    with pytest.raises(UserError, match="give --target"):
        export_for_vllm(checkpoint, tiny_target, tmp_path / "out")


def test_without_prompts_the_layers_are_never_read(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a drafter can be exported where its target fits into no memory. The card still tells which one it was."""
    checkpoint = save_checkpoint("eagle3", tiny_target, tmp_path / "checkpoint")
    monkeypatch.setattr(Target, "from_pretrained", None)
    out = tmp_path / "out"
    words = ["export", checkpoint, "--engine", "vllm", "--target", tiny_target.name, "--out", str(out)]
    assert main(words) == 0
    assert str(tiny_target.fingerprint()) in (out / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_of_the_checkpoint_is_kept(dtype: torch.dtype, tiny_target: Target, tmp_path: Path) -> None:
    drafter = DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), tiny_target)
    save_drafter(drafter, tmp_path / "checkpoint", dtype)
    export_for_vllm(str(tmp_path / "checkpoint"), tiny_target, tmp_path / "out")
    before, after = load_file(tmp_path / "checkpoint/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(tensor, before[name]) and tensor.dtype == dtype for name, tensor in after.items())


def write_rows(folder: Path, rows: list[tuple[int, int, float]]) -> Evaluation:
    """An evaluation of so many (batch size, draft length, speedup), each with an interval of 0.05 to either side."""
    results = [
        result(0.6, 1.0, length=length, batch_size=size)
        | {"speedup": speedup, "speedup_ci95": [speedup - 0.05, speedup + 0.05]}
        for size, length, speedup in rows
    ]
    write_results(folder / "evaluation.json", results)
    return read_evaluation(folder / "evaluation.json")


def test_blocks_that_see_both_ways_are_served_whole(tiny_target: Target, prompts: str, tmp_path: Path) -> None:
    """vLLM cuts a block to the tokens that are asked for, whose rows then see others than they learnt with."""
    save_drafter(untrained("dflash", tiny_target, block_size=7), tmp_path / "checkpoint")
    for name, settings in (("plain", {}), ("measured", {"prompts": prompts, "max_new_tokens": 8, "repeats": 1})):
        out = tmp_path / name
        export_for_vllm(str(tmp_path / "checkpoint"), tiny_target, out, **settings)
        assert '"num_speculative_tokens": 6' in (out / "serve_vllm.sh").read_text()
    rows = read_evaluation(tmp_path / "measured" / "evaluation.json").results
    assert [row.setting.draft_length for row in rows] == [6]


def test_schedule_by_batch_size(tmp_path: Path) -> None:
    """The best length at each size, none where no interval lies above 1; the first goes into the command itself."""
    rows = [(1, 2, 1.2), (1, 4, 1.5), (8, 2, 1.1), (8, 4, 0.9), (32, 2, 1.01), (32, 4, 0.5)]
    evaluation = write_rows(tmp_path, rows)
    assert served_result(evaluation) == evaluation.results[1]
    assert schedule_of("eagle3", evaluation) == Schedule(((1, 4), (8, 2), (32, 0)))
    assert schedule_of("medusa", evaluation) is None  # vLLM cannot change the number of heads
    first, fastest, *others = evaluation.results
    for draft in ({"tree_nodes": 8}, {"schedule": Confident(4, 0.2)}):  # which no export is served with
        other = replace(fastest, setting=replace(fastest.setting, **draft))
        assert served_result(replace(evaluation, results=[first, other, *others])) == first
    larger = write_rows(tmp_path, rows[2:])
    assert schedule_of("eagle3", larger) == Schedule(((1, 2), (32, 0)))  # both engines want the first from 1
    assert schedule_of("eagle3", write_rows(tmp_path, rows[:2])) is None


def test_card_names_the_row_that_is_served(tmp_path: Path) -> None:
    evaluation = write_rows(tmp_path, [(1, 1, 1.1), (1, 3, 1.5)])
    exported = Exported(Path("out"), "vllm", "eagle3", "me/target", None, None, ("vllm",))
    length = round(evaluation.results[1].acceptance.mean_acceptance_length, 3)
    assert metadata(exported, evaluation).draftsmith == ServedFigures("me/target", 3, length, 1.5)


@pytest.mark.parametrize(
    ("accepted", "said"),
    [
        (None, "No engine has served"),
        (12, "vLLM 0 agrees with"),
        (0, "vLLM 0 **disagrees with** draftsmith on 1 prompts"),
    ],
)
def test_card_says_what_an_engine_made_of_it(
    accepted: int | None, said: str, tiny_target: Target, tmp_path: Path
) -> None:
    """Nothing of an engine's acceptance where none was asked, or where it was another one."""
    exported = export_checkpoint(
        save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint"), "vllm", tiny_target, tmp_path / "out"
    )
    report = None
    if accepted is not None:
        ours = OutputStats([Stats(4, num_drafts=10, num_accepted_tokens=12)])
        run = EngineRun("vLLM 0", [[1]], Counters(10, 40, accepted))
        report = EngineReport("medusa", 4, ours, ours.total, run, LosslessCheck(1, 1, 0, 0), in_fp32=True)
    write_card(exported, tmp_path / "checkpoint", {}, None, report)
    assert said in (tmp_path / "out/README.md").read_text()


def test_a_failed_check_is_on_the_card(
    tiny_target: Target, prompts: str, tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory stays, with what was found; nothing of it is pushed."""
    ours = OutputStats([Stats(4, num_drafts=10, num_accepted_tokens=12)])
    run = EngineRun("vLLM 0", [[1]], Counters(10, 40, 0))
    report = EngineReport("medusa", 4, ours, ours.total, run, LosslessCheck(1, 1, 0, 0), in_fp32=True)
    monkeypatch.setattr(export_command, "check_exported", lambda *_: report)
    checkpoint, out = save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint"), tmp_path / "out"
    settings = {"prompts": prompts, "num_prompts": 1, "draft_length": (2,), "max_new_tokens": 4, "repeats": 1}
    with pytest.raises(UserError, match="disagree"):
        export_for_vllm(checkpoint, tiny_target, out, **settings, check="venv", push="me/drafter")
    assert "**disagrees with** draftsmith" in (out / "README.md").read_text()
    assert not hub.repos


@pytest.mark.parametrize(
    ("engine", "kind", "served_by"),
    [
        ("vllm", "eagle3", ["vllm", "sglang"]),
        ("vllm", "eagle", ["vllm"]),
        ("sglang", "eagle", ["sglang"]),
        ("vllm", "medusa", ["vllm"]),
        ("vllm", "p_eagle", ["vllm"]),
        ("speculators", "eagle3", ["vllm"]),
        ("fasterdecoding", "medusa", []),
    ],
)
def test_which_engines_serve_a_directory(
    engine: str, kind: str, served_by: list[str], tiny_target: Target, tmp_path: Path
) -> None:
    """One directory of an EAGLE-3 drafter serves both; EAGLE-1 has an architecture of another name for each."""
    checkpoint = save_checkpoint(kind, tiny_target, tmp_path / "checkpoint")
    exported = export_checkpoint(checkpoint, engine, tiny_target, tmp_path / "out")
    assert list(exported.served_by) == served_by
    scripts = write_scripts(exported, "somewhere", 2)
    assert {path.name for path in (tmp_path / "out").glob("*.sh")} == {f"serve_{name}.sh" for name in scripts}


# --- the check against an engine, with a script in its place


FAKE_ENGINE = """
import json, sys
job = json.load(open(sys.argv[2]))
settings, answer = job["llm"]["speculative_config"], json.load(open({text!r}))
if settings:
    assert settings["num_speculative_tokens"] == 2
else:  # without the drafter: two and a half times as slow
    for request in answer["timed"]:
        request.update(seconds=2.5 * request["seconds"], num_drafts=0)
json.dump({{"version": "vLLM 0", **answer}}, open(sys.argv[3], "w"))
"""


def fake_venv(folder: Path, answer: dict[str, Any]) -> Path:
    """An environment whose python says what the test wants, whatever script it is given."""
    (folder / "bin").mkdir(parents=True)
    (folder / "answer.json").write_text(json.dumps(answer))
    script = folder / "engine.py"
    script.write_text(FAKE_ENGINE.format(text=str(folder / "answer.json")))
    (folder / "bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    (folder / "bin/python").chmod(0o755)
    return folder


@pytest.mark.parametrize("change", ["none", "counters", "text"])
def test_disagreement_is_found(change: str, tiny_target: Target, tmp_path: Path) -> None:
    """Our own answers in the engine's mouth agree; one wrong token or a few percent of acceptance do not."""
    drafter = load_drafter("ngram", tiny_target)
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    output = SpeculativeDecoder(tiny_target, drafter).generate(prompts, max_new_tokens=40, draft_length=2)
    total = output.stats.total
    assert total.num_accepted_tokens
    answer = {
        "token_ids": output.token_ids,
        "counters": {
            "num_drafts": total.num_drafts,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens if change != "counters" else 0,
            "accepted_per_position": [1, 0],
        },
        "timed": [{"num_requests": 1, "seconds": 0.02, "num_tokens": 10, "num_drafts": 5, "num_accepted_tokens": 5}]
        * len(prompts),
    }
    if change == "text":
        answer["token_ids"] = [[(ids[0] + 1) % 300, *ids[1:]] for ids in output.token_ids]
    settings = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    venv = fake_venv(tmp_path / "venv", answer)
    report = check_engine(str(venv), settings, drafter, tiny_target, prompts, 40, is_timed=True)
    assert report.agrees == (change == "none")
    assert report.tolerance == 0.001
    near_tie = replace(report.texts, near_tie_divergences=1)
    assert replace(report, texts=near_tie).tolerance == replace(report, in_fp32=False).tolerance == 0.02
    assert replace(report, kind="suffix").agrees == (change != "text")  # which vLLM drafts by rules of its own
    assert to_json(report)["agrees"] == report.agrees
    assert report.texts.identical == (0 if change == "text" else len(prompts))
    row = to_json(add_speed(report, venv, tiny_target, prompts, 40))["speed"]
    assert row["measured_speedup"] == pytest.approx(2.5)
    assert row["forecast_speedup"] == pytest.approx(row["acceptance_length"] * 5 / 4)


class SpeculatingServer(FakeServer):
    """A vLLM at an address, whose page counts two drafts of two tokens, one of them accepted, for each answer."""

    counts = {"drafts": 2, "draft_tokens": 4, "accepted_tokens": 1}

    def get(self, path: str) -> dict | str:
        lines = [f"vllm:spec_decode_num_{name}_total {7 + n * len(self.asked)}" for name, n in self.counts.items()]
        return {"/metrics": "\n".join(lines) + "\n", "/version": {"version": "0"}}.get(path, super().get(path))


def test_an_engine_at_an_address(tiny_target: Target) -> None:
    """What it counted before the check, and for others, is not its own; one that drafts nothing is told so."""
    server, drafter = SpeculatingServer(tiny_target, "vllm"), load_drafter("ngram", tiny_target)
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    settings = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    report = check_engine(server.url, settings, drafter, tiny_target, prompts, 10)
    assert report.engine.version == "vLLM 0"
    assert report.engine.counters == Counters(8, 16, 4)
    assert report.texts.identical == len(prompts)
    server.counts = {"drafts": 0}
    with pytest.raises(UserError, match="drafted nothing"):
        check_engine(server.url, settings, drafter, tiny_target, prompts, 10)
    server.models = []
    with pytest.raises(UserError, match=r"serves \[\]"):
        check_engine(server.url, settings, drafter, tiny_target, prompts, 10)
    server.close()


def test_no_environment(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no bin/python there"):
        run_environment(tmp_path, None, tiny_target, EngineJob([[1, 2]], 4))


WORKER = "(Worker pid=31475) ERROR 11-21 17:44:45 [multiproc_executor.py:1063] "
CORE = "(EngineCore pid=30304) ERROR 11-21 17:44:45 [core.py:1512] "
IN_THE_WORKER = f"""\
(Worker pid=31475) WARNING 11-21 17:44:30 [__init__.py:211] min_p won't work with speculative decoding.
{WORKER}Traceback (most recent call last):
{WORKER}KeyError: 'fc'
{WORKER}During handling of the above exception, another exception occurred:
{WORKER}    assert not SYNTHETIC_MODE, "Synthetic acceptance not supported with CPU sampling"
{WORKER}AssertionError: Synthetic acceptance not supported with CPU sampling
{CORE}    raise RuntimeError(
{CORE}RuntimeError: Worker failed with error 'Synthetic', please check the stack trace above for the root cause
"""
IN_THE_CORE = f"""\
{CORE}EngineCore failed to start.
{CORE}ValueError: There is no module or parameter named 'model.x' in Eagle3LlamaForCausalLM.
"""
DEAD = """\
    raise self._format_exception(outputs) from None
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
  warnings.warn('resource_tracker: There appear to be 1 leaked shared_memory objects
"""
IN_THE_SETTINGS = """\
Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
  Value error, synthetic_acceptance_rates must have length 3, got [0.0]. [type=value_error]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""


@pytest.mark.parametrize(
    ("stdout", "stderr", "cause"),
    [
        (IN_THE_WORKER, DEAD, "AssertionError: Synthetic acceptance not supported with CPU sampling"),
        (IN_THE_CORE, DEAD, "ValueError: There is no module or parameter named 'model.x' in Eagle3LlamaForCausalLM."),
        (
            "WARNING 11-21 17:44:30 [a.py:1] careful\n",
            IN_THE_SETTINGS,
            "must have length 3, got [0.0]. [type=value_error]",
        ),
        ("", "Loading\nKilled\n", "Killed"),
        ("", "", "no message"),
    ],
)
def test_cause_of_a_failure(stdout: str, stderr: str, cause: str) -> None:
    """Logs of vLLM 0.32.0, shortened: of a failing worker, engine and argument, and of none that says why."""
    found = root_cause(stdout, stderr)
    assert found.endswith(cause)
    assert "\n" not in found


# --- its speed


def timed(seconds: float, num_tokens: int, num_drafts: int = 0) -> TimedBatch:
    """One request; where it was drafted for, each of its rounds had a draft and brought a token beside it."""
    return TimedBatch(1, seconds, num_tokens, num_drafts, num_tokens - num_drafts if num_drafts else 0)


def test_forecast_of_speed() -> None:
    """Times from the first and third prompt, forecast for the second and fourth: 3 tokens a draft at half a round."""
    plain = [timed(0.4, 40), timed(9, 90), timed(0.6, 60), timed(1, 10)]  # 10 ms; on the others 100 ms
    drafted = [
        timed(0.5, 40, 20),
        timed(2, 60, 30),
        timed(0.1, 20, 10),
        timed(2, 40, 10),
    ]  # 20 ms; others 40 ms a token
    ours = OutputStats([Stats(2, num_rounds=10, num_drafts=10, num_accepted_tokens=n) for n in (0, 15, 0, 25)])
    found = engine_speed(plain, drafted, ours)
    assert found is not None
    assert (found.plain_step_ms, found.round_ms) == pytest.approx((10, 20))
    assert found.acceptance_length == 3
    assert found.forecast_speedup == pytest.approx(3 * 10 / 20)
    assert found.measured_speedup == pytest.approx(100 / 40)
    assert engine_speed(plain[:1], drafted[:1], ours) is None
    lookup = engine_speed(plain, [TimedBatch(1, 0.5, 40)] * 4, ours)  # it found no draft in the texts that are timed
    assert lookup is not None
    assert lookup.round_ms == pytest.approx(1000 * 0.5 / 40)
    assert engine_speed([timed(0.1, 1), timed(0, 0)], drafted[:2], ours) is None


def test_quantised_checkpoint_is_not_exported_as_such(tiny_target: Target, tmp_path: Path) -> None:
    """Integer weights would be read as what they are not."""
    checkpoint = Path(save_checkpoint("medusa", tiny_target, tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, checkpoint / "model.safetensors")
    with pytest.raises(UserError, match=r"torch\.int8, which is not that of such a weight"):
        export_for_vllm(str(checkpoint), tiny_target, tmp_path / "out")


@pytest.mark.parametrize(
    ("written_by", "told"),
    [("decoder", "written by the target itself"), ("given", "off-policy"), (None, "not recorded")],
)
def test_the_card_says_who_wrote_the_text(written_by: str | None, told: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    environment = {"data_hash": "0" * 16, "git_commit": "abc", "template_hash": None}
    if written_by is not None:
        environment["data_written_by"] = written_by
    (run / "environment.json").write_text(json.dumps(environment))
    (run / "config.yaml").write_text(
        "{target: t, drafter: {kind: medusa}, data: {samples: data/my}, run: {steps: 2, seed: 0}}"
    )
    assert told in training_facts(run / "checkpoints" / "step-000002")["text"]
