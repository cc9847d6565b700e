"""Stock modelling on slots: what a token sees, where it is kept, and that none of it waits for the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.models import Target
from draftsmith.models.batch import document_edges
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots.attention import ATTENTION, last_seen, slot_attention
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.forward import run_on_slots
from draftsmith.models.slots.row_attention import Sight
from draftsmith.models.slots.window import Window, chain_window

PARENTS = [[-1, -1, 0, 0, 2, 4, 5], [-1, 0, 1, 2, 3, 4, 5]]  # a tree with a long branch, and a chain
TREE = torch.tensor(PARENTS)
PREFIX = torch.tensor([13, 9])


def tree_window(prefix: Tensor, parents: Tensor) -> Window:
    window = chain_window(prefix, parents.shape[1] + 1)
    positions = prefix[:, None] + node_depths(parents, parents.shape[1])
    return Window(window.slots, positions, prefix, ancestor_words(parents, parents.shape[1]))


def path_to(parents: list[int], column: int) -> list[int]:
    """Columns from the root to one."""
    return [0] if column == 0 else [*path_to(parents, parents[column - 1] + 1), column]


@pytest.mark.parametrize("reach", [1, 3, 6, 12, 100])
def test_a_sliding_window_counts_positions_along_the_path(reach: int) -> None:
    """Not slots, nor visible slots before them: in a tree, other branches lie between a node and its ancestors."""
    window = tree_window(PREFIX, TREE)
    found = last_seen(window.bool_mask(num_slots=24), reach)[:, 0]
    for row, prefix in enumerate(PREFIX.tolist()):
        for column in range(window.slots.shape[1]):
            path = [*range(prefix), *(prefix + c for c in path_to(PARENTS[row], column))]
            assert found[row, column].nonzero()[:, 0].tolist() == path[-reach:]


def test_padding_is_written_nowhere() -> None:
    """Rows with fewer new tokens than others are padded, and the padding may reach past the last slot."""
    cache = SlotCache(num_rows=3, num_slots=4)
    cache.write_to(torch.tensor([[0, 1, 2], [2, 3, 4], [3, 4, 5]]))
    key, value = torch.randn(2, 3, 2, 3, 8)
    shown = cache.update(key, value, 0)
    expected = torch.zeros(2, 3, 2, 4, 8)
    for found, new, rows in zip(shown, (key, value), expected, strict=True):
        rows[0, :, 0:3], rows[1, :, 2:4], rows[2, :, 3:4] = new[0], new[1, :, :2], new[2, :, :1]
        assert torch.equal(found, rows)


FAMILIES: dict[str, PretrainedConfig] = {
    "sliding": MistralConfig(sliding_window=4),
    "softcap and sliding": Gemma2Config(sliding_window=4, query_pre_attn_scalar=16, attn_logit_softcapping=1.0),
    "sinks and sliding": GptOssConfig(
        sliding_window=4,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}


def tiny_models(config: PretrainedConfig) -> tuple[PreTrainedModel, PreTrainedModel]:
    """One random model of the family twice: with transformers' own plain attention, and with ours."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "initializer_range": 0.3}
    config = type(config)(**{**config.to_diff_dict(), **sizes, **heads, **layers})
    models = [AutoModelForCausalLM.from_config(config, attn_implementation=a).eval() for a in ("eager", ATTENTION)]
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


