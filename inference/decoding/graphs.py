"""CUDA graphs: what a function launches on the GPU is recorded once, and then replayed with one launch."""

import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.models.errors import first_line
from draftsmith.models.kernels import counting_with, new_counters

Output = TypeVar("Output")
CALLS_TO_RECORD = 3  # the last of them is recorded; in those before it libraries allocate and kernels compile
BY_LENGTH = ("dynamic", "longrope")  # kinds of rotary embeddings whose angles go by the length of the text
SWITCH = "DRAFTSMITH_GRAPHS"  # this environment variable set to `off` has everything launched anew each time
_capturing = threading.Lock()  # a process can record one graph at a time


@dataclass
class RecordedCall:
    """A graph of one call, and what the call took and returned."""

    graph: torch.cuda.CUDAGraph
    arguments: tuple[object, ...]
    output: Any


class RecordedCalls:
    """Calls functions as they are, or, where it `records`, replays after a few calls what one call launched on a GPU.

    A recorded function reads and writes tensors that live on between the calls, and never waits for the device. It gets
    the same arguments in each call from the recorded one on. What it returns is then the same object, filled anew. All
    graphs share their memory for what is only needed within a call. Functions are not kept, so that whoever owns both
    them and the recordings is freed with its last reference.
    """

    def __init__(self, device: torch.device, records: bool) -> None:
        self.device = device
        self.records = records and os.environ.get(SWITCH) != "off"
        self._num_calls: Counter[Hashable] = Counter()
        self._recordings: dict[Hashable, RecordedCall] = {}
        self._counters: Tensor | None = None  # of its kernels alone: other graphs may be replayed at the same time

    @property
    def num_recorded(self) -> int:
        return len(self._recordings)

    def __call__(self, kind: Hashable, function: Callable[..., Output], *arguments: object) -> Output:
        """Return what the function does; all calls of one `kind` launch the same."""
        if self.records and self._num_calls[kind] == CALLS_TO_RECORD - 1:
            self._record(kind, function, arguments)
        self._num_calls[kind] += 1
        if kind not in self._recordings:
            return function(*arguments)
        recording = self._recordings[kind]
        for new, kept in zip(arguments, recording.arguments, strict=True):
            assert new is kept or (not isinstance(new, Tensor) and new == kept), "the graph reads what it recorded"
        recording.graph.replay()
        return recording.output

    def _record(self, kind: Hashable, function: Callable[..., Output], arguments: tuple[object, ...]) -> None:
        """Record one call. Where that fails nothing stays recorded, as recordings read each other's outputs."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        if self._counters is None:
            self._counters = new_counters(self.device)
        pool = next((recording.graph.pool() for recording in self._recordings.values()), None)
        try:
            # another thread may wait for the device or pin memory meanwhile
            with (
                _capturing,
                counting_with(self._counters),
                warnings.catch_warnings(),
                torch.cuda.graph(graph, pool, capture_error_mode="thread_local"),
            ):
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # plain decoding drafts nothing
                output = function(*arguments)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that fails stays on its own
            self.records = False
            self._recordings.clear()
            warnings.warn(
                f"rounds are launched one operation at a time, which is slower: CUDA graphs failed "
                f"({first_line(error)}); {SWITCH}=off does not try them",
                stacklevel=2,
            )
        else:
            self._recordings[kind] = RecordedCall(graph, arguments, output)


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
