"""The training loop: what a run must not depend on, and what it leaves on disk."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from reports import result, write_results
from runs import arguments, base_of, final_weights, make_config, of_the_run, write_held_out
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.data.samples.folder import read_samples
from draftsmith.data.samples.sample import loss_mask
from draftsmith.models import DRAFTERS, Target
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.errors import UserError
from draftsmith.models.losses.divergences import compiled_compare
from draftsmith.models.storage.reading import read_yaml
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import train
from draftsmith.train.config import resolve
from draftsmith.train.evaluation.evaluate import log_evaluation
from draftsmith.train.hardware.layouts import check_deepspeed_precision
from draftsmith.train.inputs.features import feature_source
from draftsmith.train.optimizer import Muon
from draftsmith.train.process.stages import STAGES, Stages
from draftsmith.train.run_folder.checkpoint import checkpoint_name, checkpoints
from draftsmith.train.run_folder.run_folder import best_checkpoint, link_best
from draftsmith.train.run_folder.tracking import Tracker, read_metrics
from draftsmith.train.setup import check_compiles, set_up
from draftsmith.train.step import accumulate_gradients

TRAINABLE = [kind for kind in DRAFTERS if kind in RECIPES]  # recipes are named after the kind they train
every_kind = pytest.mark.parametrize("kind", TRAINABLE)
EVALUATION_FIELDS = """
    prompt_set num_prompts temperature top_p verification_mode batch_size draft_length tree_nodes
    num_drafts num_draft_tokens num_accepted_tokens num_emitted_tokens mean_acceptance_length draft_acceptance_rate
    per_position_acceptance_rates conditional_acceptance_rates acceptance_histogram
    baseline_tokens_per_second tokens_per_second speedup speedup_ci95 repeats ttft_ms tpot_ms baseline_tpot_ms
    milliseconds_per_round step_cost_ratio lossless
