"""`init_from`: training goes on from a checkpoint, of this project or in the layout of another one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import assert_same_drafter, noisy, untrained
from families import RECURRENT, SERVED, target_and_plain_model
from public_checkpoints import PUBLIC
from runs import make_config
from safetensors.torch import load_file

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.models import Drafter, Target, load_drafter, save_drafter
from draftsmith.models.errors import UserError
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import train
from draftsmith.train.config import resolve
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.tracking import read_metrics
from draftsmith.train.setup import set_up

LAYOUTS = [name for name in PUBLIC if "," not in name]  # without variants of one layout
FAMILIES = [
    "eagle",
    "eagle3",
    "p_eagle",
    "dflash",
    "dflash2",
    "dspark",
    "domino",
    "mtp",
    "medusa",
    "hydra",
    "mlp_speculator",
    "draft_model",
]


def ours(kind: str, target: Target, folder: Path) -> Drafter:
    """A checkpoint of ours of a shape that no recipe has."""
    shapes: dict[str, dict[str, Any]] = {
        "eagle": {"intermediate_size": 24},
        "eagle3": {"draft_vocab_size": 40, "layer_ids": [1, 4, 6], "intermediate_size": 24},
        "p_eagle": {"draft_vocab_size": 40, "num_layers": 2, "mask_token_id": 7},
        "dflash": {"num_layers": 2, "mask_token_id": 7},
        "dflash2": {"num_layers": 2, "mask_token_id": 7, "conv_group_size": 8},
        "domino": {"num_layers": 2, "mask_token_id": 7, "memory_size": 12, "code_size": 6},
        "dspark": {"num_layers": 2, "mask_token_id": 7, "markov_rank": 6},
        "mtp": {"starting_layers": "random"},
        "medusa": {"num_heads": 5, "output": "shared"},
        "hydra": {"num_heads": 5, "num_layers": 2},
        "mlp_speculator": {"num_heads": 5, "inner_size": 24, "tie_weights": True},
        "draft_model": {"num_layers": 3},
    }
    drafter = noisy(kind, target, **shapes[kind])
    save_drafter(drafter, folder)
    return drafter


@pytest.fixture(scope="module")
def target_dir(make_target_dir: Any) -> Path:
    return make_target_dir(num_hidden_layers=8)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target.from_pretrained(target_dir, "cpu", torch.float32)


@pytest.fixture(scope="module")
def base(target_dir: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "prompts.txt").write_text("".join(f"strike {'the iron ' * (i % 3)}{i}\n" for i in range(8)))
    prepare(target, str(folder / "prompts.txt"), folder / "samples", PrepareSettings(max_new_tokens=24))
    return {
        "target": str(target_dir),
        "data.samples": str(folder / "samples"),
        "data.batch_size": 8,
        "run.device": "cpu",
        "run.log_every": 1,
        "optimizer.learning_rate": 1e-3,
    }


def written(name: str, target: Target, folder: Path) -> Drafter:
    """A checkpoint by the name of a public layout, or of a family of ours."""
    return PUBLIC[name](target, folder) if name in PUBLIC else ours(name, target, folder)


@pytest.mark.parametrize("name", [*LAYOUTS, *FAMILIES])
def test_training_goes_on_from_a_checkpoint(name: str, base: dict[str, Any], target: Target, tmp_path: Path) -> None:
    """Its tensors and shape to the bit, whatever the recipe's; then training as ever, resumed to the bit."""
    source = tmp_path / "source"
    expected = written(name, target, source)
    config = make_config(
        expected.kind, {**base, "init_from": source}, tmp_path / "run", run={"steps": 3, "checkpoint_every": 1}
    )
    brought = (*config.drafter.fixed_fields, "starting_layers")  # what is the checkpoint's, not the recipe's
    training = {name: value for name, value in vars(config.drafter).items() if name not in brought}
    assert_same_drafter(set_up(config).drafter, expected)
    assert training.items() <= vars(config.drafter).items()

    run = train(config)
    losses = [line["loss"] for line in read_metrics(run)]  # each step sees all samples
    assert losses[2] < losses[0]
    trained = load_drafter(checkpoints(run)[-1], target)
    assert {n: t.shape for n, t in trained.engine_tensors().items()} == {
        n: t.shape for n, t in expected.engine_tensors().items()
    }
    if (ids := expected.draft_to_target()) is not None:
        assert torch.equal(trained.draft_to_target(), ids)
    assert len(json.loads((run / "environment.json").read_text())["init_from_hash"]) == 16

    whole = load_file(checkpoints(run)[-1] / "model.safetensors")
    shutil.rmtree(checkpoints(run)[-1])
    train(resolve(RECIPES[expected.kind](), run / "config.yaml"))  # which gives the same run
    for tensor_name, tensor in load_file(checkpoints(run)[-1] / "model.safetensors").items():
        assert torch.equal(tensor, whole[tensor_name]), tensor_name


