"""The decisions of `draftsmith quickstart`; .ci/run runs the whole of it."""

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from chats import FAMILIES, chat_target
from disk_faults import Contents, contents, recorded_changes, restore
from reports import result, write_results
from rich.console import Console

from draftsmith.data.answers.prepare import PrepareSettings
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts, tokenise
from draftsmith.data.samples.sample import Sample, Span
from draftsmith.inference.measuring.measure import MeasureSettings
from draftsmith.inference.measuring.results import Evaluation, read_evaluation
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.configs.training_settings import QuickstartSettings
from draftsmith.recipes.evaluation import comparison
from draftsmith.recipes.evaluation.comparison import evaluation_paths
from draftsmith.recipes.quickstart import budget as budgets
from draftsmith.recipes.quickstart import quickstart
from draftsmith.recipes.quickstart.budget import (
    WEIGHTS,
    Budget,
    fastest_num_threads,
    load_budget,
    new_drafter,
    time_step,
)
from draftsmith.recipes.quickstart.quickstart import fastest_served, quickstart_config, ranked
from draftsmith.train import TrainConfig
from draftsmith.train.evaluation import evaluate

BUDGET = Budget("target", 1.0, 64, 4, 4, None, {"hydra": 8})


def test_lossless_drafters_come_first_then_fast_ones(tmp_path: Path, tiny_target: Target) -> None:
    checkpoints = [tmp_path / "hydra", tmp_path / "eagle3", tmp_path / "medusa"]
    alone = {"hydra": (1.1, 0), "eagle3": (1.9, 3), "medusa": (1.2, 0)}  # speedup, divergences
    behind = {f"ngram+{tmp_path}/{kind}": (1.05 - number / 100, 0) for number, kind in enumerate(alone)}
    measured = alone | behind | {"ngram": (1.15, 0)}
    paths = evaluation_paths(tmp_path / "comparison", [*map(str, checkpoints), *behind, "ngram"])
    for path, (name, (speedup, divergences)) in zip(paths, measured.items(), strict=True):
        path.parent.mkdir(parents=True)
        row = result(0.5, 1.0, divergences=divergences)
        write_results(path, [{**row, "speedup": speedup}], name, "cascade" if name in behind else name)
    fastest = ranked(checkpoints, tiny_target, BUDGET, tmp_path)
    assert [one.drafter for one in fastest] == ["medusa", "ngram", "hydra", *behind, "eagle3"]


def measured(folder: Path, kind: str, low: float) -> Evaluation:
    """An evaluation whose interval begins at `low`."""
    write_results(folder / f"{kind}.json", [{**result(0.5, 1.0), "speedup_ci95": [low, low + 1]}], kind, kind)
    return read_evaluation(folder / f"{kind}.json")


def test_what_vllm_does_not_serve_is_not_exported(tmp_path: Path) -> None:
    hydra, medusa, eagle3 = (measured(tmp_path, kind, 1.1) for kind in ("hydra", "medusa", "eagle3"))
    assert fastest_served([hydra, medusa, eagle3]) == medusa
    assert fastest_served([hydra]) is None


def test_what_is_fastest_by_confidence_is_not_what_is_served(tmp_path: Path) -> None:
    """vLLM ends no chain by it: the drafter is exported whose chains of one length are fastest."""
    by_confidence = {**result(0.5, 1.0), "speedup": 9.0, "schedule": {"confident": {"longest": 3, "least": 0.2}}}
    for kind, speedup, more in (("eagle3", 1.1, [by_confidence]), ("medusa", 1.2, [])):
        write_results(tmp_path / f"{kind}.json", [{**result(0.5, 1.0), "speedup": speedup}, *more], kind, kind)
    eagle3, medusa = (read_evaluation(tmp_path / f"{kind}.json") for kind in ("eagle3", "medusa"))
    assert eagle3.best.speed.speedup == 9.0
    assert fastest_served([eagle3, medusa]) == medusa


def test_n_grams_are_exported_where_they_are_fastest_and_pay(tmp_path: Path) -> None:
    """The report said to use them, and EAGLE-3 was exported."""
    eagle3, ngram = measured(tmp_path, "eagle3", 1.1), measured(tmp_path, "ngram", 1.1)
    assert fastest_served([ngram, eagle3]) == ngram
    assert fastest_served([measured(tmp_path, "ngram", 0.9), eagle3]) == eagle3


def test_a_step_is_timed_on_fewer_samples_than_it_takes(tiny_target: Target) -> None:
    """The first prompts of a traffic may be fewer than a batch; and a new drafter fits the target's vocabulary."""
    recipe = RECIPES["eagle3"]()
    assert recipe.data.batch_size > 3
    drafter = new_drafter(recipe, tiny_target)
    samples = [Sample([5, 6, 7, 8], [Span(1, 4)]) for _ in range(3)]
    assert time_step(recipe, drafter, tiny_target, samples).loss > 0


