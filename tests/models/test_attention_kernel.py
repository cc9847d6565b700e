"""The attention kernel against its plain twin, which runs on the CPU.

Without a CUDA device the kernel runs in Triton's interpreter (see conftest.py), with one as it is; bf16, which the
interpreter gets wrong, only there.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots.attention import slot_attention
from draftsmith.models.slots.window import Window, chain_window

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from draftsmith.models.kernels import counters
from draftsmith.models.slots.attention_kernel import MOST_SCRATCH, attend, num_splits

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")  # splits that see nothing

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALVES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
WINDOWS = ["one token", "chain", "chunk", "padded", "tree", "wide tree"]
NUM_SLOTS = 112


def tree_window(prefix: list[int], num_nodes: int) -> Window:
    """Random trees in which every parent comes before its children."""
    highest = torch.arange(num_nodes) + 1
    parents = (torch.rand(len(prefix), num_nodes) * highest).long() - 1
    window = chain_window(torch.tensor(prefix), num_nodes + 1)
    positions = window.prefix[:, None] + node_depths(parents, num_nodes)
    return Window(window.slots, positions, window.prefix, ancestor_words(parents, num_nodes))


def make_window(name: str) -> Window:
    if name == "one token":
        return chain_window(torch.tensor([0, 111]), 1)
    if name == "chain":
        return chain_window(torch.tensor([50, 0]), 5)
    if name == "chunk":  # a piece of a prompt, more rows than one tile
        return chain_window(torch.tensor([20, 0]), 35)
    if name == "padded":  # the last tokens of the second row are padding past the end
        return chain_window(torch.tensor([30, 109]), 6)
    return tree_window([64, 3], 6) if name == "tree" else tree_window([40, 0], 38)  # of two words


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """What is allocated and never written is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # on a GPU the twins have no such algorithm
    yield
    torch.use_deterministic_algorithms(False)


def plain_attention(layer: Any, *tensors: Any, **settings: Any) -> torch.Tensor:
    """Return what `slot_attention` computes on a CPU without a kernel, on `DEVICE`."""
    tensors = tuple(value.cpu() if isinstance(value, torch.Tensor) else value for value in tensors)
    sinks = settings.pop("s_aux", None)
    found, _ = slot_attention(layer, *tensors, s_aux=None if sinks is None else sinks.cpu(), **settings)
    return found.to(DEVICE)


def assert_same(
    window: Window,
    kv_heads: int = 1,
    groups: int = 2,
    width: int = 64,
    dtype: torch.dtype = torch.float32,
    splits: int | None = 2,
    sinks: bool = False,
    value_width: int | None = None,
    shared: bool = False,
    **settings: float,
) -> None:
    """Random tensors, laid out as modelling code and cache have them, through the kernel and through its twin.

    Slots behind the new tokens, which the kernel must not even read, are NaN for the kernel. `shared` values are the
    first columns of the keys.
    """
    batch, length = window.slots.shape
    value_width = value_width or width
    query = torch.randn(batch, length, kv_heads * groups, width)
    stored = torch.randn(batch, NUM_SLOTS + 1, kv_heads, width if shared else width + value_width)
    query, stored = query.to(DEVICE, dtype).transpose(1, 2), stored.to(DEVICE, dtype)
    slots = stored[:, :NUM_SLOTS].transpose(1, 2)
    key, value = slots[..., :width], slots[..., :value_width] if shared else slots[..., width:]
    logits = 2 * torch.randn(kv_heads * groups, device=DEVICE) if sinks else None
    mask, packed = window.bool_mask(NUM_SLOTS), window.packed_mask().to(DEVICE)
    scaling = width**-0.5
    expected = plain_attention(torch.nn.Identity(), query, key, value, mask, scaling, s_aux=logits, **settings)
    unused = torch.arange(NUM_SLOTS + 1) > window.slots[:, -1:]
    stored[unused.to(DEVICE)] = float("nan")
    found = attend(query, key, value, packed, scaling, sinks=logits, splits=splits, **settings)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    real = (window.slots < NUM_SLOTS).to(DEVICE)
    torch.testing.assert_close(found[real], expected[real], atol=tolerance, rtol=0)
    assert found.isfinite().all()


@pytest.mark.usefixtures("watched_memory")
@pytest.mark.parametrize("sliding_window", [None, 4, 30, 200])
@pytest.mark.parametrize("name", WINDOWS)
def test_whatever_a_token_sees(name: str, sliding_window: int | None) -> None:
    assert_same(make_window(name), splits=1, sliding_window=sliding_window)


@pytest.mark.usefixtures("watched_memory")
@pytest.mark.parametrize("splits", [2, 3, 4])
@pytest.mark.parametrize("name", ["one token", "chain", "tree"])
def test_splits_add_up(name: str, splits: int) -> None:
    """Also where a split has no slots at all, or none that a row sees. Afterwards the next launch can count again."""
    assert_same(make_window(name), splits=splits)
    assert_same(make_window(name), splits=splits, sliding_window=4, sinks=True)
    assert not counters(torch.zeros(0, device=DEVICE).device).any()


@pytest.mark.usefixtures("watched_memory")
@pytest.mark.parametrize(("kv_heads", "groups"), [(3, 1), (1, 4), (2, 8), (1, 7)])
def test_heads_that_share_keys_and_values(kv_heads: int, groups: int) -> None:
    assert_same(make_window("tree"), kv_heads, groups, splits=1)
    assert_same(make_window("one token"), kv_heads, groups, splits=2)


