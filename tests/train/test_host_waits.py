"""A whole training micro-batch on a GPU whose tensors have no values: the host waits for none of them, in any family.

From the target's features to the gradients, for rows of one document each and for packed ones.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafters import TRAINABLE, build
from gpu_without_values import GPU, HostWaits, Log, gpu_without_values, without_values
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from draftsmith.models import Drafter, Target
from draftsmith.models.batch import Batch

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
BLOCKS = ("dflash", "dflash2", "dspark", "domino")
# Domino goes through the target's head and through its own; families that are not here have one for each depth.
NUM_HEADS = {**dict.fromkeys(("eagle", "eagle3", "p_eagle", *BLOCKS, "mtp", "draft_model"), 1), "domino": 2}
REDUCED = {**dict.fromkeys(("eagle3", "medusa", "p_eagle"), {"draft_vocab_size": 40}), "draft_model": {"num_layers": 1}}


def batch_of(packing: bool) -> Batch:
    """Two rows: documents of 7 and 9 tokens side by side, and one of 12."""
    documents = torch.tensor([[0] * 7 + [1] * 9, [0] * 12 + [-1] * 4])
    mask = torch.zeros_like(documents, dtype=torch.bool)
    mask[0, 3:7] = mask[0, 9:16] = mask[1, 5:12] = True
    return Batch(torch.arange(32).view(2, 16), mask, documents if packing else None)


def train_a_micro_batch(kind: str, target: Target, packing: bool) -> tuple[Log, Drafter]:
    drafter, batch = build(kind, target, **REDUCED.get(kind, {})).train(), batch_of(packing)
    assert drafter.draftable is None or drafter.draftable.any()  # asked for once, before all steps
    for module in (target.model, drafter):
        module.to(torch.bfloat16)
    with gpu_without_values() as log:
        for module in (target.model, drafter):
            without_values(module)
        on_gpu = batch.to(GPU)
        with torch.autocast("cpu", torch.bfloat16):
            total, count = drafter(on_gpu, target.features(on_gpu, drafter.layer_ids))["loss"]
            (total / count).backward()
        assert all(p.grad is not None for p in drafter.parameters() if p.requires_grad)
    return log, drafter


@pytest.fixture(scope="module")
def target_dir(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir(num_hidden_layers=2)


@pytest.fixture
def target(target_dir: Path) -> Target:
    return Target.from_pretrained(target_dir, "cpu", torch.float32)


@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("packing", [False, True])
def test_no_micro_batch_waits(kind: str, packing: bool, target: Target) -> None:
    log, drafter = train_a_micro_batch(kind, target, packing)
    assert log.num_sent > 2  # the batch, and indices
    num_heads = NUM_HEADS.get(kind, drafter.training_depth)
    assert log.operations["_compare"] == num_heads  # all depths of a head go through it, and the loss's kernel, at once
    if packing:  # no attention over all pairs of tokens, but for mask slots
        assert log.operations["_flash_attention_forward"]
        masked = sum(number for name, number in log.operations.items() if name.startswith("_scaled_dot_product"))
        assert (masked > 0) == (kind in ("p_eagle", *BLOCKS))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TRAINABLE)
@pytest.mark.parametrize("packing", [False, True])
def test_no_micro_batch_waits_on_a_gpu(kind: str, packing: bool, target_dir: Path) -> None:
    """By PyTorch's own watch over waits; a first micro-batch, which compiles kernels, is let off."""
    on_gpu = Target.from_pretrained(target_dir, "cuda", torch.bfloat16)
    drafter = build(kind, on_gpu, **REDUCED.get(kind, {})).to(on_gpu.device).train()
    batch = batch_of(packing).pin_memory()
    for watched in ("default", "error"):
        torch.cuda.set_sync_debug_mode(watched)
        try:
            there = batch.to(on_gpu.device)
            with torch.autocast("cuda", torch.bfloat16):
                total, count = drafter(there, on_gpu.features(there, drafter.layer_ids))["loss"]
                (total / count).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert total.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "fault",
    [
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=GPU),
        lambda x: x + torch.ones(3),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: torch.ones(3).to(GPU),
    ],
)
def test_waits_are_found(fault: Callable[[Tensor], object]) -> None:
    """The stand-in's reason to be: each of these makes the host of a real GPU wait."""
    waits = (HostWaits, DataDependentOutputException, DynamicOutputShapeException)
    with gpu_without_values(), pytest.raises(waits):
        fault(torch.zeros(3, device=GPU))
