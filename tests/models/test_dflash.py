"""DFlash: what a block sees, that its parts fit together, and what speculators 0.9.0 makes of the same weights."""

import math
from typing import Any

import pytest
import torch
from block_witness import Tensors, part, witness_of, witnessed
from drafters import assert_trained_as_decoded, build, loss_of, random_batch
from torch import Tensor

from draftsmith.models import DRAFTERS, Target
from draftsmith.models.batch import Batch
from draftsmith.models.checkpoints import build_drafter, checkpoint_of
from draftsmith.models.drafter_configs import DFlashConfig
from draftsmith.models.drafter_parts.layouts import from_speculators, in_engine_layout
from draftsmith.models.drafters.dflash import SHORT_TEXT, DFlash, even_layer_ids
from draftsmith.models.errors import UserError
from draftsmith.models.losses.chain_loss import ChainLoss
from draftsmith.models.target.target import Features


def dflash(target: Target, **fields: Any) -> DFlash:
    """A drafter of two layers, with noise in its weights."""
    drafter = build("dflash", target, num_layers=2, block_size=5, **fields)
    assert isinstance(drafter, DFlash)
    return drafter


# What a block sees ----------------------------------------------------------------------------------------------------

LENGTH = 12
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])


def blocks(drafter: DFlash, batch: Batch, layers: Tensor, slots: list[int]) -> Tensor:
    """Outputs [M, R, H] of the blocks at these slots of one row."""
    with torch.no_grad():
        return drafter.run_blocks(batch, layers, torch.tensor([slots]))[0]


def text(drafter: DFlash, documents: Tensor | None) -> tuple[Batch, Tensor]:
    """A row of random tokens, and random features of it."""
    torch.manual_seed(3)
    tokens = torch.randint(1, drafter.target.vocab_size, (1, LENGTH))
    return Batch(tokens, torch.ones(1, LENGTH, dtype=torch.bool), documents), torch.randn(
        1, LENGTH, drafter.fc.in_features
    )


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 4], ids=["full", "sliding"])
def test_a_block_sees_the_features_before_its_anchor_and_the_anchors_token(
    window: int | None, documents: Tensor | None, tiny_target: Target
) -> None:
    """And nothing else, to the bit: blocks of neighbouring anchors are computed side by side.

    With a window the first row sees one feature less than it is long, for it sees itself.
    """
    drafter = dflash(tiny_target, sliding_window=window)
    batch, layers = text(drafter, documents)
    slots = [t for t in range(LENGTH - 1) if documents is None or documents[0, t] == documents[0, t + 1]]
    whole = blocks(drafter, batch, layers, slots)
    for place in range(LENGTH):
        other = layers.clone()
        other[0, place] += 1
        tokens = batch.token_ids.clone()
        tokens[0, place] = tokens[0, place] % (tiny_target.vocab_size - 1) + 1
        features_changed = (blocks(drafter, batch, other, slots) != whole).flatten(2).any(2)  # [M, R]
        token_changed = (blocks(drafter, Batch(tokens, batch.loss_mask, documents), layers, slots) != whole).any(2)
        for block, slot in enumerate(slots):
            same = documents is None or documents[0, place] == documents[0, slot]
            near = window is None or place > slot + 1 - window
            assert features_changed[block, 0] == (same and place <= slot and near)
            assert token_changed[block].any() == (place == slot + 1)
            if window is None:
                assert features_changed[block].all() == features_changed[block].any()


@pytest.mark.parametrize("window", [None, 4], ids=["both ways", "what is before"])
def test_rows_of_a_block_see_each_other(window: int | None, tiny_target: Target) -> None:
    """Both ways with full attention; with a window only those before them. Without the last rows, in effect."""
    drafter = dflash(tiny_target, sliding_window=window)
    batch, layers = text(drafter, None)
    whole = blocks(drafter, batch, layers, [6])[0]
    drafter.config.block_size = 3
    short = blocks(drafter, batch, layers, [6])[0]
    same = torch.isclose(whole[:3], short, atol=1e-6).all(1)
    assert same.tolist() == [window is not None] * 3


