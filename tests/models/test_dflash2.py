"""DFlash2: convolutions along the rows of a block, and speculators 0.9.0 as witness.

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
from draftsmith.models.block_parts.convolved_layer import INPUT, OUTPUT, BlockConvolution
from draftsmith.models.checkpoints import build_drafter, checkpoint_of
from draftsmith.models.drafter_configs import DFlash2Config
from draftsmith.models.drafter_parts.layouts import in_engine_layout
from draftsmith.models.drafters.dflash2 import SUCCESSORS, DFlash2
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return witness_of("dflash2")


@pytest.mark.parametrize("documents", ["1.", "3."])
def test_logits_are_those_of_speculators(documents: str, golden: Tensors) -> None:
    """Of three taps; with two only the row before would be mixed in."""
    sizes = {"draft_vocab_size": None, "conv_kernel_size": 3, "conv_group_size": 8}
    drafter, case = witnessed("dflash2", golden, **sizes), part(golden, documents)
    batch = Batch(case["tokens"], case["loss_mask"], case["documents"])
    with torch.no_grad():
        hidden = drafter.run_blocks(batch, case["features"], case["anchors"][None] - 1)[0]
        found = drafter.head(drafter.norm(hidden))
    size = float(case["logits"].abs().max())  # 10: of the target's head, which is made large
    torch.testing.assert_close(found / size, case["logits"] / size, atol=1e-5, rtol=1e-5)


def convolution(block_size: int, taps: int) -> BlockConvolution:
    torch.manual_seed(0)
    made = BlockConvolution(8, block_size, taps, 4)
    made.base_kernel.data.normal_()
    return made


@pytest.mark.parametrize("side", [INPUT, OUTPUT])
def test_a_row_is_mixed_with_those_before_it_in_its_block(side: int) -> None:
    """By the formula, row by row and channel by channel."""
    made, x, read = convolution(3, 2), torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    shared = made.kernel_projection(read).view(2, 6, 2, 2, 2)[:, :, side]  # [B, T, P, C]
    expected = torch.zeros(2, 6, 8)
    for row in range(6):
        for tap in range(min(2, row % 3 + 1)):
            for channel in range(8):
                weight = made.base_kernel[side, tap, channel] + shared[:, row, tap, channel // 4]
                expected[:, row, channel] += weight * x[:, row - tap, channel]
    torch.testing.assert_close(made(x, read, side), expected)


def test_new_convolutions_change_nothing(tiny_target: Target) -> None:
    """It drafts as DFlash with the same layers."""
    fields = {"num_layers": 2, "block_size": 5}
    new = DFlash2.from_target(DFlash2Config(**fields), tiny_target).eval()  # type: ignore[arg-type]
    plain = build("dflash", tiny_target, **fields)
    plain.load_state_dict({name: new.state_dict()[name] for name in plain.state_dict()})
    tokens = random_batch(tiny_target).token_ids
    found, expected = (
        one.propose(first_round(one, tiny_target, tokens, sample_drafts=True), Chain(4)).logits for one in (new, plain)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("config", "tensors", "reason"),
    [
        ({}, {SUCCESSORS: torch.ones(2, 2)}, "trained candidate selector"),
        ({"output_multiplier": 2.0}, {}, "output_multiplier 2.0"),
        ({"conv_kernel_size": None}, {}, "lacks conv_kernel_size"),
        ({"conv_group_size": 7}, {}, "conv_group_size 7 does not divide"),
    ],
)
def test_what_is_not_computed_is_refused(
    config: dict[str, Any], tensors: dict[str, Tensor], reason: str, tiny_target: Target
) -> None:
    checkpoint = checkpoint_of(build("dflash2", tiny_target, num_layers=2), torch.float32)
    checkpoint.config["dflash_config"].update(config)
    checkpoint.tensors.update(tensors)
    with pytest.raises(UserError, match=reason):
        build_drafter(in_engine_layout(checkpoint.config, checkpoint.tensors, tiny_target), tiny_target)


def test_a_kernel_longer_than_a_block_is_refused() -> None:
    with pytest.raises(UserError, match="block_size"):
        DRAFTERS["dflash2"].config_class(kind="dflash2", block_size=2, conv_kernel_size=3)  # type: ignore[call-arg]
