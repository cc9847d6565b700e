"""Making what the next steps need while the current step computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetched(make: Callable[[int], T], steps: Iterable[int], num_ahead: int = 1) -> Iterator[T]:
    """Yield `make(step)` for each step in turn, made so many steps ahead, each in a thread of its own.

    An error comes at its own step. 0 steps ahead, each is made in this thread when it is asked for.
    """
    if num_ahead == 0:
        yield from map(make, steps)
        return
    pool = ThreadPoolExecutor(num_ahead, "prefetch")
    ahead: deque[Future[T]] = deque()
    try:
        for step in steps:
            ahead.append(pool.submit(make, step))
            if len(ahead) > num_ahead:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # what is being made may wait for a server
