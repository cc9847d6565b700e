"""Features from a running vLLM: the hidden states of the texts that it is sent (its method `extract_hidden_states`).

The server writes them to a file for each text, in a folder that this process sees, too; what was read is removed.
A layer id means there what it means here. The state after the last layer is the one before the final norm, which is
applied here (vllm/model_executor/models/llama.py; layers come in ascending order).

Shapes: B rows, T tokens, V vocabulary, H hidden width, A number of layers asked for.
"""

import fcntl
import json
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.console import shell_path
from draftsmith.data.http import PassingError
from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.data.samples.samples import AGREEMENT, agreement
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.target.target import Features

SETTING = "data.features_endpoint"
REQUESTS = 32  # at a time
CHECKED_TEXTS = 16
LOGPROB_ERROR = 0.2  # on the mean, between the server's and the head's; bf16 logits of 20 err by 0.06
STATE_ERROR = 0.1  # of a state's norm, on the mean; a layer changes far more


@dataclass
class TextStates:
    """The states that the server computed on a text."""

    states: Tensor  # [T, A + 1, H], the last ones before the final norm
    token: int  # the likeliest to follow
    logprob: float  # of that token


class EndpointFeatures:
    """A `FeatureSource` of a plan's samples, one a row, from the server at `url`.

    Raises `UserError` where the server gives no hidden states, those of other layers or of another target.
    """

    def __init__(self, url: str, target: Target, layer_ids: tuple[int, ...], plan: BatchPlan) -> None:
        self.target, self.layer_ids, self.plan = target, layer_ids, plan
        options = serve_options([*layer_ids, target.num_layers], "/dev/shm/hidden_states")
        self.command = shlex.join(["vllm", "serve", shell_path(target.name), *options])
        self.endpoint = Endpoint(url, target, 1, setting=SETTING, command=self.command)
        longest = max(plan.lengths[index] for index in plan.trained)
        if longest >= self.endpoint.context:
            raise UserError(
                f"{SETTING}={url} takes {self.endpoint.context} tokens, and it writes one after the longest sample's "
                f"{longest}: serve with --max-model-len {longest + 1}, or give data.max_length="
                f"{self.endpoint.context - 1}"
            )
        self._check()

    def __call__(self, rows: MicroBatch, batch: Batch) -> Features:
        texts = [batch.token_ids[number, : self.plan.lengths[index]].tolist() for number, (index,) in enumerate(rows)]
        states = torch.zeros(*batch.token_ids.shape, len(self.layer_ids) + 1, self.target.hidden_size)
        with ThreadPoolExecutor(REQUESTS) as pool:
            for row, reading in zip(states, pool.map(self.read, texts), strict=True):
                row[: len(reading.states)] = reading.states
        states = states.to(self.target.device, self.target.dtype)
        layers = states[:, :, :-1].flatten(2) if self.layer_ids else None
        return Features(self._last_hidden(states), layers)

    def read(self, token_ids: list[int]) -> TextStates:
        """Return what the server computes on a text. Raises `UserError` where it fails or is no such server."""
        body = {"model": self.endpoint.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
        return self.endpoint.server.ask(
            "/v1/completions", {**body, "return_token_ids": True}, lambda answer: self._read_answer(answer, token_ids)
        )

    def _read_answer(self, answer: Any, token_ids: list[int]) -> TextStates:
        """Return what an answer tells. Raises `PassingError` where it is not about this text."""
        try:
            transfer = answer["kv_transfer_params"] or {}
            path = Path(transfer["hidden_states_path"])
            (choice,) = answer["choices"]
            token, logprob = choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]
        except (KeyError, TypeError, IndexError, ValueError):
            raise UserError(
                f"{SETTING}={self.endpoint.server.url} gives no hidden states: start it as `{self.command}`"
            ) from None
        tensors = take_file(path)
        if tensors.get("token_ids", torch.empty(0)).tolist() != token_ids:
            raise PassingError(f"{path} holds hidden states of another text")
        states = tensors["hidden_states"]
        expected = (len(token_ids), len(self.layer_ids) + 1, self.target.hidden_size)
        if tuple(states.shape) != expected:
            raise UserError(
                f"{SETTING}={self.endpoint.server.url} gives hidden states of shape {list(states.shape)} and not "
                f"{list(expected)}: tokens, layers {list(self.layer_ids)} and the last one, width; start it as "
                f"`{self.command}`"
            )
        return TextStates(states, token, logprob)

    @torch.no_grad()
    def _last_hidden(self, states: Tensor) -> Tensor:
        """Return the last of the states [..., A + 1, H] after the final norm: [..., H]."""
        return self.target.final_norm(states[..., -1, :])

    # --- what is checked before the first shard

    @torch.no_grad()
    def _check(self) -> None:
        """Raise `UserError` for states that are not the target's.

        The server's probabilities, the first layer and the samples show it.
        """
        texts = [self.plan.samples[i].token_ids[: self.plan.lengths[i]] for i in self.plan.trained[:CHECKED_TEXTS]]
        readings = [self.read(text) for text in texts]
        where = f"{SETTING}={self.endpoint.server.url}"
        errors = [abs(self._logits(reading.states[-1:])[0, reading.token] - reading.logprob) for reading in readings]
        error = float(torch.stack(errors).mean())
        if not error < LOGPROB_ERROR:
            raise UserError(
                f"{where}: the head of {self.target.name} makes other probabilities of the last hidden states than the "
                f"server does (they differ by a factor of e^{error:.2g}): serve this target, as `{self.command}`"
            )
        if self.layer_ids and not (error := self._first_layer_error(texts[0], readings[0].states)) < STATE_ERROR:
            raise UserError(
                f"{where}: what it gives as layer {self.layer_ids[0]} is not what comes out of that layer of "
                f"{self.target.name} (relative error {error:.1e}): start it as `{self.command}`"
            )
        cut = [replace(sample, token_ids=sample.token_ids[: self.plan.max_length]) for sample in self.plan.samples]
        share = agreement(cut, lambda text: self._logits(self.read(text).states).argmax(-1))
        if share < AGREEMENT:
            raise UserError(
                f"{where} would write {share:.0%} of the greedy tokens of the samples; the target that wrote them "
                f"writes {AGREEMENT:.0%} or more: serve that one, or prepare again"
            )

    def _logits(self, states: Tensor) -> Tensor:
        """Return the log-probabilities [T, V] of what follows."""
        last = self._last_hidden(states.to(self.target.device, self.target.dtype))
        return self.target.logits(last).float().log_softmax(-1).cpu()

    def _first_layer_error(self, token_ids: list[int], states: Tensor) -> float:
        """Return the relative error of the first layer's states.

        It is taken against the target's own first layers, which are read for this alone.
        """
        target, layer_id = self.target, self.layer_ids[0]
        first = Target.first_layers_from_pretrained(target.name, layer_id, target.device, target.dtype)
        row = torch.tensor([token_ids], device=target.device)
        own = first.features(Batch(row, torch.ones_like(row, dtype=torch.bool)), (layer_id,)).layers
        assert own is not None
        expected = own[0].float().cpu()
        difference = (states[:, 0].float() - expected).norm(dim=-1)
        return float((difference / expected.norm(dim=-1).clamp(min=1e-6)).mean())


def serve_options(layer_ids: list[int], folder: str) -> list[str]:
    """Return the options of `vllm serve` for a server that writes the states after these layers to a folder."""
    drafter = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": drafter}
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    extra = {"kv_connector_extra_config": {"shared_storage_path": folder}}
    return [
        "--speculative-config",
        json.dumps(speculation),
        "--kv-transfer-config",
        json.dumps({**transfer, **extra}),
    ]


def take_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, which the server locks while it writes, and remove file and lock."""
    lock = Path(f"{path}.lock")
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH)  # waits for the server
        tensors = load(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(
            f"the server writes hidden states to {path}, but {error.filename} is not there: give it a "
            "shared_storage_path that this process sees, too, and leave its use_synchronization_lock on"
        ) from None
    except (SafetensorError, OSError) as error:
        raise PassingError(f"{path} cannot be read: {first_line(error)}") from None
    for written in (path, lock):
        written.unlink(missing_ok=True)
    return tensors
