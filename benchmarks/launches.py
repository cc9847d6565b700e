"""Launches of a decoding round on a GPU, counted on a machine without one.

The decoder runs on fake tensors of a CUDA device: they have a shape, a dtype and strides, and no values. PyTorch's
operations are counted as they are called, one launch each, views left out. Triton kernels are counted where they would
be launched; tests/models/test_compiled_kernels.py compiles them. A value that the host would wait for does not exist:
to read one is an error here, as is a shape that hangs on one. What the host would send to the device is an error, too.

    python benchmarks/launches.py            # the table of benchmarks/results/launches.txt, for Llama-3.1-8B's shape
    python benchmarks/launches.py --target qwen3_30b_a3b    # for another shape of recipes/configs/public_targets.py
    python benchmarks/launches.py --every    # every drafter, mode and shape, on two layers, for the errors
"""

import argparse
import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, get_args
from unittest import mock

os.environ["DRAFTSMITH_GRAPHS"] = "off"  # a graph would record real launches
os.environ["DRAFTSMITH_PRODUCTS"] = "fused"  # there is no GPU to measure on which form of a product is faster

import torch
from stand_in_gpu import Gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftsmith.inference.decoding.batch_engine import BatchEngine
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import DynamicTree, Shape, StaticTree
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.recipes.configs.public_targets import PUBLIC_TARGETS

SETTINGS: dict[str, dict[str, Any]] = {  # of drafters, where they are not the defaults; vocabularies are the recipes'
    "draft_model": {"num_layers": 1},
    "eagle3": {"draft_vocab_size": 32000},
    "p_eagle": {"draft_vocab_size": 32000},
}
PRODUCTS = ("mm", "addmm", "bmm", "addmm_", "baddbmm", "linear")
NO_LAUNCH = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view")
H200 = SimpleNamespace(multi_processor_count=132, major=9, minor=0)


@dataclass(frozen=True)
class Round:
    """A round to count: which drafter, how it drafts and verifies, and for how many texts."""

    drafter: str
    mode: VerificationMode
    draft: int | Shape  # a draft length or a tree
    batch: int = 1

    @property
    def temperature(self) -> float:
        return 0.0 if self.mode in ("greedy", "synthetic") else 0.8

    @property
    def name(self) -> str:
        shape = f"K = {self.draft}" if isinstance(self.draft, int) else type(self.draft).__name__
        return f"{self.drafter}, {self.mode}, {shape}, batch {self.batch}"


TREE, SHALLOW, STATIC_TREE = (
    DynamicTree(16, 4, 4),
    DynamicTree(16, 2, 4),
    StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0))),
)
ROUNDS = [
    Round("none", "greedy", 0),
    Round("none", "one_hot", 0),
    Round("eagle3", "greedy", 1),
    Round("eagle3", "greedy", 4),
    Round("eagle3", "probabilistic", 4),
    Round("eagle3", "greedy", TREE),
    Round("eagle3", "greedy", STATIC_TREE),
    Round("eagle", "greedy", 1),
    Round("eagle", "greedy", 4),
    Round("draft_model", "greedy", 1),
    Round("draft_model", "greedy", 4),
    Round("dflash", "greedy", 4),
    Round("p_eagle", "greedy", 4),
    Round("eagle3", "greedy", 4, batch=8),
]


@dataclass
class Launches:
    """Launches of one half of a round, by what is launched."""

    products: int = 0  # of matrices
    kernels: Counter[str] = field(default_factory=Counter)  # Triton kernels, by name
    operations: Counter[str] = field(default_factory=Counter)  # of PyTorch, by name

    @property
    def total(self) -> int:
        return self.products + self.kernels.total() + self.operations.total()


class Counting(TorchDispatchMode):
    """Adds PyTorch's operations to `launches`."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        devices = {tensor.device.type for tensor in tree_leaves(output) if isinstance(tensor, Tensor)}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_view = function.is_view and shares_memory(output, inputs)
        if "cuda" not in devices or is_view or name in NO_LAUNCH:
            return output
        if any(tensor.device.type == "cpu" and (tensor.ndim or "copy" in name) for tensor in inputs):
            raise HostError(f"{name} sends a tensor of {[list(tensor.shape) for tensor in inputs]} to the device")
        if name in PRODUCTS:
            self.launches.products += 1
        else:
            self.launches.operations[name] += 1
        return output


def shares_memory(output: Any, inputs: list[Tensor]) -> bool:
    """Return whether an output lies in the memory of an input; `to`, `reshape` and others may also copy."""
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(leaf.untyped_storage()._cdata in storages for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


class HostError(Exception):
    """A round that the host takes part in: no CUDA graph can hold it."""


def indexed(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return the view that the slices, numbers and Nones of an index give, and the tensors of it, by dimension.

    PyTorch's own indexing asks for a CUDA driver, even on fake tensors.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is ... for part in parts):
        place = next(i for i, part in enumerate(parts) if part is ...)
        taken = sum(part is not None for part in parts) - 1
        parts[place : place + 1] = [slice(None)] * (tensor.ndim - taken)
    view, tensors = tensor, list[Tensor | None]()
    for part in parts:
        dimension = len(tensors)
        if isinstance(part, int):
            view = view.select(dimension, part)
        elif part is None:
            view = view.unsqueeze(dimension)
            tensors.append(None)
        elif isinstance(part, slice):
            view = torch.ops.aten.slice(view, dimension, part.start, part.stop, part.step or 1)
            tensors.append(None)
        else:
            tensors.append(torch.as_tensor(part))
    return view, tensors


def get_item(tensor: Tensor, index: Any) -> Tensor:
    view, tensors = indexed(tensor, index)
    return torch.ops.aten.index(view, tensors) if any(part is not None for part in tensors) else view


def set_item(tensor: Tensor, index: Any, value: Any) -> None:
    view, tensors = indexed(tensor, index)
    if not isinstance(value, Tensor):
        assert not any(part is not None for part in tensors)
        view.fill_(value)
    elif any(part is not None for part in tensors):
        torch.ops.aten.index_put_(view, tensors, value)
    else:
        copy(view, value)


def copy(tensor: Tensor, source: Tensor) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():  # which asks for a CUDA driver
        return torch.ops.aten.copy_(tensor, source)


def address(tensor: Tensor) -> int:
    """Return an address that is aligned as the real one would be, whose distance to views of the tensor is right."""
    return 2**20 + int(tensor.storage_offset()) * tensor.element_size()


@contextmanager
def fake_gpu(launched: list[str]) -> Iterator[None]:
    """Give fake tensors of a CUDA device; the names of kernels that would be launched go to `launched`."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    def count_only(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(kernel.__name__)

    driver.set_active(Gpu())
    with (
        mock.patch.object(JITFunction, "run", count_only),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=H200),
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(Tensor, "__getitem__", get_item),
        mock.patch.object(Tensor, "__setitem__", set_item),
        mock.patch.object(Tensor, "__invert__", lambda tensor: torch.bitwise_not(tensor)),
        mock.patch.object(Tensor, "copy_", copy),
        mock.patch.object(Tensor, "data_ptr", address),
        mock.patch.object(torch.nn.init, "trunc_normal_"),  # it looks at values
        FakeTensorMode(allow_non_fake_inputs=False),
        torch.no_grad(),
    ):
        yield


