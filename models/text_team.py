"""Texts that several processes take together: each trains on a part of the slots, and sees all of them.

Shapes: B rows, T tokens of a row, S = B * T slots, L of them in a part.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from draftsmith.models.batch import Batch
from draftsmith.models.layers import shift_left


@dataclass(frozen=True)
class Team:
    """The processes that take each batch together. A process without others is a team, too."""

    size: int = 1
    place: int = 0  # of this process among them
    group: ProcessGroup | None = None  # None: this process alone

    def sum_(self, x: Tensor) -> Tensor:
        """Put the sum over all members into x, and return it. All members call this together."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def send_(self, x: Tensor) -> Tensor:
        """Put the first member's values into x, and return it. All members call this together."""
        torch.distributed.broadcast(x, group=self.group, group_src=0)
        return x

    def part_of(self, batch: Batch, num_steps: int) -> "TextPart":
        """Return this process's part of a batch that is unrolled over so many steps.

        The slots lie one behind the other and are cut so that all members compute alike: every slot once, and one whose
        next token the target wrote in each step besides.
        """
        num_slots = batch.token_ids.numel()
        if self.size == 1:
            return TextPart(0, num_slots, num_slots, self)
        drafts = shift_left(batch.on_host.loss_mask, 1).flatten()
        costs = (1 + num_steps * drafts).cumsum(0)  # up to each slot, with it
        shares = costs[-1] * torch.tensor([self.place, self.place + 1]) // self.size
        first, last = torch.searchsorted(costs, shares, right=True).tolist()
        return TextPart(first, last, num_slots, self)


@dataclass(frozen=True)
class TextPart:
    """The slots of a batch that a process trains on: `first` to `last` - 1 of all."""

    first: int
    last: int
    num_slots: int  # of all members together
    team: Team

    @classmethod
    def whole(cls, num_slots: int) -> "TextPart":
        """Return the part of a process without others."""
        return cls(0, num_slots, num_slots, Team())

    @property
    def size(self) -> int:
        """Number of its slots, which may be none."""
        return self.last - self.first

    def of(self, x: Tensor) -> Tensor:
        """Return the part's slots [L, ...] of x [B, T, ...], a view."""
        return x.flatten(0, 1)[self.first : self.last]

    def within(self, marked: Tensor) -> Tensor:
        """Return which of the marked slots, bool [B, T], are in the part."""
        places = torch.arange(marked.numel(), device=marked.device).view_as(marked)
        return marked & (places >= self.first) & (places < self.last)

    def joined(self, own: Tensor) -> Tensor:
        """Return values of all slots [S, ...], of which each member gives those of its own part [L, ...].

        The gradient that reaches them is the sum over what all members made of them. All members call this together,
        and their backward passes do so, too.
        """
        return own if self.team.size == 1 else _Joined.apply(own, self)


class _Joined(torch.autograd.Function):
    """The parts of all members as one: a sum of parts that are zero elsewhere, for parts differ in length."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, part: TextPart) -> Tensor:
        ctx.part = part
        whole = own.new_zeros(part.num_slots, *own.shape[1:])
        whole[part.first : part.last] = own
        return part.team.sum_(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        part = ctx.part
        return part.team.sum_(grad.clone(memory_format=torch.contiguous_format))[part.first : part.last], None
