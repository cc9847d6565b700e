"""Muon beside AdamW, the learning rate over the steps, and runs that are made longer."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import build, loss_of, random_batch
from runs import base_of, final_weights, make_config
from torch.nn import Parameter

from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.train import train
from draftsmith.train.config import OptimizerConfig
from draftsmith.train.hardware.layouts import make_accelerator
from draftsmith.train.optimizer import (
    inner_matrices,
    learning_rate,
    optimizer_of,
    orthogonal,
    polynomials,
    polynomials_by_gram,
)
from draftsmith.train.run_folder.checkpoint import TRAINER, checkpoints, remove
from draftsmith.train.run_folder.tracking import read_metrics

MUON: dict[str, Any] = {"matrices": "muon"}


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return base_of(tiny_target_dir, tiny_target, tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("draft_vocab_size", [None, 40])
def test_heads_and_norms_are_not_inner_matrices(draft_vocab_size: int | None, tiny_target: Target) -> None:
    drafter = build("eagle3", tiny_target, draft_vocab_size=draft_vocab_size)
    inner = inner_matrices(drafter)
    names = {name for name, parameter in drafter.named_parameters() if any(parameter is matrix for matrix in inner)}
    parts = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}
    assert names == {"fc.weight", *(f"layers.0.{part}.weight" for part in parts)}


@pytest.mark.parametrize("loads_a_state", [False, True])
def test_each_parameter_moves_as_by_its_own_optimiser(loads_a_state: bool, tiny_target: Target) -> None:
    """Also after a state was loaded, as accelerate does with each new optimiser. torch's Muon computes in bf16.

    Projections that stand in one matrix move as matrices of their own.
    """
    drafter, twin = build("eagle3", tiny_target), build("eagle3", tiny_target)
    config, batch = (
        OptimizerConfig(learning_rate=3e-3, weight_decay=0.1, matrices_rate_factor=2, **MUON),
        random_batch(tiny_target),
    )
    optimizer = optimizer_of(drafter, config)
    if loads_a_state:
        optimizer.load_state_dict(optimizer.state_dict())
    inner = inner_matrices(twin)
    rest = [parameter for parameter in twin.parameters() if all(parameter is not matrix for matrix in inner)]
    parts = {matrix: [Parameter(part) for part in matrix.data.split(rows)] for matrix, rows in inner.items()}
    assert sorted(map(len, parts.values())) == [1, 1, 1, 2, 3]
    projections = [part for found in parts.values() for part in found]
    expected = [
        torch.optim.Muon(projections, lr=6e-3, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3, betas=(config.beta1, config.beta2), weight_decay=0.1, fused=True),
    ]
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    for _ in range(3):
        for moved, optimizers in ((drafter, [optimizer]), (twin, expected)):
            loss_of(moved, batch, tiny_target)["loss"][0].backward()
            for matrix, found in parts.items() if moved is twin else ():
                assert matrix.grad is not None
                for part, gradient in zip(found, matrix.grad.split(inner[matrix]), strict=True):
                    part.grad = gradient.clone()
                matrix.grad = None
            for one in optimizers:
                with torch.autocast("cpu", torch.bfloat16):
                    one.step()
                one.zero_grad()
        for parameter, wanted in zip(drafter.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=0, atol=1e-7)
            wanted.data.copy_(parameter)  # or bf16 would make a last digit into another direction of the next step


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_muon_moves_in_all_directions_alike(shape: tuple[int, int]) -> None:
    """The directions are those of the gradient; the polynomial brings singular values between 0.68 and 1.13."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    stretched = left.T @ orthogonal(gradient) @ right.T  # diagonal: the new singular values
    values = stretched.diagonal()
    torch.testing.assert_close(stretched, torch.diag(values), rtol=0, atol=1e-4)
    assert 0.6 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize("rank", [1, 12, 16])
def test_polynomials_by_the_gram_matrix_are_the_same(rank: int) -> None:
    """Singular values range over four orders of size, as those of gradients do, and some may be 0."""
    left, _, right = torch.linalg.svd(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)), False)
    values = torch.logspace(-0.5, -4.5, 16).where(torch.arange(16) < rank, torch.zeros(()))
    wide = left * values @ right
    torch.testing.assert_close(polynomials_by_gram(wide), polynomials(wide), rtol=0, atol=1e-4)


