"""The folder of a run: which settings it goes on with."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from runs import base_of, make_config

from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.train.config import dump
from draftsmith.train.run_folder.run_folder import check_same_run, environment_of
from draftsmith.train.run_folder.tracking import start_wandb


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


@pytest.fixture
def begun(base: dict[str, Any], tiny_target: Target, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a run with a checkpoint, and what environment.json says."""
    (tmp_path / "run/checkpoints/step-000001").mkdir(parents=True)
    config = make_config("medusa", base, tmp_path / "run")
    environment = environment_of(config, tiny_target, 512)
    (tmp_path / "run/config.yaml").write_text(dump(config))
    (tmp_path / "run/environment.json").write_text(json.dumps(environment))
    return tmp_path / "run", environment


@pytest.mark.parametrize(
    ("part", "changed"),
    [
        ("run", {"log_every": 7, "keep_checkpoints": 2, "timeout": 900, "dir": "elsewhere"}),
        ("data", {"tokens_per_micro_batch": 4096}),
        ("evaluation", {"temperatures": [1.0], "draft_length": 2}),
    ],
)
def test_what_changes_no_weights_may_change(
    part: str, changed: dict[str, Any], begun: Any, base: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """After running out of memory, with another prompt set, under a slower network: the run goes on, and says how."""
    run, environment = begun
    check_same_run(run, make_config("medusa", base, run, **{part: changed}), environment)
    told = capsys.readouterr().err
    assert all(f"{part}.{key} " in told for key in changed if key != "dir")
    assert ("`best` compares" in told) == (part == "evaluation")


def test_a_target_is_its_weights_and_not_its_name(begun: Any, base: dict[str, Any]) -> None:
    run, environment = begun
    elsewhere = {**base, "target": "elsewhere/target", "data.samples": "elsewhere/samples"}
    check_same_run(run, make_config("medusa", elsewhere, run), environment)
    for key, name in (("target", "target_fingerprint"), ("data.samples", "data_hash")):
        with pytest.raises(UserError, match=f"the content of {key} .* -> another"):
            check_same_run(run, make_config("medusa", base, run), {**environment, name: "another"})


def test_a_row_is_its_tokens_and_not_its_setting(begun: Any, base: dict[str, Any]) -> None:
    """Less tokens a micro-batch than the longest sample cut it; a run of an older draftsmith does not tell its rows."""
    run, environment = begun
    check_same_run(run, make_config("medusa", base, run, data={"max_length": 600}), environment)
    smaller = make_config("medusa", base, run, data={"tokens_per_micro_batch": 500})
    with pytest.raises(UserError, match="the tokens of a row by data.max_length 512 -> 500"):
        check_same_run(run, smaller, {**environment, "row_length": 500})
    del environment["row_length"]
    (run / "environment.json").write_text(json.dumps(environment))
    check_same_run(run, smaller, {**environment, "row_length": 500})


def test_a_run_goes_on_after_an_upgrade(begun: Any, base: dict[str, Any]) -> None:
    """A setting that there was not yet is what it is by default, and as any other when it is changed."""
    run, environment = begun
    stored = yaml.safe_load((run / "config.yaml").read_text())
    del stored["data"]["drop_cut"], stored["drafter"]["head_decay"]
    (run / "config.yaml").write_text(yaml.safe_dump(stored))
    check_same_run(run, make_config("medusa", base, run), environment)
    with pytest.raises(UserError, match="data.drop_cut False -> True"):
        check_same_run(run, make_config("medusa", base, run, data={"drop_cut": True}), environment)


@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_a_damaged_file_is_named(name: str, begun: Any, base: dict[str, Any]) -> None:
    run, environment = begun
    (run / name).write_text("2.5")
    with pytest.raises(UserError, match=re.escape(str(run / name))):
        check_same_run(run, make_config("medusa", base, run), environment)


def test_a_folder_without_a_checkpoint_is_free(begun: Any, base: dict[str, Any]) -> None:
    """Else a command that failed before its first checkpoint could not be mended in the same folder."""
    run, environment = begun
    other = make_config("medusa", base, run, run={"steps": 3})
    with pytest.raises(UserError, match="run.steps"):
        check_same_run(run, other, environment)
    (run / "checkpoints/step-000001").rmdir()
    check_same_run(run, other, environment)


def test_wandb_without_a_login_costs_one_line(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty)\nmore")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with pytest.raises(UserError, match="run.wandb_project=x: .*not configured.*WANDB_MODE=offline") as caught:
        start_wandb(make_config("medusa", base, tmp_path, run={"wandb_project": "x"}), tmp_path)
    assert "\n" not in str(caught.value)
