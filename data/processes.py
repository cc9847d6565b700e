"""Which of several processes this one is, its device, what they tell each other, and the lock it holds on a folder."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout

from draftsmith.data.progress import notice
from draftsmith.models.errors import UserError
from draftsmith.models.ranges import Count, Natural, checked
from draftsmith.models.storage.files import made_folder, real_path, require_writable

if TYPE_CHECKING:  # commands lock their folder before they load torch
    from torch.distributed import ProcessGroup

LONGEST_WAIT = timedelta(days=7)  # for another process; where one dies its launcher ends all

T = TypeVar("T")


def rank_and_num_ranks() -> tuple[int, int]:
    """Return this process's rank, from 0, and the number of processes, as launchers tell them; (0, 1) without one.

    Raises `UserError` where these variables hold what no launcher sets.
    """
    rank = checked(Natural, os.environ.get("RANK", "0"), "RANK")
    num_ranks = checked(Count, os.environ.get("WORLD_SIZE", "1"), "WORLD_SIZE")
    if rank >= num_ranks:
        raise UserError(f"RANK={rank} is not below WORLD_SIZE={num_ranks}: unset both, or start by a launcher")
    return rank, num_ranks


def device_of_process() -> str | None:
    """Return the GPU of this process where a launcher started several; None leaves the choice to the target."""
    import torch

    local_rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{local_rank}" if local_rank and torch.cuda.is_available() else None


def on_first(own: T) -> list[T]:
    """Return what every process has, in their order, on the first of them; nothing on the others."""
    rank, num_ranks = rank_and_num_ranks()
    if num_ranks == 1:
        return [own]
    import torch.distributed as dist

    of_all: list[Any] | None = None if rank else [None] * num_ranks
    with group_of_all() as group:
        dist.gather_object(own, of_all, group=group)
    return of_all or []


def decided_by_first(decide: Callable[[], T]) -> T:
    """Return on every process what the first one decides, which alone does the work; the others wait for it."""
    rank, num_ranks = rank_and_num_ranks()
    if num_ranks == 1:
        return decide()
    import torch.distributed as dist

    decided: list[Any] = [None if rank else decide()]
    with group_of_all() as group:
        dist.broadcast_object_list(decided, group=group)
    return decided[0]  # type: ignore[no-any-return]


@contextlib.contextmanager
def group_of_all() -> "Iterator[ProcessGroup | None]":
    """Let all processes speak to each other on the CPU, however long they must wait for that."""
    import torch.distributed as dist

    if dist.is_initialized():
        group = dist.new_group(timeout=LONGEST_WAIT, backend="gloo")
        yield group
        dist.destroy_process_group(group)
    else:
        dist.init_process_group("gloo", timeout=LONGEST_WAIT)
        yield None
        dist.destroy_process_group()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder, which need not exist, for this launch alone: each rank of it has a lock of its own.

    Raises `UserError` where it cannot be written to, and where another process holds it. The lock is a hidden file
    beside the folder, and ends with the process, however that ends. A file system without locks is told of, and is no
    reason to stop.
    """
    rank, _ = rank_and_num_ranks()
    if rank == 0:
        require_writable(folder)
    place = real_path(folder)
    path = place.with_name(f".{place.name}.lock" if rank == 0 else f".{place.name}-{rank}.lock")
    lock = FileLock(path, fallback_to_soft=False)
    with made_folder(place.parent):
        try:
            lock.acquire(blocking=False)
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        except Timeout:
            raise UserError(
                f"{folder} is being written by {holder(path)}: wait until it ends, or give another folder"
            ) from None
        except OSError as error:
            notice(f"{folder} cannot be locked ({error.strerror}): see to it that no other process writes there")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if lock.is_locked:
                    path.unlink()  # before it is free, so that nobody locks a file that then vanishes
                lock.release()


def holder(path: Path) -> str:
    """Return in words who holds a lock."""
    try:
        return path.read_text() or "another process"
    except OSError:
        return "another process"
