"""Kernels of running states against their plain twins: the states that they keep, and what windows of drafts read.

On a CPU they run in Triton's interpreter (see conftest.py), on a CUDA device as they are.
"""

import copy
from types import ModuleType

import pytest
import torch
from torch import Tensor

from draftsmith.models.sampling.trees import ancestor_words
from draftsmith.models.slots import state_rules
from draftsmith.models.slots.state_buffers import Buffer, RunningStates, WindowRead
from draftsmith.models.slots.state_rules import delta_inputs, mamba2_inputs
from draftsmith.models.slots.window import Window, chain_window

pytest.importorskip("triton", reason="kernels need triton, which exists for Linux only")
from draftsmith.models.slots import state_kernels

pytestmark = pytest.mark.usefixtures("watched_memory")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS, COLUMNS = 4, 7
H, DK, DV = 2, 20, 36
PARENTS = torch.tensor([[-1, -1, 0, 1, 1, 4]])
PREFIX = [9, 0, 14]  # the second row begins anew
HELD, WAITING = [9, 12, 11], [3, 2, 5]  # so of the first none is kept, of the third three
WINDOWS = [("one token", slice(3)), ("chain", torch.tensor([2, 0, 3])), ("tree", slice(3))]


def window_of(name: str) -> Window:
    if name == "one token":
        return chain_window(torch.tensor(PREFIX), 1)
    window = chain_window(torch.tensor(PREFIX), 7 if name == "tree" else 5)
    words = ancestor_words(PARENTS.expand(3, -1), 6) if name == "tree" else None
    return Window(window.slots, window.positions, window.prefix, words)


def read_of(states: RunningStates, window: Window, rows: Tensor | slice) -> WindowRead:
    states.make_counts(torch.device("cpu"))
    assert states.num_held is not None
    assert states.num_waiting is not None
    states.num_held[rows], states.num_waiting[rows] = torch.tensor(HELD), torch.tensor(WAITING)
    read = WindowRead(states, rows, window)
    assert read.num_kept.tolist() == [0, 0, 3]
    assert read.is_new.tolist() == [False, True, False]
    return read


def on_device(read: WindowRead) -> WindowRead:
    """Return the same read, whose tensors are on a GPU where there is one."""
    read = copy.copy(read)
    read._ancestors = read.ancestors.to(DEVICE)
    if isinstance(read.rows, Tensor):
        read.rows = read.rows.to(DEVICE)
    read.is_new, read.num_kept = read.is_new.to(DEVICE), read.num_kept.to(DEVICE)
    return read


def copied(buffer: Buffer, device: str) -> Buffer:
    return Buffer(buffer.state.clone().to(device), [part.clone().to(device) for part in buffer.inputs])


def random_inputs(rule: str, batch: int, length: int) -> list[Tensor]:
    key, value = torch.randn(batch, length, H, DK), torch.randn(batch, length, H, DV)
    if rule == "mamba2":
        return mamba2_inputs(value, torch.rand(batch, length, H), -torch.logspace(-4, 1.2, H), key)
    widths = (H, DK) if rule == "delta, each channel" else (H,)
    decays = -torch.logspace(-4, 1.2, 50)[torch.randint(0, 50, (batch, length, *widths))]
    return delta_inputs(key, value, decays, torch.rand(batch, length, H), normalize=True)


@pytest.mark.parametrize(("name", "rows"), WINDOWS)
@pytest.mark.parametrize("rule", ["delta", "delta, each channel", "mamba2"])
def test_rules(rule: str, name: str, rows: Tensor | slice) -> None:
    """Widths of keys and values fill neither a tile nor a block; a row that no pass reads stays as it is."""
    window = window_of(name)
    read = read_of(RunningStates(NUM_ROWS, COLUMNS), window, rows)
    shape = (DV, DK) if rule == "mamba2" else (DK, DV)
    buffer = Buffer(torch.randn(NUM_ROWS, H, *shape), random_inputs(rule, NUM_ROWS, COLUMNS))
    inputs, query = random_inputs(rule, 3, window.slots.shape[1]), torch.randn(3, window.slots.shape[1], H, DK)
    call = "mamba2_rule" if rule == "mamba2" else "delta_rule"
    expected, found = copied(buffer, "cpu"), copied(buffer, DEVICE)
    output = getattr(state_rules, call)(read, expected, query, inputs)
    on_kernels = getattr(state_kernels, call)(
        on_device(read), found, query.to(DEVICE), [part.to(DEVICE) for part in inputs]
    )
    torch.testing.assert_close(on_kernels.cpu(), output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.state.cpu(), expected.state, rtol=1e-5, atol=1e-6)
    (idle,) = set(range(NUM_ROWS)) - set(torch.arange(NUM_ROWS)[rows].tolist())
    assert torch.equal(found.state[idle].cpu(), buffer.state[idle])


@pytest.mark.parametrize(("name", "rows"), WINDOWS)
@pytest.mark.parametrize(("num_taps", "with_bias"), [(4, True), (3, False)])
def test_convolutions(num_taps: int, with_bias: bool, name: str, rows: Tensor | slice) -> None:
    """Of more channels than a block has."""
    window, channels = window_of(name), 270
    read = read_of(RunningStates(NUM_ROWS, COLUMNS), window, rows)
    buffer = Buffer(torch.randn(NUM_ROWS, num_taps - 1, channels), [torch.randn(NUM_ROWS, COLUMNS, channels)])
    inputs, weight = torch.randn(3, window.slots.shape[1], channels), torch.randn(channels, num_taps)
    bias = torch.randn(channels) if with_bias else None
    expected, found = copied(buffer, "cpu"), copied(buffer, DEVICE)
    output = state_rules.read_convolution(read, expected, inputs, weight, bias)
    read = on_device(read)
    read._taps = read.taps(num_taps).to(DEVICE)
    given = inputs.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)
    on_kernels = state_kernels.read_convolution(read, found, *given)
    torch.testing.assert_close(on_kernels.cpu(), output, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.state.cpu(), expected.state)


def advanced(rounds: list[tuple[list[Tensor], int]], state: Tensor, rules: ModuleType) -> Tensor:
    """Return a state [1, H, Dk, Dv] after rounds, each of inputs and of how many of these are kept."""
    states, length = RunningStates(1, COLUMNS), 1
    buffer = Buffer(state.clone(), [torch.zeros(1, COLUMNS, *part.shape[2:]) for part in rounds[0][0]])
    for inputs, num_kept in [*rounds, (rounds[0][0], 0)]:
        read = WindowRead(states, slice(1), chain_window(torch.tensor([length]), inputs[0].shape[1]))
        rules.delta_rule(read, buffer, torch.randn_like(inputs[0]), inputs)
        read.let_wait(buffer, inputs)
        length += num_kept
    return buffer.state


@pytest.mark.skipif(DEVICE == "cuda", reason="its tensors are those of a CPU")
def test_a_state_does_not_depend_on_rounds() -> None:
    """To the bit: the tokens of a round one after the other give the state that they give together."""
    inputs, state = random_inputs("delta", 1, 6), torch.randn(1, H, DK, DV)
    alone = [([part[:, i : i + 1] for part in inputs], 1) for i in range(4)]
    together = advanced([(inputs, 4)], state, state_kernels)
    assert torch.equal(together, advanced(alone, state, state_kernels))
    torch.testing.assert_close(together, advanced(alone, state, state_rules), rtol=1e-5, atol=1e-6)
