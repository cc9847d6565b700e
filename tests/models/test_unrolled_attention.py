"""The attention of unrolled steps: its linear form against the plain one, and that against the definition."""

from contextlib import nullcontext

import pytest
import torch
from gpu_without_values import GPU, gpu_without_values
from torch import Tensor

from draftsmith.models.batch import Batch
from draftsmith.models.eagle_parts import unrolled_attention as unrolled
from draftsmith.models.eagle_parts.unrolled_attention import (
    DraftingSlots,
    KeyValue,
    plain_unrolled_attention,
    unrolled_attention,
)


def inputs(num_slots: int, num_rows: int, num_steps: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Query, key and value of the text, then keys and values of the steps; 4 query heads on 2."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, 4, 8), *[(num_slots, 2, 8)] * 2, *[(num_rows, 2, 8)] * (2 * num_steps)]
    made = (2 * torch.randn(shape, generator=generator) for shape in shapes)
    return [tensor.to(device, dtype).requires_grad_() for tensor in made]


def pairs(tensors: list[Tensor]) -> tuple[Tensor, KeyValue, list[KeyValue]]:
    query, key, value, *own = tensors
    return query, (key, value), list(zip(own[::2], own[1::2], strict=True))


def drafting(device: str = "cpu") -> tuple[Batch, DraftingSlots]:
    """Two rows: three documents with prompts and padding; one document with padding."""
    documents = torch.tensor([[0] * 7 + [1] * 5 + [2] * 6 + [-1] * 2, [0] * 17 + [-1] * 3])
    mask = torch.zeros_like(documents, dtype=torch.bool)
    mask[0, 3:7] = mask[0, 8:12] = mask[0, 13:15] = mask[0, 16:18] = mask[1, 5:17] = True
    batch = Batch(torch.zeros_like(documents), mask, documents).to(torch.device(device))
    counted = batch.loss_mask.roll(-1, 1) & batch.loss_mask.roll(-2, 1)
    return batch, DraftingSlots.from_counted(counted, batch.positions)


def check_forms(num_steps: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    batch, slots = drafting(device)
    results = []
    for attention in (plain_unrolled_attention, unrolled_attention):
        tensors = inputs(batch.token_ids.numel(), len(slots.index), num_steps, dtype, device)
        output = attention(*pairs(tensors), slots.spans if attention is plain_unrolled_attention else slots)
        output.backward(torch.arange(output.numel(), device=device).view_as(output).to(dtype).sin())
        results.append([output.detach(), *(tensor.grad for tensor in tensors)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_both_forms_and_their_gradients(num_steps: int) -> None:
    check_forms(num_steps, torch.float32, "cpu", 1e-5)


@pytest.mark.parametrize("most_rows", [1, 4])
def test_parts_of_a_span(most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unrolled, "MOST_ROWS", most_rows)
    check_forms(2, torch.float32, "cpu", 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_both_forms_on_a_gpu(num_steps: int) -> None:
    check_forms(num_steps, torch.float32, "cuda", 1e-5)
    check_forms(num_steps, torch.bfloat16, "cuda", 5e-2)


def test_a_document_drafts_from_its_first_counted_slot_to_its_last() -> None:
    _, slots = drafting()
    found = [(span.text, span.first, span.last) for span in slots.spans]
    # x_3..x_6 are the target's: slot 2 predicts x_4, slot 4 predicts x_6; slot 14's chain is broken by x_15
    assert found == [(0, 2, 5), (7, 7, 10), (12, 12, 16), (20, 24, 35)]
    assert slots.index.tolist() == [*range(2, 5), *range(7, 10), *range(12, 16), *range(24, 35)]


def test_spans_as_flash_attention_reads_them() -> None:
    """Each span takes the text from where its document begins: built once for all steps, forward and backward."""
    _, slots = drafting()
    table = slots.table
    assert slots.table is table
    assert table.text.tolist() == [*range(5), *range(7, 10), *range(12, 16), *range(20, 35)]
    assert table.query_starts.tolist() == [0, 3, 6, 10, 21]
    assert table.key_starts.tolist() == [0, 5, 8, 12, 27]
    assert (table.longest_query, table.longest_key) == (11, 15)
    assert {table.query_starts.dtype, table.key_starts.dtype} == {torch.int32}
    assert table.query_starts.is_contiguous()
    assert table.key_starts.is_contiguous()


def test_all_pairs_of_tokens_are_not_computed_in_silence() -> None:
    """A GPU has flash attention for half precision only: in fp32 a warning tells the mend."""
    _, slots = drafting()
    for dtype in (torch.bfloat16, torch.float32):
        with gpu_without_values() as log:
            shapes = (len(slots.index), 4, 8), (40, 2, 8), (40, 2, 8)
            query, key, value = (torch.empty(shape, dtype=dtype, device=GPU) for shape in shapes)
            expected = pytest.warns(UserWarning, match="data.max_length") if dtype == torch.float32 else nullcontext()
            with expected:
                assert unrolled_attention(query, (key, value), [], slots.to(GPU)).shape == query.shape
        assert (log.operations["_flash_attention_forward"] == 1) == (dtype == torch.bfloat16)


def test_what_a_slot_sees() -> None:
    """Attention with the mask written out over the slots of all steps, [steps x sequence]^2."""
    batch, slots = drafting()
    query, text, own = pairs(inputs(batch.token_ids.numel(), len(slots.index), 2, torch.float32, "cpu"))
    documents = (batch.documents + torch.tensor([[0], [10]])).flatten()
    places = torch.arange(len(documents))
    sees_text = (documents[:, None] == documents) & (places[:, None] >= places)
    sees_own = torch.eye(len(slots.index), dtype=torch.bool)
    mask = torch.cat([sees_text[slots.index], sees_own, sees_own], 1)
    keys, values = (torch.cat([text[i], *(pair[i] for pair in own)]).transpose(0, 1) for i in (0, 1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    found = plain_unrolled_attention(query, text, own, slots.spans)
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


def test_nothing_to_draft() -> None:
    counted = torch.zeros(2, 5, dtype=torch.bool)
    slots = DraftingSlots.from_counted(counted, torch.arange(5)[None])
    tensors = inputs(10, len(slots.index), 1, torch.float32, "cpu")
    output = unrolled_attention(*pairs(tensors), slots)
    assert output.shape == (0, 4, 8)
    output.sum().backward()
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in tensors)
