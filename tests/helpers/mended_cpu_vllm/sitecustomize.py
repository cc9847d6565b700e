"""On the PYTHONPATH of a vLLM for CPU: writes the temperatures of drafted tokens, which vLLM 0.32.0 leaves unwritten.

Its `_expand_kernel_impl` repeats a value of each request for each drafted token, into a copy of the output wherever
that is no int64: the temperatures, by which the logits are divided, stay what the memory held. Sampled texts of any
drafter are then not the target's. Builds for GPUs have a Triton kernel there.
"""

import importlib.util
import sys
from typing import Any

MODULE = "vllm.utils.cpu_triton_utils"


def expand(output: Any, values: Any, ends: Any, replace_from: Any, replace_to: Any, *_: Any) -> None:
    """Write the value of each request as often as it has tokens: `ends` are the sums of their numbers so far."""
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    output.copy_(values.where(values != replace_from, replace_to).repeat_interleave(counts))


class Mending:
    """Finds the module as it is, and puts the function in as soon as it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module._expand_kernel_impl = expand

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Mending())  # type: ignore[arg-type]
