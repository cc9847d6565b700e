"""The overfit gate: every family learns a few answers by heart, and faults of known kinds are named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import SMALLER

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.models import DRAFTERS, Target
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import overfit as gate
from draftsmith.train.config import TrainConfig, resolve
from draftsmith.train.overfit import GOAL, overfit


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "prompts.txt").write_text("strike the iron\nheats it again\nreturn [iron.hit()\n")
    prepare(tiny_target, str(folder / "prompts.txt"), folder / "samples", PrepareSettings(max_new_tokens=16))
    return {
        "target": tiny_target_dir,
        "data.samples": folder / "samples",
        "run.device": "cpu",
        "run.dir": folder / "run",
        "evaluation.max_new_tokens": 24,
    }


def make_config(kind: str, base: dict[str, Any], **drafter: Any) -> TrainConfig:
    changes = {f"drafter.{key}": value for key, value in drafter.items()}
    return resolve(RECIPES[kind](), None, [f"{key}={value}" for key, value in {**base, **changes}.items()])


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind in RECIPES])
def test_every_family_learns_a_few_answers_by_heart(
    kind: str, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CHECK_EVERY", 10)
    from_all_slots = {"anchor_share": 1.0} if kind in ("dflash", "dflash2", "domino") else {}  # in a third of the steps
    result = overfit(make_config(kind, base, **SMALLER.get(kind, {}), **from_all_slots), 2)
    assert result.acceptance_length >= GOAL * 5


def test_faults_are_named(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "STEPS", 4)
    with pytest.raises(UserError, match="not even the first drafted token was learnt"):
        overfit(make_config("medusa", base), 2)
    monkeypatch.setattr(Eagle3, "fit_vocabulary", lambda self, counts: None)  # keeps ids 0, 1, 2, ...
    with pytest.raises(UserError, match="not in the draft vocabulary"):
        overfit(make_config("eagle3", base, draft_vocab_size=8), 2)


def test_a_decoder_that_sees_other_features_is_named(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The features of drafting shifted by their sign: training knows nothing of it."""
    propose = Eagle3.propose

    def wrong(self: Eagle3, state: Any, shape: Any) -> Any:
        state.features.layers = -state.features.layers
        draft = propose(self, state, shape)
        state.features.layers = -state.features.layers
        return draft

    monkeypatch.setattr(Eagle3, "propose", wrong)
    monkeypatch.setattr(gate, "STEPS", 150)
    with pytest.raises(UserError, match="see different features"):
        overfit(make_config("eagle3", base), 2)


def test_depths_that_were_not_trained_are_named(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(gate, "STEPS", 120)
    with pytest.raises(UserError, match="unroll_steps"):
        overfit(make_config("eagle3", base, unroll_steps=1), 2)


@pytest.mark.parametrize(
    ("recipe", "num_sequences", "reason"),
    [("medusa_2", 2, "changes the target that it is judged by"), ("medusa", 4, "has 3 samples")],
)
def test_what_the_gate_cannot_judge_is_refused(
    recipe: str, num_sequences: int, reason: str, base: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=reason):
        overfit(make_config(recipe, base), num_sequences)