@pytest.mark.parametrize(
    ("recipe", "drafter", "message"),
    [
        ("medusa", {}, "holds a drafter of kind eagle3, but this recipe trains medusa"),
        ("eagle3", {"draft_vocab_size": 64}, r"draft_vocab_size=64, but init_from=\S+ has 40"),
        ("eagle3", {"layer_ids": [2, 4, 5]}, r"layer_ids=\[2, 4, 5\], but init_from=\S+ has \[1, 4, 6\]"),
        ("eagle3", {"draft_vocab_coverage": 0.9}, r"draft_vocab_coverage=0.9, but init_from=\S+ has None"),
    ],
)
def test_another_shape_is_refused(
    recipe: str, drafter: dict[str, Any], message: str, base: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    ours("eagle3", target, tmp_path / "source")
    config = make_config(recipe, {**base, "init_from": tmp_path / "source"}, tmp_path / "run", drafter=drafter)
    with pytest.raises(UserError, match=message):
        set_up(config)


def test_what_agrees_may_be_said(base: dict[str, Any], target: Target, tmp_path: Path) -> None:
    """Fields of training are the config's; a null asks for nothing."""
    expected = ours("eagle3", target, tmp_path / "source")
    drafter = {"draft_vocab_size": 40, "layer_ids": [1, 4, 6], "intermediate_size": "null", "unroll_steps": 2}
    config = make_config("eagle3", {**base, "init_from": tmp_path / "source"}, tmp_path / "run", drafter=drafter)
    found = set_up(config).drafter
    assert_same_drafter(found, expected)
    assert found.config.unroll_steps == 2


def test_medusa_2_does_not_start_from_a_checkpoint(base: dict[str, Any], target: Target, tmp_path: Path) -> None:
    ours("medusa", target, tmp_path / "source")
    with pytest.raises(UserError, match="adapt_target=low_rank"):
        set_up(make_config("medusa_2", {**base, "init_from": tmp_path / "source"}, tmp_path / "run"))


def test_a_head_of_another_target(
    base: dict[str, Any], target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fine-tuned target takes the head of the original one, and the user is told; another tokenizer cannot."""
    expected = ours("eagle3", target, tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    content = json.loads(path.read_text())
    config = make_config("eagle3", {**base, "init_from": tmp_path / "source"}, tmp_path / "run")

    content["draftsmith"]["trained_for"]["target_fingerprint"] = "another"
    path.write_text(json.dumps(content))
    assert_same_drafter(set_up(config).drafter, expected)
    assert "made with other weights or another config" in capsys.readouterr().err

    content["draftsmith"]["trained_for"]["tokenizer_fingerprint"] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="another tokenizer"):
        set_up(config)


def test_an_embedding_of_its_own_gives_way(
    base: dict[str, Any], target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of a target which was fine-tuned since: drafting reads the target's, so training goes on with it."""
    expected = PUBLIC["SafeAILab EAGLE-3"](target, tmp_path / "source")
    file = tmp_path / "source" / "pytorch_model.bin"
    torch.save({**torch.load(file), "embed_tokens.weight": torch.randn(target.vocab_size, 32)}, file)
    config = make_config("eagle3", {**base, "init_from": tmp_path / "source"}, tmp_path / "run")
    assert_same_drafter(set_up(config).drafter, expected)
    assert "an embedding of its own" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["granite", "cohere", "falcon_h1"])
@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3"])
def test_new_heads_make_the_targets_logits(kind: str, family: str) -> None:
    """Also where its family scales them, which a plain head has in its weights."""
    target, _ = target_and_plain_model(family, {**SERVED, **RECURRENT}[family])
    drafter: Any = untrained(kind, target, draft_vocab_size=None) if kind == "eagle3" else untrained(kind, target)
    head = drafter.lm_head if kind == "eagle3" else drafter.lm_heads[0]
    hidden = torch.randn(3, target.hidden_size)
    expected = target.logits(hidden)
    assert not torch.allclose(expected, hidden @ target.head_weight().T)
    torch.testing.assert_close(head(hidden), expected)
