"""A vLLM that `draftsmith tune-server` starts on this machine for a measurement, and that ends with it."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.http import Server
from draftsmith.recipes.bench.runner import Rival, rival_at
from draftsmith.recipes.serving.vllm_run import SpeculativeConfig, vllm_environment
from draftsmith.train.engine.restarted import EngineCommand, started


@dataclass(frozen=True)
class VllmStarter:
    """The interpreter that has vLLM, and what each server is started with."""

    python: Path
    options: Sequence[str]  # words of the user's
    log: Path
    timeout: float  # seconds until an answer counts as failed

    @contextlib.contextmanager
    def serving(
        self, model: str, speculative_config: SpeculativeConfig | None, on_wait: Callable[[], None]
    ) -> Iterator[tuple[Rival, float]]:
        """Yield a server of the model, and the seconds until it answered. Raises `UserError` where it does not start.

        It listens on 127.0.0.1 alone. Its module is run and not the script `vllm`, which CPU builds lack data for.
        """
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        words = [str(self.python.absolute()), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        words += ["--host", "127.0.0.1", "--port", str(port), *self.options]
        if speculative_config is not None:
            words += ["--speculative-config", speculative_config.text]
        command = EngineCommand(words, vllm_environment(), "tune-server")
        server = Server(url, "tune-server", f"see {self.log}", self.timeout)
        with started(command, server, self.log, on_wait) as seconds:
            yield rival_at(url, "tune-server", None, self.timeout), seconds


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