def on_gpu(module: torch.nn.Module) -> Any:
    """Return a module of the meta device with fake parameters, in bf16, and buffers on a CUDA device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                tensor = torch.empty(parameter.shape, dtype=torch.bfloat16, device="cuda")
                part._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    return module.eval()


def meta_model(name: str, num_layers: int | None) -> PreTrainedModel:
    config = PUBLIC_TARGETS[name].config
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    config._attn_implementation = ATTENTION
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)


def make_target(model: PreTrainedModel) -> Target:
    with mock.patch("draftsmith.models.target.target.check_decodes_exactly"):
        return Target(on_gpu(model), None, model.config.model_type)


@functools.cache
def make_drafter(kind: str, target: Target) -> Drafter:
    drafter_class = DRAFTERS[kind]
    config = drafter_class.config_class(kind=kind, **SETTINGS.get(kind, {}))
    return on_gpu(drafter_class.from_target(config, target))


def count(action: Callable[[], Any], launched: list[str]) -> tuple[Any, Launches]:
    """Return what a call returns, and its launches."""
    launches = Launches()
    launched.clear()
    with Counting(launches):
        output = action()
    launches.kernels = Counter(launched)
    return output, launches


def count_round(round_: Round, target: Target, launched: list[str]) -> dict[str, Launches]:
    """Return the launches of drafting and of verification in a round that is not the first.

    Raises `UserError` where the drafter cannot draft or verify so, and `HostError` or one of PyTorch's errors on
    fake tensors where the host takes part in the round.
    """
    drafter = make_drafter(round_.drafter, target)
    rates = (0.5, 0.3) if round_.mode == "synthetic" else ()
    sampling = Sampling(round_.temperature, top_p=0.9 if round_.temperature else 1.0)
    settings = resolve_settings(drafter, sampling, 64, round_.draft, round_.mode, synthetic_rates=rates)
    engine = BatchEngine(target, drafter, settings, round_.batch, 4096)
    engine.verify(engine.draft())  # the first makes the caches
    draft, drafting = count(engine.draft, launched)
    _, verifying = count(lambda: engine.verify(draft), launched)
    return {"draft": drafting, "verify": verifying}


def every_round() -> list[Round]:
    """Return every drafter in every shape, and every verification mode in every shape.

    Drafts are two tokens deep: the first token is drafted from the target's features, all later ones in one way.
    """
    modes: list[VerificationMode] = ["greedy", "probabilistic"]
    drafters = itertools.product([kind for kind in DRAFTERS if kind != "none"], modes)
    pairs = dict.fromkeys([*drafters, *itertools.product(["eagle3"], get_args(VerificationMode))])
    plain = [Round("none", mode, 0) for mode in ("greedy", "one_hot", "typical")]
    return plain + [Round(kind, mode, shape) for kind, mode in pairs for shape in (2, STATIC_TREE, SHALLOW)]


def print_counts(round_: Round, halves: dict[str, Launches]) -> None:
    print(f"{round_.name}: {sum(launches.total for launches in halves.values())} launches")
    for half, launches in halves.items():
        kinds = {"matrix products": launches.products, **launches.kernels, **launches.operations}
        names = sorted(kinds, key=lambda name: -kinds[name])
        print(f"  {half} {launches.total}: " + ", ".join(f"{kinds[name]} {name}" for name in names if kinds[name]))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", action="store_true", help="every drafter, every mode and every shape, on two layers")
    parser.add_argument("--target", default="llama_3_1_8b", choices=list(PUBLIC_TARGETS))
    args = parser.parse_args(arguments)
    launched: list[str] = []
    model = meta_model(args.target, 2 if args.every else None)
    with fake_gpu(launched):
        target = make_target(model)
        for round_ in every_round() if args.every else ROUNDS:
            with suppress(UserError):  # of drafters that do not draft so
                print_counts(round_, count_round(round_, target, launched))


if __name__ == "__main__":
    main(sys.argv[1:])
