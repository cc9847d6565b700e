"""The optimisers, and their learning rate over the steps."""

import math
from functools import reduce

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from draftsmith.data.processes import rank_and_num_ranks
from draftsmith.models import Drafter
from draftsmith.models.layers import MergedLinear, as_computed
from draftsmith.train.config import OptimizerConfig

# Of the quintic polynomial that brings all singular values near 1, as in `torch.optim.Muon`.
POLYNOMIAL, POLYNOMIAL_STEPS = (3.4445, -4.7750, 2.0315), 5
MOMENTUM = 0.95
SHARE_OF_ADAMW = 0.2  # root mean square of AdamW's usual step (arXiv 2502.16982, section 2.2)


class Muon(torch.optim.Optimizer):
    """The steps of `torch.optim.Muon`, of AdamW's size, with matrix products in the precision of the training.

    torch's are in bf16 on any device. On CPUs without instructions for it they take four times as long as in fp32.
    Projections that stand in one matrix have a direction each, as if each were a matrix of its own.
    """

    def __init__(self, matrices: dict[Parameter, list[int]], weight_decay: float, rate_factor: float = 1.0) -> None:
        """`matrices`: those to be trained, with the number of rows of each projection in them."""
        groups = [{"params": [matrix], "rows": rows} for matrix, rows in matrices.items()]
        super().__init__(groups, {"lr": 1e-3, "weight_decay": weight_decay, "rate_factor": rate_factor})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move each matrix [m, n] that has a gradient, of several processes one for each of them at a time."""
        groups = [group for group in self.param_groups if group["params"][0].grad is not None]
        # Processes that compute matrices of one size take as long.
        groups.sort(key=lambda group: group["params"][0].numel(), reverse=True)
        _, num_ranks = rank_and_num_ranks()
        for first in range(0, len(groups), num_ranks):
            at_once = groups[first : first + num_ranks]
            updates = [self.update(group["params"][0]) for group in at_once]
            found = directions(updates, [group["rows"] for group in at_once])
            for group, direction in zip(at_once, found, strict=True):
                rate = group["lr"] * group["rate_factor"]
                group["params"][0].mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate * SHARE_OF_ADAMW)

    def update(self, matrix: Parameter) -> Tensor:
        """Add the gradient of a matrix to its momentum, and return what its direction is computed of."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - MOMENTUM)
        return matrix.grad.lerp(momentum, MOMENTUM)


def directions(updates: list[Tensor], rows: list[list[int]]) -> list[Tensor]:
    """Return the direction of each of some updates [m, n], laid out as they are: in pieces under FSDP2.

    `rows` has the number of rows of the projections in each. There are no more updates than processes: each computes
    one, and all get it. So a process never holds more whole matrices at once than there are processes.
    """
    rank, num_ranks = rank_and_num_ranks()
    found = []
    for owner, update in enumerate(updates):
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        own = torch.cat([orthogonal(part) for part in whole.split(rows[owner])]) if owner == rank else None
        dtype = as_computed(whole[:0]).dtype
        found.append(torch.empty(whole.shape, dtype=dtype, device=whole.device) if own is None else own)
    for owner, direction in enumerate(found):
        if num_ranks > 1:
            distributed.broadcast(direction, owner)
    return [
        laid_out_as(update, direction * sizes_of(direction, heights))
        for update, direction, heights in zip(updates, found, rows, strict=True)
    ]


def sizes_of(direction: Tensor, rows: list[int]) -> Tensor:
    """Return the factors of the rows of a direction [m, n], fp32 [m, 1], that make its mean square about 1.

    The direction holds projections of so many rows each.
    """
    columns, device = direction.shape[1], direction.device
    return torch.cat([torch.full((height, 1), math.sqrt(max(height, columns)), device=device) for height in rows])


