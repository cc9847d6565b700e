"""Fixtures of all tests: one thread, one seed, and a tiny random target with a tokenizer of its own.

Without a GPU kernels run in Triton's interpreter. Triton asks for it when a kernel is defined, its own among them, so
the variable is set before transformers imports triton.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: several run side by side
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with suppress(ImportError):  # triton exists for Linux only
        from fast_interpreter import speed_up

        speed_up()

from tiny_target import save_target
from warm_python import warm_python

from draftsmith.models import Target

SEES_PNGS = (
    "test_output_folder.py",
    "test_report.py",
    "test_report_page.py",
    "test_layout.py",
    "test_foreign_texts.py",
)
PYTHON = pytest.StashKey[str]()  # path of the Python that the processes of pytest-xdist share
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

if TYPE_CHECKING:
    from shadow_memory import ShadowMemory


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the processes of pytest-xdist one warm Python, which starts with the first of them."""
    config = node.config
    if PYTHON not in config.stash:
        held = ExitStack()
        config.add_cleanup(held.close)
        config.stash[PYTHON] = held.enter_context(warm_python(Path(held.enter_context(TemporaryDirectory()))))
    node.workerinput["python"] = config.stash[PYTHON]


def pytest_collection_finish() -> None:
    gc.freeze()  # the collector would look through all libraries again and again


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries tell of what was not collected


@pytest.fixture(autouse=True)
def reproducible() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def pngs_nobody_sees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave PNGs of figures empty outside of the tests of pages: painting them is two thirds of a figure's time."""
    if request.path.name not in SEES_PNGS:
        monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda canvas, file, **_: file.write(PNG_SIGNATURE))


@pytest.fixture(scope="session")
def make_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Call it with fields of LlamaConfig for a target other than the tiny one."""
    return lambda **changes: save_target(tmp_path_factory.mktemp("target"), **changes)


@pytest.fixture(scope="session")
def tiny_target_dir(make_target_dir: Callable[..., Path]) -> Path:
    return make_target_dir()


@pytest.fixture(scope="session")
def tiny_target(tiny_target_dir: Path) -> Target:
    """On the CPU in fp32. Frozen, so that all tests may share it."""
    return Target.from_pretrained(tiny_target_dir, "cpu", torch.float32)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[str]:
    """Path of a Python in which programs of training start at once (helpers/warm_python.py), on Linux."""
    if sys.platform != "linux":  # the only one where a process can be waited for beside a socket
        yield sys.executable
        return
    if hasattr(request.config, "workerinput"):
        yield request.config.workerinput["python"]
        return
    with warm_python(tmp_path_factory.mktemp("python")) as path:
        yield path


@pytest.fixture
def watched_memory() -> "Iterator[ShadowMemory]":
    """Fail for kernels that race, read what was never written, or leave their tensors; on a GPU nothing is watched."""
    from shadow_memory import watched

    with watched() as memory:
        yield memory
