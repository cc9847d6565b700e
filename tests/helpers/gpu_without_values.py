"""A stand-in for a GPU on which tensors have shapes and no values, so that a wait for a value is an error.

Tensors of the device are fake tensors, which PyTorch itself takes for the CPU's: its autograd wants a CUDA driver even
for fake ones of a CUDA device. To Python code they say that they lie on `cuda:0`. Tensors of the host are real.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")


class HostWaits(Exception):
    """Code in which the host would wait for the device."""


@dataclass
class Log:
    """The work of the device: how many tensors the host sent, and how often which operation or kernel ran."""

    num_sent: int = 0
    operations: Counter[str] = field(default_factory=Counter)


class _Device(TorchDispatchMode):
    """Runs what concerns fake tensors or the device on fake tensors, and all else, on the host, as it is."""

    def __init__(self, fakes: FakeTensorMode, log: Log) -> None:
        super().__init__()
        self.fakes, self.log, self.inside = fakes, log, False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, was_inside = kwargs or {}, self.inside
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.inside = True
        try:
            if GPU not in leaves and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                with unset_fake_temporarily():
                    return function(*args, **kwargs)
            self.check_sent(function, [t for t in tensors if not isinstance(t, FakeTensor) and t.ndim], kwargs)
            self.log.operations[function.overloadpacket.__name__] += 1
            return function(*tree_map(self.as_fake, args), **tree_map(self.as_fake, kwargs))
        finally:
            self.inside = was_inside

    def check_sent(self, function: Any, sent: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Raise `HostWaits` where tensors of the host go to the device in a way that waits."""
        if sent and not (function is torch.ops.aten._to_copy.default and kwargs.get("non_blocking")):
            raise HostWaits(f"{function} takes a tensor of {list(sent[0].shape)} from the host")
        self.log.num_sent += bool(sent)

    def as_fake(self, leaf: Any) -> Any:
        if leaf == GPU:
            return torch.device("cpu")
        real = isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)
        return self.fakes.from_tensor(leaf) if real else leaf


@contextmanager
def gpu_without_values() -> Iterator[Log]:
    """Give a device `GPU` whose tensors have no values: to ask for one raises, as does a copy that the host waits for.

    Raises `HostWaits`, or one of PyTorch's errors on fake tensors.
    """
    from triton.runtime.jit import KernelInterface

    log = Log()
    with FakeTensorMode(allow_non_fake_inputs=False) as fakes:
        device = _Device(fakes, log)
        own_device = FakeTensor.device

        def said_device(tensor: FakeTensor) -> torch.device:
            return own_device.fget(tensor) if device.inside else GPU

        with (
            mock.patch.object(FakeTensor, "device", property(said_device)),
            mock.patch.object(FakeTensor, "is_cuda", property(lambda tensor: not device.inside), create=True),
            mock.patch.object(Tensor, "pin_memory", lambda tensor: tensor),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
            mock.patch.object(
                KernelInterface,
                "__getitem__",
                lambda kernel, _: lambda *_, **__: log.operations.update([kernel.fn.__name__]),
            ),
            device,
        ):
            yield log


def without_values(module: nn.Module) -> None:
    """Put a module's parameters and buffers on the device, and forget their values."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
                    tensors[name] = nn.Parameter(fake, tensor.requires_grad) if tensors is part._parameters else fake
