"""vLLM 0.33.0's loaders against those of 0.32.0, for which the rules were written: it has no build for a CPU.

DRAFTSMITH_VLLM=VENV pytest -m engine tests/recipes/test_vllm_source.py       downloads its wheel, 340 MB
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
MODELS = "vllm/model_executor/models/"
SAME = ("llama_eagle", "llama_eagle3", "qwen3_dflash2", "qwen3_dspark")


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a file of vLLM 0.33.0 -> its text, of those that load drafters."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(folder)]
    subprocess.run([*command, "vllm==0.33.0"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if name.startswith(MODELS) and name.endswith(".py")]
        return {Path(name).stem: wheel.read(name).decode() for name in names}


@pytest.fixture(scope="module")
def older() -> Path:
    path = os.environ.get("DRAFTSMITH_VLLM")
    if not path:
        pytest.skip("DRAFTSMITH_VLLM names no environment with vLLM 0.32.0")
    return next(Path(path).glob("lib/python3*/site-packages")) / MODELS


@pytest.mark.parametrize("module", SAME)
def test_loaders_are_the_same_to_the_byte(module: str, newer: dict[str, str], older: Path) -> None:
    assert newer[module] == (older / f"{module}.py").read_text()


def test_dflash_loads_plain_weights_alike(newer: dict[str, str], older: Path) -> None:
    """What changed concerns quantised drafters and attention sinks, which ours have not; the names are the same."""
    names = ("hidden_norm.", "fc.", "d2t", "t2d", "lm_head", "embed_tokens", "qkv_proj", "gate_up_proj")
    text = (older / "qwen3_dflash.py").read_text()
    assert all((name in newer["qwen3_dflash"]) == (name in text) for name in names)
    assert "class DFlashQwen3ForCausalLM" in newer["qwen3_dflash"]


def test_medusa_heads_are_gone(newer: dict[str, str], older: Path) -> None:
    assert (older / "medusa.py").is_file()
    assert "medusa" not in newer
    assert '"MedusaModel"' not in newer["registry"]
