"""`draftsmith plan` and `draftsmith tune`: what they write, what they say, what they refuse."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.decoding.schedule import Schedule, read_schedule
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.planning import cost_measurement
from draftsmith.inference.planning.best_draft import acceptance_length
from draftsmith.inference.planning.cost_measurement import CostRange, Visit
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.plans import Acceptance, Plan
from draftsmith.models import DRAFTERS, Target, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.command_settings import TuneSettings
from draftsmith.recipes.configs.published_acceptance import PUBLISHED
from draftsmith.recipes.planning.expectations import drafter_plan, known_acceptance
from draftsmith.recipes.studies.tune import prompts_to_fit


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostRange, "seconds", 0.1)
    monkeypatch.setattr(CostRange.__init__, "__defaults__", (16, 256, 8, 0, 0.1))
    for name, value in (
        ("MOST_ROUNDS", 20),
        ("MOST_VISITS", 5),
        ("PLAIN_VISIT", Visit(4, 1)),
        ("DRAFT_VISIT", Visit(4, 1)),
    ):
        monkeypatch.setattr(cost_measurement, name, value)


def test_a_plan_before_training(tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"plan --target {tiny_target_dir} --drafter medusa --drafter ngram --batch-size 1 2 --context 24"
    command += " --tree-nodes 12 6"
    assert main([*command.split(), "--acceptance", "0.9", "--device", "cpu", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    assert to_json(from_json(Plan, content)) == content
    medusa, ngram = content["drafters"]
    assert [row["batch_size"] for row in medusa["by_batch_size"]] == [1, 2]
    assert medusa["training"]["hours"] > 0
    assert "training" not in ngram
    costs = from_json(Costs, json.loads((tmp_path / "1-medusa" / "costs.json").read_text()))
    for row in medusa["by_batch_size"]:
        for length, needed in row["break_even_acceptance_length"].items():
            assert needed == costs.break_even(int(length), row["batch_size"], 24)
        assert list(row["tree_break_even_acceptance_length"]) == ["6", "12"]
        for nodes, needed in row["tree_break_even_acceptance_length"].items():
            depth = medusa["tree_depths"][nodes]
            assert needed == costs.break_even(depth, row["batch_size"], 24, int(nodes))
            assert needed == costs.round(depth, row["batch_size"], 24, int(nodes)) / row["plain_ms"]
    assert {row.nodes for row in costs.fitted_on if row.tree} == {4, 12}
    assert not ngram["tree_depths"]
    out = capsys.readouterr().out
    assert main([*command.replace("medusa", "hydra").split(), "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "costs of other drafters lies in" in capsys.readouterr().err
    assert "this device" in out
    assert "break even" in out
    assert "12 nodes, depth" in out


def test_a_rate_holds_at_all_depths() -> None:
    (acceptance,) = known_acceptance(["0.9"], "draft_model", 16)[:1]
    assert acceptance_length(acceptance.rates, 16) == pytest.approx(sum(0.9**depth for depth in range(17)))


def test_a_plan_says_when_nothing_pays() -> None:
    """Rounds of ten plain steps: off at every batch size, whatever is accepted."""
    costs = Costs("", "", "d", "d", {"step: pass": 20.0}, {"pass": 2.0}, 0.0)
    plan = drafter_plan(costs, [1, 8], 10, [1, 2], [Acceptance("here", "own", [1.0, 1.0])])
    assert [draft.draft_length for draft in plan.expected[0].by_batch_size] == [0, 0]
    assert "at batch 1, 8 no draft length pays even if all is accepted" in plan.verdicts[0]
    assert "no draft length pays at any batch size" in plan.verdicts[1]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: f"{one.kind}-{one.where}")
def test_published_rates_give_the_published_length(published: Any) -> None:
    expected = published.length if published.length is not None else 1 + sum(published.unconditional)
    assert acceptance_length(published.rates, published.draft_length) == pytest.approx(expected)
    assert published.kind in DRAFTERS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--drafter none", "drafts nothing"),
        ("--drafter nowhere", "nowhere"),
        ("--drafter medusa --draft-length 5", "up to 4 tokens"),
        ("--drafter medusa --acceptance 1.5", "from 0 to 1"),
        ("--drafter medusa --acceptance nowhere.json", "cannot be read"),
        ("--drafter medusa --context 100000", "context"),
        ("--drafter ngram --tree-nodes 8", "drafts chains only"),
        ("--drafter medusa --draft-length 1 --tree-nodes 9", "8 at most"),
    ],
)
def test_mistakes(
    arguments: str,
    message: str,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command = ["plan", "--target", str(tiny_target_dir), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*command, *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", ["--batch-size 0", "--tree-nodes 1"])
def test_too_small_numbers(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--target", "t", "--drafter", "d", "--out", "o", *words.split()])
    assert capsys.readouterr().err.startswith(
        f"error: argument {words.split()[0]}: {words.split()[1]!r}: give at least"
    )


def test_the_choice_is_fitted_on_other_prompts(
    make_target_dir: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target_dir = make_target_dir(max_position_embeddings=256)  # costs cannot be measured in 128
    target = Target.from_pretrained(target_dir, "cpu")
    drafter = DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), target)
    save_drafter(drafter, tmp_path / "medusa")
    (tmp_path / "fit.txt").write_text("heat the iron\nheats it again, and\n")
    (tmp_path / "held_out.txt").write_text("return [iron.hit()\nThe smith\n")
    out = tmp_path / "out"
    command = f"tune --target {target_dir} --device cpu --drafter {tmp_path}/medusa --out {out}"
    command += f" --max-new-tokens 12 --repeats 1 --prompts {tmp_path}/held_out.txt --fit-prompts {tmp_path}/"
    assert main([*(command + "fit.txt").split()]) == 0
    choice = json.loads((out / "choice.json").read_text())
    assert {"draft_length", "tree", "schedule", "fitted_on", "predicted", "vllm", "sglang"} <= choice.keys()
    schedule = read_schedule(out / "choice.json")
    assert isinstance(schedule, Schedule)
    assert schedule.draft_length(1) == choice["draft_length"]
    assert 4 in {row["draft_length"] for row in json.loads((out / "evaluation.json").read_text())["results"]}
    assert choice["confident"]["pays"] in (True, False)
    assert (out / "costs.json").is_file()
    assert "not measured here" not in (out / "evaluation.md").read_text()
    capsys.readouterr()
    assert main([*(command + "held_out.txt").split()]) == 2
    assert "fit on other prompts" in capsys.readouterr().err


def test_without_others_the_prompts_are_divided(tiny_target: Target, tmp_path: Path) -> None:
    """Every second one is to fit on; where they equal those that are measured, or there is but one, it is refused."""
    settings = TuneSettings(target="t", drafter=("d",), prompts=("p",), out=tmp_path)
    fit, (measured,) = prompts_to_fit(settings, [PromptSet("p", [[1], [2], [3]], ["a", "b", "c"])], tiny_target)
    assert (fit.token_ids, measured.token_ids) == ([[2]], [[1], [3]])
    assert (fit.domains, measured.domains) == (["b"], ["a", "c"])
    for token_ids, message in ([[1], [1]], "fit on other prompts"), ([[1]], "two prompts or more"):
        with pytest.raises(UserError, match=message):
            prompts_to_fit(settings, [PromptSet("p", token_ids)], tiny_target)