"""


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_held_out(tmp_path_factory.mktemp("prompts"))


@every_kind
def test_micro_batches_do_not_change_the_gradient(kind: str, base: dict[str, Any], tmp_path: Path) -> None:
    """Sums are divided once, by the tokens of the whole step: means of means would weigh short rows more.

    Cut at 30 tokens, rows hold different numbers of trained tokens; 16 samples make five micro-batches of 3 and a
    single one, or one of 16. AdamW hides the size of a gradient, so its norm is compared, too.
    """
    runs = {}
    for size in (3, 16):
        data = {"tokens_per_micro_batch": 30 * size, "max_length": 30}
        runs[size] = train(make_config(kind, base, tmp_path / str(size), data=data, run={"steps": 2}))
    expected_weights = final_weights(runs[16])
    for name, weight in final_weights(runs[3]).items():
        torch.testing.assert_close(weight, expected_weights[name], atol=1e-5, rtol=1e-5)
    for line, expected in zip(read_metrics(runs[3]), read_metrics(runs[16]), strict=True):
        for name, value in of_the_run(expected).items():
            assert line[name] == pytest.approx(value, rel=1e-4), name


def test_a_token_weighs_the_same_in_every_step(base: dict[str, Any], tmp_path: Path) -> None:
    """In steps of about as many tokens the gradient is a sum over tokens, divided by the same number everywhere."""
    data = {"batch_size": 200, "batch_unit": "tokens", "max_length": 30}
    config = make_config("medusa", base, tmp_path, data=data)
    setup = set_up(config)
    stages = Stages(torch.device("cpu"))
    source = feature_source(config, None, setup.plan, setup.drafter, setup.accelerator, stages)

    def gradient(indices: list[int]) -> torch.Tensor:
        setup.drafter.zero_grad()
        micro_batch = [[index] for index in indices]
        batches = [(micro_batch, setup.plan.collate(micro_batch))]
        accumulate_gradients(setup, setup.drafter, batches, source, stages, config.data.batch_size)
        return torch.cat([p.grad.flatten() for p in setup.drafter.parameters() if p.grad is not None])

    few, many = setup.plan.trained[:2], setup.plan.trained[2:9]
    torch.testing.assert_close(gradient(few) + gradient(many), gradient([*few, *many]), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("batch_size", [3, 10**8])
def test_a_step_of_tokens_holds_any_sample_and_not_all(batch_size: int, base: dict[str, Any], tmp_path: Path) -> None:
    config = make_config("medusa", base, tmp_path, data={"batch_size": batch_size, "batch_unit": "tokens"})
    with pytest.raises(UserError, match=f"data.batch_size={batch_size} tokens: .*; give a number between them"):
        set_up(config)


@every_kind
def test_packing_does_not_change_the_loss(kind: str, base: dict[str, Any], tmp_path: Path) -> None:
    """The same documents a step, side by side or apart: the same losses and gradients."""
    curves = {}
    for packing in (False, True):
        data = {"packing": packing, "max_length": 100, "tokens_per_micro_batch": 300}
        curves[packing] = read_metrics(
            train(make_config(kind, base, tmp_path / str(packing), data=data, run={"steps": 3}))
        )
    for apart, packed in zip(curves[False], curves[True], strict=True):
        assert packed["loss"] == pytest.approx(apart["loss"], abs=1e-5)
        assert packed["gradient_norm"] == pytest.approx(apart["gradient_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "in_bf16"),
    [(None, False), ("bf16", True), ("fp32", False)],
)
def test_products_on_a_cpu_are_in_fp32_unless_bf16_is_asked_for(
    precision: str | None,
    in_bf16: bool,
    base: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the whole step: of the loss, of its gradient, and of Muon. The target's and the weights stay fp32."""
    found: dict[str, set[torch.dtype]] = {"loss": set(), "gradient": set(), "optimiser": set()}

    class Products(TorchDispatchMode):
        def __init__(self, part: str) -> None:
            super().__init__()
            self.part = part

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                found[self.part].add(result.dtype)
            return result

    def within(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with Products(part):
                return call(*args, **kwargs)

        return recorded

    monkeypatch.setattr(Eagle3, "forward", within("loss", Eagle3.forward))
    monkeypatch.setattr(Accelerator, "backward", within("gradient", Accelerator.backward))
    monkeypatch.setattr(Muon, "step", within("optimiser", Muon.step))
    run = train(
        make_config("eagle3", base, tmp_path, optimizer={"matrices": "muon"}, run={"steps": 1, "precision": precision})
    )
    assert found == dict.fromkeys(found, {torch.bfloat16 if in_bf16 else torch.float32})
    assert {weight.dtype for weight in final_weights(run).values() if weight.is_floating_point()} == {torch.float32}


def test_deepspeed_on_a_cpu_computes_in_fp32_and_says_so() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type, before = DistributedType.DEEPSPEED, accelerator.state.distributed_type
    try:
        check_deepspeed_precision(None, accelerator)
        with pytest.raises(UserError, match="DeepSpeed computes in fp32 on a CPU"):
            check_deepspeed_precision("bf16", accelerator)
    finally:
        accelerator.state.distributed_type = before


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_loss_is_the_same(
    backend: str, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is compiled once, though each of the steps has chunks of other sizes.

    By default torch runs the graphs that it traced, forward and backward; `pytest -m long` compiles them as C++.
    """
    from torch._dynamo.utils import counters  # slow to import

    counters.clear()
    compiled_compare.cache_clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    runs = {
        compile: train(make_config("medusa", base, tmp_path / str(compile), run={"steps": 6, "compile": compile}))
        for compile in (False, True)
    }
    compiled_compare.cache_clear()
    assert 1 <= counters["stats"]["unique_graphs"] <= 2
    for line, expected in zip(*(read_metrics(runs[compile]) for compile in (True, False)), strict=True):
        for name, value in of_the_run(expected).items():
            assert line[name] == pytest.approx(value, rel=1e-4), name
    for name, weight in final_weights(runs[True]).items():
        torch.testing.assert_close(weight, final_weights(runs[False])[name], atol=1e-5, rtol=1e-4)


def test_a_compiled_loss_is_of_cpus() -> None:
    with pytest.raises(UserError, match="run.compile is for CPUs"):
        check_compiles(torch.device("cuda"))


@every_kind
def test_loss_decreases_and_only_the_drafter_changes(kind: str, base: dict[str, Any], tmp_path: Path) -> None:
    target = Target.from_pretrained(base["target"], "cpu")
    before = target.fingerprint()
    run = train(make_config(kind, base, tmp_path, run={"steps": 9}))
    losses = [line["loss"] for line in read_metrics(run)]
    assert len(losses) == 9
    assert sum(losses[-3:]) < 0.98 * sum(losses[:3])  # the third epoch and the first: 0.945 at most with three seeds
    assert Target.from_pretrained(base["target"], "cpu").fingerprint() == before


def command(base: dict[str, Any], run: Path) -> list[str]:
    changes = {"steps": 40, "checkpoint_every": 4, "log_every": 1}
    return [sys.executable, "-m", "draftsmith.train", "medusa", *arguments(base, run, run=changes)]


@pytest.mark.long
def test_killed_run_goes_on_bit_for_bit(base: dict[str, Any], tmp_path: Path) -> None:
    """SIGKILL at any moment: the same command ends with the weights of the uninterrupted run.

    Optimiser, scheduler, data order and random state must all come back, and nothing half written may be read.
    By default `test_killed_processes_go_on_bit_for_bit` in test_survival.py shows it of two processes.
    """
    config = make_config("medusa", base, tmp_path / "whole", run={"steps": 40, "checkpoint_every": 4})
    whole = train(config)

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = tmp_path / "killed"
    process = subprocess.Popen(
        command(base, run), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    chance = random.SystemRandom()
    awaited = run / "checkpoints" / checkpoint_name(4 * chance.randint(1, 7))
    while process.poll() is None and not awaited.is_dir():
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.05))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended by itself"
    assert not (run / "checkpoints" / checkpoint_name(40)).exists()

    subprocess.run(command(base, run), env=environment, check=True, capture_output=True)
    assert len(checkpoints(run)) == 10
    for checkpoint in checkpoints(run):
        expected = whole / "checkpoints" / checkpoint.name / "model.safetensors"
        assert (checkpoint / "model.safetensors").read_bytes() == expected.read_bytes(), checkpoint.name
    assert [line["step"] for line in read_metrics(run)] == list(range(1, 41))
    assert [line["loss"] for line in read_metrics(run)] == [line["loss"] for line in read_metrics(whole)]


def test_changed_config_in_the_same_folder_is_refused(base: dict[str, Any], tmp_path: Path) -> None:
    """Going on with other settings would leave a config.yaml that tells of a run that never was."""
    run = train(make_config("medusa", base, tmp_path, run={"steps": 2}))
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError, match="other settings .run.steps 2 -> 3.: .*init_from=.*step-000002"):
        train(make_config("medusa", base, tmp_path, run={"steps": 3}))
    assert (run / "config.yaml").read_text() == before
    assert train(make_config("medusa", base, tmp_path, run={"steps": 2})) == run  # the same one has nothing to do
    assert [line["step"] for line in read_metrics(run)] == [1, 2]


def test_a_sample_is_shown_once(base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that goes on, as each rung of a search does, has shown what it is trained on."""
    config, shown = make_config("medusa", base, tmp_path, run={"steps": 2, "checkpoint_every": 1}), "are trained on, in"
    run = train(config)
    assert shown in capsys.readouterr().out
    shutil.rmtree(checkpoints(run)[-1])
    train(config)
    assert len(checkpoints(run)) == 2
    assert shown not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"data": {"batch_size": 49}}, "exceeds the 48 samples.*: give data.batch_size=16$"),
        ({"data": {"samples": "nowhere"}}, "holds no prepared samples"),
        ({"evaluation": {"prompts": "nowhere.txt"}}, "no prompts file"),
        ({"evaluation": {"baselines": ["eagle3"]}}, "eagle3"),  # needs a checkpoint
        ({"evaluation": {"draft_length": 5}}, "draft_length"),  # Medusa has four heads
        ({"evaluation": {"draft_length": 0}}, "draft_length"),
        ({"evaluation": {"batch_size": 0}}, "batch_size"),
        ({"evaluation": {"temperatures": [-1]}}, "temperature"),
        ({"evaluation": {"temperatures": []}}, "temperatures"),
        ({"evaluation": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"data": {"max_length": 0}}, "max_length"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    parts: dict[str, Any], message: str, base: dict[str, Any], prompts: Path, tmp_path: Path
) -> None:
    """A bad setting of the evaluation that shows only after the first checkpoint has cost hours."""
    parts = {"run": {"steps": 1}, **parts}
    parts["evaluation"] = {"prompts": prompts, **parts.get("evaluation", {})}
    with pytest.raises(UserError, match=message):
        train(make_config("medusa", base, tmp_path / "run", **parts))
    assert not (tmp_path / "run").exists()


