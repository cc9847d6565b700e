"""The decisions of `draftsmith quickstart`; .ci/run runs the whole of it."""

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from chats import FAMILIES, chat_target
from reports import result, write_results
from rich.console import Console

from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts, tokenise
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.command_settings import QuickstartSettings
from draftsmith.recipes.evaluation.comparison import evaluation_paths
from draftsmith.recipes.studies import quickstart
from draftsmith.recipes.studies.quickstart import fastest_served, ranked
from draftsmith.recipes.studies.quickstart_budget import Budget, load_budget
from draftsmith.train import TrainConfig

BUDGET = Budget("target", 1.0, 64, 4, 4, None, {"hydra": 8})


def test_lossless_drafters_come_first_then_fast_ones(tmp_path: Path, tiny_target: Target) -> None:
    checkpoints = {tmp_path / "a": "hydra", tmp_path / "b": "eagle3", tmp_path / "c": "medusa"}
    measured = [(1.1, 0), (1.9, 3), (1.2, 0), (1.0, 0)]  # speedup, divergences; the last one is of n-grams
    paths = evaluation_paths(tmp_path / "comparison", [*map(str, checkpoints), "ngram"])
    for path, (speedup, divergences) in zip(paths, measured, strict=True):
        path.parent.mkdir(parents=True)
        row = result(0.5, 1.0, divergences=divergences)
        write_results(path, [{**row, "speedup": speedup}])
    assert list(ranked(checkpoints, tiny_target, BUDGET, tmp_path).values()) == ["medusa", "hydra", "eagle3"]


def test_what_vllm_does_not_serve_is_not_exported() -> None:
    assert fastest_served({Path("a"): "hydra", Path("b"): "medusa", Path("c"): "eagle3"}) == Path("b")
    assert fastest_served({Path("a"): "hydra"}) is None


def test_an_interrupted_run_goes_on_with_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert load_budget(path, "target", 1.0, ["hydra"]) is None
    path.write_text("target: target\nminutes: 1.0\nnum_prompts: 64\nnum_checkpoint_prompts: 4\n")
    with pytest.raises(ValueError, match="num_comparison_prompts"):
        load_budget(path, "target", 1.0, ["hydra"])
    path.write_text(path.read_text() + "num_comparison_prompts: 4\nnum_threads: null\nsteps: {hydra: 8}\n")
    assert load_budget(path, "target", 1.0, ["hydra"]) == BUDGET
    with pytest.raises(UserError, match="holds a quickstart with --target target --minutes 1 --drafters hydra"):
        load_budget(path, "target", 2.0, ["hydra"])


def test_a_finished_quickstart_prints_its_table_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains and exports once: what is exported stays, and the same command says where it is.

    Features that the drafters shared are gone when all are trained.
    """
    calls: list[str] = []

    def trained(config: TrainConfig) -> None:
        calls.append("train")
        assert config.data.features == "stored"
        checkpoint = Path(config.run.dir) / "checkpoints" / "step-000008"
        checkpoint.mkdir(parents=True)
        (checkpoint / "evaluation.json").touch()
        assert config.data.features_dir
        Path(config.data.features_dir).mkdir()

    replaced = {
        "prompts_for": lambda *_: [Prompt(text="a")] * 200,
        "prepare": lambda *_: calls.append("prepare"),
        "train": trained,
        "best_checkpoint": lambda run: run / "checkpoints/step-000008",
        "ranked": lambda checkpoints, *_: checkpoints,
        "build_report": lambda out: out / "report.html",
        "print_summary": lambda *_: calls.append("table"),
        "export": lambda settings, *_: (calls.append("export"), settings.out.mkdir()),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(quickstart, name, function)
    monkeypatch.setattr(quickstart.Target, "from_pretrained", lambda *_: SimpleNamespace(name="t"))
    (tmp_path / "plan.yaml").write_text(
        yaml.safe_dump(asdict(replace(BUDGET, target="t", steps={"medusa": 8}, stored_layers=[])))
    )
    settings = QuickstartSettings(target="t", drafters="medusa,medusa", minutes=1.0, out=tmp_path)
    for _ in range(2):
        quickstart.run(settings, Console(quiet=True))
    assert calls == ["prepare", "train", "table", "export", "prepare", "table"]
    assert not (tmp_path / "features").exists()
    with pytest.raises(UserError, match="--drafters medusa: give these to go on"):
        quickstart.run(replace(settings, drafters="hydra"), Console(quiet=True))


def test_targets_that_chat_get_dialogues_beside_begun_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written and read as they are, in a mixture that no order of the files shows through."""
    functions = [f'def f{i}():\n    """Do {i}."""\n    return {i}\n' for i in range(40)]
    monkeypatch.setattr(quickstart, "stdlib_groups", lambda held_out: [[function] for function in functions])
    chats = chat_target(FAMILIES["chatml"])
    prompts = quickstart.prompts_for(chats, held_out=True)
    assert sorted(prompt.domain for prompt in prompts) == ["chat"] * 40 + ["code"] * 40
    assert {"chat", "code"} == {prompt.domain for prompt in prompts[:20]}
    assert chats.tokenizer is not None
    for prompt in prompts:
        opened = str(chats.tokenizer.decode(tokenise(prompt, chats))).endswith("assistant\n")
        assert opened == (prompt.domain == "chat")
    quickstart.write_jsonl(tmp_path / "prompts.jsonl", prompts)
    assert read_prompts(tmp_path / "prompts.jsonl") == prompts
    chats.tokenizer.chat_template = None
    assert [prompt.domain for prompt in quickstart.prompts_for(chats, held_out=True)] == ["code"] * 40
