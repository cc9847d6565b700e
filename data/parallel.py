"""Work that all cores share."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from draftsmith.models.errors import UserError

T = TypeVar("T")
R = TypeVar("R")


class _Calls(Dataset[R | UserError], Generic[T, R]):
    """Calls of a function as a data set: number i is its value for input i, or the mistake that it found there."""

    def __init__(self, function: Callable[[T], R], inputs: Sequence[T]) -> None:
        self.function, self.inputs = function, inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> R | UserError:
        try:
            return self.function(self.inputs[index])
        except UserError as error:  # as a value: raised, it would come with a traceback in its text
            return error


def on_all_cores(function: Callable[[T], R], inputs: Sequence[T]) -> Iterator[R]:
    """Yield the values of a function for the inputs, in their order, computed by a process on each core.

    The processes are forked, so neither function nor inputs are copied, and the function must not use a GPU or the
    console. They are those of a `DataLoader`, which end with this process however it ends, and keep no more than two
    values each waiting. A single input is computed in this process. Raises the first `UserError` of the function.
    """
    num_workers = min(len(inputs), len(os.sched_getaffinity(0))) if len(inputs) > 1 else 0
    values = DataLoader(
        _Calls(function, inputs),
        batch_size=None,
        collate_fn=lambda value: value,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        generator=torch.Generator(),  # the global one stays as it is
    )
    for value in values:
        if isinstance(value, UserError):
            raise value
        yield value
