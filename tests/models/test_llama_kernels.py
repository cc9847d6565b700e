"""Steps of a fused layer: kernels against their plain twins, in Triton's interpreter (bf16 runs on a GPU).

The twins are written for fp32, so that a kernel in half precision is held to its twin on the same values in fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch

from draftsmith.models.errors import UserError
from draftsmith.models.fused import layer_kernels as llama_kernels
from draftsmith.models.fused import layer_steps as llama_steps
from draftsmith.models.fused import product_kernel
from draftsmith.models.fused.layer_steps import Beside, Ending
from draftsmith.models.kernels import counters
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Window, chain_window

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
    """Rows that lie apart, large and small, are normed as torch does it; a row of zeros stays one."""
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


@pytest.mark.parametrize("picked", [None, [2, 0]])
@pytest.mark.parametrize("num_words", [0, 1, 3])
@pytest.mark.parametrize("width", [64, 1100])
def test_enter(width: int, num_words: int, picked: list[int] | None, device: str) -> None:
    """Slots past the cache's end are padding, positions past the last angle have the last."""
    batch, length, half, num_slots = 2, 3, 10, 16
    slots = torch.tensor([[4, 5, 6], [14, 15, 16]], device=device)
    ancestors = None
    if num_words:
        ancestors = torch.randint(-(2**31), 2**31, (batch, length, num_words), device=device).int()
    window = Window(slots, slots - 1 + (slots == 6).int(), slots[:, 0], ancestors)
    token_ids, embedding = torch.randint(50, (batch, length), device=device), torch.randn(50, width, device=device)
    cache = SlotCache(3, num_slots)
    if picked:
        cache = cache.rows(torch.tensor(picked, device=device))
    cache.angles = torch.randn(14, 2, half, device=device)
    plain = llama_steps.enter(token_ids, embedding, window, cache, {None})
    written = cache.written
    cache.written = torch.zeros(0)
    found = llama_kernels.enter(token_ids, embedding, window, cache, {None})
    assert torch.equal(cache.written, written)
    assert torch.equal(found.mask, window.packed_mask())
    for one, other in ((plain.x, found.x), (plain.cos, found.cos), (plain.sin, found.sin)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("columns", [slice(0, 1), slice(2, 3), slice(1, 4)])
def test_a_part_of_a_window_is_entered_as_a_window_of_its_own(columns: slice) -> None:
    """What all parts share, made of the whole, gives each what its own slots would, past the last angle, too."""
    whole = chain_window(torch.tensor([4, 12]), 4)
    alone = Window(whole.slots[:, columns], whole.positions[:, columns], whole.prefix)
    token_ids, embedding = torch.randint(50, alone.slots.shape), torch.randn(50, 8)
    cache, shared = (SlotCache(2, 15) for _ in range(2))
    cache.angles = shared.angles = torch.randn(14, 2, 10)
    expected = llama_steps.enter(token_ids, embedding, alone, cache, {None, 3})
    found = llama_steps.enter(token_ids, embedding, whole.part(columns), shared, {None, 3})
    assert whole.places is not None
    assert torch.equal(shared.written, cache.written)
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_enter_with_features(dtype: torch.dtype, device: str) -> None:
    """Embedding and feature stand side by side, each normed by its own weights; features and tokens lie apart."""
    width, token_ids = 100, torch.randint(50, (2, 6), device=device)[:, ::2]
    embedding, weight = (rounded(rows, width, dtype=dtype, device=device) for rows in (50, 2))
    hidden = rounded(6, 2 * width, dtype=dtype, device=device)[:, width:]
    window, cache = chain_window(torch.tensor([4, 9], device=device), 3), SlotCache(2, 16)
    cache.angles = torch.randn(14, 2, 10, device=device)
    beside = Beside(hidden, DecodingNorm(weight, 1e-5))
    expected = llama_steps.enter(token_ids, embedding, window, cache, {None}, beside)
    for part, x in enumerate((embedding[token_ids.flatten()], hidden)):
        alone = torch.nn.functional.rms_norm(x, (width,), weight[part], 1e-5)
        torch.testing.assert_close(expected.x[:, part], alone, atol=1e-5, rtol=1e-5)
    written, cache.written = cache.written, torch.zeros(0)
    beside = Beside(hidden.to(dtype), DecodingNorm(weight.to(dtype), 1e-5))
    found = llama_kernels.enter(token_ids, embedding.to(dtype), window, cache, {None}, beside)
    torch.testing.assert_close(found.x.float(), expected.x, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(cache.written, written)
    assert torch.equal(found.mask, window.packed_mask())
    assert torch.equal(found.sin, expected.sin)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "queries", "kv_heads", "width"), [(5, 4, 2, 32), (5, 3, 3, 20), (5, 8, 1, 128), (1, 4, 2, 32)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_and_store(
    num_tokens: int, queries: int, kv_heads: int, width: int, normed: bool, dtype: torch.dtype, device: str
) -> None:
    """Queries are turned in place, keys and values go to the cache; its other slots and v are left alone.

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


@dataclass
class Given:
    """Arguments of a product, in fp32, of values that `dtype` holds."""

    x: torch.Tensor
    weight: torch.Tensor  # [O, H]
    norm: DecodingNorm | None
    bias: torch.Tensor | None
    before: torch.Tensor  # what stands in the output
    ending: Ending

    def result(self, form: Callable[..., None], dtype: torch.dtype = torch.float32, **settings: int) -> torch.Tensor:
        """Return what a form of the product gives in a dtype, as fp32."""
        norm = self.norm and DecodingNorm(self.norm.weight.to(dtype), self.norm.eps)
        bias = None if self.bias is None else self.bias.to(dtype)
        out = self.before.to(dtype, copy=True)
        form(self.x.to(dtype), self.weight.to(dtype).t(), out, norm, bias, self.ending, **settings)
        return out.float()


def random_product(num_rows: int, width: int, outputs: int, ending: Ending, dtype: torch.dtype, device: str) -> Given:
    """Norm and bias come with every ending but "add", as in a layer. Rows and output lie in wider tensors."""
    plain = ending == "add"
    x = rounded(num_rows, 2 * width, dtype=dtype, device=device)[:, :width]
    weight = (rounded(outputs, width, dtype=dtype, device=device) * width**-0.5).to(dtype).float()
    norm = None if plain else DecodingNorm(1 + 0.3 * rounded(width, dtype=dtype, device=device), 1e-5)
    bias = None if plain else rounded(outputs, dtype=dtype, device=device)
    before = rounded(num_rows, outputs // 2 if ending == "gate" else outputs, dtype=dtype, device=device)
    return Given(x, weight, norm, bias, before if plain else torch.full_like(before, float("nan")), ending)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ending", get_args(Ending))
@pytest.mark.parametrize(
    ("num_rows", "width", "outputs", "splits"), [(1, 128, 96, 1), (5, 1100, 150, 3), (8, 512, 64, 4)]
)
def test_product(
    num_rows: int, width: int, outputs: int, splits: int, ending: Ending, dtype: torch.dtype, device: str
) -> None:
    """In one launch and in several, of whole tiles and of pieces of one, with all that stands around a product."""
    given = random_product(num_rows, width, outputs, ending, dtype, device)
    expected = given.result(llama_steps.product)
    for found in (
        given.result(product_kernel.product, dtype, splits=splits),
        given.result(llama_kernels.separate_product, dtype),
    ):
        torch.testing.assert_close(found, expected, atol=3 * TOLERANCE[dtype], rtol=3 * TOLERANCE[dtype])
    assert not counters(given.x.device).any()  # of a split product, too: the next finds them at zero


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_among_any_others(dtype: torch.dtype, device: str) -> None:
    """Bit for bit, so that a plain step and a round of a few drafts round alike."""
    given = random_product(8, 300, 64, "gate", dtype, device)
    together = given.result(product_kernel.product, dtype, splits=2)
    for row in (0, 5):
        alone = replace(given, x=given.x[row : row + 1], before=given.before[:1])
        assert torch.equal(alone.result(product_kernel.product, dtype, splits=2)[0], together[row])


def test_a_product_rounds_where_separate_launches_round(device: str) -> None:
    """Sums of the row are exact in fp16 and in fp32, so that only the rounding in between can differ."""
    x = torch.tensor([[3.0, -1.0]] * 16, device=device).view(1, 32)
    weight = torch.randint(-8, 9, (64, 32), device=device) / 8
    norm = DecodingNorm(torch.linspace(0.5, 1.5, 32, device=device).half().float(), 1e-5)
    given = Given(x, weight, norm, None, torch.zeros(1, 32, device=device), "gate")
    fused, separate = (given.result(f, torch.float16) for f in (product_kernel.product, llama_kernels.separate_product))
    assert torch.equal(fused, separate)


@pytest.mark.parametrize(
    ("num_rows", "times", "expected"), [(8, (1.0, 2.0), True), (1, (2.0, 1.0), False), (9, (), False)]
)
def test_the_faster_form_is_taken(
    num_rows: int, times: tuple[float, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU by one measurement of each form; many rows are never measured. The switch says otherwise."""
    measured = iter(times)
    monkeypatch.setattr(llama_kernels, "milliseconds", lambda form, kind: next(measured))
    monkeypatch.delenv(llama_kernels.SWITCH, raising=False)
    device = torch.device("cuda", num_rows)  # nothing is kept of another test
    kind = llama_kernels.ProductKind(num_rows, 64, 64, torch.float16, device, True, False, "write")
    assert [llama_kernels.is_fused(kind) for _ in range(2)] == [expected] * 2
    for value in ("fused", "separate"):
        monkeypatch.setenv(llama_kernels.SWITCH, value)
        assert llama_kernels.is_fused(kind) == (value == "fused" and num_rows <= 8)
    monkeypatch.setenv(llama_kernels.SWITCH, "slow")
    with pytest.raises(UserError, match="give fused or separate"):
        llama_kernels.is_fused(replace(kind, num_rows=1))


@pytest.mark.gpu
def test_products_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(llama_kernels.SWITCH, raising=False)
    for ending in get_args(Ending):
        kind = llama_kernels.ProductKind(2, 256, 512, torch.bfloat16, torch.device("cuda"), True, False, ending)
        assert llama_kernels.milliseconds(product_kernel.product, kind) > 0
        llama_kernels.is_faster_fused(kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1100])
def test_silu_mul(width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = 4 * rounded(4, 2 * width, dtype=dtype, device=device)
    expected = torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]
    found = torch.full((4, width), float("nan"), dtype=dtype, device=device)
    llama_kernels.silu_mul(gate_up.to(dtype), found)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
