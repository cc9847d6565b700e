"""The loss of a chain of predictions: divergences summed over many rows and depths, at little memory.

Shapes: B rows of a batch, T tokens, S rows of the target's hidden states, R rows of the drafter's, H hidden width,
V vocabulary of the target, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.models.kernels import runs_kernels
from draftsmith.models.layers import shift_left
from draftsmith.models.losses.divergences import Divergence, Teacher, compiled_compare

if TYPE_CHECKING:
    from draftsmith.models.losses.divergence_kernels import FusedTeacher

LossSums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), reduced over all ranks before dividing

CHUNK_ELEMENTS, CHUNK_ROWS = 1 << 21, 256  # logits that exist at once, 8 MiB a tensor in fp32, or so many rows of them


@dataclass
class RowLosses:
    """Losses and acceptance of R rows of the drafter's hidden states."""

    loss: Tensor  # scalar sum
    correct: Tensor  # [R] bool: the drafter's likeliest token is the target's
    acceptance: Tensor  # scalar sum of min(p, q) over tokens, the probability that a sampled draft is accepted


@dataclass
class Depth:
    """Hidden states of one depth of a chain, and which of the target's rows teach them."""

    hidden: Tensor  # [R, H]
    head: Callable[[Tensor], Tensor]  # a module, or a function without parameters; its backward keeps no logits
    teachers: Tensor  # [R] int64, ascending
    weight: float = 1.0  # of its loss in the total


def divergence_over_rows(
    drafter_hidden: Tensor,
    drafter_head: Callable[[Tensor], Tensor],
    target_hidden: Tensor,
    target_head: Callable[[Tensor], Tensor],
    divergence: Divergence,
    draft_to_target: Tensor | None = None,
    compiled: bool = False,
) -> RowLosses:
    """Sum a divergence over rows of hidden states [R, H], each with its own teacher; the loss has a gradient."""
    teachers = torch.arange(len(target_hidden), device=target_hidden.device)
    depth = Depth(drafter_hidden, drafter_head, teachers)
    total, (rows,) = divergence_over_depths([depth], target_hidden, target_head, divergence, draft_to_target, compiled)
    return replace(rows, loss=total)


def divergence_over_depths(
    depths: list[Depth],
    target_hidden: Tensor,
    target_head: Callable[[Tensor], Tensor],
    divergence: Divergence,
    draft_to_target: Tensor | None = None,
    compiled: bool = False,
) -> tuple[Tensor, list[RowLosses]]:
    """Return the weighted sum of a divergence over all depths, with its gradient, and the sums of each depth without.

    Logits exist for a chunk of the target's rows [S, H] at a time. The chunk's teachers are made once for all depths,
    and its part of the gradient at once, so nothing is kept or made again for the backward pass.
    `draft_to_target` [Vd] gives the target ids of a reduced draft vocabulary: the divergence then compares within it
    (the target renormalised), while `correct` and `acceptance` count the mass outside it as lost. `compiled`: compare
    by code that torch has compiled, on a CPU.
    """
    heads = {id(depth.head): depth.head for depth in depths}.values()
    parameters = [p for head in heads if isinstance(head, nn.Module) for p in head.parameters() if p.requires_grad]
    tensors = [*(depth.hidden for depth in depths), *parameters]
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    sums = _DepthSums(depths, parameters, draft_to_target, divergence, with_gradient, compiled)
    with torch.no_grad():
        sums.add_all(target_hidden, target_head)
        total = sums.total()
    if with_gradient:
        total = _WithGradients.apply(total, [*sums.hidden_gradients, *sums.parameter_gradients], *tensors)
    return total, sums.losses


def chunk_rows(vocabulary: int) -> int:
    """Return the number of the target's rows whose logits are made at once."""
    return max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


