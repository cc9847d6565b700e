"""A text that several processes take together: the parts of its loss and gradients add up to those of one process.

Threads stand for the processes here; tests/train/test_teams.py has real ones.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from drafters import build, loss_of
from torch import Tensor

from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.batch import Batch
from draftsmith.models.losses.chain_loss import LossSums
from draftsmith.models.text_team import Team


@dataclass
class Meeting:
    """A place where the threads of a team exchange tensors."""

    size: int
    tensors: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass(frozen=True)
class TeamOfThreads(Team):
    meeting: Meeting | None = None

    def sum_(self, x: Tensor) -> Tensor:
        assert self.meeting is not None
        self.meeting.tensors[self.place] = x.clone()
        self.meeting.barrier.wait()
        x.copy_(torch.stack([self.meeting.tensors[place] for place in range(self.size)]).sum(0))
        self.meeting.barrier.wait()
        return x


@dataclass(frozen=True)
class TeamOfOnePresent(Team):
    """A member whose others give zeros: enough to see what it takes."""

    def sum_(self, x: Tensor) -> Tensor:
        return x


def batch_of(packed: bool, target: Target) -> Batch:
    """Two rows: three documents with prompts, a second turn and padding; and one with padding."""
    documents = torch.tensor([[0] * 9 + [1] * 12 + [2] * 7 + [-1] * 2, [0] * 23 + [-1] * 7])
    documents = documents if packed else torch.where(documents >= 0, 0, -1)
    mask = torch.zeros_like(documents, dtype=torch.bool)
    mask[0, 3:8] = mask[0, 11:14] = mask[0, 17:21] = mask[0, 23:28] = mask[1, 6:23] = True
    token_ids = torch.randint(3, target.vocab_size, documents.shape, generator=torch.Generator().manual_seed(0))
    return Batch(token_ids, mask, documents if packed else None)


def sums_and_gradients(drafter: Drafter, batch: Batch, target: Target) -> tuple[LossSums, dict[str, Tensor]]:
    sums = loss_of(drafter, batch, target)
    (sums["loss"][0] / 7).backward()
    return sums, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


CASES = [
    ("eagle", {}, True, 2),
    ("eagle3", {}, False, 2),
    ("eagle3", {"draft_vocab_size": 100, "recompute": True}, True, 3),
    ("eagle3", {"num_layers": 2, "detach": True, "norm_output": True}, True, 2),
    ("eagle3", {}, True, 40),  # some have no slot that drafts
]


def check_parts_add_up(kind: str, fields: dict[str, Any], batch: Batch, size: int, target: Target) -> None:
    drafters = [build(kind, target, **fields) for _ in range(size + 1)]
    whole, gradients = sums_and_gradients(drafters[-1], batch, target)
    meeting = Meeting(size)
    for place, drafter in enumerate(drafters[:-1]):
        drafter.team = TeamOfThreads(size, place, None, meeting)
    with ThreadPoolExecutor(size) as pool:
        parts = list(pool.map(lambda drafter: sums_and_gradients(drafter, batch, target), drafters[:-1]))
    assert gradients
    for name, pair in whole.items():
        for number, value in enumerate(pair):
            found = torch.stack([sums[name][number] for sums, _ in parts]).sum(0)
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        found = torch.stack([of_part[name] for _, of_part in parts]).sum(0)
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


@pytest.mark.parametrize(("kind", "fields", "packed", "size"), CASES)
def test_parts_add_up_to_the_whole(
    kind: str, fields: dict[str, Any], packed: bool, size: int, tiny_target: Target
) -> None:
    check_parts_add_up(kind, fields, batch_of(packed, tiny_target), size, tiny_target)


@pytest.mark.parametrize(("kind", "fields", "packed"), [case[:3] for case in CASES])
def test_a_member_may_have_no_slot(kind: str, fields: dict[str, Any], packed: bool, tiny_target: Target) -> None:
    """Of a text of four tokens, the first of which costs more than a member's share."""
    documents = torch.tensor([[0, 0, 1, 1]]) if packed else None
    batch = Batch(torch.tensor([[5, 17, 8, 30]]), torch.tensor([[False, True, not packed, True]]), documents)
    depth = build(kind, tiny_target, **fields).training_depth
    assert 0 in [Team(4, place).part_of(batch, depth).size for place in range(4)]
    check_parts_add_up(kind, fields, batch, 4, tiny_target)


def test_members_compute_alike(tiny_target: Target) -> None:
    """A prompt of 60 tokens and an answer of 40, which goes through the layer at each of 4 steps besides."""
    mask = torch.arange(100)[None] >= 60
    batch, parts = Batch(torch.zeros(1, 100, dtype=torch.int64), mask), []
    for place in range(3):
        parts.append(Team(3, place).part_of(batch, 4))
    assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])]
    assert parts[-1].last == parts[-1].num_slots == 100
    drafts = [int(mask[0, part.first + 1 : part.last + 1].sum()) for part in parts]
    costs = [part.size + 4 * number for part, number in zip(parts, drafts, strict=True)]
    assert costs == [pytest.approx((100 + 4 * 40) / 3, abs=5)] * 3  # a slot that drafts costs five


def kept_bytes(drafter: Drafter, batch: Batch, target: Target) -> int:
    """What the forward pass keeps for the backward pass, without weights and features."""
    features, kept = target.features(batch, drafter.layer_ids), dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = drafter.loss(batch, features)["loss"][0]
    held = [features.last_hidden, features.layers, *drafter.parameters(), *target.model.parameters()]
    for tensor in held:
        if tensor is not None:
            kept.pop(tensor.untyped_storage().data_ptr(), None)
    loss.backward()
    return sum(kept.values())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_what_a_member_keeps_falls_with_their_number(kind: str, tiny_target: Target) -> None:
    """One of four keeps a quarter of the unrolled steps, and the keys and values of the whole text."""
    length, size = 512, 4
    token_ids = torch.randint(3, tiny_target.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    batch = Batch(token_ids, torch.arange(length)[None] >= 100)
    drafter = build(kind, tiny_target, unroll_steps=6)
    alone = kept_bytes(drafter, batch, tiny_target)
    attention = drafter.layer.self_attn
    text = 4 * length * 2 * attention.num_kv_heads * attention.head_dim
    for place in range(size):
        drafter.team = TeamOfOnePresent(size, place)
        assert kept_bytes(drafter, batch, tiny_target) < 1.1 * alone / size + text


def test_families_say_whether_they_divide_texts() -> None:
    assert {kind for kind, drafter in DRAFTERS.items() if drafter.divides_texts} == {"eagle", "eagle3"}
