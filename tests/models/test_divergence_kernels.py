"""The fused divergences against the plain ones, which test_losses.py holds against their definitions.

On a CPU the kernels run in Triton's interpreter (see conftest.py), on a CUDA device as they are; half precision, which
the interpreter gets wrong, on a device only.
"""

import pytest
import torch
from torch import Tensor

from draftsmith.models.losses import chain_loss
from draftsmith.models.losses.chain_loss import Depth, divergence_over_depths
from draftsmith.models.losses.divergences import DIVERGENCES, Comparison, Teacher

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from draftsmith.models.losses import divergence_kernels
from draftsmith.models.losses.divergence_kernels import FusedTeacher

pytestmark = pytest.mark.usefixtures("watched_memory")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 16
SIZES = [(5, 5), (37, 37), (32, 40)]  # draft and target vocabulary, which are a part of a block or several
NUM_ROWS = 7
WEIGHTS = torch.linspace(0.5, 2.0, 64)  # of rows in the gradient
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def random_logits(vocab: int) -> Tensor:
    """Rows of all kinds: near, far, equal to another, flat, sharp, shifted."""
    logits = torch.randn(NUM_ROWS, vocab)
    logits[1] = 0
    logits[2] *= 30
    logits[3] += 50
    logits[4, vocab // 2] += 80
    return logits


def compare_both(
    logits: Tensor, teacher_logits: Tensor, ids: Tensor | None, rows: slice | Tensor, divergence, with_gradient=True
) -> tuple[Comparison, Comparison]:
    found, expected = (
        form.from_logits(teacher_logits.to(DEVICE), None if ids is None else ids.to(DEVICE))[
            rows.to(DEVICE) if isinstance(rows, Tensor) else rows
        ].compare(logits.to(DEVICE).clone(), WEIGHTS.to(DEVICE)[: len(logits)], divergence, with_gradient)
        for form in (FusedTeacher, Teacher)
    )
    return found, expected


def assert_same(found: Comparison, expected: Comparison, tolerance: float = 1e-5) -> None:
    for name in ("loss", "acceptance", "gradient"):
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(
            one.float(), other, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert torch.equal(found.choice, expected.choice)


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.setattr(divergence_kernels, "BLOCK", BLOCK)


@every_divergence
@pytest.mark.parametrize(("vocab", "whole"), SIZES)
def test_kernels_are_the_definitions(divergence, vocab: int, whole: int) -> None:
    """Every row beside a teacher of another kind; rows repeat, and are taken out of order."""
    ids = torch.randperm(whole)[:vocab].sort().values if vocab < whole else None
    rows = torch.tensor([5, 0, 6, 4, 4, 3, 1])
    assert_same(*compare_both(random_logits(vocab), random_logits(whole), ids, rows, divergence))


@every_divergence
def test_no_divergence_between_equals(divergence) -> None:
    logits = random_logits(37)
    found, expected = compare_both(logits, logits, None, slice(0, NUM_ROWS), divergence)
    assert_same(found, expected)
    if "cross_entropy" not in divergence:
        torch.testing.assert_close(found.loss, torch.zeros_like(found.loss), atol=1e-5, rtol=0)


@pytest.mark.parametrize("divergence", [name for name in DIVERGENCES if name != "reverse_kl"])
def test_what_the_target_never_writes(divergence) -> None:
    """Chances of 0, a whole first block of them too. Reverse KL is infinite there."""
    teacher_logits = random_logits(37)
    teacher_logits[:, torch.rand(37) < 0.3] = float("-inf")
    teacher_logits[:3, :BLOCK] = float("-inf")
    teacher_logits[:, 20] = 1.0
    assert_same(*compare_both(random_logits(37), teacher_logits, None, slice(0, NUM_ROWS), divergence))


def test_logits_are_left_alone_without_a_gradient() -> None:
    logits = random_logits(37).to(DEVICE)
    before = logits.clone()
    found = FusedTeacher.from_logits(logits, None).compare(
        logits, torch.ones(len(logits), device=DEVICE), "forward_kl", False
    )
    assert found.gradient is None
    assert torch.equal(logits, before)


def losses_and_gradients(ids: Tensor | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    head, target_head = torch.nn.Linear(6, 9 if ids is None else len(ids)), torch.nn.Linear(6, 9)
    for module in (head, target_head):
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
    hidden = [torch.randn(n, 6, generator=generator).to(DEVICE).requires_grad_() for n in (5, 3)]
    teachers = [torch.tensor(t) for t in ([0, 1, 2, 5, 6], [1, 2, 6])]
    head, target_head = head.to(DEVICE), target_head.to(DEVICE).requires_grad_(False)
    depths = [Depth(h, head, t) for h, t in zip(hidden, teachers, strict=True)]
    target_hidden = torch.randn(8, 6, generator=generator).to(DEVICE)
    total, rows = divergence_over_depths(depths, target_hidden, target_head, "lk_hybrid", ids)
    sums = [tensor for row in rows for tensor in (row.loss, row.correct, row.acceptance)]
    return [total.detach(), *sums, *torch.autograd.grad(total, [*hidden, *head.parameters()])]


@pytest.mark.parametrize("ids", [None, torch.tensor([0, 2, 3, 7])], ids=["whole", "reduced"])
def test_the_loss_of_training_by_both(ids: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of rows, depths that share a head, gradients in hidden states and parameters."""
    ids = None if ids is None else ids.to(DEVICE)
    monkeypatch.setattr(chain_loss, "chunk_rows", lambda vocabulary: 2)
    monkeypatch.setattr(chain_loss, "teacher_from", Teacher.from_logits)
    expected = losses_and_gradients(ids)
    monkeypatch.setattr(chain_loss, "teacher_from", FusedTeacher.from_logits)
    torch.testing.assert_close(losses_and_gradients(ids), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(divergence, dtype: torch.dtype) -> None:
    """Of real size. The gradient is rounded to the dtype of the logits, whose values both forms read."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits, teacher_logits = (
        (4 * torch.randn(64, size, generator=generator, device="cuda")).to(dtype) for size in (32000, 128256)
    )
    ids = torch.randperm(128256)[:32000].sort().values
    found, expected = compare_both(logits, teacher_logits, ids, slice(0, 64), divergence)
    assert found.gradient is not None
    assert expected.gradient is not None
    assert found.gradient.dtype == dtype
    expected.gradient = expected.gradient.to(dtype).float()
    assert_same(found, expected, 1e-5 if dtype == torch.float32 else 1e-2)