@pytest.mark.parametrize("width", [16, 80, 96, 128, 256, 512])
def test_head_widths(width: int) -> None:
    assert_same(make_window("tree"), kv_heads=2, width=width, splits=1)
    assert_same(make_window("one token"), width=width, splits=2)


@pytest.mark.usefixtures("watched_memory")
@pytest.mark.parametrize(("width", "value_width", "shared"), [(24, 16, False), (40, 32, True), (20, 48, False)])
def test_keys_and_values_of_different_widths(width: int, value_width: int, shared: bool) -> None:
    """Of latent attention: its expanded keys and values, its latents, and values that are wider."""
    for dtype in (torch.float32, *HALVES):
        assert_same(make_window("tree"), 1, 4, width, dtype, splits=2, value_width=value_width, shared=shared)


@pytest.mark.parametrize(("width", "value_width", "shared"), [(576, 512, True), (192, 128, False)])
def test_the_widths_of_deepseek(width: int, value_width: int, shared: bool) -> None:
    assert_same(make_window("one token"), 1, 8, width, splits=2, value_width=value_width, shared=shared)


@pytest.mark.usefixtures("watched_memory")
@pytest.mark.parametrize("chunk", [4, 200])
@pytest.mark.parametrize("name", ["chain", "padded", "tree"])
def test_tokens_that_see_their_own_chunk(name: str, chunk: int) -> None:
    """Llama 4; chunks also end within a tree."""
    window, config = make_window(name), SimpleNamespace(layer_types=["chunked_attention"], attention_chunk_size=chunk)
    layer: Any = SimpleNamespace(config=config, layer_idx=0)
    query, key, value = (torch.randn(2, 2, length, 16, device=DEVICE) for length in (window.slots.shape[1], 112, 112))
    expected = plain_attention(layer, query, key, value, window.bool_mask(NUM_SLOTS))
    found, _ = slot_attention(layer, query, key, value, window.packed_mask().to(DEVICE))
    real = (window.slots < NUM_SLOTS).to(DEVICE)
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=0)


@pytest.mark.usefixtures("watched_memory")
def test_slots_that_the_model_chose() -> None:
    """DeepSeek's sparse attention: a mask of bool, in one split and in several."""
    window = make_window("tree")
    query, key = torch.randn(2, 2, 7, 40, device=DEVICE), torch.randn(2, 1, NUM_SLOTS, 40, device=DEVICE)
    mask = (window.bool_mask(NUM_SLOTS) & (torch.rand(2, 1, 7, NUM_SLOTS) < 0.1)).to(DEVICE)
    mask[..., 0] = True
    expected = plain_attention(torch.nn.Identity(), query, key, key[..., :32], mask, 0.2)
    for splits in (1, 3):
        found = attend(query, key, key[..., :32], mask, 0.2, splits=splits)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 1.0, "sinks": True}])
def test_softcap_and_sinks(settings: dict) -> None:
    """A sink counts once, however many splits there are."""
    for splits in (1, 3):
        assert_same(make_window("chain"), splits=splits, **settings)


@pytest.mark.usefixtures("watched_memory")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", WINDOWS)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    splits = None if CUDA else 1
    assert_same(make_window(name), dtype=dtype, splits=splits)
    assert_same(make_window(name), dtype=dtype, splits=splits, width=80, softcap=5.0, sinks=True, sliding_window=6)


def test_a_row_of_more_than_2_to_the_31_elements(tmp_path: Path) -> None:
    """Slots far apart in a file that is nearly all holes."""
    far, num_slots, width = 2**26, 34, 16
    size = (num_slots - 1) * far + width
    (tmp_path / "slots").touch()
    stored = torch.from_file(str(tmp_path / "slots"), shared=True, size=size, dtype=torch.float16)
    slots = stored.as_strided((1, 1, num_slots, width), (0, 0, far, 1))
    slots.copy_(torch.randn(slots.shape))
    query, window = torch.randn(1, 1, 1, width).half().to(DEVICE), chain_window(torch.tensor([num_slots - 1]), 1)
    slots = slots if not CUDA else stored.to(DEVICE).as_strided(slots.shape, slots.stride())
    found = attend(query, slots, slots, window.packed_mask().to(DEVICE), 1.0, splits=1)
    expected = (query @ slots.mT).float().softmax(-1) @ slots.float()
    torch.testing.assert_close(found.float(), expected.transpose(1, 2), atol=4e-3, rtol=0)


@pytest.mark.parametrize(
    ("batch", "length", "num_slots", "expected"),
    [
        (1, 1, 4096, 33),  # programs for each multiprocessor twice: 264 of them, 8 for each split
        (32, 5, 32768, 8),  # programs enough, but rows that may be ragged
        (1, 512, 32768, 8),
        (32, 512, 32768, 1),  # 268 MB a split
        (8, 512, 32768, 4),
    ],
)
def test_long_caches_are_split_within_the_scratch(
    batch: int, length: int, num_slots: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 heads of 128 on 8, four of them in a tile of 64 rows, on a GPU of 132 multiprocessors."""
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    tiles, part_bytes = -(-length * 4 // 64), 4 * batch * length * 32 * 128
    splits = num_splits(batch * 8 * tiles, num_slots, 32, part_bytes, torch.device("cuda"))
    assert splits == expected
    assert splits == 1 or splits * part_bytes <= MOST_SCRATCH
