"""Blocks that drafters share, beside torch's own operators and their gradients."""

import pytest
import torch
from torch.nn import functional as F

from draftsmith.models.layers import RMSNorm


@pytest.mark.parametrize("learns_input", [True, False])
def test_the_norm_is_that_of_torch(learns_input: bool) -> None:
    norm, x = RMSNorm(6, eps=0.1), torch.randn(2, 5, 6, requires_grad=learns_input)
    torch.nn.init.normal_(norm.weight)
    x.data[0, 0] = 0  # a row of which eps alone tells the length
    learnt = [norm.weight, *([x] if learns_input else [])]
    expected = F.rms_norm(x, (6,), norm.weight, 0.1)
    weights = torch.randn_like(expected)
    found = norm(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), learnt), torch.autograd.grad((expected * weights).sum(), learnt)
    )