def laid_out_as(update: Tensor, whole: Tensor) -> Tensor:
    """Return a whole matrix as it is, or a process's piece of it, where the update is in pieces."""
    if not isinstance(update, DTensor):
        return whole
    return distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return U V^T of a matrix U S V^T [m, n], roughly: its singular values lie between 0.5 and 1.5."""
    wide = matrix if len(matrix) <= matrix.shape[1] else matrix.T  # [rows, columns], rows <= columns
    wide = as_computed(wide)
    wide = wide / wide.norm().clamp(min=1e-7)
    rows, columns = wide.shape
    # Products of the small square matrices round too much in bf16, and are fewer operations for wide matrices alone.
    by_gram = wide.dtype == torch.float32 and columns > 1.5 * rows
    wide = polynomials_by_gram(wide) if by_gram else polynomials(wide)
    return wide if len(matrix) <= matrix.shape[1] else wide.T


def polynomials(wide: Tensor) -> Tensor:
    """Return the polynomial of a matrix X [m, n], taken `POLYNOMIAL_STEPS` times: each is P X with P of X X^T."""
    first, third, fifth = POLYNOMIAL
    for _ in range(POLYNOMIAL_STEPS):
        gram = wide @ wide.T  # [m, m]
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first)
    return wide


def polynomials_by_gram(wide: Tensor) -> Tensor:
    """Return what `polynomials` does, up to rounding, by products of [m, m] matrices but for the first and the last.

    As P X has the Gram matrix P (X X^T) P, no step needs X itself.
    """
    first, third, fifth = POLYNOMIAL
    gram = wide @ wide.T  # [m, m]
    factors: list[Tensor] = []
    for _ in range(POLYNOMIAL_STEPS):
        if factors:
            gram = factors[-1] @ gram @ factors[-1]
        factors.append(torch.addmm(gram, gram, gram, beta=third, alpha=fifth))
        factors[-1].diagonal().add_(first)
    return reduce(torch.mm, reversed(factors)) @ wide


def operations_of_direction(matrix: Tensor, rows: list[int]) -> int:
    """Return the floating-point operations that the direction of a matrix takes; its projections have so many rows.

    These are the operations of `polynomials`; in fp32 a wide matrix takes fewer.
    """
    shapes = [sorted((height, matrix.shape[1])) for height in rows]
    return sum(POLYNOMIAL_STEPS * (4 * less**2 * more + 2 * less**3) for less, more in shapes)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimiser: AdamW has the last group of parameters, Muon those before."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW) -> None:
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.muon, self.adamw = muon, adamw

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with both, on the groups and the state as they are: loading a state makes new ones."""
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:-1], self.param_groups[-1:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()


def optimizer_of(drafter: Drafter, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimiser of what is trained: AdamW or, as `config.matrices` says, Muon for the inner matrices.

    Muon (https://kellerjordan.github.io/posts/muon) makes all directions of a matrix's step equally long. Steps are as
    large as AdamW's at the same learning rate (arXiv 2502.16982, equation 4), of which `config.matrices_rate_factor`
    gives them more or less. Embeddings and heads, whose rows are tokens, stay with AdamW.
    """
    trainable = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    inner = {} if config.matrices == "adamw" else inner_matrices(drafter)
    rest = [parameter for parameter in trainable if all(parameter is not matrix for matrix in inner)]
    # one kernel does all that a step does to a tensor, on a GPU to all tensors
    adamw = torch.optim.AdamW(rest, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay, fused=True)
    if not inner:
        return adamw
    return MuonAndAdamW(Muon(inner, config.weight_decay, config.matrices_rate_factor), adamw)


def inner_matrices(drafter: Drafter) -> dict[Parameter, list[int]]:
    """Return the trained matrices but for those that have as many rows as the target's or the draft vocabulary.

    A matrix that has so many rows by accident is trained by AdamW, which does no harm. Beside each stands the number of
    rows of every projection in it.
    """
    layers = [module for module in drafter.modules() if isinstance(module, MergedLinear)]
    merged = {layer.weight: list(layer.parts.values()) for layer in layers}
    matrices = [parameter for parameter in drafter.parameters() if parameter.requires_grad and parameter.ndim == 2]
    inner = [matrix for matrix in matrices if not has_rows_of_tokens(matrix, drafter)]
    return {matrix: merged.get(matrix, [len(matrix)]) for matrix in inner}


def has_rows_of_tokens(matrix: Tensor, drafter: Drafter) -> bool:
    """Return whether a matrix has as many rows as one of the drafter's vocabularies."""
    ids = drafter.draft_to_target()
    return len(matrix) in (drafter.target.vocab_size, drafter.target.vocab_size if ids is None else len(ids))


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of `step`, counted from 0.

    It rises linearly in the warm-up. Then it falls on a cosine to `final_share` of its peak, or it stays at the peak
    and falls linearly to there over the last `decay_share` of all steps.
    """
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.decay == "late":
        start = config.decay_start(num_steps)
        left = min(1.0, (num_steps - step) / max(1, num_steps - start))
    else:
        left = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
    return config.learning_rate * (config.final_share + (1 - config.final_share) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give all parameters the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
