"""Texts of 131,072 tokens: no tensor grows with the square of a text, in any family, and parts change no value."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import TRAINABLE, build, loss_of
from families import RECURRENT, SERVED, target_and_plain_model
from gpu_without_values import GPU, gpu_without_values, without_values
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.batch import Batch, document_edges
from draftsmith.models.drafters import dflash, p_eagle
from draftsmith.models.slots import row_attention
from draftsmith.models.slots.attention import attend_on_slots

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 12 + [-1] * 3, [0] * 4 + [1] * 11 + [2] * 9])
LENGTH = 131_072
MOST = LENGTH**2 // 32  # numbers of a tensor


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, softcap: Any, sinks: Any) -> Tensor:
    """The definition, in fp64: query [B, H, T, D] to [B, T, H, D], by which tokens see which, bool [B, T, T]."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) * 0.3
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~seen[:, None], -torch.inf).exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return torch.einsum("bhts,bhsd->bthd", weights / total, value)


def sees(documents: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """bool [B, T, T], pair by pair."""
    rows, length = documents.shape
    seen = torch.zeros(rows, length, length, dtype=torch.bool)
    for row in range(rows):
        for query in range(length):
            begin = documents[row].tolist().index(int(documents[row, query]))
            for key in range(begin, query + 1):
                near = window is None or query - key < window
                together = chunk is None or (query - begin) // chunk == (key - begin) // chunk
                seen[row, query, key] = near and together
    return seen


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [{}, {"sliding_window": 5}, {"chunk": 4}, {"softcap": 0.5}, {"sinks": True}, {"sinks": True, "sliding_window": 3}],
)
def test_parts_are_the_whole(packed: bool, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, of one query at a time, of a few, and of all."""
    documents = DOCUMENTS if packed else torch.zeros_like(DOCUMENTS)
    torch.manual_seed(0)
    shapes = [(2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8)]
    sinks = torch.randn(4) if kind.get("sinks") else None
    settings = {**kind, "sinks": sinks}
    mask = document_edges(documents)[None, None, None] if packed else None
    expected: list[Tensor] = []
    for most in (None, 1, 200, 1 << 20):
        torch.manual_seed(1)
        tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
        if most is None:
            seen = sees(documents, kind.get("sliding_window"), kind.get("chunk"))
            output = plain_attention(*tensors, seen, kind.get("softcap"), sinks)
        else:
            monkeypatch.setattr(row_attention, "MOST_PAIRS", most)
            monkeypatch.setattr(row_attention, "MOST_SCORES", most)
            output = attend_on_slots(*tensors, 0.3, mask, **settings)
        output.square().sum().backward()
        found = [output.float(), *(tensor.grad for tensor in tensors if tensor.grad is not None)]
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["p_eagle", "dflash", "dspark"])
def test_mask_slots_in_parts_are_all_at_once(
    kind: str, packed: bool, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = torch.randint(3, tiny_target.vocab_size, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))
    mask = (DOCUMENTS >= 0) & (torch.arange(24) > 0) & (DOCUMENTS.roll(1, 1) == DOCUMENTS)
    batch, found = Batch(token_ids, mask, DOCUMENTS if packed else None), []
    for most in (1 << 20, 1500, 60):
        for module in (p_eagle, dflash):
            monkeypatch.setattr(module, "MOST_PAIRS", most)
        drafter = build(kind, tiny_target)
        sums = loss_of(drafter, batch, tiny_target)
        sums["loss"][0].backward()
        found.append([sums["loss"][0], *(p.grad for p in drafter.parameters() if p.grad is not None)])
    for other in found[1:]:
        for one, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(one, expected, atol=1e-4 * float(expected.detach().abs().max()), rtol=1e-4)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor, in numbers, and the operation that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() // tensor.itemsize > self.size:
                self.size = tensor.untyped_storage().nbytes() // tensor.itemsize
                self.operation = f"{func} {list(tensor.shape)}"
        return result


def long_batch(packed: bool, length: int = LENGTH) -> Batch:
    """One row: a single document, or two of different lengths. The target wrote the last 4096 tokens."""
    documents = (torch.arange(length) >= length // 3).long()[None]
    mask = (torch.arange(length) >= length - 4096)[None]
    return Batch(torch.ones(1, length, dtype=torch.int64), mask, documents if packed else None)


def largest_of(target: Target, batch: Batch, compute: Callable[[Batch], object]) -> Largest:
    """The largest tensor of a computation on a GPU without values."""
    pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
    with gpu_without_values(), Largest() as largest:
        without_values(target.model)
        with torch.autocast("cpu", torch.bfloat16):
            compute(batch.to(GPU))
    return largest


@pytest.fixture(scope="module")
def long_target_dir(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir(num_hidden_layers=2, max_position_embeddings=LENGTH)


def cases(kinds: list[str], by_default: dict[str, bool]) -> list[Any]:
    """Each kind, packed and not; by default those that are named, in one of both."""
    return [
        pytest.param(kind, packed, marks=() if by_default.get(kind) == packed else pytest.mark.long)
        for kind in kinds
        for packed in (False, True)
    ]


# Unrolled steps, mask slots, blocks, and decoder layers of transformers.
DRAFTER_CASES = cases(TRAINABLE, {"eagle3": True, "p_eagle": False, "dflash": True, "draft_model": False})


@pytest.mark.parametrize(("kind", "packed"), DRAFTER_CASES)
def test_no_drafter_is_trained_in_the_square_of_a_text(kind: str, packed: bool, long_target_dir: Path) -> None:
    target = Target.from_pretrained(long_target_dir, "cpu", torch.float32)
    drafter = build(kind, target, **({"num_layers": 1} if kind == "draft_model" else {})).train()
    assert drafter.draftable is None or drafter.draftable.any()
    for module in (target.model, drafter):
        module.to(torch.bfloat16)

    def train(batch: Batch) -> None:
        without_values(drafter)
        total, count = drafter(batch, target.features(batch, drafter.layer_ids))["loss"]
        (total / count).backward()

    largest = largest_of(target, long_batch(packed), train)
    assert largest.size < MOST, largest.operation


FAMILIES = {**SERVED, **RECURRENT}
# Sliding windows, sinks, latents, and learnt positions.
TARGET_CASES = cases(
    [*FAMILIES], {"llama": True, "cohere2": False, "gpt_oss": False, "deepseek_v3": False, "gpt2": True}
)


@pytest.mark.parametrize(("family", "packed"), TARGET_CASES)
def test_no_target_is_read_in_the_square_of_a_text(family: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of DeepSeek's sparse attention score all pairs to choose among them: their module is transformers' own.

    Layers with running states loop over chunks, of which a text that is shorter here has fewer.
    """
    changes = {**FAMILIES[family], "max_position_embeddings": LENGTH}
    changes |= {name: 256 for name in ("chunk_size", "mamba_chunk_size") if name in changes}
    target = target_and_plain_model(family, changes, torch.bfloat16)[0]
    if "index_topk" in changes or (packed and target.carries_states):
        pytest.skip("pairs are scored by transformers, or rows are never packed")
    length = LENGTH // 8 if target.carries_states else LENGTH
    monkeypatch.setattr(torch, "histc", lambda x, bins, **_: x.new_zeros(bins))  # of experts; for CUDA alone
    largest = largest_of(target, long_batch(packed, length), lambda batch: target.features(batch, (1, 2)))
    assert largest.size < length**2 // 8, largest.operation


# --- a drafter beyond the texts of its training


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("eagle3", True), ("p_eagle", True), ("dflash", True), ("mtp", True), ("native", False), ("medusa", False)],
)
def test_texts_far_beyond_those_of_the_training_are_told(
    kind: str, expected: bool, tiny_target: Target, tmp_path: Path
) -> None:
    """The checkpoint keeps the length. Drafters that read the newest hidden state alone know no length.

    A head that the target brought along learnt from the target's own texts, however short those of its training are.
    """
    drafter = build("mtp" if kind == "native" else kind, tiny_target)
    if kind == "native":
        drafter.config.starting_layers = "native"
    drafter.trained_length = 12
    save_drafter(drafter, tmp_path)
    decoder = SpeculativeDecoder(tiny_target, load_drafter(tmp_path, tiny_target))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        decoder.generate([[5] * 8], max_new_tokens=16)
        assert not told
        decoder.generate([[5] * 8], max_new_tokens=17)
    assert bool(told) == expected
    assert all("texts of at most 12 tokens" in str(warning.message) for warning in told)