@pytest.mark.parametrize("full_layers", [[0], [1]])
def test_layers_may_differ(full_layers: list[int], tiny_target: Target) -> None:
    """A row sees beyond the window, and what is behind it, through the full layer alone. Training is as drafting is."""
    drafter = dflash(tiny_target, sliding_window=4, full_layers=full_layers)
    assert [layer.sliding_window for layer in drafter.block_layers()] == [None, 4][:: 1 if full_layers == [0] else -1]
    assert_trained_as_decoded(drafter, tiny_target)
    batch, layers = text(drafter, None)
    far = layers.clone()
    far[0, 0] += 1
    whole = blocks(drafter, batch, layers, [8])[0]
    assert (blocks(drafter, batch, far, [8])[0] != whole).any(1).all()
    checkpoint = checkpoint_of(drafter, torch.float32)
    found = build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)
    assert found.config == drafter.config


@pytest.mark.parametrize(("both_ways", "causal"), [(False, None), (True, False)])
def test_layers_of_speculators_may_differ(both_ways: bool, causal: bool | None) -> None:
    """Each layer then goes by its own type, unless windows see both ways: then none has what draftsmith computes."""
    types = {"layer_types": ["full_attention", "sliding_attention"]}
    config = {"aux_hidden_state_layer_ids": [1], "sliding_window_non_causal": both_ways}
    top = {**config, "speculators_model_type": "dflash", "transformer_layer_config": types}
    assert from_speculators(top, {})[0].get("is_causal") is causal


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"full_layers": [0]}, "drafter.full_layers are those without a window"),
        ({"full_layers": [5], "sliding_window": 4}, "give some of the layers 0 to 4, not all"),
        ({"full_layers": [0, 1], "sliding_window": 4, "num_layers": 2}, "give some of the layers 0 to 1, not all"),
    ],
)
def test_layers_that_cannot_differ_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        DFlashConfig(**fields)


def test_blocks_do_not_hang_on_which_others_are_trained(tiny_target: Target) -> None:
    drafter = dflash(tiny_target)
    batch, layers = text(drafter, DOCUMENTS)
    slots = [0, 1, 2, 3, 5, 6, 9]
    whole = blocks(drafter, batch, layers, slots)
    for block, slot in enumerate(slots):
        torch.testing.assert_close(blocks(drafter, batch, layers, [slot])[0], whole[block])


def test_memory_grows_with_the_number_of_blocks(tiny_target: Target) -> None:
    """No tensor of the forward pass has a row for each pair of blocks: masks are of a text's length at most."""
    drafter = dflash(tiny_target)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            tensors = found if isinstance(found, tuple | list) else [found]
            largest = max([largest, *(x.numel() for x in tensors if isinstance(x, Tensor))])
            return found

    found = []
    lengths = SHORT_TEXT, 2 * SHORT_TEXT
    for length in lengths:
        batch = random_batch(tiny_target, 1, length)
        layers = torch.randn(1, length, drafter.fc.in_features)
        largest = 0
        with Sizes():
            blocks(drafter, batch, layers, list(range(length - 1)))
        found.append(largest)
    # blocks beside blocks would take 25 times the square of the text's length
    assert all(size <= 4 * length**2 for size, length in zip(found, lengths, strict=True))


# Training -------------------------------------------------------------------------------------------------------------


def test_trained_anchors_are_a_part_of_the_slots(tiny_target: Target) -> None:
    """Sums within five standard errors of those over all slots, which an evaluation takes."""
    drafter = dflash(tiny_target, anchor_share=0.5)
    batch = random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)
    with torch.no_grad():
        whole = drafter.loss(batch, features)
        drafter.train()
        draws = [drafter.loss(batch, features) for _ in range(200)]
    for name in ("loss", "simulated_acceptance_length"):
        values = torch.stack([draw[name][0].double() for draw in draws])
        assert (values.mean() - whole[name][0]).abs() <= 5 * values.std() / len(values) ** 0.5 + 1e-6
    assert draws[0]["accuracy_3"][1] < whole["accuracy_3"][1]


def test_weights_fall_with_the_depth(tiny_target: Target) -> None:
    """As exp(-i / decay_length), of which the paper says 7 for a block of 16."""
    drafter = dflash(tiny_target, decay_length=7.0)
    batch = random_batch(tiny_target)
    depths = list(drafter.depths(ChainLoss(batch), batch, tiny_target.features(batch, drafter.layer_ids), 4))
    for i, depth in enumerate(depths):
        torch.testing.assert_close(depth.weight, torch.full((len(depth.hidden),), math.exp(-i / 7)))


