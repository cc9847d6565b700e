"""Medusa's options: output matrices, a reduced vocabulary, and training the target along (Medusa-2)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import CHANGED_TARGET, Target, load_drafter, save_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafters.medusa import Medusa, MedusaConfig
from draftsmith.models.errors import UserError
from draftsmith.models.slots.forward import run_causal
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import train
from draftsmith.train.config import resolve


@pytest.fixture
def batch(tiny_target: Target) -> Batch:
    token_ids = torch.randint(1, tiny_target.vocab_size, (2, 12))
    return Batch(token_ids, torch.arange(12).expand(2, 12) >= 3)


@pytest.mark.parametrize("draft_vocab_size", [None, 60])
@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_output_matrices(output: Any, draft_vocab_size: int | None, tiny_target: Target, batch: Batch, tmp_path: Path):
    """Untrained heads repeat the target's choice, out of those tokens that they have; a checkpoint gives them back."""
    config = MedusaConfig(num_heads=3, num_layers=2, output=output, draft_vocab_size=draft_vocab_size)
    drafter = Medusa.from_target(config, tiny_target).eval()
    counts = torch.rand(tiny_target.vocab_size)
    drafter.fit_vocabulary(counts)
    num_matrices = sum(name.startswith("lm_heads") for name in drafter.engine_tensors())
    assert num_matrices == (3 if output == "own" else 1)
    assert any(p.requires_grad for p in drafter.lm_heads.parameters()) == (output != "target")

    features = tiny_target.features(batch)
    logits = tiny_target.logits(features.last_hidden)
    kept = torch.arange(tiny_target.vocab_size) if draft_vocab_size is None else counts.topk(60).indices.sort().values
    expected = kept[logits[..., kept].argmax(-1)]
    for block, head in drafter.heads():
        ids = head(block(features.last_hidden)).argmax(-1)
        assert torch.equal(ids if drafter.draft_to_target() is None else kept[ids], expected)

    drafter.loss(batch, features)["loss"][0].backward()
    assert all(p.grad is not None for p in drafter.parameters() if p.requires_grad)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, tiny_target)
    assert loaded.config == drafter.config
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target)).generate(["strike the iron"], 20)
    for one in (drafter, loaded):
        output_ = SpeculativeDecoder(tiny_target, one).generate(["strike the iron"], 20, draft_length=3)
        assert output_.token_ids == plain.token_ids


@pytest.mark.parametrize("adapt_target", ["low_rank", "full"])
def test_a_target_trained_along_is_written_as_it_became(
    adapt_target: Any, tiny_target_dir: Path, batch: Batch, tmp_path: Path
) -> None:
    """The teacher stays what it was; the written target computes what the heads were trained on."""
    target = Target.from_pretrained(tiny_target_dir, "cpu")
    before = target.features(batch).last_hidden
    drafter = Medusa.from_target(MedusaConfig(adapt_target=adapt_target, adapter_rank=4), target)
    sums = drafter.loss(batch, target.features(batch))
    assert sums["target_change"][0].abs() < 1e-4  # corrections start as nothing
    sums["loss"][0].backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    torch.optim.SGD(drafter.corrections.parameters(), lr=0.01).step()
    assert torch.equal(target.features(batch).last_hidden, before)
    assert drafter.loss(batch, target.features(batch))["target_change"][0] > 1e-3

    save_drafter(drafter, tmp_path)
    assert not any(name.startswith("corrections") for name in drafter.engine_tensors())
    changed = Target.from_pretrained(tmp_path / CHANGED_TARGET, "cpu")
    with torch.no_grad(), drafter.corrections.applied():
        expected = run_causal(target.model, batch.token_ids)
    assert not torch.allclose(expected, before, atol=1e-3)
    torch.testing.assert_close(changed.features(batch).last_hidden, expected, atol=1e-5, rtol=1e-5)
    assert load_drafter(tmp_path, changed).config.adapt_target == "no"


def test_medusa_2_is_measured_on_the_changed_target(tiny_target: Target, tiny_target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("strike the iron\nheats it again\n")
    prepare(tiny_target, str(tmp_path / "prompts.txt"), tmp_path / "samples", PrepareSettings(max_new_tokens=16))
    changes: dict[str, Any] = {
        "target": tiny_target_dir,
        "data.samples": tmp_path / "samples",
        "data.batch_size": 2,
        "drafter.adapt_target": "low_rank",
        "evaluation.prompts": tmp_path / "prompts.txt",
        "evaluation.repeats": 1,
        "run.device": "cpu",
        "run.dir": tmp_path / "run",
        "run.steps": 2,
    }
    run = train(resolve(RECIPES["medusa"](), None, [f"{key}={value}" for key, value in changes.items()]))
    result = read_evaluation(run / "best" / "evaluation.json").results[0]
    assert result.lossless.identical == result.lossless.checked == 2
    assert (run / "best" / CHANGED_TARGET / "model.safetensors").is_file()
    evaluation = json.loads((run / "best" / "evaluation.json").read_text())
    assert evaluation["target"] == str(run / "checkpoints" / "step-000002" / CHANGED_TARGET)


@pytest.mark.parametrize("setting", ["data.features=stored", "run.target_placement=sharded"])
def test_a_target_that_is_trained_along_is_whole(setting: str) -> None:
    settings = ["target=t", "data.samples=s", "run.dir=r", "drafter.adapt_target=full", setting]
    with pytest.raises(UserError, match=f"{setting}: the target is trained along"):
        resolve(RECIPES["medusa"](), None, settings)
