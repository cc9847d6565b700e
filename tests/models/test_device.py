"""The device that a user names, on GPUs that are not there."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, devices, load_drafter
from draftsmith.models.devices import default_dtype, large_products, pick_device, training_precision
from draftsmith.models.errors import UserError
from draftsmith.models.kernels import has_flash_attention


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """What is made the current device of two old GPUs, which do bf16 by emulation alone."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    return current


def test_the_gpu_that_is_named_becomes_the_current_one(chosen: list[torch.device]) -> None:
    """Kernels, graphs and events go to the current device, wherever their tensors are."""
    assert pick_device("cuda:1") == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    for device in (None, "cuda", "cpu"):  # the current one, whichever that is
        pick_device(device)
    assert len(chosen) == 1
    with pytest.raises(UserError, match="the last GPU of this machine is cuda:1"):
        pick_device("cuda:2")


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.tensor([1, 2]), 32])
def test_what_is_no_dtype_of_weights_is_refused(dtype: Any, tiny_target_dir: Path) -> None:
    with pytest.raises(UserError, match="dtype .*: give torch.float32"):
        Target.from_pretrained(tiny_target_dir, "cpu", dtype)


@pytest.mark.parametrize("device", ["gpu", int, ["cpu"], 1.5, "\ud800", "cpu\0", torch.ones(2)])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(UserError, match="is not a device: give cpu, cuda or cuda:N"):
        pick_device(device)


@pytest.mark.parametrize("name", [None, int, 7, "", "a" * 300, ["x"]])
def test_what_is_no_name_is_refused(name: Any, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="target"):
        Target.from_pretrained(name, "cpu")
    with pytest.raises(UserError, match="drafter"):
        load_drafter(name, tiny_target)


@pytest.mark.parametrize("eos", ["<end>", [0, "<end>"], 2.5, [[0]], True])
def test_ids_that_end_a_text_are_whole_numbers(eos: Any, make_target_dir: Callable[..., Path]) -> None:
    target = Target.from_pretrained(make_target_dir(num_hidden_layers=1), "cpu")
    target.model.generation_config.eos_token_id = eos
    with pytest.raises(UserError, match="eos_token_id .*: give a whole number"):
        SpeculativeDecoder(target, load_drafter("none", target)).generate(["x"], 2)


def test_old_gpus_do_without_bf16_and_flash_attention(chosen: list[torch.device]) -> None:
    assert default_dtype(torch.device("cuda:0")) == torch.float32
    with pytest.warns(UserWarning, match="no flash attention for torch.float16"):
        assert not has_flash_attention(torch.empty(4, 64, dtype=torch.float16))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="malloc is not that of glibc")
def test_what_a_step_frees_the_next_one_gets_without_asking_the_system() -> None:
    program = """
import resource
import torch
from draftsmith.models.devices import keep_freed_memory

def take_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _ = [torch.ones(4 << 20) for _ in range(8)]  # 16 MiB each
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

take_step()
by_default = take_step()
keep_freed_memory()
take_step()
print(by_default, take_step())
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    by_default, kept = map(int, told.split())
    assert by_default > 8 * 4096 / 2  # pages
    assert kept < by_default / 100


@pytest.mark.parametrize("multiply", [torch.mm, lambda a, b: torch.mm(b.t(), a.t()).t()], ids=["rows", "columns"])
def test_large_products_are_not_rounded(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """On a CPU whose products torch takes by oneDNN in training, that computes in fp32 as MKL does."""
    a, b = torch.randn(300, 500), torch.randn(500, 700)
    with large_products():
        found = multiply(a, b)
    whole = (a.double() @ b.double()).float()
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-5)  # bf16 would be 1e-1 away


def test_products_are_taken_as_before_behind_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "mkl_misses_avx512", lambda: True)
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    with training_precision(torch.device("cpu"), "fp32"):
        assert setting.fp32_precision == "bf16"
        with large_products(False):
            assert setting.fp32_precision == "ieee"
        assert setting.fp32_precision == "bf16"
    assert setting.fp32_precision == before
    with ExitStack() as one, ExitStack() as other:  # as of two threads
        one.enter_context(large_products())
        other.enter_context(large_products())
        one.close()
        assert setting.fp32_precision == "bf16"
    assert setting.fp32_precision == before
