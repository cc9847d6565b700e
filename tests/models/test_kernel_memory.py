"""Every kernel in Triton's interpreter on watched memory: no races, no gaps, no stray accesses.

`watched` in helpers/shadow_memory.py says what is found. Tests of single kernels run on it, too; here stand one launch
of each kernel at least, and the faults that must be found.
"""

import importlib.util
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from kernel_names import launched_kernels

from draftsmith.inference.decoding.round_steps import Ends
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft, chain
from draftsmith.models.fused.layer_steps import Beside, Ending
from draftsmith.models.layers import DecodingNorm
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream
from draftsmith.models.sampling.trees import ancestor_words
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.state_buffers import Buffer, RunningStates, WindowRead
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.models.target.target import Features

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from faulty_kernel import FAULTS, add_blocks
from shadow_memory import ShadowMemory, watched

from draftsmith.inference.decoding import round_kernels
from draftsmith.inference.verification import acceptance_kernels
from draftsmith.models.fused import expert_kernels, layer_kernels, product_kernel
from draftsmith.models.losses import divergence_kernels
from draftsmith.models.sampling import cut_kernels, sampling_kernels
from draftsmith.models.slots import attention_kernel, cache_kernels, state_kernels

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in the interpreter on a CPU only"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),  # splits that see nothing
]
NUM_SLOTS = 40
PARENTS = torch.tensor([[-1, -1, 0, 0, 2]]).expand(3, -1)
SEEDS = range(3)  # orders of programs
Call = Callable[..., None]  # of a `ShadowMemory` and, where one stands for another, a module


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row, the last of them not full."""
    monkeypatch.setattr(sampling_kernels, "CHUNK", 16)
    monkeypatch.setattr(divergence_kernels, "BLOCK", 16)


def attend(window: Window, splits: int, memory: ShadowMemory, kernel: ModuleType = attention_kernel) -> None:
    """Rows of different lengths, in a cache in which nothing stands behind them."""
    batch, length = window.slots.shape
    stored = torch.empty(2, batch, NUM_SLOTS + 1, 2, 20)
    for row, last in enumerate(window.slots[:, -1].tolist()):
        stored[:, row, : last + 1] = torch.randn(2, last + 1, 2, 20)
    key, value = stored[:, :, :NUM_SLOTS].transpose(2, 3)
    query = torch.randn(batch, length, 6, 20).transpose(1, 2)
    kernel.attend(query, key, value, window.packed_mask(), 0.2, splits=splits)


def tree_window() -> Window:
    window = chain_window(torch.tensor([33, 0, 7]), 6)
    return Window(window.slots, window.positions, window.prefix, ancestor_words(PARENTS, 5))


def norm_in_place(memory: ShadowMemory, kernel: ModuleType = layer_kernels) -> None:
    x = torch.randn(5, 100)
    kernel.rms_norm(x, DecodingNorm(torch.randn(100), 1e-6), x)


def rotate(memory: ShadowMemory) -> None:
    """Three query heads and two of keys: the last program of a token is not full."""
    qkv, norm, flat = torch.randn(3, 7 * 20), DecodingNorm(torch.randn(5, 20), 1e-6), torch.zeros(12, 80)
    angles = torch.randn(3, 1, 2, 10)
    cos, heads = angles[:, :, :1].contiguous(), qkv[:, :100].view(3, 5, 2, 10)
    layer_kernels.rotate_and_store(heads, qkv[:, 60:], cos, angles, norm, torch.tensor([3, 11, 0]), flat)


def enter(memory: ShadowMemory) -> None:
    """Trees in picked rows of a cache; some tokens are padding."""
    window, cache = tree_window(), SlotCache(5, 37).rows(torch.tensor([4, 0, 2]))
    cache.angles = torch.randn(36, 2, 10)
    layer_kernels.enter(torch.randint(0, 9, (3, 6)), torch.randn(9, 1100), window, cache, {None})


def enter_with_features(memory: ShadowMemory) -> None:
    cache, beside = SlotCache(3, 37), Beside(torch.randn(6, 100), DecodingNorm(torch.randn(2, 100), 1e-6))
    cache.angles, window = torch.randn(36, 2, 10), chain_window(torch.tensor([3, 0, 36]), 2)
    layer_kernels.enter(torch.randint(0, 9, (3, 2)), torch.randn(9, 100), window, cache, {None}, beside)


def both_ends(num_nodes: int, memory: ShadowMemory) -> None:
    """Open and close a round of three rows, of which the last has ended: with a tree of five nodes or a chain."""
    torch.manual_seed(0)
    tokens, lengths = torch.randint(-1, 9, (3, num_nodes)), torch.tensor([3, 8, 5])
    draft = Draft(tokens, PARENTS, 3) if num_nodes == 5 else chain(tokens)
    features = Features(torch.empty(3, 4, 30), torch.empty(3, 4, 2100))
    noise = Noise(0, torch.arange(3))
    columns, newest = torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    token_ids, sampling = torch.zeros(3, 20, dtype=torch.int64), Sampling()
    state = DecodingState(token_ids, lengths, features, columns, columns.clone(), newest, sampling, noise, False)
    round_kernels.open_round(state.token_ids, state.lengths, draft)
    path = torch.tensor([[2, 4, 4], [1, 3, 5], [0, 0, 0]])[:, : draft.depth].contiguous()
    verified = acceptance_kernels.Verified(
        torch.tensor([2, 3, 0]).clamp(max=draft.depth), path, torch.tensor([7, 1, 2])
    )
    ends = Ends(lengths + 3, torch.tensor([1, 4]), torch.tensor([False, False, True]))
    read = Features(*(torch.randn(3, num_nodes + 1, width) for width in (30, 2100)))
    round_kernels.close_round(state, ends, draft, verified, read)


def window_read() -> WindowRead:
    """Three new tokens in two rows: in the first, three columns of four are kept, and the second begins anew."""
    states = RunningStates(2, 4)
    states.num_held, states.num_waiting = torch.tensor([0, 5]), torch.tensor([4, 2])
    return WindowRead(states, slice(2), chain_window(torch.tensor([3, 0]), 3))


def read_delta_rule(memory: ShadowMemory) -> None:
    sizes = ((2, 20), (2, 36), (2, 1), (2,))
    inputs, waiting = ([torch.randn(2, length, *size) for size in sizes] for length in (3, 4))
    buffer = Buffer(torch.randn(2, 2, 20, 36), waiting)
    state_kernels.delta_rule(window_read(), buffer, torch.randn(2, 3, 2, 20), inputs)


def read_convolution(memory: ShadowMemory, kernel: ModuleType = state_kernels) -> None:
    """More channels than a block has."""
    buffer = Buffer(torch.randn(2, 3, 270), [torch.randn(2, 4, 270)])
    kernel.read_convolution(window_read(), buffer, torch.randn(2, 3, 270), torch.randn(270, 4), torch.randn(270))


def draw(sampling: Sampling, memory: ShadowMemory) -> None:
    noise = Noise(0, torch.arange(3))
    out = torch.empty(3, 2, dtype=torch.int64)
    cut_kernels.draw(torch.randn(3, 37), sampling, noise, torch.arange(3), Stream.DRAFT, 1, out[:, 1])


def experts(memory: ShadowMemory, kernel: ModuleType = expert_kernels) -> None:
    """Three tokens that share an expert, with widths that are no multiples of what a program reads or writes."""
    gate_up, down = torch.randn(4, 2 * 20, 600), torch.randn(4, 600, 20)
    ids = torch.tensor([[0, 3], [3, 1], [3, 0]])
    kernel.add_experts(torch.randn(3, 600), torch.randn(3, 600), gate_up, down, ids, torch.rand(3, 2))


def silu(memory: ShadowMemory, kernel: ModuleType = layer_kernels) -> None:
    kernel.silu_mul(torch.randn(3, 2 * 1100), torch.empty(3, 1100))


def product(ending: Ending, memory: ShadowMemory, kernel: ModuleType = product_kernel) -> None:
    """Two tiles of outputs, the second not full, from two splits of the inputs."""
    norm = None if ending == "add" else DecodingNorm(torch.randn(300), 1e-6)
    bias = torch.randn(90) if ending == "write" else None
    out = torch.randn(3, 45 if ending == "gate" else 90)
    kernel.product(torch.randn(3, 300), torch.randn(90, 300).t(), out, norm, bias, ending, splits=2)


def write(memory: ShadowMemory) -> None:
    """Two tokens go to the slot past the end."""
    key, flat = torch.randn(2, 3, 3, 20), torch.empty(2 * 10, 120)
    memory.allow_races(flat[19])
    cache_kernels.write_slots(key, key, torch.tensor([3, 4, 5, 18, 19, 19]), flat)


def move(memory: ShadowMemory, kernel: ModuleType = cache_kernels) -> None:
    """What one node reads another overwrites; the last row reaches past the end."""
    stored = [torch.randn(3, 13, 2, 2, 16) for _ in range(2)]
    for tensor in stored:
        memory.allow_races(tensor[:, 12])
    (table,) = kernel.move_tables(stored)
    kernel.move_slots(table, torch.tensor([0, 4, 9]), torch.tensor([[2, 3, 4, 6], [3, 1, 2, 2], [1, 3, 5, 6]]))


def compare(memory: ShadowMemory, kernel: ModuleType = divergence_kernels) -> None:
    teacher = kernel.FusedTeacher.from_logits(torch.randn(4, 40), torch.arange(0, 40, 3))
    teacher[torch.tensor([3, 0, 0, 1, 2])].compare(torch.randn(5, 14), torch.rand(5), "jensen_shannon", True)


def verify(rule: str, memory: ShadowMemory) -> None:
    """Verify a chain or a tree of five nodes in three rows, of which one has no draft."""
    logits, draft_logits, tokens = torch.randn(3, 6, 37), torch.randn(3, 5, 37), torch.randint(0, 37, (3, 5))
    tokens[1] = -1
    coins, draws = torch.rand(3, 5, dtype=torch.float64), torch.rand(3, 6, dtype=torch.float64)
    tree = tokens, PARENTS, 3
    arguments: dict[str, tuple[Any, ...]] = {
        "greedy": (logits, *tree),
        "typical": (logits, *tree),
        "one_hot": (logits, *tree, draws[:, :4]),
        "probabilistic": (logits, draft_logits, tokens, coins, draws),
        "block": (logits, draft_logits, tokens, coins, draws),
        "without_replacement": (logits, draft_logits[:, :4].contiguous(), *tree, coins, draws[:, :4]),
    }
    getattr(acceptance_kernels, rule)(*arguments[rule])


def uniforms(memory: ShadowMemory) -> None:
    keys, positions, branch = torch.arange(3), torch.arange(3)[:, None], torch.arange(150)
    sampling_kernels.uniforms(keys, positions, Stream.DRAFT, branch)


RULES = ("greedy", "one_hot", "typical", "probabilistic", "block", "without_replacement")
CALLS: list[Call] = [
    lambda memory: attend(chain_window(torch.tensor([30, 0]), 9), 1, memory),
    lambda memory: attend(chain_window(torch.tensor([39, 0, 16]), 1), 3, memory),
    lambda memory: attend(tree_window(), 2, memory),
    *(norm_in_place, enter, enter_with_features, rotate, silu, experts, write, move, compare, uniforms),
    *(read_delta_rule, read_convolution),
    *(partial(verify, rule) for rule in RULES),
    *(partial(both_ends, num_nodes) for num_nodes in (0, 3, 5)),
    *(partial(draw, sampling) for sampling in (Sampling(0.7), Sampling(0.7, 0.8), Sampling(0.7, 0.9, 5))),
    *(partial(product, ending) for ending in get_args(Ending)),
]


def test_every_kernel_on_watched_memory() -> None:
    launched = set()
    for call in CALLS:
        with watched() as memory:
            call(memory)
        launched |= memory.launched
    assert launched == launched_kernels(), "whoever adds a kernel adds a call of it to CALLS"


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_that_an_atomic_orders(seed: int) -> None:
    assert add_up("", seed) == []


@pytest.mark.parametrize(("fault", "finding"), FAULTS.items())
def test_a_fault_is_found(fault: str, finding: str) -> None:
    """In any order of the programs."""
    for seed in SEEDS:
        assert any(finding in found for found in add_up(fault, seed)), seed


def add_up(fault: str, seed: int) -> list[str]:
    """Return what is found in `add_blocks`; where nothing is wrong, its sums are right."""
    x = torch.randn(61)
    memory = ShadowMemory(seed)
    try:
        with watched(seed) as memory:
            doubled, counter, total = torch.empty(64), torch.zeros(1, dtype=torch.int32), torch.empty(16)
            add_blocks[(4,)](x, doubled, counter, total, 61, fault, 16)
    except AssertionError:
        return list(memory.findings)
    torch.testing.assert_close(total, 2 * torch.nn.functional.pad(x, (0, 3)).view(4, 16).sum(0))
    return []


CHANGES: dict[str, tuple[Call, str, str, str]] = {
    "a move without its barrier": (move, "tl.debug_barrier()", "", "overwrites what another thread loads"),
    "splits that saw nothing": (
        lambda memory, kernel=attention_kernel: attend(chain_window(torch.tensor([39, 0]), 1), 3, memory, kernel),
        "filled = tl.cdiv(tl.maximum(end - first, 1), tl.maximum(share, 1))",
        "filled = tl.num_programs(1)",
        "reads memory that nothing was written to",
    ),
    "slots behind a row": (
        lambda memory, kernel=attention_kernel: attend(chain_window(torch.tensor([5, 0]), 3), 1, memory, kernel),
        "(d < D)[None, :] & (n < high)[:, None]",
        "(d < D)[None, :]",
        "reads memory that nothing was written to",
    ),
    "a state stored before all taps are read": (
        read_convolution,
        "tl.debug_barrier()  # all is read",
        "# all is read",
        "overwrites what another thread loads",
    ),
    "a row that is not full": (
        silu,
        "tl.load(gate_up + (2 * n + 1) * width + i, mask=i < width",
        "tl.load(gate_up + (2 * n + 1) * width + i, mask=i < 2048",
        "leaves the tensor",
    ),
    "adding up before all have stored": (
        partial(product, "write"),
        "if is_last(counters + tl.program_id(0), S)",
        "if is_last(counters + tl.program_id(0), S) | (S > 0)",
        "writes what another program reads",
    ),
    "two programs on one row": (
        compare,
        "logits, teacher = logits + row * V",
        "logits, teacher = logits + row // 2 * V",
        "what another program writes",
    ),
    "the next row": (norm_in_place, "x + n * x_n, weight", "x + (n + 1) * x_n, weight", "what another program"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_line_of_a_kernel_is_found(change: str, tmp_path: Path) -> None:
    call, old, new, finding = CHANGES[change]
    kernel = inspect.signature(call).parameters["kernel"].default
    source = Path(kernel.__file__).read_text()
    assert source.count(old) == 1
    path = tmp_path / "changed_kernel.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("changed_kernel", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    changed.BLOCK = getattr(kernel, "BLOCK", None)
    with pytest.raises(AssertionError, match=finding), watched() as memory:
        call(memory, changed)
