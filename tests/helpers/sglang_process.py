"""The command of a real SGLang for tests: DRAFTSMITH_SGLANG names the folder of its virtual environment."""

import os
import shlex
import socket
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parent / "sglang_cpu.py"
BACKENDS = ("prefill-attention-backend", "decode-attention-backend", "speculative-draft-attention-backend")
LIMITS = {"context-length": 256, "max-total-tokens": 16384, "max-running-requests": 8, "mem-fraction-static": 0.3}


def command_at_free_port(model: str, *options: str) -> tuple[str, str]:
    """Return the command that serves `model` in fp32 on the CPU, and the URL at which it will.

    `options` stand in it as they are, so that a shell puts values in the place of variables.
    """
    if "DRAFTSMITH_SGLANG" not in os.environ:
        pytest.skip("set DRAFTSMITH_SGLANG to a virtual environment with SGLang")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["env", "HF_HUB_OFFLINE=1", str(Path(os.environ["DRAFTSMITH_SGLANG"]) / "bin" / "python"), str(LAUNCHER)]
    words += [
        "--model-path",
        model,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    words += [word for backend in BACKENDS for word in (f"--{backend}", "intel_amx")]  # SGLang's backend for CPUs
    words += [word for limit, value in LIMITS.items() for word in (f"--{limit}", str(value))]
    words.append("--sleep-on-idle")  # else a server that waits keeps a core busy
    return " ".join(["exec", shlex.join(words), *options]), f"http://127.0.0.1:{port}"
