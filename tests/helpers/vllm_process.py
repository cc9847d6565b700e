"""A real vLLM server for tests: DRAFTSMITH_VLLM names the folder of its virtual environment."""

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.data.features.endpoint import serve_options

START_UP = 300  # seconds


def extraction_options(layer_ids: list[int], folder: Path) -> list[str]:
    """The options of a server that writes hidden states to a folder below this one.

    vLLM's CPU build has the method but cannot write the files (`pin_memory=True requires a CUDA ... backend`), so the
    one copy that needs a GPU is replaced (cpu_hidden_states.py, which has to be on its PYTHONPATH).
    """
    *speculation, transfer = serve_options(layer_ids, str(folder / "states"))
    connector = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_hidden_states"}
    return [*speculation, json.dumps({**json.loads(transfer), **connector})]


@contextlib.contextmanager
def serving(model: str, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """The URL of a server that runs `model` in fp32 on the CPU for as long as the block lasts."""
    if "DRAFTSMITH_VLLM" not in os.environ:
        pytest.skip("set DRAFTSMITH_VLLM to a virtual environment with vLLM")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = Path(os.environ["DRAFTSMITH_VLLM"]) / "bin" / "python"  # `vllm serve` asks for metadata CPU wheels lack
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *options]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **environment}
    with open(log, "w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=variables)
    try:
        for _ in range(START_UP):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)
