"""CUDA graphs: a function on tensors that stay where they are, recorded once and then replayed with one launch."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Output = TypeVar("Output")
CALLS_TO_RECORD = 3  # the last of them is recorded: libraries allocate and kernels compile in those before


class Replay(Generic[Output]):
    """Calls the function as it is on a CPU; on a GPU, after a few calls, replays what one call launched.

    The function reads and writes tensors that live on between the calls, takes no arguments, and never waits for the
    device. What it returns is the same object each time, filled anew.
    """

    def __init__(self, function: Callable[[], Output], device: torch.device) -> None:
        self._function, self._on_gpu = function, device.type == "cuda"
        self._num_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output

    def __call__(self) -> Output:
        if not self._on_gpu or self._num_calls < CALLS_TO_RECORD - 1:
            self._num_calls += 1
            return self._function()
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = self._function()
        self._graph.replay()
        return self._output
