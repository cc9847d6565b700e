"""The loss of a chain of predictions: divergences summed over many rows and depths, at little memory.

Shapes: B rows of a batch, T tokens, S rows of the target's hidden states, R rows of the drafter's, H hidden width,
V vocabulary of the target, Vd draft vocabulary, K depths.

Which slots count and which rows teach them is worked out in the host's memory, and the indices are sent to the device
without a wait: no step reads a value back from there.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from draftsmith.models.batch import Batch, send
from draftsmith.models.kernels import runs_kernels
from draftsmith.models.layers import as_computed, shift_left
from draftsmith.models.losses.divergences import Comparison, Divergence, Teacher, compiled_compare
from draftsmith.models.text_team import TextPart

if TYPE_CHECKING:
    from draftsmith.models.losses.divergence_kernels import FusedTeacher

LossSums = dict[str, tuple[Tensor, Tensor]]  # name -> (sum, count), reduced over all ranks before dividing

CHUNK_ELEMENTS, CHUNK_ROWS = 1 << 21, 256  # logits that exist at once, 8 MiB a tensor in fp32, or so many rows of them
LINE, PAGE = 64, 4096  # bytes of a line of a CPU's cache, and those after which lines share its places
GPU_ROWS = 4096  # of the drafter's logits that exist at once on a GPU, whose products are fast from about 2,000 rows on


@dataclass
class RowLosses:
    """Losses and acceptance of R rows of the drafter's hidden states; [0] of what is not told."""

    loss: Tensor  # scalar sum
    correct: Tensor  # [R] bool: the drafter's likeliest token is the target's
    acceptance: Tensor  # [R] fp32 sum of min(p, q) over tokens, the probability that a sampled draft is accepted


@dataclass
class Depth:
    """Hidden states of one depth of a chain, and which of the target's rows teach them."""

    hidden: Tensor  # [R, H]
    head: Callable[[Tensor], Tensor]  # a module, or a function without parameters; its backward keeps no logits
    teachers: Tensor  # [R] int64 in the host's memory, ascending
    weight: float | Tensor = 1.0  # of its loss in the total, or of each row's [R]
    confidence: Tensor | None = None  # [R] logit of the drafter's own estimate of each row's acceptance, if it has one


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
    teachers = torch.arange(len(target_hidden))
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
    tells_acceptance: bool = True,
) -> tuple[Tensor, list[RowLosses]]:
    """Return the weighted sum of a divergence over all depths, with its gradient, and the sums of each depth without.

    Logits exist for a chunk of the target's rows [S, H] at a time. The chunk's teachers are made once for all depths,
    and its part of the gradient at once, so nothing is kept or made again for the backward pass. On a GPU the depths of
    one head go through it side by side; a CPU is faster with the few rows of one depth, which its caches hold.
    `draft_to_target` [Vd] gives the target ids of a reduced draft vocabulary: the divergence then compares within it
    (the target renormalised), while `correct` and `acceptance` count the mass outside it as lost. `compiled`: compare
    by code that torch has compiled, on a CPU. Without `tells_acceptance` there are losses alone.
    """
    heads = {id(depth.head): depth.head for depth in depths}.values()
    modules = nn.ModuleList(head for head in heads if isinstance(head, nn.Module))
    parameters = [p for p in modules.parameters() if p.requires_grad]  # each once, though two heads may share it
    tensors = [*(depth.hidden for depth in depths), *parameters]
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    sums = _DepthSums(depths, parameters, draft_to_target, divergence, with_gradient, compiled, tells_acceptance)
    with torch.no_grad():
        sums.add_all(target_hidden, target_head)
    total = sums.total
    if with_gradient:
        total = _WithGradients.apply(total, [*sums.hidden_gradients, *sums.parameter_gradients], *tensors)
    return total, sums.losses


def chunk_rows(vocabulary: int) -> int:
    """Return the number of the target's rows whose logits are made at once; training on a GPU has `GPU_ROWS`."""
    return max(CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)


