"""Writing and moving what a cache holds: kernels against their plain twins."""

import pytest
import torch

from draftsmith.models.slots import cache as slots

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from shadow_memory import ShadowMemory

from draftsmith.models.slots import cache_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there the interpreter runs them (conftest.py)
NUM_SLOTS = 20


@pytest.mark.parametrize(("heads", "width"), [(2, 16), (3, 80), (8, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tokens_are_written_where_they_belong(
    heads: int, width: int, dtype: torch.dtype, watched_memory: ShadowMemory
) -> None:
    """From tensors as projections leave them and as rotary embeddings do; padding goes to the slot past the end."""
    key = torch.randn(2, 4, heads, width, dtype=dtype).transpose(1, 2)
    value = torch.randn(2, heads, 4, width, dtype=dtype)
    key, value = key.to(DEVICE), value.to(DEVICE)
    where = torch.tensor([[3, 4, 5, 6], [18, 19, 20, 20]], device=DEVICE)
    written = (where + torch.tensor([[0], [NUM_SLOTS + 1]], device=DEVICE)).flatten()
    expected = torch.full((2 * (NUM_SLOTS + 1), 2 * heads * width), -7.0, dtype=dtype, device=DEVICE)
    found = expected.clone()
    watched_memory.allow_races(found[-1])
    slots.write_slots(key, value, written, expected)
    cache_kernels.write_slots(key, value, written, found)
    assert torch.equal(found[:-1], expected[:-1])
    assert torch.equal(found[4], torch.cat([key[0, :, 1], value[0, :, 1]]).flatten())
    assert (expected == -7.0).any()


def filled_cache(dtypes: list[torch.dtype], widths: list[int]) -> slots.SlotCache:
    """A layer for each width; no two slots hold the same."""
    cache = slots.SlotCache(3, NUM_SLOTS)
    cache.write_to(torch.arange(NUM_SLOTS + 1, device=DEVICE).expand(3, -1))
    for layer, (dtype, width) in enumerate(zip(dtypes, widths, strict=True)):
        key, value = torch.randn(2, 3, 2, NUM_SLOTS + 1, width).to(DEVICE, dtype)
        cache.update(key, value, layer)
    return cache


PATHS = {
    "rows that read what others overwrite": [[1, 3, 4, 6], [2, 3, 4, 5], [3, 4, 5, 6]],
    "nothing moves": [[1, 2, 3, 4]] * 3,
    "any columns where fewer are kept": [[2, 0, 0, 0], [3, 4, 1, 1], [6, 5, 2, 0]],
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_the_kept_path_moves_in_every_layer(path: list[list[int]], watched_memory: ShadowMemory) -> None:
    """Layers of two sizes in bytes, a table for each; the third row reaches past the end."""
    prefix, paths = torch.tensor([0, 7, 17], device=DEVICE), torch.tensor(path, device=DEVICE)
    layers = [torch.float32, torch.bfloat16, torch.float16], [16, 32, 80]
    cache = filled_cache(*layers)
    stored = [layer.kept for layer in cache._layers.values()]
    expected = [tensor.clone() for tensor in stored]
    before = [tensor.clone() for tensor in stored]
    slots.move_slots(expected, prefix, paths)
    for tensor in stored:
        watched_memory.allow_races(tensor[:, NUM_SLOTS])
    tables = cache_kernels.move_tables(stored)
    assert len(tables) == 2
    for table in tables:
        cache_kernels.move_slots(table, prefix, paths)
    for found, twin, old in zip(stored, expected, before, strict=True):
        assert torch.equal(found[:, :NUM_SLOTS], twin[:, :NUM_SLOTS])
        for row, columns in enumerate(path):
            for node, column in enumerate(columns):
                kept, source = prefix[row] + node + 1, prefix[row] + column
                if kept < NUM_SLOTS and source < NUM_SLOTS:
                    assert torch.equal(found[row, kept], old[row, source])