def test_weights_follow_the_chances_of_the_text(tiny_target: Target) -> None:
    """D-PACE on the tokens of the text, of which a reduced vocabulary gives the later half no chance at all."""
    drafter = dflash(
        tiny_target, position_weights="d_pace", draft_vocab_size=tiny_target.vocab_size // 2, anchor_share=1.0
    ).train()
    batch = random_batch(tiny_target)
    drafter_ids = drafter.draft_to_target()
    assert drafter_ids is not None
    depths = list(drafter.depths(ChainLoss(batch), batch, tiny_target.features(batch, drafter.layer_ids), 2))
    slots = [(depth.teachers - 1 - i).tolist() for i, depth in enumerate(depths)]
    raised = []  # of each depth, by slot
    for i, depth in enumerate(depths):
        tokens = batch.token_ids.flatten()[depth.teachers + 1]
        known = torch.isin(tokens, drafter_ids)
        q = depth.head(depth.hidden).softmax(-1).gather(1, torch.where(known, tokens, 0)[:, None])[:, 0]  # ids agree
        raised.append(dict(zip(slots[i], (0.5 + 0.5 * q * known).tolist(), strict=True)))
        assert 0 < known.sum() < len(known)
    for row, slot in enumerate(slots[0]):
        reached = raised[0][slot] * raised[1].get(slot, 0)
        assert float(depths[0].weight[row]) == pytest.approx(raised[0][slot] + reached, abs=1e-5)
        if slot in raised[1]:
            assert float(depths[1].weight[slots[1].index(slot)]) == pytest.approx(reached, abs=1e-5)


def test_a_held_out_loss_weighs_depths_alike_at_any_checkpoint(tiny_target: Target) -> None:
    """By the decay: D-PACE's weights grow as a drafter improves, and would hide it."""
    drafter, batch = dflash(tiny_target, position_weights="d_pace"), random_batch(tiny_target)
    plain = dflash(tiny_target)
    plain.load_state_dict(drafter.state_dict())
    found, expected = (loss_of(one.eval(), batch, tiny_target)["loss"][0] for one in (drafter, plain))
    assert torch.equal(found, expected)


def test_padding_and_packing_change_no_weights(tiny_target: Target) -> None:
    drafter = dflash(tiny_target, position_weights="d_pace", anchor_share=1.0).train()
    batch = random_batch(tiny_target)
    pad = torch.zeros(3, 4, dtype=torch.int64)
    padded = Batch(torch.cat([batch.token_ids, pad], 1), torch.cat([batch.loss_mask, pad.bool()], 1))
    packed = Batch(
        batch.token_ids.view(1, -1), batch.loss_mask.view(1, -1), torch.arange(3).repeat_interleave(12)[None]
    )
    with torch.no_grad():
        expected, *found = (loss_of(drafter, one, tiny_target)["loss"][0] for one in (batch, padded, packed))
    torch.testing.assert_close(found, [expected, expected])


def test_a_decay_that_does_not_count_is_refused() -> None:
    with pytest.raises(UserError, match="decay_length"):
        DFlashConfig(position_weights="d_pace", decay_length=4.0)


def test_layers_can_start_as_the_targets_last_ones(tiny_target: Target) -> None:
    config = DRAFTERS["dflash"].config_class(kind="dflash", num_layers=2, starting_layers="target")  # type: ignore[call-arg]
    drafter = DRAFTERS["dflash"].from_target(config, tiny_target)
    tensors, model = drafter.engine_tensors(), tiny_target.model.base_model
    for own, layer in enumerate(model.layers[-2:]):
        for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"):
            assert torch.equal(tensors[f"layers.{own}.{name}.weight"], layer.get_submodule(name).weight)
    assert torch.equal(tensors["norm.weight"], model.norm.weight)


def test_layers_are_read_evenly() -> None:
    """As the authors' checkpoints have them, which count outputs from 0: Qwen3-8B reads 1, 9, 17, 25, 33 of 36."""
    assert [layer_id - 1 for layer_id in even_layer_ids(36, 5)] == [1, 9, 17, 25, 33]
    assert even_layer_ids(26, 5) == [2, 7, 13, 19, 24]  # of halves: round(1 + i * 5.5), from 0 on
    assert even_layer_ids(6, 1) == [3]
    assert even_layer_ids(3, 5) == [1, 2]


# Against speculators --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return witness_of("dflash")


@pytest.fixture(scope="module")
def drafter(golden: Tensors) -> DFlash:
    return witnessed("dflash", golden)


