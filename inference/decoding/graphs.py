"""CUDA graphs: what a function launches on the GPU is recorded once, and then replayed with one launch."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

Output = TypeVar("Output")
CALLS_TO_RECORD = 3  # the last of them is recorded; in those before it libraries allocate and kernels compile
BY_LENGTH = ("dynamic", "longrope")  # kinds of rotary embeddings whose angles go by the length of the text


class RecordedCall(Generic[Output]):
    """Calls a function as it is, or, where it `records`, replays after a few calls what one call launched on a GPU.

    A recorded function reads and writes tensors that live on between the calls, and never waits for the device. It gets
    the same arguments in each call from the recorded one on. What it returns is then the same object, filled anew.
    """

    def __init__(self, function: Callable[..., Output], records: bool) -> None:
        self._function, self._records = function, records
        self._num_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._arguments: tuple[object, ...]
        self._output: Output

    def __call__(self, *arguments: object) -> Output:
        if not self._records or self._num_calls < CALLS_TO_RECORD - 1:
            self._num_calls += 1
            return self._function(*arguments)
        if self._graph is None:
            self._graph, self._arguments = torch.cuda.CUDAGraph(), arguments
            with torch.cuda.graph(self._graph):
                self._output = self._function(*arguments)
        assert all(new is kept or new == kept for new, kept in zip(arguments, self._arguments, strict=True))
        self._graph.replay()
        return self._output


def can_be_recorded(module: nn.Module) -> bool:
    """Return whether no transformers model in a module waits for the device in a pass, by its class and config.

    Some mixtures of experts count the tokens of each expert on the host, and some rotary embeddings look at the length
    of the text there.
    """
    return not any(
        (isinstance(part, PreTrainedModel) and not part._can_compile_fullgraph)
        or any(kind in str(getattr(part, "rope_type", "")) for kind in BY_LENGTH)  # may be a dict by layer type
        for part in module.modules()
    )
