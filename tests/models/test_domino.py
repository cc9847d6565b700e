"""Domino: a recurrent unit that reads the tokens of a block, and the loss that moves from base to corrected logits.

What a block sees is DFlash's affair (test_dflash.py).
"""

from typing import Any

import pytest
import torch
from drafters import build, loss_of, random_batch
from torch import nn

from draftsmith.models import Target
from draftsmith.models.block_parts.slot_correctors import PrefixGRU, SlotWalk
from draftsmith.models.checkpoints import build_drafter, checkpoint_of
from draftsmith.models.drafter_parts.layouts import in_engine_layout
from draftsmith.models.drafters.domino import Domino
from draftsmith.models.errors import UserError


def domino(target: Target, **fields: Any) -> Domino:
    """A drafter of two layers, with noise in its weights."""
    drafter = build("domino", target, num_layers=2, block_size=5, memory_size=12, code_size=8, **fields)
    assert isinstance(drafter, Domino)
    return drafter


def test_the_recurrent_unit_is_pytorchs() -> None:
    """All tokens at once, and in two parts with what is remembered between them."""
    theirs, ours, x = nn.GRU(6, 4, bias=False, batch_first=True), PrefixGRU(6, 4), torch.randn(3, 5, 6)
    ours.load_state_dict(theirs.state_dict())
    expected, _ = theirs(x)
    torch.testing.assert_close(ours(x, None), expected)
    first = ours(x[:, :2], None)
    torch.testing.assert_close(torch.cat([first, ours(x[:, 2:], first[:, -1])], 1), expected)


def test_slots_one_after_the_other_are_all_at_once(tiny_target: Target) -> None:
    """Along two paths of a tree: what training makes of all slots of each path at once. The first is as without."""
    drafter = domino(tiny_target, draft_vocab_size=40)
    ids = drafter.draft_to_target()
    assert ids is not None
    hidden, anchor = torch.randn(1, 4, tiny_target.hidden_size), torch.tensor([9])
    paths = torch.tensor([[5, 17, 3], [30, 2, 3]])  # tokens behind the anchor, by draft ids
    walk = SlotWalk(hidden, drafter.head(hidden), drafter.corrector, None, ids)
    found = [walk.first(anchor).expand(-1, 2, -1)]
    found += [walk.read(paths[:, 0][None], torch.tensor([[0, 0]]))]
    found += [walk.read(paths[:, depth][None], torch.tensor([[0, 1]])) for depth in (1, 2)]
    before = torch.cat([anchor.expand(2, 1), ids[paths]], 1)[None]  # [1, 2, K]
    inputs, head = drafter.with_codes(hidden[:, None].expand(-1, 2, -1, -1), before)
    torch.testing.assert_close(torch.stack(found, 2), head(inputs))
    assert torch.equal(found[0][0, 0], drafter.head(hidden)[0, 0])
    assert (found[3][0, 0] != found[3][0, 1]).any()  # after the same token, behind others


def test_training_begins_with_the_logits_that_are_not_corrected(tiny_target: Target) -> None:
    """And ends with the others: at first the loss is that of DFlash with the same layers."""
    batch, fields = random_batch(tiny_target), {"num_layers": 2, "block_size": 5, "layout": "next_token"}
    drafter = domino(tiny_target, anchor_share=1.0).train()
    plain = build("dflash", tiny_target, **fields)
    plain.load_state_dict({name: drafter.state_dict()[name] for name in plain.state_dict()})
    plain.training_depth = drafter.training_depth  # one less, in the layout of DSpark
    at_first = loss_of(drafter, batch, tiny_target)["loss"][0]
    torch.testing.assert_close(at_first, loss_of(plain, batch, tiny_target)["loss"][0])
    drafter.progress = 0.5
    halfway = loss_of(drafter, batch, tiny_target)["loss"][0]
    drafter.config.base_share = 0.0
    at_the_end = loss_of(drafter, batch, tiny_target)["loss"][0]
    assert at_first != at_the_end
    torch.testing.assert_close(halfway, (at_first + at_the_end) / 2)
    drafter.config.base_share = 1.0
    assert loss_of(drafter.eval(), batch, tiny_target)["loss"][0] == at_the_end  # checkpoints are compared by one loss


def test_a_head_that_two_losses_share_gets_their_gradient_once(tiny_target: Target) -> None:
    """With a draft vocabulary the head makes the logits with and without correction: of both, a central difference."""
    drafter, batch = domino(tiny_target, draft_vocab_size=40, anchor_share=1.0).train(), random_batch(tiny_target)
    drafter.progress = 0.5
    assert drafter.lm_head is not None
    weight = drafter.lm_head.weight
    loss_of(drafter, batch, tiny_target)["loss"][0].backward()
    assert weight.grad is not None
    direction, losses = torch.randn_like(weight), []
    for step in (0.01, -0.01):
        weight.data += step * direction
        losses.append(loss_of(drafter, batch, tiny_target)["loss"][0].item())
        weight.data -= step * direction
    slope = (losses[0] - losses[1]) / 0.02
    assert (weight.grad * direction).sum().item() == pytest.approx(slope, rel=0.01)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pure_draft_prefix_len": 0}, "pure_draft_prefix_len 0"),
        ({"gru_hidden_dim": None}, "lacks gru_hidden_dim"),
        ({"emb_dim": 9}, r"embed_proj.0.weight \[8, 44\]"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], reason: str, tiny_target: Target) -> None:
    checkpoint = checkpoint_of(domino(tiny_target), torch.float32)
    checkpoint.config["dflash_config"].update(change)
    with pytest.raises(UserError, match=reason):
        build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)


@pytest.mark.parametrize("shift_label", [False, True])
def test_a_foreign_checkpoint_is_told_by_its_projector(shift_label: bool, tiny_target: Target) -> None:
    checkpoint = checkpoint_of(domino(tiny_target), torch.float32)
    del checkpoint.config["draftsmith"]
    checkpoint.config["dflash_config"]["shift_label"] = shift_label
    found = build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)
    assert isinstance(found, Domino)
    assert (found.config.layout, found.max_draft_length) == ("next_token" if shift_label else "fill_in", 4)