@dataclass
class Teachers:
    """The target's rows [U] that teach any depth, and where among them those of each depth are, [R] int64."""

    rows: Tensor  # [U] int64 on the device
    places: list[Tensor]  # in the host's memory, ascending
    on_device: list[Tensor]  # the same places

    @classmethod
    def of(cls, depths: list[Depth], num_rows: int, device: torch.device) -> "Teachers":
        """Return which of the target's `num_rows` rows teach the depths."""
        teaches = torch.zeros(num_rows, dtype=torch.bool)
        teaches[torch.cat([depth.teachers for depth in depths])] = True
        rows, place = teaches.nonzero()[:, 0], teaches.cumsum(0) - 1
        places = [place[depth.teachers] for depth in depths]
        sent = send(torch.cat([rows, *places]), device).split([len(rows), *map(len, places)])
        return cls(sent[0], places, list(sent[1:]))

    def among(self, number: int, rows: slice, start: int) -> slice | Tensor:
        """Return which of the teachers from `start` on teach some rows of a depth: a slice, a view, where it can be."""
        first, last = (int(place) for place in self.places[number][rows][[0, -1]])
        if last - first == rows.stop - rows.start - 1:
            return slice(first - start, last - start + 1)
        return self.on_device[number][rows] - start


def teacher_from(logits: Tensor, draft_to_target: Tensor | None, tells_acceptance: bool) -> "Teacher | FusedTeacher":
    """Return the target at the rows of its logits [R, V], in the form for their device."""
    if not runs_kernels(logits.device):
        return Teacher.from_logits(logits, draft_to_target, tells_acceptance)
    from draftsmith.models.losses.divergence_kernels import FusedTeacher  # needs triton

    return FusedTeacher.from_logits(logits, draft_to_target, tells_acceptance)


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
        tells_acceptance: bool,
    ) -> None:
        """`parameters`: those of the drafter's heads that have gradients."""
        self.depths, self.parameters, self.draft_to_target = depths, parameters, draft_to_target
        self.divergence, self.with_gradient, self.compiled = divergence, with_gradient, compiled
        self.tells_acceptance = tells_acceptance
        zero = torch.zeros((), device=depths[0].hidden.device)
        sizes = [len(depth.hidden) if tells_acceptance else 0 for depth in depths]
        self.losses = [RowLosses(zero.clone(), zero.new_empty(n, dtype=torch.bool), zero.new_empty(n)) for n in sizes]
        self.buffer = depths[0].hidden.new_empty(0)  # logits of the drafter
        self.total = zero.clone()  # weighted sum of the losses of all depths
        self.hidden_gradients = [torch.zeros_like(depth.hidden) for depth in depths] if with_gradient else []
        self.parameter_gradients = [torch.zeros_like(p) for p in parameters] if with_gradient else []

    def add_all(self, target_hidden: Tensor, target_head: Callable[[Tensor], Tensor]) -> None:
        """Add the rows of all depths, chunk after chunk of those of the target's rows [S, H] that teach any."""
        teachers = Teachers.of(self.depths, len(target_hidden), target_hidden.device)
        num_used = len(teachers.rows)
        if not num_used:
            return
        groups, matrix = self._groups(runs_kernels(target_hidden.device)), matrix_of(target_head, target_hidden)
        if runs_kernels(target_hidden.device):
            step = max(1, GPU_ROWS // max(map(len, groups)))
        else:
            step = chunk_rows(target_head(target_hidden[:1]).shape[-1] if matrix is None else len(matrix))
        starts = list(range(0, num_used, step))
        edges = torch.tensor([*starts, num_used])
        bounds = [torch.searchsorted(places, edges).tolist() for places in teachers.places]
        for chunk, start in enumerate(starts):
            taught_by = target_hidden.index_select(0, teachers.rows[start : start + step])
            logits = target_head(taught_by) if matrix is None else product(taught_by, matrix)
            teacher = teacher_from(logits, self.draft_to_target, self.tells_acceptance)
            del logits  # of the whole vocabulary
            for group in groups:
                slices = {number: slice(*bounds[number][chunk : chunk + 2]) for number in group}
                slices = {number: rows for number, rows in slices.items() if rows.start < rows.stop}
                if len(slices) == 1:
                    ((number, rows),) = slices.items()
                    self._add(slices, teacher[teachers.among(number, rows, start)])
                elif slices:
                    taught = torch.cat([teachers.on_device[number][rows] for number, rows in slices.items()])
                    self._add(slices, teacher[taught - start])
            del teacher  # before the next one takes as much memory

    def _groups(self, side_by_side: bool) -> list[list[int]]:
        """Return the numbers of the depths that go through a head together: those of the same head, or each alone."""
        if not side_by_side:
            return [[number] for number in range(len(self.depths))]
        of_head: dict[Callable[[Tensor], Tensor], list[int]] = {}
        for number, depth in enumerate(self.depths):
            of_head.setdefault(depth.head, []).append(number)
        return list(of_head.values())

    def _add(self, slices: dict[int, slice], teacher: "Teacher | FusedTeacher") -> None:
        """Add some rows of depths which have one head, given the target at these rows, one depth after another."""
        sizes, head = [rows.stop - rows.start for rows in slices.values()], self.depths[next(iter(slices))].head
        hidden = _side_by_side([self.depths[number].hidden[rows] for number, rows in slices.items()])
        weights = _side_by_side([self._weights(number, rows) for number, rows in slices.items()])
        matrix = matrix_of(head, hidden)
        with torch.set_grad_enabled(self.with_gradient and matrix is None):
            hidden = hidden.detach().requires_grad_(self.with_gradient)
            logits = head(hidden) if matrix is None else product(hidden, matrix, self._memory_of(hidden, matrix))
        comparison = self._compare(teacher, logits.detach(), weights)
        self.total += (comparison.loss * weights).sum()
        for number, loss in zip(slices, comparison.loss.split(sizes), strict=True):
            self.losses[number].loss += loss.sum()
        if self.tells_acceptance:
            assert comparison.acceptance is not None
            assert comparison.choice is not None
            assert teacher.choice is not None
            choice = comparison.choice if self.draft_to_target is None else self.draft_to_target[comparison.choice]
            correct = torch.eq(choice, teacher.choice).split(sizes)
            acceptance = comparison.acceptance.split(sizes)
            for (number, rows), right, accepted in zip(slices.items(), correct, acceptance, strict=True):
                self.losses[number].correct[rows], self.losses[number].acceptance[rows] = right, accepted
        if comparison.gradient is not None:
            gradient = comparison.gradient.to(logits.dtype)
            own = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
            indices = [i for i, p in enumerate(self.parameters) if id(p) in own]
            if matrix is None:
                inputs = [hidden, *(self.parameters[i] for i in indices)]
                of_hidden, *of_parameters = torch.autograd.grad(logits, inputs, gradient)
                for i, of_parameter in zip(indices, of_parameters, strict=True):
                    self.parameter_gradients[i] += of_parameter
            else:
                of_hidden = gradient @ matrix
                for i in indices:
                    if gradient.dtype == self.parameter_gradients[i].dtype:
                        self.parameter_gradients[i].addmm_(gradient.t(), hidden)
                    else:
                        self.parameter_gradients[i] += gradient.t() @ as_computed(hidden)
            for (number, rows), of_rows in zip(slices.items(), of_hidden.split(sizes), strict=True):
                self.hidden_gradients[number][rows] = of_rows

    def _memory_of(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        """Return memory for the logits of hidden states [R, H] by a matrix, the same for all chunks."""
        size = len(hidden) * row_width(matrix)
        if self.buffer.dtype != matrix.dtype or self.buffer.numel() < size:
            self.buffer = matrix.new_empty(size)
        return self.buffer[:size]

    def _compare(self, teacher: "Teacher | FusedTeacher", logits: Tensor, weights: Tensor) -> Comparison:
        """Compare the drafter's logits [R, Vd] with the target; the gradient may overwrite them."""
        if not isinstance(teacher, Teacher):
            return teacher.compare(logits, weights, self.divergence, self.with_gradient)
        compare = compiled_compare() if self.compiled else Teacher.compare_in_blocks
        return compare(teacher, logits, weights, self.divergence, self.with_gradient)

    def _weights(self, number: int, rows: slice) -> Tensor:
        """Return the weights of some rows of a depth, fp32 [R]."""
        weight = self.depths[number].weight
        if isinstance(weight, Tensor):
            return weight[rows]
        return torch.full((rows.stop - rows.start,), weight, dtype=torch.float32, device=self.total.device)


def matrix_of(head: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor | None:
    """Return the matrix [Vd, H] of a head that is nothing else, on a CPU, as it is computed; None for others.

    Its products need no autograd: they are written where they belong, and nothing is allocated for each chunk.
    """
    if runs_kernels(hidden.device) or not isinstance(head, nn.Linear):
        return None
    if head.bias is not None or type(head.weight) is not nn.Parameter:
        return None
    matrix = as_computed(head.weight.detach())
    return matrix if matrix.dtype == as_computed(hidden).dtype else None


def product(hidden: Tensor, matrix: Tensor, memory: Tensor | None = None) -> Tensor:
    """Return logits [R, Vd] of hidden states [R, H] by a matrix [Vd, H] of `matrix_of`.

    They are written to `memory`, which has R * `row_width(matrix)` numbers; None: to new memory.
    """
    width = row_width(matrix)
    if memory is None:
        memory = matrix.new_empty(len(hidden) * width)
    return torch.mm(as_computed(hidden), matrix.t(), out=memory.view(-1, width)[:, : len(matrix)])


def row_width(matrix: Tensor) -> int:
    """Return how many numbers apart rows of logits by a matrix [Vd, H] begin.

    Each begins at a line of the cache, or the product, as with 2,051 columns, takes much longer. They are not whole
    pages apart, as with 4,096 columns, or lines of a column would drive each other out of the cache.
    """
    line, page = LINE // matrix.element_size(), PAGE // matrix.element_size()
    width = -(-len(matrix) // line) * line
    return width if width % page else width + line


def _side_by_side(tensors: list[Tensor]) -> Tensor:
    """Return the rows of all tensors; those of a single one are not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


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
    """Return the target's rows [R] among B * T that teach the slots [B, T] which count at a depth, all on the host."""
    return counted.flatten().nonzero()[:, 0] + 1 + depth


def marked_rows(x: Tensor, marked: Tensor) -> Tensor:
    """Return the rows [R, H] of x [B, T, H] at the slots that are marked, bool [B, T] in the host's memory."""
    return x.flatten(0, 1).index_select(0, send(marked.flatten().nonzero()[:, 0], x.device))


class ChainLoss:
    """Adds up the losses of a chain of predictions: depth i at slot t predicts x_{t+2+i}.

    A prediction counts when every token from x_{t+1} to the predicted one was written by the target, and those between
    are in the draft vocabulary, because only then would it be drafted. `next_depth` marks the slots that count, `add`
    takes which of them were right, `total` holds the weighted loss of all depths, and `sums` comes at the end.
    All of them are of one part of the slots; those of all parts add up to the whole.
    """

    def __init__(
        self,
        batch: Batch,
        draftable: Tensor | None = None,
        part: TextPart | None = None,
        tells_acceptance: bool = True,
    ) -> None:
        """`draftable` [V] bool in the host's memory: the tokens that can be drafted, None: all. `part` None: all slots.

        A token that is trained on counts in the part that holds its slot. `tells_acceptance`: the losses that are added
        know what the target would accept.
        """
        host = batch.on_host
        self.part = TextPart.whole(batch.token_ids.numel()) if part is None else part
        self.tells_acceptance = tells_acceptance
        self.device, self.loss_mask = batch.token_ids.device, host.loss_mask
        self.draftable = None if draftable is None else draftable[host.token_ids]  # [B, T]
        # [B, T] slots whose newest token the target wrote
        self._roots = self._chains = self.part.within(shift_left(self.loss_mask, 1))
        self._marked: list[tuple[Tensor, float]] = []  # for each depth, which slots count, and the share kept
        self.total = torch.zeros((), device=self.device)  # weighted loss of all depths
        self.added: list[RowLosses] = []  # of each depth so far

    def next_depth(self, kept: Tensor | None = None, share: float = 1.0) -> Tensor:
        """Return the slots that count at the next depth, bool [B, T] in the host's memory.

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
        self.added.append(rows)

    def sums(self) -> LossSums:
        """Return the sums and counts of all measures.

        They are the loss over the trained tokens; for each depth the accuracy and the probability that a sampled draft
        is accepted; and the acceptance length that greedy decoding would have if all of it followed the training text.
        Without `tells_acceptance` it is the loss alone.
        """
        sums = {"loss": (self.total, self._number(self.part.within(self.loss_mask).sum()))}
        if not self.tells_acceptance:
            return sums
        num_roots = self._roots.sum()
        accepted = self._number(num_roots) + self._accepted()
        sums["simulated_acceptance_length"] = (accepted, self._number(num_roots))
        for depth, (rows, (counted, _)) in enumerate(zip(self.added, self._marked, strict=False)):
            num_counted = self._number(counted.sum())
            sums[f"accuracy_{depth}"] = (rows.correct.sum(), num_counted)
            sums[f"sampled_acceptance_{depth}"] = (rows.acceptance.sum(), num_counted)
        return sums

    def _accepted(self) -> Tensor:
        """Return the number of drafted tokens, a scalar, that greedy decoding would accept from all slots."""
        marked = send(torch.stack([counted for counted, _ in self._marked[: len(self.added)]]), self.device)
        right = torch.zeros_like(marked).masked_scatter(marked, torch.cat([rows.correct for rows in self.added]))
        leading = right.cumprod(0).flatten(1).sum(1)  # [K] slots whose predictions up to that depth are all right
        shares = [share for _, share in self._marked[: len(self.added)]]
        return (leading / send(torch.tensor(shares), self.device)).sum()

    def _number(self, count: Tensor) -> Tensor:
        """Return a number of the host's memory as a scalar on the device."""
        return torch.full((), int(count), device=self.device)
