"""DSpark: tokens of a block that follow each other, a head that says how sure it is, and speculators 0.9.0 as witness.

What a block sees is DFlash's affair (test_dflash.py).
"""

from typing import Any

import pytest
import torch
from block_witness import Tensors, part, witness_of, witnessed
from drafters import build, first_round, random_batch
from torch import Tensor

from draftsmith.models import DRAFTERS, Target
from draftsmith.models.batch import Batch
from draftsmith.models.block_parts.slot_correctors import SlotWalk
from draftsmith.models.checkpoints import build_drafter, checkpoint_of
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.drafter_parts.layouts import in_engine_layout
from draftsmith.models.drafters.dspark import DSpark
from draftsmith.models.errors import UserError
from draftsmith.models.losses.chain_loss import ChainLoss
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.target.target import Features


def dspark(target: Target, **fields: Any) -> DSpark:
    """A drafter of two layers, with noise in its weights."""
    drafter = build("dspark", target, num_layers=2, block_size=5, markov_rank=8, **fields)
    assert isinstance(drafter, DSpark)
    return drafter


# Against speculators --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return witness_of("dspark")


@pytest.fixture(scope="module")
def drafter(golden: Tensors) -> DSpark:
    built = witnessed("dspark", golden, markov_rank=6)
    assert isinstance(built, DSpark)
    return built


@pytest.mark.parametrize("documents", ["1.", "3."])
def test_logits_and_confidence_are_those_of_speculators(documents: str, golden: Tensors, drafter: DSpark) -> None:
    """In training, where the tokens of the text stand before the slots, in all blocks that end in their document."""
    case = part(golden, documents)
    batch = Batch(case["tokens"], case["loss_mask"], case["documents"])
    features = Features(torch.zeros(1, case["tokens"].shape[1], drafter.target.hidden_size), case["features"])
    with torch.no_grad():
        depths = list(drafter.depths(ChainLoss(batch), batch, features, 5))
    for i, depth in enumerate(depths):
        slots = (depth.teachers - 1 - i).tolist()
        rows = [slots.index(int(anchor) - 1) for anchor in case["anchors"]]
        torch.testing.assert_close(depth.head(depth.hidden[rows]), case["logits"][:, i], atol=1e-5, rtol=1e-5)
        assert depth.confidence is not None
        torch.testing.assert_close(depth.confidence[rows], case["confidence"][:, i], atol=1e-5, rtol=1e-5)


# The corrector --------------------------------------------------------------------------------------------------------


def test_a_new_corrector_changes_nothing(tiny_target: Target) -> None:
    """It drafts as DFlash with the same layers in the same layout."""
    fields = {"num_layers": 2, "block_size": 5}
    config = DRAFTERS["dspark"].config_class(kind="dspark", **fields)  # type: ignore[arg-type]
    new = DRAFTERS["dspark"].from_target(config, tiny_target).eval()
    plain = build("dflash", tiny_target, layout="next_token", **fields)
    plain.load_state_dict({name: new.state_dict()[name] for name in plain.state_dict()})
    tokens = random_batch(tiny_target).token_ids
    found, expected = (
        one.propose(first_round(one, tiny_target, tokens, sample_drafts=True), Chain(4)) for one in (new, plain)
    )
    assert torch.equal(found.tokens, expected.tokens)
    assert found.logits is not None
    assert torch.equal(found.logits, expected.logits)


def test_slots_one_after_the_other_are_all_at_once(tiny_target: Target) -> None:
    """Along two paths of a tree: what training makes of all slots of each path at once."""
    drafter = dspark(tiny_target, draft_vocab_size=40)
    ids = drafter.draft_to_target()
    assert ids is not None
    hidden, anchor = torch.randn(1, 3, tiny_target.hidden_size), torch.tensor([9])
    paths = torch.tensor([[5, 17], [30, 2]])  # tokens behind the anchor, by draft ids
    walk = SlotWalk(hidden, drafter.head(hidden), drafter.corrector, drafter.confidence_head, ids)
    found = [walk.first(anchor).expand(-1, 2, -1)]
    found += [walk.read(paths[:, depth][None], torch.tensor([[0, depth]])) for depth in range(2)]
    before = torch.cat([anchor.expand(2, 1), ids[paths]], 1)[None]  # [1, 2, K]
    inputs, head = drafter.with_codes(hidden[:, None].expand(-1, 2, -1, -1), before)
    torch.testing.assert_close(torch.stack(found, 2), head(inputs))
    assert (found[1][0, 0] != found[1][0, 1]).any()


# Confidence -----------------------------------------------------------------------------------------------------------


def test_confidence_learns_the_chance_of_acceptance(tiny_target: Target) -> None:
    """Beside the divergence the loss has the head's cross-entropy to the mass that target and drafter share."""
    drafter, batch = dspark(tiny_target), random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)

    def loss(weight: float) -> Tensor:
        drafter.config.confidence_weight = weight
        return drafter.loss(batch, features)["loss"][0]

    expected = torch.zeros(())
    for depth in drafter.depths(ChainLoss(batch), batch, features, 5):
        p = tiny_target.logits(features.last_hidden.flatten(0, 1)[depth.teachers]).softmax(-1)
        shared = torch.minimum(p, depth.head(depth.hidden).softmax(-1)).sum(-1)
        assert depth.confidence is not None
        own = depth.confidence.sigmoid()
        expected += (depth.weight * -(shared * own.log() + (1 - shared) * (1 - own).log())).sum().detach()
    torch.testing.assert_close(loss(2.0) - loss(0.0), 2 * expected, atol=1e-3, rtol=1e-3)


def test_chains_end_by_the_head(tiny_target: Target) -> None:
    """With a half at each slot, the confidence in a chain of one is above 0.4, and in one of two below."""
    drafter = dspark(tiny_target)
    assert drafter.confidence_head is not None
    drafter.confidence_head.load_state_dict({"proj.weight": torch.zeros(1, 40), "proj.bias": torch.zeros(1)})
    state = first_round(drafter, tiny_target, random_batch(tiny_target).token_ids)
    whole = drafter.propose(state, Chain(4)).tokens
    state.least_confidence = 0.4
    drafted = drafter.propose(state, Chain(4)).tokens
    assert torch.equal(drafted, whole[:, :2])
    drafter.confidence_head.proj.bias.data += 10
    assert (drafter.propose(state, Chain(4)).tokens != NO_TOKEN).all()


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"markov_head_type": "gated"}, "markov_head_type 'gated'"),
        ({"enable_confidence_head": False}, "enable_confidence_head False"),
        ({"confidence_head_with_markov": False}, "confidence_head_with_markov False"),
        ({"markov_rank": None}, "lacks markov_rank"),
        ({"markov_rank": 9}, "markov_head.markov_w1.weight"),
    ],
)
def test_heads_that_are_not_computed_are_refused(change: dict[str, Any], reason: str, tiny_target: Target) -> None:
    checkpoint = checkpoint_of(dspark(tiny_target), torch.float32)
    checkpoint.config.update(change)
    with pytest.raises(UserError, match=reason):
        build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)


def test_the_older_layout_is_read_as_it_is(tiny_target: Target) -> None:
    """Also of a checkpoint that draftsmith did not write: a row predicts the token at its place."""
    checkpoint = checkpoint_of(dspark(tiny_target), torch.float32)
    del checkpoint.config["draftsmith"]
    checkpoint.config["sample_from_anchor"] = False
    found = build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)
    assert (found.config.layout, found.max_draft_length) == ("fill_in", 4)
