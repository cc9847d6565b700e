"""Products with weights in fp16 give what fp32 gives, and are taken only where they may be."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftsmith.models import Target
from draftsmith.models.fused import layer_steps
from draftsmith.models.fused.fused_layers import fuse
from draftsmith.models.fused.layer_steps import Ending
from draftsmith.models.half_weights import DraftingLinear, HalfWeight, has_half_products, in_half, multiply
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import chain_window

pytestmark = pytest.mark.skipif(not has_half_products(torch.ones(1, 1)), reason="this CPU has no products with fp16")


def bf16_values(*shape: int) -> Tensor:
    """Return fp32 values of which bf16 holds all, some of them next to zero."""
    values = torch.randn(*shape) * 10.0 ** torch.randint(-9, 2, shape)
    return values.bfloat16().float()


@pytest.mark.parametrize("num_rows", [1, 3, 5, 64])
def test_a_product_is_as_near_to_the_exact_one_as_fp32(num_rows: int) -> None:
    weight, x = bf16_values(96, 70), torch.randn(num_rows, 96)
    found = in_half(weight)
    assert isinstance(found, HalfWeight)
    exact = x.double() @ weight.double()
    size = x.double().abs() @ weight.double().abs()
    assert ((multiply(x, found) - exact).abs() <= 2**-20 * size + 96 * 2**-25).all()


def test_takes_rows_that_do_not_lie_one_behind_another() -> None:
    weight = HalfWeight(bf16_values(16, 8))
    x = torch.randn(3, 16, 5).transpose(1, 2)
    torch.testing.assert_close(weight(x), torch.stack([weight(row.contiguous()) for row in x]))
    torch.testing.assert_close(weight(x[0, 0]), weight(x[:, 0])[0])
    assert weight(x[:0]).shape == (0, 5, 8)


@pytest.mark.parametrize("value", [1.0 + 2**-12, 1e5, float("nan"), float("inf"), 3e-4 * (1 + 2**-12)])
def test_a_frozen_weight_with_a_value_that_fp16_lacks_stays_as_it_is(value: float) -> None:
    weight = torch.ones(4, 4)
    assert isinstance(in_half(weight), HalfWeight)
    weight[1, 2] = value
    assert in_half(weight) is weight
    assert in_half(weight.bfloat16()).dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize("ending", ["write", "add", "gate"])
def test_a_step_of_a_layer_is_the_same_in_both_forms(ending: Ending) -> None:
    weight, x, norm = bf16_values(32, 24), torch.randn(5, 32), DecodingNorm(torch.rand(32), 1e-6)
    bias = None if ending == "add" else torch.randn(24)
    outputs = [torch.ones(5, 12 if ending == "gate" else 24) for _ in range(2)]
    for form, out in zip((weight, in_half(weight)), outputs, strict=True):
        layer_steps.product(x, form, out, norm, bias, ending)
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("in_bf16", [True, False])
def test_a_target_reads_weights_in_fp16_that_hold_their_values(in_bf16: bool, tiny_target_dir: Path) -> None:
    """Its logits stay those of its head; weights of a checkpoint in fp32 are read as they are."""
    stock = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32, fuse_layers=False)
    for parameter in stock.model.parameters():
        parameter.data = parameter.bfloat16().float() if in_bf16 else parameter + 1e-5
    target = Target(stock.model, stock.tokenizer, "tiny")
    assert target.fused_decoder is not None
    layer = target.fused_decoder.layers[0]
    forms = [layer.qkv, layer.attention_out, layer.mlp.gate_up, layer.mlp.out]  # type: ignore[union-attr]
    assert [isinstance(form, HalfWeight) for form in forms] == [in_bf16] * 4
    hidden = torch.randn(1, 5, target.hidden_size)
    torch.testing.assert_close(target.logits(hidden), target.head(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_pass_of_a_target_is_the_same_in_both_forms(num_tokens: int, tiny_target_dir: Path) -> None:
    """On weights that bf16 holds; the layers between give what they read to the next one."""
    model = Target.from_pretrained(tiny_target_dir, "cpu", torch.float32, fuse_layers=False).model
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    token_ids, window = (
        torch.arange(1, 1 + num_tokens)[None],
        chain_window(torch.zeros(1, dtype=torch.int64), num_tokens),
    )
    hidden = []
    for frozen in (False, True):
        decoder = fuse(model, frozen)
        assert decoder is not None
        hidden.append(decoder.run(token_ids, window, SlotCache(1, num_tokens))[0])
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-5, rtol=1e-5)


class TestDraftingLinear:
    @pytest.fixture
    def linear(self) -> DraftingLinear:
        torch.manual_seed(0)
        return DraftingLinear(12, 7).eval()

    def test_rounds_in_inference_mode_alone(self, linear: DraftingLinear) -> None:
        x = torch.randn(2, 3, 12)
        exact = nn.functional.linear(x, linear.weight, linear.bias)
        rounded = nn.functional.linear(x, linear.weight.half().float(), linear.bias)
        assert not torch.equal(rounded, exact)
        assert torch.equal(linear(x), exact)
        with torch.inference_mode():
            torch.testing.assert_close(linear(x), rounded, atol=1e-6, rtol=1e-6)
            assert torch.equal(linear.train()(x), exact)

    def test_a_step_of_training_shows_in_the_next_draft(self, linear: DraftingLinear) -> None:
        x = torch.randn(2, 12)
        with torch.inference_mode():
            before = linear(x)
        linear.train()
        with torch.no_grad():
            linear.weight += 1.0
        linear.eval()
        with torch.inference_mode():
            torch.testing.assert_close(linear(x), before + x.sum(1, keepdim=True), atol=1e-2, rtol=1e-2)
