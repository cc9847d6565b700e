"""A stand-in for CUDA graphs on a CPU: what a call runs is kept, and on replay run again on the same memory.

A replay reads what stands at the addresses of the capture, not what Python would pass today. Here a tensor from
outside that was freed since raises `StaleAddress`, where a GPU would read whatever lies there by then. What the
recorded call returned, and what it made on the way, is filled anew in place. Python's own values stay as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class StaleAddress(Exception):
    """A replay reads memory that was freed since the capture."""


class Outside:
    """A tensor that the call did not make: its address, which keeps nothing alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._dtype = StorageWeakRef(tensor.untyped_storage()), tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()

    def read(self) -> Tensor:
        if self._storage.expired():
            raise StaleAddress
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        offset, shape, stride = self._layout
        return torch.empty(0, dtype=self._dtype).set_(storage, offset, shape, stride)


class Graph(TorchDispatchMode):
    """The operations of one call. They run while they are kept, so that the replay right after does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()  # addresses of storages that an operation of the call made
        self._has_run = False
        self.num_replays = 0

    def pool(self) -> str:
        return "pool"

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept_args, kept_kwargs = tree_map(self._keep, (args, kwargs or {}))
        output = op(*args, **(kwargs or {}))
        given = {address(tensor) for tensor in tensors((args, kwargs))}
        new = [tensor for tensor in tensors(output) if address(tensor) not in given]  # no view, nor changed in place
        self._made |= {address(tensor) for tensor in new}
        self._steps.append((op, kept_args, kept_kwargs, new))
        self._has_run = True
        return output

    def _keep(self, value: Any) -> Any:
        is_outside = isinstance(value, Tensor) and address(value) not in self._made
        return Outside(value) if is_outside else value

    @torch.inference_mode()  # in which some of the tensors were made
    def replay(self) -> None:
        self.num_replays += 1
        if self._has_run:
            self._has_run = False
            return
        for op, args, kwargs, made in self._steps:
            args, kwargs = tree_map(lambda value: value.read() if isinstance(value, Outside) else value, (args, kwargs))
            given = {address(tensor) for tensor in tensors((args, kwargs))}
            output = [tensor for tensor in tensors(op(*args, **kwargs)) if address(tensor) not in given]
            for old, new in zip(made, output, strict=True):
                old.copy_(new)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def capture(graph: Graph, pool: object = None, capture_error_mode: str = "global") -> Iterator[None]:
    assert capture_error_mode == "thread_local"
    with graph:
        yield


def record_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `RecordedCalls` that record take the stand-in."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
