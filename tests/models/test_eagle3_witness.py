"""EAGLE-3 training against speculators 0.9.0, which wrote the witness (see `witness_eagle3.py`).

Which slots count differs on purpose, docs/eagle3.md says why: here those that count with us are compared, one by one.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots
from draftsmith.models.layers import checkpoint_tensors
from draftsmith.models.losses.divergences import DIVERGENCES
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.target.target import Features

GOLDEN = Path(__file__).parents[1] / "golden"
STEPS = 4
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3_1": {"feature_norm": "each", "norm_output": True},
    "eagle3_norm_before_fc": {"feature_norm": "all"},
}
Tensors = dict[str, Tensor]


def part(tensors: Tensors, name: str) -> Tensors:
    return {key.removeprefix(name): tensor for key, tensor in tensors.items() if key.startswith(name)}


@pytest.fixture(scope="module")
def golden() -> Tensors:
    return load_file(GOLDEN / "eagle3_witness.safetensors")


@pytest.fixture(scope="module")
def drafter(golden: Tensors) -> Eagle3:
    return drafter_of(golden)


def drafter_of(golden: Tensors, **settings: Any) -> Eagle3:
    """The witness's weights in a drafter and a target of ours; the target's layers are not needed."""
    own, of_target = part(golden, "drafter."), part(golden, "target.")
    vocab, width = of_target["lm_head.weight"].shape
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=own["layers.0.mlp.up_proj.weight"].shape[0],
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    config._attn_implementation = ATTENTION
    model = LlamaForCausalLM(config)
    model.load_state_dict(of_target, strict=False)
    eagle3_config = Eagle3Config(layer_ids=[2, 3, 4], draft_vocab_size=len(own["d2t"]), unroll_steps=STEPS, **settings)
    drafter = Eagle3.from_target(eagle3_config, Target(model, None, "witness"))
    tensors = checkpoint_tensors(drafter)
    assert tensors.keys() == own.keys()
    for name, tensor in tensors.items():
        tensor.copy_(own[name])
    return drafter


def text(case: Tensors, drafter: Eagle3) -> tuple[Batch, Features]:
    batch = Batch(case["tokens"], case["loss_mask"], case["documents"])
    last_hidden = drafter.target.model.model.norm(case["last_hidden"])
    return batch, Features(last_hidden, case["features"])


def counted_slots(batch: Batch, step: int) -> list[int]:
    """Slots of the row whose chain up to the token predicted at a step is all the target's, from the definition."""
    mask = batch.loss_mask[0].tolist()
    return [t for t in range(len(mask) - 2 - step) if all(mask[t + 1 : t + 3 + step])]


@pytest.mark.parametrize(
    ("variant", "documents"), [("eagle3", "1."), ("eagle3", "3."), ("eagle3_1", "3."), ("eagle3_norm_before_fc", "3.")]
)
def test_logits_of_every_unrolled_step(variant: str, documents: str) -> None:
    golden = load_file(GOLDEN / f"{variant}_witness.safetensors")
    drafter, case = drafter_of(golden, **VARIANTS[variant]), part(golden, documents)
    batch, features = text(case, drafter)
    assert features.layers is not None
    drafting = DraftingSlots.from_counted(batch.loss_mask.roll(-2, 1), batch.positions)
    with torch.no_grad():
        for k, hidden in enumerate(drafter.unroll(batch, features.layers, drafting, drafter.config.unroll_steps)):
            slots = counted_slots(batch, k)
            assert slots
            rows = torch.isin(drafting.index, torch.tensor(slots))
            found = drafter.lm_head(drafter.head_input(hidden[rows]))
            torch.testing.assert_close(found, case[f"logits.{k}"][slots], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("documents", ["1.", "3."])
@pytest.mark.parametrize("divergence", list(DIVERGENCES))
def test_each_loss(divergence, documents: str, golden: Tensors, drafter: Eagle3) -> None:
    """Over the slots that count, weighted by depth; this holds teachers and their alignment too.

    The witness also counts chains that leave the draft vocabulary.
    """
    case = part(golden, documents)
    parts = {"cross_entropy": 0.1, "total_variation": 1.8} if divergence == "cross_entropy_and_l1" else {divergence: 1}
    batch, features = text(case, drafter)
    drafter.config.divergence = divergence
    total, count = drafter.loss(batch, features)["loss"]
    ids = drafter.draft_to_target()
    assert ids is not None
    known, per_step = torch.isin(batch.token_ids[0], ids), []
    for k in range(STEPS):
        slots = [t for t in counted_slots(batch, k) if known[t + 2 : t + 2 + k].all()]
        per_step.append(sum(share * case[f"{name}.{k}"][slots].sum() for name, share in parts.items()))
    expected = sum(0.8**k * loss for k, loss in enumerate(per_step))
    torch.testing.assert_close(total.detach(), expected, atol=1e-5, rtol=1e-5)
    assert count == batch.loss_mask.sum()


@pytest.mark.engine
@pytest.mark.parametrize("variant", VARIANTS)
def test_speculators_still_says_so(variant: str, tmp_path: Path) -> None:
    """Runs the witness again, with the Python in DRAFTSMITH_SPECULATORS."""
    python = os.environ.get("DRAFTSMITH_SPECULATORS")
    if not python:
        pytest.skip("set DRAFTSMITH_SPECULATORS to the Python of an environment with speculators 0.9.0")
    out = tmp_path / "witness.safetensors"
    subprocess.run(
        [python, Path(__file__).parents[1] / "helpers" / "witness_eagle3.py", variant, out],
        check=True,
        capture_output=True,
    )
    golden, found = load_file(GOLDEN / f"{variant}_witness.safetensors"), load_file(out)
    assert found.keys() == golden.keys()
    for name, tensor in golden.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)
