"""Training in bf16 by autocast, as on a GPU: losses and gradients stay close to those in fp32, in every family."""

from pathlib import Path

import pytest
import torch
from drafters import TRAINABLE, build, loss_of, random_batch

from draftsmith.models import Target

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The label of a cross-entropy is the target's most likely token. Where an untrained target has two of nearly the same
# probability, rounding chooses the other one, and the gradient points elsewhere. So these drafters learn by L1 alone.
SOFT_LABELS = {"dspark": {"divergence": "total_variation"}}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32 target", "bf16 target"])
def target(request: pytest.FixtureRequest, tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, DEVICE, request.param)


def loss_and_gradient(kind: str, target: Target, plain: Target, autocast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss of a drafter on a random batch, and its gradient in all parameters, in a row.

    The drafter, in fp32, is made of the `plain` target.
    """
    drafter = build(kind, plain, **SOFT_LABELS.get(kind, {})).to(DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        total, count = loss_of(drafter, random_batch(target).to(DEVICE), target)["loss"]
        loss = total / count
    loss.backward()
    gradients = [parameter.grad.flatten() for parameter in drafter.parameters() if parameter.grad is not None]
    return loss.detach(), torch.cat(gradients)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_bf16_stays_close_to_fp32(kind: str, target: Target, tiny_target_dir: Path) -> None:
    """With eight bits of a mantissa losses agree to two in a hundred, and gradients point the same way."""
    plain = Target.from_pretrained(tiny_target_dir, DEVICE, torch.float32)
    expected, expected_gradient = loss_and_gradient(kind, plain, plain, autocast=False)
    loss, gradient = loss_and_gradient(kind, target, plain, autocast=True)
    assert loss.dtype == gradient.dtype == torch.float32
    assert loss != expected  # autocast was on
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert torch.nn.functional.cosine_similarity(gradient, expected_gradient, dim=0) > 0.99
    torch.testing.assert_close(gradient.norm(), expected_gradient.norm(), rtol=5e-2, atol=0)