def test_a_recipes_batches_shrink_to_few_samples(
    base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who gave no batch size is told, and the run keeps and resumes with the one that fits."""
    for _ in range(2):
        config = make_config("medusa", base, tmp_path, run={"steps": 1}, data={"batch_size": 49})
        config.explicit_keys = frozenset()
        run = train(config)
        assert "48 samples, and the recipe's batches hold 49: they hold 16" in capsys.readouterr().err
    assert read_yaml(run / "config.yaml")["data"]["batch_size"] == 16


@pytest.fixture(scope="module")
def evaluated(base: dict[str, Any], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two checkpoints, both measured at two temperatures."""
    torch.manual_seed(0)
    evaluation = {"prompts": prompts, "max_new_tokens": 8, "repeats": 2, "temperatures": [0.0, 1.0]}
    run = tmp_path_factory.mktemp("evaluated")
    return train(make_config("medusa", base, run, run={"steps": 4, "checkpoint_every": 2}, evaluation=evaluation))


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize(("name", "kind"), [("evaluation.json", "medusa"), ("evaluation.ngram.json", "ngram")])
def test_every_checkpoint_is_measured(name: str, kind: str, step: int, evaluated: Path, prompts: Path) -> None:
    """The names of the fields are a contract: reports and users' scripts read them."""
    checkpoint = evaluated / "checkpoints" / checkpoint_name(step)
    content = json.loads((checkpoint / name).read_text())
    assert set(content) == {"target", "drafter", "drafter_kind", "environment", "results", "cost"}
    assert content["drafter_kind"] == kind
    assert content["environment"]["target_fingerprint"]
    assert [row["temperature"] for row in content["results"]] == [0.0, 1.0]
    for row in content["results"]:
        assert set(EVALUATION_FIELDS.split()) <= set(row)
        assert (row["prompt_set"], row["num_prompts"], row["repeats"]) == ("held_out", 3, 2)
        assert len(row["acceptance_histogram"]) == row["draft_length"] + 1 == 5
        assert set(row["ttft_ms"]) == {"p50", "p95", "p99"}
        assert set(row["milliseconds_per_round"]) == {"draft", "verify", "host"}
        assert set(row["lossless"]) == {
            *("checked", "identical", "near_tie_divergences", "divergences", "first_differences")
        }
        assert row["lossless"]["divergences"] == 0
        low, high = row["speedup_ci95"]
        assert 0 < low <= row["speedup"] <= high
    greedy = content["results"][0]
    assert greedy["lossless"]["checked"] == 3


def test_a_gap_between_training_and_decoding_is_told(
    evaluated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((evaluated / "checkpoints" / checkpoint_name(4) / "evaluation.json").read_text())
    for flagged in (False, True):
        content["results"][0]["teacher_forced_gap"]["flagged"] = flagged
        checkpoint = tmp_path / str(flagged) / checkpoint_name(4)
        checkpoint.mkdir(parents=True)
        (checkpoint / "evaluation.json").write_text(json.dumps(content))
        log_evaluation(checkpoint, Tracker(RECIPES["medusa"](), checkpoint, 0))
        printed = " ".join(capsys.readouterr().out.split())
        assert ("training and drafting see different features" in printed) == flagged


def test_metrics_hold_training_and_evaluation(evaluated: Path) -> None:
    lines = read_metrics(evaluated)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    measured = {line["step"]: line for line in lines if "speedup" in line}
    assert set(measured) == {2, 4}
    for step, line in measured.items():
        row = json.loads((evaluated / "checkpoints" / checkpoint_name(step) / "evaluation.json").read_text())
        assert line["speedup"] == row["results"][0]["speedup"]
        assert line["acceptance_length"] == row["results"][0]["mean_acceptance_length"]
        assert [line["speedup_low"], line["speedup_high"]] == row["results"][0]["speedup_ci95"]
        rates = row["results"][0]["per_position_acceptance_rates"]
        assert [line[f"acceptance_at_{i}"] for i in range(4)] == rates


def test_folder_of_a_run(evaluated: Path) -> None:
    """The documented layout, whole: nothing half written is left."""
    names = {path.name for path in evaluated.iterdir()}
    assert names == {"config.yaml", "environment.json", "metrics.jsonl", "checkpoints", "best"}
    assert {path.name for path in (evaluated / "checkpoints").iterdir()} == {"step-000002", "step-000004"}
    environment = json.loads((evaluated / "environment.json").read_text())
    assert {"versions", "git_commit", "command", "target_fingerprint", "template_hash", "data_hash"} <= set(environment)
    assert environment["data_written_by"] == "decoder"
    config = resolve(RECIPES["medusa"](), evaluated / "config.yaml")
    assert config.run.dir == str(evaluated)
    own = json.loads((evaluated / "checkpoints" / "step-000004" / "config.json").read_text())["draftsmith"]
    assert own["trained_length"] == read_samples(Path(config.data.samples)).lengths.max()


@pytest.mark.parametrize(
    ("kept", "divergences", "best"),
    [
        ([0.3, 0.6, 0.5], [0, 0, 0], 2),
        ([0.7, 0.3, 0.3], [0, 0, 0], 1),
        ([0.3, 0.5, 0.6], [0, 0, 0], 3),
        ([0.3, 0.5, 0.5], [0, 0, 0], 3),  # equal: the later one
        ([0.3, 0.9, 0.5], [0, 1, 0], 3),  # its output is not the target's
    ],
)
def test_best_emits_the_most_tokens_a_round(
    kept: list[float], divergences: list[int], best: int, tmp_path: Path
) -> None:
    """By the first setting's counts, whatever its times say; the link is relative, so that runs can move."""
    for number, (keep, differing) in enumerate(zip(kept, divergences, strict=True), 1):
        checkpoint = tmp_path / "checkpoints" / checkpoint_name(number)
        checkpoint.mkdir(parents=True)
        row = {**result(keep, 1.0, divergences=differing), "speedup": 2 - keep}
        write_results(checkpoint / "evaluation.json", [row, result(1 - keep, 1.0)])
        link_best(tmp_path)
    (tmp_path / "checkpoints" / checkpoint_name(9)).mkdir()  # not measured
    assert link_best(tmp_path) == tmp_path / "checkpoints" / checkpoint_name(best)
    assert os.readlink(tmp_path / "best") == f"checkpoints/{checkpoint_name(best)}"


def test_a_run_that_was_copied_without_links_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its `best` is a folder then, and stays; which checkpoint is the best is computed, and said."""
    checkpoint = tmp_path / "checkpoints" / checkpoint_name(1)
    checkpoint.mkdir(parents=True)
    write_results(checkpoint / "evaluation.json", [result(0.5, 1.0)])
    (tmp_path / "best").mkdir()
    assert link_best(tmp_path) == best_checkpoint(tmp_path) == checkpoint
    assert f"best is no link to the best checkpoint, which is {checkpoint}" in capsys.readouterr().err


def test_no_best_without_measurements(tmp_path: Path) -> None:
    assert link_best(tmp_path) is None
    assert not (tmp_path / "best").is_symlink()
    with pytest.raises(UserError, match="no checkpoint of .* was measured: see evaluation.error.txt"):
        best_checkpoint(tmp_path)


@pytest.mark.parametrize("state", ["measured", "baselines missing", "not logged", "not linked"])
def test_kill_around_an_evaluation(state: str, base: dict[str, Any], prompts: Path, tmp_path: Path) -> None:
    """A kill after the last checkpoint leaves some of what its evaluation writes; the same command adds the rest."""
    evaluation = {"prompts": prompts, "max_new_tokens": 8, "repeats": 1}
    config = make_config("medusa", base, tmp_path, run={"steps": 2}, evaluation=evaluation)
    run = train(config)
    last, metrics = checkpoints(run)[-1], (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert "speedup" in metrics[-1]
    (run / "best").unlink()
    if state != "not linked":
        (run / "metrics.jsonl").write_text("".join(metrics[:-1]))
    if state in ("measured", "baselines missing"):
        (last / "evaluation.ngram.json").unlink()
    if state == "measured":
        (last / "evaluation.json").unlink()

    train(config)
    assert (run / "best").resolve() == last.resolve()
    assert (last / "evaluation.json").is_file()
    assert (last / "evaluation.ngram.json").is_file()
    assert [(line["step"], "speedup" in line) for line in read_metrics(run)] == [(1, False), (2, False), (2, True)]


def test_what_a_logged_step_says(base: dict[str, Any], prompts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Shares of the time add up, a trace is there when asked for, and wandb offline holds the same numbers."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    evaluation = {"prompts": prompts, "max_new_tokens": 4, "repeats": 1}
    changes = {"steps": 8, "checkpoint_every": 4, "wandb_project": "test", "profile": True}
    run = train(make_config("medusa", base, tmp_path, run=changes, evaluation=evaluation))
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    wanted = (b"time_share_target", b"acceptance_at_3")
    end = time.monotonic() + 60  # wandb writes the file in a process of its own, which may be a little late
    while time.monotonic() < end and not all(name in file.read_bytes() for name in wanted):
        time.sleep(0.1)
    assert all(name in file.read_bytes() for name in wanted)
    lines = [line for line in read_metrics(run) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 9))
    for line in lines:
        shares = [line[f"time_share_{stage}"] for stage in STAGES]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        assert line["tokens_per_second"] == line["tokens_per_second_per_device"] > 0
        assert line["model_flop_utilisation"] is None  # of a CPU no peak is known
        assert 0.01 < line["peak_memory_gb"] < 64
    assert lines[4]["time_share_evaluation"] > 0.1 > lines[3]["time_share_evaluation"]  # of the checkpoint after step 4
    trace = json.loads((run / "profile" / "trace.json").read_text())
    assert any("backward" in event.get("name", "").lower() for event in trace["traceEvents"])


def test_model_flop_utilisation_counts_products_of_matrices(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operations a weight and token of the target, six of what is trained, of the device's peak."""
    monkeypatch.setattr("draftsmith.train.hardware.meter.peak_of", lambda device: 1e12)
    epoch = {"steps": 3, "log_every": 3}
    (line,) = read_metrics(train(make_config("medusa", base, tmp_path, run=epoch)))
    target = Target.from_pretrained(base["target"], "cpu")
    head = target.head_weight().numel()
    layers = sum(weight.numel() for layer in target.decoder_layers for weight in layer.parameters())
    blocks = target.hidden_size**2 + target.hidden_size
    samples = read_samples(Path(base["data.samples"]))
    read = sum(len(sample.token_ids) for sample in samples)
    trained = sum(int(loss_mask(sample)[1:].sum()) for sample in samples)
    operations = (2 * (layers + head) + 6 * 4 * (blocks + head)) * read / trained  # a trained token
    assert line["model_flop_utilisation"] == pytest.approx(operations * line["tokens_per_second"] / 1e12, rel=1e-3)
