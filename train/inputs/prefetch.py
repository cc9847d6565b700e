"""Making the next step's batches while the current step computes."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetched(make: Callable[[int], T], steps: Iterable[int]) -> Iterator[T]:
    """Yield `make(step)` for each step in turn, made one step ahead in a thread. An error comes at its own step."""
    with ThreadPoolExecutor(1, "prefetch") as pool:
        ahead = None
        for step in steps:
            following = pool.submit(make, step)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()
