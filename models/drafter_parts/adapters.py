"""Trainable corrections to the linear layers of a frozen model, switched on for as long as they are wanted.

Low-rank (LoRA, arXiv 2106.09685) or of full rank. Off, the model computes as before: one copy of the weights serves as
teacher and as pupil.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Correction(nn.Module):
    """scale * B(A(x)), which starts as nothing; `rank` 0: one matrix of full rank."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        inputs, outputs = linear.in_features, linear.out_features
        self.down = nn.Linear(inputs, rank, bias=False) if rank else nn.Identity()
        self.up = nn.Linear(rank or inputs, outputs, bias=False)
        nn.init.zeros_(self.up.weight)
        self.scale = alpha / rank if rank else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.up(self.down(x))

    def matrix(self) -> Tensor:
        """Return what it adds to the layer's weight, [outputs, inputs]."""
        down = self.down.weight if isinstance(self.down, nn.Linear) else torch.eye(self.up.in_features)
        return self.scale * self.up.weight @ down.to(self.up.weight.device)


class Corrections(nn.Module):
    """Corrections to every linear layer inside some modules."""

    def __init__(self, inside: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self._on = False
        linears = {name: module for name, module in inside.named_modules() if isinstance(module, nn.Linear)}
        self.names = list(linears)
        self.corrections = nn.ModuleList([Correction(linear, rank, alpha) for linear in linears.values()])
        for linear, correction in zip(linears.values(), self.corrections, strict=True):
            linear.register_forward_hook(self._hook(correction))

    def _hook(self, correction: nn.Module) -> Callable[..., Tensor]:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return output + correction(inputs[0]) if self._on else output

        return add

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model compute with the corrections inside the context."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def matrices(self) -> dict[str, Tensor]:
        """Return what is added to each layer's weight, by the layer's name."""
        pairs = zip(self.names, self.corrections, strict=True)
        return {name: correction.matrix() for name, correction in pairs if isinstance(correction, Correction)}