def test_a_step_is_timed_in_the_precision_that_it_is_trained_in(make_target_dir: Callable[..., Path]) -> None:
    """On hardware that computes in bf16 the target's features are in bf16, and the drafter's weights in fp32."""
    target = Target.from_pretrained(make_target_dir(), "cpu", torch.bfloat16)
    recipe = RECIPES["quickstart_eagle3"]()
    recipe.run.precision = "bf16"
    samples = [Sample([5, 6, 7, 8], [Span(1, 4)]) for _ in range(3)]
    assert time_step(recipe, new_drafter(recipe, target).float(), target, samples).loss > 0


@pytest.mark.parametrize(("lookup_seconds", "expected"), [({1: 3.0, 2: 2.0}, (2, 1.1)), ({1: 2.05, 2: 2.0}, (1, 1.0))])
def test_rounds_have_a_say_in_the_number_of_threads(
    lookup_seconds: dict[int, float],
    expected: tuple[int, float],
    tiny_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two threads are taken where rounds gain more by them than plain steps lose; the time told is of plain steps."""

    class Decoder:
        def __init__(self, seconds: dict[int, float]) -> None:
            self.target, self.seconds = tiny_target, seconds

        def generate(self, prompts: list[list[int]], max_new_tokens: int) -> SimpleNamespace:
            timing = SimpleNamespace(total=2 * self.seconds[torch.get_num_threads()])
            return SimpleNamespace(token_ids=[[1, 2]], timing=timing)

    monkeypatch.setattr(budgets, "SpeculativeDecoder", lambda *_: Decoder(lookup_seconds))
    plain: Any = Decoder({1: 1.0, 2: 1.1})
    with budgets.cpu_threads(2):
        found, seconds = fastest_num_threads(plain, [Prompt(text="def f"), Prompt(text="x = 1")])
    assert (found, seconds) == (expected[0], pytest.approx(expected[1]))


def test_an_interrupted_run_goes_on_with_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert load_budget(path, "target", 1.0, ["hydra"], 0) is None
    path.write_text("target: target\nminutes: 1.0\nnum_prompts: 64\nnum_checkpoint_prompts: 4\n")
    with pytest.raises(ValueError, match="num_comparison_prompts"):
        load_budget(path, "target", 1.0, ["hydra"], 0)
    path.write_text(path.read_text() + "num_comparison_prompts: 4\nnum_threads: null\nsteps: {hydra: 8}\n")
    assert load_budget(path, "target", 1.0, ["hydra"], 0) == BUDGET
    with pytest.raises(UserError, match="holds a quickstart with --target target --minutes 1 --drafters hydra"):
        load_budget(path, "target", 2.0, ["hydra"], 0)
    with pytest.raises(UserError, match="--drafters hydra --seed 0: give these to go on"):
        load_budget(path, "target", 1.0, ["hydra"], 1)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_target_with_too_little_context_is_told(
    held_out: bool, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers alone fill the context of 128 tokens."""
    functions = [f"def strike_{i}(iron):\n    return iron" for i in range(200)]
    monkeypatch.setattr(quickstart, "stdlib_groups", lambda _: [functions])
    monkeypatch.setattr(quickstart, "ANSWERS", replace(quickstart.ANSWERS, max_new_tokens=128))
    with pytest.raises(UserError, match="has a context of 128 tokens, .* answers of 128 tokens only 0 prompts fit"):
        quickstart.traffic_for(tiny_target, held_out)
    monkeypatch.setattr(quickstart, "ANSWERS", replace(quickstart.ANSWERS, max_new_tokens=64))
    assert len(quickstart.traffic_for(tiny_target, held_out)) == 200


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
        "traffic_for": lambda *_: [Prompt(text="a")] * 200,
        "prepare": lambda *_: calls.append("prepare"),
        "train": trained,
        "best_checkpoint": lambda run: run / "checkpoints/step-000008",
        "ranked": lambda *_: [measured(tmp_path, "medusa", 1.1)],
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
    with pytest.raises(UserError, match="--drafters medusa --seed 0: give these to go on"):
        quickstart.run(replace(settings, drafters="hydra"), Console(quiet=True))


def test_targets_that_chat_get_dialogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written and read as they are, in a mixture that no order of the files shows through.

    Begun functions are among all prompts, but none of a quickstart's.
    """
    functions = [f'def f{i}():\n    """Do {i}."""\n    return {i}\n' for i in range(130)]
    monkeypatch.setattr(quickstart, "stdlib_groups", lambda held_out: [[function] for function in functions])
    chats = chat_target(FAMILIES["chatml"])
    prompts = quickstart.prompts_for(chats, held_out=True)
    assert sorted(prompt.domain for prompt in prompts) == ["chat"] * 130 + ["code"] * 130
    assert {"chat", "code"} == {prompt.domain for prompt in prompts[:20]}
    assert chats.tokenizer is not None
    for prompt in prompts:
        opened = str(chats.tokenizer.decode(tokenise(prompt, chats))).endswith("assistant\n")
        assert opened == (prompt.domain == "chat")
    quickstart.write_jsonl(tmp_path / "prompts.jsonl", prompts)
    assert read_prompts(tmp_path / "prompts.jsonl") == prompts
    assert quickstart.traffic_for(chats, held_out=True) == [p for p in prompts if p.messages is not None]
    chats.tokenizer.chat_template = None
    for chosen in (quickstart.prompts_for, quickstart.traffic_for):
        assert [prompt.domain for prompt in chosen(chats, held_out=True)] == ["code"] * 130


def test_a_dialogue_may_be_as_long_as_its_turns_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one limit for all no dialogue of several turns was left."""
    methods = [f'def f{i}():\n    """Do {i}."""\n    return {i}\n' for i in range(3)]
    wordy = f'def g():\n    """{"Do it. " * 20}"""\n    return 1\n'
    monkeypatch.setattr(quickstart, "stdlib_groups", lambda held_out: [methods, [wordy]])
    chats = chat_target(FAMILIES["chatml"])
    prompts = quickstart.prompts_for(chats, held_out=True)
    [dialogue] = [prompt for prompt in prompts if prompt.messages is not None]
    assert quickstart.num_turns(dialogue) == 3
    assert len(tokenise(dialogue, chats)) > quickstart.TURN
    assert len(prompts) == 4


# --- killed

# Files that hold times, the commit, hashes of such files, or texts of the drafter that was fastest, so that no two runs
# need write the same.
OF_RUN = re.compile(
    r"(evaluation.*\.(json|md)|comparison/samples\.json|(costs|progress|manifest|environment)\.json|metrics\.jsonl|README\.md)$"
)


@pytest.fixture
def small_quickstart(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quickstart measure little, on few prompts and steps, and without a report, whose figures take seconds."""

    def config(*arguments: Any) -> TrainConfig:
        changed = quickstart_config(*arguments)
        changed.evaluation.max_new_tokens, changed.evaluation.repeats = 2, 1
        return changed

    replaced = {
        "load_target": lambda *_: tiny_target,
        "traffic_for": lambda *_: [Prompt(text=f"strike {number}") for number in range(130)],
        "measure_budget": lambda *_: Budget(tiny_target.name, 1.0, 4, 2, 2, 1, {"medusa": 2}),
        "quickstart_config": config,
        "ANSWERS": PrepareSettings(max_new_tokens=4),
        "COMPARISON": MeasureSettings(max_new_tokens=2, repeats=1),
        "build_report": lambda out: out / "report.html",
        "print_summary": lambda *_: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(quickstart, name, value)
    for module in (evaluate, comparison):  # whose costs are measured only where the time is enough
        monkeypatch.setattr(module, "costs_beside", lambda *_: None)


@pytest.mark.usefixtures("small_quickstart")
@pytest.mark.parametrize("tried", [pytest.param(slice(None), marks=pytest.mark.long), slice(8, None, 17)])
def test_a_quickstart_killed_at_any_change_goes_on(tried: slice, tiny_target: Target, tmp_path: Path) -> None:
    """What a kill before a change on the disk leaves, the same command brings to the same end: tried at some changes.

    `pytest -m long` tries all. A lock of a process that was killed may stay: nobody holds it.
    """

    def num_lines(state: Contents) -> int:
        metrics = state["out/medusa/metrics.jsonl"]
        assert isinstance(metrics, bytes)
        return metrics.count(b"\n")

    settings = QuickstartSettings(target=tiny_target.name, drafters="medusa", minutes=1.0, out=tmp_path / "out")
    with recorded_changes(tmp_path) as states:
        quickstart.run(settings, Console(quiet=True))
    whole = contents(tmp_path)
    assert len(states) > 80
    for number in range(len(states))[tried]:
        restore(tmp_path, states[number])
        quickstart.run(settings, Console(quiet=True))
        found = {name: content for name, content in contents(tmp_path).items() if not name.endswith(".lock")}
        assert found.keys() == whole.keys(), number
        assert num_lines(found) == num_lines(whole), number
        assert not [name for name in whole if found[name] != whole[name] and not OF_RUN.search(name)], number


@pytest.mark.parametrize("kind", WEIGHTS)
def test_features_are_stored_for_drafters_that_need_no_layers(kind: str, tmp_path: Path) -> None:
    """A draft model is made of the target's layers, which are not there beside stored features."""
    budget = replace(BUDGET, steps=dict.fromkeys(WEIGHTS, 8), stored_layers=[1])
    config = quickstart_config(kind, budget, tmp_path, None)
    assert config.data.features == ("online" if kind == "draft_model" else "stored")