@torch.no_grad()
def read_tree(model: PreTrainedModel, text: Tensor, drafts: Tensor) -> Tensor:
    """Hidden states [B, N + 1, H] of a tree over the first PREFIX tokens of text [B, P], on slots."""
    cache = SlotCache(len(text), 24)
    text, drafts, prefix, tree = (x.to(model.device) for x in (text, drafts, PREFIX, TREE))
    run_on_slots(model, text, chain_window(torch.zeros_like(prefix), text.shape[1]), cache)
    return run_on_slots(model, drafts, tree_window(prefix, tree), cache).cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_on_slots_are_their_paths_in_plain_attention(family: str) -> None:
    """Ragged rows, and windows that slide within the tree."""
    plain, ours = tiny_models(FAMILIES[family])
    text, drafts = torch.randint(1, 50, (2, 13)), torch.randint(1, 50, (2, TREE.shape[1] + 1))
    found = read_tree(ours, text, drafts)
    for row, prefix in enumerate(PREFIX.tolist()):
        for column in range(drafts.shape[1]):
            ids = torch.cat([text[row, :prefix], drafts[row, path_to(PARENTS[row], column)]])
            with torch.no_grad():
                expected = plain.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, -1]
            torch.testing.assert_close(found[row, column], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_gets_its_mask_through_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, it is no mask that transformers knows, and must reach the attention as it is."""
    attention_kernel = pytest.importorskip(
        "draftsmith.models.slots.attention_kernel", reason="triton is for Linux only"
    )
    model = tiny_models(FAMILIES[family])[1]
    text, drafts = torch.randint(1, 50, (2, 13)), torch.randint(1, 50, (2, TREE.shape[1] + 1))
    expected = read_tree(model, text, drafts)
    monkeypatch.setattr(Window, "mask", lambda window, num_slots: window.packed_mask())
    monkeypatch.setattr(attention_kernel, "num_splits", lambda *_: 1)
    found = read_tree(model.cuda() if torch.cuda.is_available() else model, text, drafts)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def run_on_fakes(step: Callable[[Tensor], Tensor], token_ids: Tensor) -> None:
    """Run on tensors without data: whatever asks for a value (item, nonzero, a bool mask as index) raises."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        step(fake.from_tensor(token_ids))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_decoding_step_does_not_wait_for_the_device(tree: bool, tiny_target: Target) -> None:
    cache = SlotCache(2, 32)
    tiny_target.run(torch.ones(2, 13, dtype=torch.int64), chain_window(torch.zeros(2, dtype=torch.int64), 13), cache)

    def step(token_ids: Tensor) -> Tensor:
        window = tree_window(PREFIX, TREE) if tree else chain_window(PREFIX, token_ids.shape[1])
        features = tiny_target.run(token_ids, window, cache, layer_ids=(1, 3))
        cache.keep_path(PREFIX, TREE + 2)
        return tiny_target.logits(features.last_hidden).argmax(-1)

    token_ids = torch.ones(2, 8, dtype=torch.int64)
    run_on_fakes(step, token_ids)
    with pytest.raises(DynamicOutputShapeException):
        run_on_fakes(lambda token_ids: step(token_ids).nonzero(), token_ids)
    with pytest.raises(DataDependentOutputException):
        run_on_fakes(lambda token_ids: step(token_ids)[0, 0].item(), token_ids)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 1, 1, 1, 2, 3, 3]])


def pairs_mask(documents: Tensor) -> Tensor:
    """bool [B, 1, T, T]: each token sees those up to it of its own document."""
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def test_documents_by_where_they_begin_and_by_all_pairs() -> None:
    """Packed rows on a GPU: the last document of a row and the first of the next one stay apart."""
    edges = document_edges(DOCUMENTS)
    assert edges.tolist() == [0, 3, 7, 8, 10, 13, 14, 16]
    mask = Sight((2, 8), edges).mask(slice(None), slice(None), edges.device)
    assert torch.equal(mask, pairs_mask(DOCUMENTS))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2])
def test_attention_within_documents_on_a_gpu(window: int | None) -> None:
    """Flash attention that reads no other pairs, and its gradients, beside attention with a mask of all pairs."""
    shapes = [(2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)]
    results = []
    for mask in (pairs_mask(DOCUMENTS).cuda(), document_edges(DOCUMENTS).cuda()[None, None, None]):
        torch.manual_seed(0)
        tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        output = slot_attention(torch.nn.Identity(), *tensors, mask, sliding_window=window)[0]
        output.float().square().sum().backward()
        results.append([output, *(tensor.grad for tensor in tensors)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=5e-2, rtol=5e-2)
