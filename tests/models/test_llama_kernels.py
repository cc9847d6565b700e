"""Steps of a fused layer: kernels against their plain twins, in Triton's interpreter (bf16 runs on a GPU).

The twins are written for fp32, so that a kernel in half precision is held to its twin on the same values in fp32.
"""

import pytest
import torch

from draftsmith.models.layers import DecodingNorm
from draftsmith.models.target import layer_kernels as llama_kernels
from draftsmith.models.target import layer_steps as llama_steps

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("watched_memory")
HALF_PRECISION = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
DTYPES = [torch.float32, *HALF_PRECISION]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def rounded(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """fp32, of values that `dtype` holds."""
    return torch.randn(*shape, device=device).to(dtype).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 100, 1536])
def test_rms_norm(width: int, dtype: torch.dtype, device: str) -> None:
    """Of rows that lie apart, large and small; a row of zeros stays one."""
    factors = torch.tensor([[1], [0], [8], [1], [2**-7]], device=device)
    x = rounded(5, 2 * width, dtype=dtype, device=device)[:, :width] * factors
    weight = rounded(width, dtype=dtype, device=device)
    expected = torch.empty(5, width, device=device)
    llama_steps.rms_norm(x, DecodingNorm(weight, 1e-5), out=expected)
    torch.testing.assert_close(expected, torch.nn.functional.rms_norm(x, (width,), weight, 1e-5), atol=1e-5, rtol=1e-5)
    found = torch.full((5, width), float("nan"), dtype=dtype, device=device)
    llama_kernels.rms_norm(x.to(dtype), DecodingNorm(weight.to(dtype), 1e-5), out=found)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not found[1].any()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "queries", "kv_heads", "width"), [(5, 4, 2, 32), (5, 3, 3, 20), (5, 8, 1, 128), (1, 4, 2, 32)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_and_store(
    num_tokens: int, queries: int, kv_heads: int, width: int, normed: bool, dtype: torch.dtype, device: str
) -> None:
    """Of q in place, k and v in the cache; the cache's other slots and v itself are left alone.

    One token, as a step of plain decoding has it, is a view whose stride along the tokens means nothing.
    """
    num_rotated, half = queries + kv_heads, width // 2
    qkv = rounded(num_tokens, (num_rotated + kv_heads) * width, dtype=dtype, device=device)
    angles = torch.randn(num_tokens, 1, 1, half, device=device)
    cos, sin = angles.cos(), torch.cat((-angles.sin(), angles.sin()), 2)
    weight = rounded(num_rotated, width, dtype=dtype, device=device)
    written = torch.tensor([3, 11, 4, 0, 7], device=device)[:num_tokens]
    results = []
    for steps, kind in ((llama_steps, torch.float32), (llama_kernels, dtype)):
        own = qkv.to(kind, copy=True)
        heads, stored = own[:, : num_rotated * width].view(num_tokens, -1, 2, half), own[:, queries * width :]
        flat = torch.full((12, 2 * kv_heads * width), -7.0, dtype=kind, device=device)
        norm = DecodingNorm(weight.to(kind), 1e-6) if normed else None
        steps.rotate_and_store(heads, stored, cos, sin, norm, written, flat)
        results.append((own[:, : queries * width].float(), flat.float()))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    flat = results[1][1]
    assert torch.equal(flat[written, kv_heads * width :], qkv[:, num_rotated * width :])
    assert (flat[[1, 2, 5]] == -7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1100])
def test_silu_mul(width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = 4 * rounded(4, 2 * width, dtype=dtype, device=device)
    expected = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
    for steps, kind in ((llama_steps, torch.float32), (llama_kernels, dtype)):
        gate, up = gate_up.to(kind, copy=True).chunk(2, 1)
        found = steps.silu_mul_(gate, up).float()
        tolerance = TOLERANCE[kind]
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(up.float(), gate_up[:, width:])
