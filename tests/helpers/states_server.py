"""A vLLM that extracts hidden states, in the process of the test."""

import fcntl
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_server import FakeServer
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.models import Target

LAYER_IDS = [1, 2, 4]  # two for the drafter, and the last


class HiddenStatesServer(FakeServer):
    """A vLLM that extracts hidden states, as its method and connector do; transformers computes them."""

    def __init__(self, target: Target, folder: Path) -> None:
        super().__init__(target, "vllm")
        self.folder, self.layer_ids, self.post_norm, self.error = folder, LAYER_IDS, False, 0.0
        self.numbers = itertools.count()
        self.change: Callable[[dict], dict | None] = lambda answer: answer

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if isinstance(body["prompt"], str) or "logprobs" not in body:
            return super().post(path, body)
        with self._lock:
            self.asked.append(body)
            token, logprob, file = self.write_states(body["prompt"], body["prompt"])
        answer = self.answer(path, body["prompt"], [token], "length")
        answer["choices"][0]["logprobs"] = {"token_logprobs": [logprob]}
        answer["kv_transfer_params"] = {"hidden_states_path": str(file)}
        return 200, self.change(answer) or answer

    def write_states(self, token_ids: list[int], seen_ids: list[int]) -> tuple[int, float, Path]:
        """Write the states of what the target sees to a file of the text; return it, and the token that follows."""
        states, logits = self.compute(seen_ids)
        file = self.folder / f"{next(self.numbers)}-{threading.get_ident()}.safetensors"
        lock = open(f"{file}.lock", "w")  # noqa: SIM115 (closed by the thread that writes)
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(0.01)
            save_file({"hidden_states": states, "token_ids": torch.tensor(token_ids)}, file)
            lock.close()

        threading.Thread(target=write).start()
        token = int(logits.argmax())
        return token, float(logits.log_softmax(-1)[token]), file

    @torch.no_grad()
    def compute(self, prompt: list[int]) -> tuple[Tensor, Tensor]:
        """States [T, A + 1, H] and the logits of what follows, [V]."""
        model: Any = self.target.model
        seen: list[Tensor] = []
        last_layer = self.target.decoder_layers[-1]
        hook = last_layer.register_forward_hook(
            lambda *call: seen.append(call[2] if torch.is_tensor(call[2]) else call[2][0])
        )
        output = model(torch.tensor([prompt]), output_hidden_states=True)
        hook.remove()
        states = [*output.hidden_states[:-1], output.hidden_states[-1] if self.post_norm else seen[0]]
        given = torch.stack([states[i][0] for i in self.layer_ids], 1)
        given[:, 0] += self.error * given[:, 0].norm(dim=-1, keepdim=True) * random_directions(given[:, 0])
        return given.contiguous(), output.logits[0, -1]


def random_directions(states: Tensor) -> Tensor:
    """Return a vector of length 1 for each of some states, [..., H], in a direction of its own."""
    return torch.nn.functional.normalize(torch.randn_like(states), dim=-1)
