"""Running states on slots: read in closed form, kept a token at a time, and functions of the text alone.

Shapes: B rows, T columns, H heads, Dk and Dv widths of keys and values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from families import RECURRENT, family_config, plain_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots import state_rules
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.forward import run_on_slots
from draftsmith.models.slots.running_states import replace_rules
from draftsmith.models.slots.state_buffers import RunningStates, WindowRead
from draftsmith.models.slots.state_rules import (
    advance_delta,
    advance_mamba2,
    delta_inputs,
    mamba2_inputs,
    normalized,
    read_delta,
    read_mamba2,
)
from draftsmith.models.slots.window import Window, chain_window

B, H, DK, DV = 2, 3, 8, 5
TEXT = 13  # tokens


def random_parents(num_nodes: int, seed: int) -> list[int]:
    """Parents of nodes, each before its children; -1 is the root."""
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, node, (1,), generator=generator)) if node else -1 for node in range(num_nodes)]


def paths_of(parents: list[int]) -> list[list[int]]:
    """The columns from the root to each column, it among them."""
    paths = [[0]]
    for parent in parents:
        paths.append([*paths[parent + 1], len(paths)])
    return paths


def ancestors_of(parents: list[int]) -> Tensor:
    seen = torch.zeros(B, len(parents) + 1, len(parents) + 1, dtype=torch.bool)
    for column, path in enumerate(paths_of(parents)):
        seen[:, column, path] = True
    return seen


def decays(*shape: int) -> Tensor:
    """Logarithms of decays, spread over six orders of magnitude."""
    return -torch.logspace(-4, 1.2, 50)[torch.randint(0, 50, shape)]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("num_nodes", [0, 1, 6, 32])
def test_the_delta_rule_in_closed_form_is_the_walk_along_each_path(num_nodes: int, per_channel: bool) -> None:
    """The walk is transformers' own rule of a token at a time, where it has one decay for all channels of a head."""
    parents, length = random_parents(num_nodes, num_nodes), num_nodes + 1
    query, key = (torch.randn(B, length, H, DK) for _ in range(2))
    value, beta = torch.randn(B, length, H, DV), torch.rand(B, length, H)
    g = decays(B, length, H, DK) if per_channel else decays(B, length, H)
    state = torch.randn(B, H, DK, DV)
    inputs = delta_inputs(key, value, g, beta, normalize=True)
    queries = normalized(query)
    found = read_delta(queries, inputs, state, ancestors_of(parents))
    assert found.isfinite().all()
    for column, path in enumerate(paths_of(parents)):
        after = advance_delta(state, [part[:, path] for part in inputs], torch.tensor([len(path)] * B))
        expected = (queries[:, column, :, None] * DK**-0.5 @ after)[:, :, 0]
        torch.testing.assert_close(found[:, column], expected, rtol=1e-4, atol=2e-6)
        if not per_channel:
            given = [part[:, path] for part in (query, key, value)]
            outputs, last = qwen3_next.torch_recurrent_gated_delta_rule(
                *given,
                g=g[:, path],
                beta=beta[:, path],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            torch.testing.assert_close(after, last, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found[:, column], outputs[:, -1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("num_nodes", [0, 1, 6, 32])
def test_mamba_2_in_closed_form_is_the_walk_along_each_path(num_nodes: int) -> None:
    parents, length = random_parents(num_nodes, num_nodes), num_nodes + 1
    hidden, dt = torch.randn(B, length, H, DV), F.softplus(torch.randn(B, length, H))
    reads, writes = torch.randn(B, length, H, DK), torch.randn(B, length, 1, DK)
    inputs = mamba2_inputs(hidden, dt, -torch.logspace(-4, 1.2, H), writes)
    state = torch.randn(B, H, DV, DK)
    found = read_mamba2(reads, inputs, state, ancestors_of(parents))
    assert found.isfinite().all()
    for column, path in enumerate(paths_of(parents)):
        after = advance_mamba2(state, [part[:, path] for part in inputs], torch.tensor([len(path)] * B))
        expected = (after @ reads[:, column, :, :, None])[..., 0]
        torch.testing.assert_close(found[:, column], expected, rtol=1e-4, atol=2e-6)


def test_columns_that_are_not_kept_change_nothing() -> None:
    """To the bit, in both rules, whatever stands in them."""
    inputs = delta_inputs(
        torch.randn(B, 6, H, DK), torch.randn(B, 6, H, DV), decays(B, 6, H), torch.rand(B, 6, H), normalize=True
    )
    num_kept = torch.tensor([0, 4])
    found = advance_delta(state := torch.randn(B, H, DK, DV), inputs, num_kept)
    assert torch.equal(found[0], state[0])
    alone = advance_delta(state[1:], [part[1:, :4] for part in inputs], num_kept[1:])
    assert torch.equal(found[1:], alone)


# --- whole models


@pytest.fixture(params=RECURRENT)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A decoder with each kind of running state; it attends on slots."""
    return model_on_slots(request.param)


def model_on_slots(model_type: str) -> PreTrainedModel:
    torch.manual_seed(3)
    plain = plain_model(family_config(model_type, RECURRENT[model_type]))
    model = AutoModelForCausalLM.from_config(plain.config, attn_implementation=ATTENTION)
    model.load_state_dict(plain.state_dict())
    replace_rules(model)
    return model.eval().requires_grad_(False)


def read(model: PreTrainedModel, cache: SlotCache, tokens: Tensor, first: list[int], num_text: Any = None) -> Tensor:
    """The last hidden states of a chain of new tokens [B, T] from slots `first` on."""
    num_text = None if num_text is None else torch.tensor(num_text)
    return run_on_slots(model, tokens, chain_window(torch.tensor(first), tokens.shape[1], num_text), cache)


def states_of(cache: SlotCache, row: int) -> list[Tensor]:
    return [buffer.state[row].clone() for buffer in cache.states.buffers.values()]


def read_text(model: PreTrainedModel, text: Tensor, num_columns: int = 1) -> SlotCache:
    cache = SlotCache(len(text), 64, num_columns)
    read(model, cache, text, [0] * len(text), [text.shape[1]] * len(text))
    return cache


def commit(model: PreTrainedModel, cache: SlotCache, tokens: Tensor, length: int) -> list[Tensor]:
    """The states of row 0 when the token at place `length` is about to be read."""
    read(model, cache, tokens[:, length : length + 1], [length] * len(tokens))
    return states_of(cache, 0)


@pytest.mark.parametrize("padding", [1, 7])
def test_padding_does_not_enter_a_state(model: PreTrainedModel, padding: int) -> None:
    """To the bit; a row of nothing but padding keeps its state."""
    text = torch.randint(3, 50, (1, TEXT))
    cache = SlotCache(1, 64)
    padded = torch.cat([text, torch.randint(3, 50, (1, padding))], 1)
    read(model, cache, padded, [0], [TEXT])
    known = states_of(cache, 0)
    for ours, expected in zip(known, states_of(read_text(model, text), 0), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)  # other shapes of the products before
    read(model, cache, padded[:, :5], [TEXT + padding], [0])
    assert all(map(torch.equal, states_of(cache, 0), known))


def test_a_state_is_of_the_text_however_it_fell_into_rounds(model: PreTrainedModel) -> None:
    """Drafts of 4, 0, 0, 3 and 0 tokens, of which some are kept, and rounds that are read twice.

    A round without a draft behind one with accepted tokens is the case that vLLM got wrong (issue 39273).
    """
    text, wrong = torch.randint(3, 50, (1, 40)), torch.randint(3, 50, (1, 8))
    cache, length = read_text(model, text[:, :TEXT], 5), TEXT
    for num_drafted, num_accepted in [(4, 2), (0, 0), (0, 0), (3, 3), (0, 0), (4, 4), (4, 0), (0, 0)]:
        drafted = text[:, length : length + 1 + num_drafted].clone()
        drafted[:, 1 + num_accepted :] = wrong[:, : num_drafted - num_accepted]
        for _ in range(2):
            hidden = read(model, cache, drafted, [length])
        length += 1 + num_accepted
        whole = read(model, SlotCache(1, 64), text[:, :length], [0], [length])
        torch.testing.assert_close(hidden[:, num_accepted], whole[:, -1], rtol=1e-4, atol=1e-5)
    one_by_one = read_text(model, text[:, :TEXT])
    for place in range(TEXT, length):
        read(model, one_by_one, text[:, place : place + 1], [place])
    states = commit(model, cache, text, length), commit(model, one_by_one, text, length)
    for ours, expected in zip(*states, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_branch_of_a_tree_that_is_kept(model: PreTrainedModel) -> None:
    text, parents = torch.randint(3, 50, (1, 20)), torch.tensor([[-1, -1, 0, 1, 1, 4]])
    cache, kept = read_text(model, text[:, :TEXT], 7), [2, 5]  # columns, behind the root
    nodes = torch.randint(3, 50, (1, 7))
    nodes[0, [0, *kept]] = text[0, TEXT : TEXT + 3]
    prefix = torch.tensor([TEXT])
    slots = chain_window(prefix, 7).slots
    positions = prefix[:, None] + node_depths(parents, 4)
    hidden = run_on_slots(model, nodes, Window(slots, positions, prefix, ancestor_words(parents, 4)), cache)
    whole = read(model, SlotCache(1, 64), text[:, : TEXT + 3], [0], [TEXT + 3])
    # fp32 sums in another order: they differ by 1.4e-5 on a CPU without AVX-512
    torch.testing.assert_close(hidden[:, [0, *kept]], whole[:, TEXT:], rtol=1e-4, atol=3e-5)
    cache.keep_path(prefix, torch.tensor([[*kept, 6, 6]]))  # a path is as long as the tree is deep
    chain = read_text(model, text[:, :TEXT], 7)
    read(model, chain, text[:, TEXT : TEXT + 3], [TEXT])
    for ours, expected in zip(*(commit(model, which, text, TEXT + 3) for which in (cache, chain)), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_row_begins_anew_with_each_text(model: PreTrainedModel) -> None:
    """A second request in a row is decoded as if alone, beside a row that is between draft and verdict."""
    texts = torch.randint(3, 50, (3, 20))
    cache = read_text(model, texts[:2, :TEXT], 3)
    read(model, cache, texts[:2, TEXT : TEXT + 3], [TEXT, TEXT])
    view = cache.rows(torch.tensor([1]))
    read(model, view, texts[2:, :TEXT], [0], [TEXT])
    second = read(model, cache, torch.stack([texts[0, 15:18], texts[2, TEXT : TEXT + 3]]), [15, TEXT])
    alone = read(model, read_text(model, texts[2:, :TEXT]), texts[2:, TEXT : TEXT + 3], [TEXT])
    first = read(model, read_text(model, texts[:1, :15]), texts[:1, 15:18], [15])
    torch.testing.assert_close(second[1:], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second[:1], first, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model_type", ["nemotron_h", "zamba2"])
def test_time_steps_keep_the_limits_of_the_checkpoint(model_type: str) -> None:
    """Which is 0: transformers raises small ones to `time_step_min`, which is meant for initialisation."""
    text, model = torch.randint(3, 50, (1, TEXT)), model_on_slots(model_type)
    plain = plain_model(family_config(model_type, RECURRENT[model_type]))
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            parameter.fill_(-9.0)
    plain.load_state_dict(model.state_dict())
    found = read(model, SlotCache(1, 64), text, [0], [TEXT])
    with torch.no_grad():
        raised = plain.base_model(text, use_cache=False).last_hidden_state
        for module in plain.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = (0.0, float("inf"))
        expected = plain.base_model(text, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (raised - expected).abs().max() > 1e-3


def as_chain(ancestors: Tensor) -> Tensor:
    return torch.ones_like(ancestors).tril()


def keeps_all(
    read: WindowRead, states: RunningStates, rows: Any, window: Window, right: Any = WindowRead.__init__
) -> None:
    states.make_counts(window.slots.device)
    assert states.num_waiting is not None
    waiting = states.num_waiting[rows].clone()
    right(read, states, rows, window)
    read.num_kept, read.most_kept = waiting, int(waiting.max())


def all_columns(read: WindowRead) -> Tensor | None:
    text = read.window.num_text
    return text if text is None else torch.full_like(text, read.window.slots.shape[1])


def by_column(read: WindowRead, num_taps: int) -> Tensor:
    num_rows, length = read.window.slots.shape
    return (torch.arange(length)[:, None] + torch.arange(num_taps)).expand(num_rows, -1, -1)


# What holds the function, its name, the wrong function, and the test that must fail.
WRONG: dict[str, tuple[Any, str, Any, Callable[[PreTrainedModel], None]]] = {
    "nothing is committed": (
        state_rules,
        "advance_delta",
        lambda state, inputs, num_kept: state,
        test_a_state_is_of_the_text_however_it_fell_into_rounds,
    ),
    "all columns are committed": (
        WindowRead,
        "__init__",
        keeps_all,
        test_a_state_is_of_the_text_however_it_fell_into_rounds,
    ),
    "columns are committed in the tree's order": (
        RunningStates,
        "keep_path",
        lambda states, rows, path: None,
        test_the_branch_of_a_tree_that_is_kept,
    ),
    "the convolution keeps nothing": (
        state_rules,
        "newest",
        lambda inputs, num_new, count: inputs[:, :count],
        test_a_state_is_of_the_text_however_it_fell_into_rounds,
    ),
    "the convolution reads columns and not ancestors": (
        WindowRead,
        "taps",
        by_column,
        test_the_branch_of_a_tree_that_is_kept,
    ),
    "the state of the column before is read as the parent's": (
        state_rules,
        "read_delta",
        lambda query, inputs, state, ancestors: read_delta(query, inputs, state, as_chain(ancestors)),
        test_the_branch_of_a_tree_that_is_kept,
    ),
    "padding enters": (
        WindowRead,
        "num_text",
        property(all_columns),
        partial(test_padding_does_not_enter_a_state, padding=7),
    ),
    "a row goes on from the text before": (
        WindowRead,
        "begin",
        lambda read, buffer: buffer.state[read.rows],
        test_a_row_begins_anew_with_each_text,
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants that are wrong fail the tests above, which the right one passes."""
    model = model_on_slots("qwen3_next")
    holder, name, wrong, test = WRONG[mistake]
    test(model)
    monkeypatch.setattr(holder, name, wrong)
    with pytest.raises(AssertionError):
        test(model)