@pytest.mark.parametrize("documents", ["1.", "3."])
def test_blocks_are_those_of_speculators(documents: str, golden: Tensors, drafter: DFlash) -> None:
    case = part(golden, documents)
    batch = Batch(case["tokens"], case["loss_mask"], case["documents"])
    hidden = blocks(drafter, batch, case["features"], [int(anchor) - 1 for anchor in case["anchors"]])
    torch.testing.assert_close(drafter.head(drafter.norm(hidden)), case["logits"], atol=1e-5, rtol=1e-5)


def test_teachers_are_those_of_speculators(golden: Tensors, drafter: DFlash) -> None:
    """Row k of a block is taught by the target's distribution of the token at its place."""
    case = part(golden, "1.")
    batch = Batch(case["tokens"], case["loss_mask"], case["documents"])
    last_hidden = drafter.target.model.model.norm(case["last_hidden"])
    depths = drafter.depths(ChainLoss(batch), batch, Features(last_hidden, case["features"]), 4)
    ids = drafter.draft_to_target()
    for i, depth in enumerate(depths):
        anchors = (depth.teachers - i).tolist()
        teachers = depth.teachers[[anchors.index(anchor) for anchor in case["anchors"].tolist()]]
        found = drafter.target.logits(last_hidden[0, teachers])[:, ids]
        torch.testing.assert_close(found, case["teacher"][:, 1 + i], atol=1e-5, rtol=1e-5)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_config_says_what_engines_must_know(tiny_target: Target) -> None:
    """Layer ids that count outputs from 0; blocks that see both ways, which the engines' defaults do not agree on."""
    config = checkpoint_of(dflash(tiny_target, layer_ids=[1, 3]), torch.float32).config
    assert config["dflash_config"]["target_layer_ids"] == [0, 2]
    assert config["is_causal"] is False
    sliding = checkpoint_of(dflash(tiny_target, sliding_window=4), torch.float32).config
    assert (sliding["is_causal"], sliding["use_sliding_window"], sliding["sliding_window"]) == (True, True, 4)
    assert sliding["layer_types"] == ["sliding_attention"] * 2
    mixed = checkpoint_of(dflash(tiny_target, sliding_window=4, full_layers=[1]), torch.float32).config
    assert (mixed["layer_types"], mixed["sliding_window"]) == (["sliding_attention", "full_attention"], 4)
    assert "is_causal" not in mixed  # engines would read it for both layers


def test_norms_of_keys_are_ones_unless_asked_for(tiny_target: Target) -> None:
    """vLLM's CPU build applies those of the first layer to the context of all layers."""
    for key_norm in (False, True):
        tensors = checkpoint_of(dflash(tiny_target, key_norm=key_norm), torch.float32).tensors
        norms = [tensor for name, tensor in tensors.items() if name.endswith("k_norm.weight")]
        assert len(norms) == 2
        assert all(bool((norm == 1).all()) is not key_norm for norm in norms)


NESTED = {"mask_token_id": 1, "target_layer_ids": [0, 2], "block_size": 5}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_causal": True}, "full_attention with is_causal True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding and full attention with is_causal False"),
        ({"layer_types": ["full_attention"]}, "2 layers and layer_types for 1"),
        ({"dflash_config": {"mask_token_id": 1}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [0, 2]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 9]}}, "layer_ids"),
        ({"is_causal": None, "dflash_config": {**NESTED, "causal": True}}, "full_attention with is_causal True"),
        ({"dflash_config": {**NESTED, "use_swa": True, "swa_window_size": 4}}, r"use_swa \(in dflash_config\)"),
        (
            {
                "is_causal": True,
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 8,
                "dflash_config": {**NESTED, "swa_window_size": 4},
            },
            r"swa_window_size 4 \(in dflash_config\) beside sliding_window 8",
        ),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], reason: str, tiny_target: Target) -> None:
    checkpoint = checkpoint_of(dflash(tiny_target), torch.float32)
    checkpoint.config.update(change)
    with pytest.raises(UserError, match=reason):
        build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)


def test_longer_drafts_than_trained_are_refused(tiny_target: Target) -> None:
    assert dflash(tiny_target).max_draft_length == 4
    assert dflash(tiny_target, layout="next_token").max_draft_length == 5
    assert (
        loss_of(dflash(tiny_target, layout="next_token"), random_batch(tiny_target), tiny_target)["accuracy_4"][1] > 0
    )