def teacher_from(logits: Tensor, draft_to_target: Tensor | None) -> "Teacher | FusedTeacher":
    """Return the target at the rows of its logits [R, V], in the form for their device."""
    if not runs_kernels(logits.device):
        return Teacher.from_logits(logits, draft_to_target)
    from draftsmith.models.losses.divergence_kernels import FusedTeacher  # needs triton

    return FusedTeacher.from_logits(logits, draft_to_target)


class _DepthSums:
    """The sums of all depths over all chunks, with the gradients of their weighted total beside them."""

    def __init__(
        self,
        depths: list[Depth],
        parameters: list[nn.Parameter],
        draft_to_target: Tensor | None,
        divergence: Divergence,
        with_gradient: bool,
        compiled: bool,
    ) -> None:
        """`parameters`: those of the drafter's heads that have gradients."""
        self.depths, self.parameters, self.draft_to_target = depths, parameters, draft_to_target
        self.divergence, self.with_gradient, self.compiled = divergence, with_gradient, compiled
        zero = torch.zeros((), device=depths[0].teachers.device)
        self.losses = [
            RowLosses(zero.clone(), torch.empty_like(d.teachers, dtype=torch.bool), zero.clone()) for d in depths
        ]
        self.hidden_gradients = [torch.zeros_like(depth.hidden) for depth in depths] if with_gradient else []
        self.parameter_gradients = [torch.zeros_like(p) for p in parameters] if with_gradient else []

    def add_all(self, target_hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> None:
        """Add the rows of all depths, chunk after chunk of those of the target's rows [S, H] that teach any."""
        used, places = torch.cat([depth.teachers for depth in self.depths]).unique(return_inverse=True)
        if not len(used):
            return
        places_of_depth = places.split([len(depth.teachers) for depth in self.depths])
        step = chunk_rows(target_head(target_hidden[:1]).shape[-1])
        edges = torch.tensor([*range(0, len(used), step), len(used)], device=used.device)
        bounds = [torch.searchsorted(places, edges).tolist() for places in places_of_depth]
        # teachers without a gap are taken as a slice, which is a view
        firsts = [int(p[0]) if len(p) and bool((p.diff() == 1).all()) else None for p in places_of_depth]
        for chunk, start in enumerate(range(0, len(used), step)):
            teacher = teacher_from(target_head(target_hidden[used[start : start + step]]), self.draft_to_target)
            for depth, (places, bound, first) in enumerate(zip(places_of_depth, bounds, firsts, strict=True)):
                rows = slice(bound[chunk], bound[chunk + 1])
                if rows.start == rows.stop:
                    continue
                if first is None:
                    self._add(depth, rows, teacher[places[rows] - start])
                else:
                    self._add(depth, rows, teacher[first + rows.start - start : first + rows.stop - start])

    def total(self) -> Tensor:
        """Return the weighted sum of the losses of all depths."""
        zero = torch.zeros((), device=self.depths[0].teachers.device)
        return sum((d.weight * rows.loss for d, rows in zip(self.depths, self.losses, strict=True)), start=zero)

    def _add(self, number: int, rows: slice, teacher: "Teacher | FusedTeacher") -> None:
        """Add some rows of a depth, given the target at these rows."""
        depth, losses = self.depths[number], self.losses[number]
        with torch.set_grad_enabled(self.with_gradient):
            hidden = depth.hidden[rows].detach().requires_grad_(self.with_gradient)
            logits = depth.head(hidden)
        compare = compiled_compare() if self.compiled else type(teacher).compare
        comparison = compare(teacher, logits.detach(), self.divergence, self.with_gradient)  # type: ignore[arg-type]
        choice = comparison.choice if self.draft_to_target is None else self.draft_to_target[comparison.choice]
        losses.correct[rows] = choice == teacher.choice
        losses.acceptance += comparison.acceptance.sum()
        losses.loss += comparison.loss.sum()
        if comparison.gradient is not None:
            own = {id(p) for p in depth.head.parameters()} if isinstance(depth.head, nn.Module) else set()
            indices = [i for i, p in enumerate(self.parameters) if id(p) in own]
            inputs = [hidden, *(self.parameters[i] for i in indices)]
            gradients = torch.autograd.grad(logits, inputs, comparison.gradient.to(logits.dtype))
            torch.mul(gradients[0], depth.weight, out=self.hidden_gradients[number][rows])
            for i, gradient in zip(indices, gradients[1:], strict=True):
                self.parameter_gradients[i].add_(gradient, alpha=depth.weight)


class _WithGradients(torch.autograd.Function):
    """A value, and its gradients in some tensors, which were computed along with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(tensor * grad.to(tensor.dtype) for tensor in ctx.saved_tensors)


def teacher_rows(counted: Tensor, depth: int) -> Tensor:
    """Return the target's rows [R] among B * T that teach the slots [B, T] which count at a depth."""
    return counted.flatten().nonzero()[:, 0] + 1 + depth


class ChainLoss:
    """Adds up the losses of a chain of predictions: depth i at slot t predicts x_{t+2+i}.

    A prediction counts when every token from x_{t+1} to the predicted one was written by the target, and those between
    are in the draft vocabulary, because only then would it be drafted. `next_depth` marks the slots that count, `add`
    takes which of them were right, `total` holds the weighted loss of all depths, and `sums` comes at the end.
    """

    def __init__(self, loss_mask: Tensor, draftable: Tensor | None = None) -> None:
        """`loss_mask` [B, T]: the tokens that the target wrote; `draftable` [B, T]: those to draft from, None: all."""
        self.loss_mask, self.draftable = loss_mask, draftable
        self._roots = self._chains = shift_left(loss_mask, 1)  # [B, T] slots whose newest token the target wrote
        self._marked: list[tuple[Tensor, float]] = []  # for each depth, which slots count, and the share kept
        self._leading = self._roots  # [B, T] slots whose predictions so far are all right
        self.followed = torch.zeros_like(loss_mask, dtype=torch.int64)  # [B, T] right predictions in a row
        self._accepted = self._roots.sum()
        self.total = torch.zeros((), device=loss_mask.device)  # weighted loss of all depths
        self._depths: LossSums = {}
        self._num_added = 0

    def next_depth(self, kept: Tensor | None = None, share: float = 1.0) -> Tensor:
        """Return the slots [B, T] that count at the next depth.

        A family that trains a depth on some slots only passes those as `kept`, fewer at each depth, and as `share` the
        probability with which a slot was kept. The sums are then divided by it, to estimate those of all slots.
        """
        predicted = 2 + len(self._marked)
        counted = self._chains & shift_left(self.loss_mask, predicted)
        if kept is not None:
            counted = counted & kept
        self._chains = counted if self.draftable is None else counted & shift_left(self.draftable, predicted)
        self._marked.append((counted, share))
        return counted

    def add(self, rows: RowLosses) -> None:
        """Add the losses of the next depth, whose rows are the slots that count there, in row-major order."""
        depth, (counted, share) = self._num_added, self._marked[self._num_added]
        self._leading = self._leading & torch.zeros_like(counted).masked_scatter(counted, rows.correct)
        self.followed += self._leading
        self._accepted = self._accepted + self._leading.sum() / share
        self._depths[f"accuracy_{depth}"] = (rows.correct.sum(), counted.sum())
        self._depths[f"sampled_acceptance_{depth}"] = (rows.acceptance, counted.sum())
        self._num_added += 1

    def sums(self) -> LossSums:
        """Return the sums and counts of all measures.

        They are the loss over the trained tokens; for each depth the accuracy and the probability that a sampled draft
        is accepted; and the acceptance length that greedy decoding would have if all of it followed the training text.
        """
        return {
            "loss": (self.total, self.loss_mask.sum()),
            "simulated_acceptance_length": (self._accepted, self._roots.sum()),
            **self._depths,
        }