def test_muon_goes_on_bit_for_bit(base: dict[str, Any], tmp_path: Path) -> None:
    """From a checkpoint in the middle, with the momentum that it holds."""
    run = {"steps": 4, "checkpoint_every": 2}
    whole = train(make_config("eagle3", base, tmp_path / "whole", optimizer=MUON, run=run))
    shutil.copytree(whole, tmp_path / "run")
    for checkpoint in checkpoints(tmp_path / "run")[1:]:
        remove(checkpoint)
    resumed = train(make_config("eagle3", base, tmp_path / "run", optimizer=MUON, run=run))
    expected = final_weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(resumed).items())


def test_muon_is_refused_where_deepspeed_steps(monkeypatch: pytest.MonkeyPatch, base: dict[str, Any]) -> None:
    """A piece of a matrix has other directions than the whole one."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match="DeepSpeed steps on pieces of them: start with recipes/launch/ddp.yaml"):
        make_accelerator(make_config("eagle3", base, Path("unused"), optimizer=MUON))


def test_the_late_decay_keeps_the_peak_and_falls_at_the_end() -> None:
    config = OptimizerConfig(learning_rate=1.0, decay="late", warmup_share=0.1, decay_share=0.2, final_share=0.1)
    rates = [learning_rate(step, 20, config) for step in range(21)]
    assert rates[:2] == [0.5, 1.0]
    assert rates[2:17] == [1.0] * 15
    assert rates[17:] == pytest.approx([0.775, 0.55, 0.325, 0.1])


def test_a_rate_of_muon_is_refused_beside_adamw(base: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="matrices_rate_factor has no effect on AdamW"):
        make_config("eagle3", base, Path("unused"), optimizer={"matrices_rate_factor": 10})


def test_a_decay_of_the_cosine_is_refused(base: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="decay_share has no effect on the cosine"):
        make_config("eagle3", base, Path("unused"), optimizer={"decay_share": 0.5})


LATE: dict[str, Any] = {"decay": "late", "decay_share": 0.5, "warmup_share": 0.0}


@pytest.fixture(scope="module")
def short(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, whose learning rate falls in the last two."""
    folder = tmp_path_factory.mktemp("short")
    return train(make_config("medusa", base, folder, optimizer=LATE, run={"steps": 4, "checkpoint_every": 4}))


def test_a_longer_run_goes_on_from_before_the_decay(short: Path, base: dict[str, Any], tmp_path: Path) -> None:
    """It ends as one that had all of its steps from the start."""
    run = {"steps": 8, "checkpoint_every": 8}
    whole = train(make_config("medusa", base, tmp_path / "whole", optimizer=LATE, run=run))
    shutil.copytree(short, tmp_path / "run")
    longer = train(make_config("medusa", base, tmp_path / "run", optimizer=LATE, run=run))
    expected = final_weights(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in final_weights(longer).items())
    assert [line["step"] for line in read_metrics(longer)] == [line["step"] for line in read_metrics(whole)]
    names = sorted(path.name for path in (longer / "checkpoints").iterdir())
    assert names == ["decayed-step-000004", "step-000002", "step-000004", "step-000008"]


def test_a_run_is_made_longer_twice(short: Path, base: dict[str, Any], tmp_path: Path) -> None:
    """Step 4 lies behind where each of the two ends begins to fall, and is set aside each time."""
    shutil.copytree(short, tmp_path / "run")
    for steps in (6, 8):
        run = {"steps": steps, "checkpoint_every": 4}
        longer = train(make_config("medusa", base, tmp_path / "run", optimizer=LATE, run=run))
    names = sorted(path.name for path in (longer / "checkpoints").iterdir())
    aside = ["decayed-step-000004", "decayed-step-000006"]
    assert names == [*aside, "step-000002", "step-000003", "step-000004", "step-000008"]


def test_a_run_without_a_state_from_before_the_decay_is_refused(
    short: Path, base: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(short, tmp_path / "run")
    remove(checkpoints(tmp_path / "run")[0] / TRAINER)
    with pytest.raises(UserError, match="no checkpoint of .* up to step 2"):
        train(make_config("medusa", base, tmp_path / "run", optimizer=LATE, run={"steps": 8, "checkpoint_every": 8}))


def test_a_shorter_run_is_another_run(short: Path, base: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="holds a run with other settings"):
        train(make_config("medusa", base, short, optimizer=LATE, run={"steps": 3, "checkpoint_every": 3}))
