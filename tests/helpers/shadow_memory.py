"""Memory for Triton's interpreter that finds what hides there: races, gaps and stray accesses of kernels.

The interpreter runs the programs of a launch one after another, on whatever lies at an address. Inside `watched`

* the programs of a launch run in shuffled order;
* no byte may be written by one program and read or written by another, unless an atomic orders them: a program that
  acquires comes after whatever was written before the barrier before the release;
* within a program, which is many threads, a barrier must stand between a store and a load of the same byte, and
  between a load and a store by another thread (that of another element);
* every address lies in the storage of the tensor that it was computed from. Addresses are made up, 2^48 bytes apart
  for each storage, so that none leads from one tensor into another, however far it is off;
* memory that was allocated and never written must not be read. It is filled with POISON, by which a load knows it, and
  which copies by PyTorch take along.

`allow_races` is for bytes whose content never matters, such as the slot that takes what is written past the end.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, TensorHandle, interpreter_builder

# Shapes: n lanes of a load or store that are not masked off, w bytes an element.
POISON = 0x7F  # every byte of it; NaN in fp16, 3.4e38 in fp32, large numbers in integers
NUMBER_BITS = 48  # from here on an address holds the number of its storage
NOBODY, SEVERAL = 0, 1  # stamps that are no program's
EVERY_LANE = -1
ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


@dataclass
class Storage:
    """Bytes that addresses of one number lead to, and of each what the running launch did with it."""

    tensor: Tensor  # keeps the storage alive
    real: int  # address
    any_order: np.ndarray  # bool: may be written by several
    writer: np.ndarray  # stamps
    reader: np.ndarray
    is_atomic: np.ndarray  # bool: written so last
    written_in: np.ndarray  # phases: the times between barriers
    read_in: np.ndarray
    written_by: np.ndarray  # lanes
    read_by: np.ndarray

    @classmethod
    def of(cls, tensor: Tensor) -> "Storage":
        size = tensor.untyped_storage().nbytes()
        shadows = [np.zeros(size, kind) for kind in (bool, "i4", "i4", bool, "i4", "i4", "i4", "i4")]
        return cls(tensor, tensor.untyped_storage().data_ptr(), *shadows)

    def begin_launch(self) -> None:
        for shadow in (self.writer, self.reader, self.is_atomic, self.written_in, self.read_in):
            shadow[:] = 0


@dataclass
class Access:
    """Lanes of a load, a store or an atomic that stay within a storage."""

    storage: Storage
    lanes: np.ndarray  # [n]
    bytes: np.ndarray  # [n, w] places in the storage


class ShadowMemory:
    """What `watched` gives: the kernels launched, and what was found."""

    def __init__(self, seed: int) -> None:
        self.launched: set[str] = set()
        self.findings: dict[str, None] = {}  # in order, each once
        self._random = np.random.default_rng(seed)
        self._builder = {name: getattr(interpreter_builder, name) for name in self._hooks()}
        self._run_launch = GridExecutor.__call__
        self._storages: dict[int, Storage] = {}  # by number
        self._numbers: dict[int, int] = {}  # by storage, of those alive
        self._num_storages = 0
        self._kernel = ""
        self._phase = 0

    def _hooks(self) -> dict[str, Callable[..., Any]]:
        return {
            "set_grid_dim": self._begin_programs,
            "set_grid_idx": self._begin_program,
            "create_masked_load": self._load,
            "create_masked_store": self._store,
            "create_atomic_rmw": self._atomic_rmw,
            "create_atomic_cas": self._atomic_cas,
            "create_barrier": self._barrier,
        }

    def allow_races(self, tensor: Tensor) -> None:
        """Let programs write any of a tensor's bytes in any order; reading them then is still a finding."""
        storage = self._storages[self.data_ptr(tensor) >> NUMBER_BITS]
        size = tensor.element_size()
        places = torch.arange(len(storage.writer) // size)
        places = places.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset())).reshape(-1, 1)
        storage.any_order[(places * size + torch.arange(size)).numpy()] = True

    def data_ptr(self, tensor: Tensor) -> int:
        key = tensor.untyped_storage()._cdata
        if key not in self._numbers:
            self._num_storages += 1
            self._numbers[key] = self._num_storages
            self._storages[self._num_storages] = Storage.of(tensor.detach())
        return (self._numbers[key] << NUMBER_BITS) + int(tensor.storage_offset()) * tensor.element_size()

    def launch(self, executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        """Run a launch; storages that were unknown before are forgotten after it."""
        known = dict(self._numbers)
        self._kernel = executor.fn.__name__
        self.launched.add(self._kernel)
        try:
            self._run_launch(executor, *args, **kwargs)
        finally:
            for number in set(self._numbers.values()) - set(known.values()):
                del self._storages[number]
            self._numbers = known

    def _find(self, what: str, where: np.ndarray, storage: Storage | None) -> None:
        """Note a finding unless it is nowhere; with the shape of the tensor by which its storage became known."""
        if where.any():
            shape = [] if storage is None else list(storage.tensor.shape)
            self.findings[f"{self._kernel}: {what}, {shape}"] = None

    # Order: of programs, and of a program's accesses

    def _begin_programs(self, *size: int) -> None:
        self._builder["set_grid_dim"](*size)
        self._size = size
        self._order = iter(self._random.permutation(int(np.prod(size))))
        for storage in self._storages.values():
            storage.begin_launch()
        self._stamp = SEVERAL
        self._published: dict[tuple[int, int], set[int]] = {}  # stamps, by number and place of an atomic

    def _begin_program(self, *_: int) -> None:
        self._builder["set_grid_idx"](*(int(i) for i in np.unravel_index(next(self._order), self._size)))
        self._is_before = np.zeros(max(1024, 2 * self._stamp), bool)  # by stamp: whether this program comes after it
        self._is_before[NOBODY] = True
        self._own: set[int] = set()
        self._releasable: set[int] = set()  # what other threads of this program, too, have behind them
        self._next_stamp()
        self._phase += 1

    def _next_stamp(self) -> None:
        self._stamp += 1
        if self._stamp >= len(self._is_before):
            self._is_before = np.append(self._is_before, np.zeros_like(self._is_before))
        self._is_before[self._stamp] = True
        self._own.add(self._stamp)

    def _barrier(self) -> None:
        self._releasable |= self._own
        self._next_stamp()
        self._phase += 1

    def _synchronize(self, accesses: list[Access], sem: Any) -> None:
        """Note atomics, under a stamp of their own: whoever acquires from one comes after it."""
        self._next_stamp()
        for access in accesses:
            self._note_write(access, atomic=True)
            for place in access.bytes[:, 0]:
                published = self._published.setdefault((access.storage.real, int(place)), set())
                if sem in ACQUIRES:
                    self._releasable |= published
                    self._is_before[list(published)] = True
                if sem in RELEASES:
                    published |= self._releasable | {self._stamp}
        self._next_stamp()

    # Loads, stores and atomics

    def _load(self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *rest: Any) -> TensorHandle:
        kind = interpreter._get_np_dtype(ptrs.get_element_ty())
        real, mask, accesses = self._reach(ptrs, mask, kind.itemsize)
        for access in accesses:
            self._note_read(access)
        result = self._builder["create_masked_load"](real, mask, other, *rest)
        for access in accesses:
            values = np.ascontiguousarray(result.data).reshape(-1)[access.lanes, None].view(np.uint8)
            self._find("reads memory that nothing was written to", (values == POISON).all(1), access.storage)
        return result

    def _store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> None:
        real, mask, accesses = self._reach(ptrs, mask, value.data.itemsize)
        for access in accesses:
            self._note_write(access, atomic=False)
        self._builder["create_masked_store"](real, value, mask, *rest)

    def _atomic_rmw(
        self, op: Any, ptr: TensorHandle, val: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        real, mask, accesses = self._reach(ptr, mask, val.data.itemsize)
        self._synchronize(accesses, sem)
        return self._builder["create_atomic_rmw"](op, real, val, mask, sem, scope)

    def _atomic_cas(
        self, ptr: TensorHandle, cmp: TensorHandle, val: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        everywhere = TensorHandle(np.ones(ptr.data.shape, bool), interpreter.tl.int1)
        real, _, accesses = self._reach(ptr, everywhere, val.data.itemsize)
        self._synchronize(accesses, sem)
        return self._builder["create_atomic_cas"](real, cmp, val, sem, scope)

    def _reach(
        self, ptrs: TensorHandle, mask: TensorHandle, width: int
    ) -> tuple[TensorHandle, TensorHandle, list[Access]]:
        """Return real addresses, the mask without lanes that lead nowhere, and what the others reach."""
        addresses = ptrs.data.reshape(-1)
        wanted = np.broadcast_to(mask.data, ptrs.data.shape).reshape(-1)
        real, allowed, accesses = np.zeros_like(addresses), np.zeros_like(wanted), []
        numbers = addresses >> np.uint64(NUMBER_BITS)
        for number in np.unique(numbers[wanted]):
            lanes = np.flatnonzero(wanted & (numbers == number))
            offsets = (addresses[lanes] & np.uint64(2**NUMBER_BITS - 1)).astype(np.int64)
            storage = self._storages.get(int(number))
            inside = offsets + width <= (0 if storage is None else len(storage.writer))
            self._find("leaves the tensor that an address belongs to", ~inside, storage)
            if storage is not None:
                lanes, offsets = lanes[inside], offsets[inside]
                real[lanes] = offsets + storage.real
                allowed[lanes] = True
                accesses.append(Access(storage, lanes, offsets[:, None] + np.arange(width)))
        shape = ptrs.data.shape
        return TensorHandle(real.reshape(shape), ptrs.dtype), TensorHandle(allowed.reshape(shape), mask.dtype), accesses

    def _note_read(self, access: Access) -> None:
        storage, places = access.storage, access.bytes
        self._find("reads what another program writes", ~self._is_before[storage.writer[places]], storage)
        self._find("loads what it stored, with no barrier between", storage.written_in[places] == self._phase, storage)
        readers = storage.reader[places]
        storage.reader[places] = np.where(self._is_before[readers], self._stamp, SEVERAL)
        lanes = access.lanes[:, None] if len(access.lanes) > 1 else EVERY_LANE  # a scalar is loaded by all threads
        others = (storage.read_in[places] == self._phase) & (storage.read_by[places] != lanes)
        lanes = np.where(others, EVERY_LANE, lanes)
        storage.read_by[places] = lanes
        storage.read_by[places[storage.read_by[places] != lanes]] = EVERY_LANE
        storage.read_in[places] = self._phase

    def _note_write(self, access: Access, atomic: bool) -> None:
        storage, places, lanes = access.storage, access.bytes, access.lanes[:, None]
        free = storage.any_order[places] | (atomic & storage.is_atomic[places])
        self._find("writes what another program writes", ~self._is_before[storage.writer[places]] & ~free, storage)
        self._find("writes what another program reads", ~self._is_before[storage.reader[places]], storage)
        read_now, written_now = (storage.read_in[places] == self._phase), (storage.written_in[places] == self._phase)
        others = read_now & (storage.read_by[places] != lanes)
        self._find("overwrites what another thread loads, with no barrier between", others & (not atomic), storage)
        others = written_now & (storage.written_by[places] != lanes)
        storage.written_by[places] = lanes
        others |= storage.written_by[places] != lanes
        self._find("stores twice to one place", others & ~free & (not atomic), storage)
        storage.writer[places], storage.written_in[places] = self._stamp, self._phase
        storage.is_atomic[places] = atomic


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an allocating function that fills the memory which it gives."""

    def call(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.device.type == "cpu":
            torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(POISON)
        return tensor

    return call


@contextmanager
def watched(seed: int = 0) -> Iterator[ShadowMemory]:
    """Watch all launches in the interpreter. Raises AssertionError at the end if anything was found."""
    memory = ShadowMemory(seed)
    if torch.cuda.is_available():  # kernels are compiled
        yield memory
        return
    with ExitStack() as stack:
        for name, hook in memory._hooks().items():
            stack.enter_context(mock.patch.object(interpreter_builder, name, hook))
        launch = lambda *args, **kwargs: memory.launch(*args, **kwargs)  # noqa: E731  a method, so that `self` comes first
        stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))
        stack.enter_context(mock.patch.object(Tensor, "data_ptr", lambda tensor: memory.data_ptr(tensor)))
        for place, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(place, name, poisoned(getattr(place, name))))
        yield memory
    assert not memory.findings, "\n".join(memory.findings)
