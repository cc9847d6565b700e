"""Features from a running vLLM: the hidden states of the texts that it is sent (its method `extract_hidden_states`).

The server writes them to a file for each text, in a folder that this process sees, too, or that a service beside it
gives away (file_service.py); what was read is removed.
A layer id means there what it means here. The state after the last layer is the one before the final norm, which is
applied here (vllm/model_executor/models/llama.py; layers come in ascending order).

Samples with images are sent with their images to another path (answers/with_images.py), and whole.

Shapes: B rows, T tokens, V vocabulary, H hidden width, A number of layers asked for.
"""

import json
import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field, FiniteFloat, StrictInt
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.answers.with_images import OPTION, PATH, Name, One, request_with_images
from draftsmith.data.console import shell_path
from draftsmith.data.features import file_service
from draftsmith.data.features.stored import token_bytes
from draftsmith.data.http import NoAnswer, PassingError, Server
from draftsmith.data.samples.batches import BatchPlan
from draftsmith.data.samples.folder import AGREEMENT, agreement, greedy_samples
from draftsmith.data.samples.images import kept_image
from draftsmith.data.samples.sample import Sample
from draftsmith.models import Target
from draftsmith.models.batch import Batch
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.reading import open_tensors
from draftsmith.models.storage.typed_json import from_json
from draftsmith.models.target.target_files import why_not_read

SETTING = "data.features_endpoint"
FILES_SETTING = "data.features_files"
CHECKED_TEXTS = 16
CHECKED_TOKENS = 512  # of a text, that the target's own layers or its head compute at once
LOGPROB_ERROR = 0.2  # on the mean, between the server's and the head's; bf16 logits of 20 err by 0.06
FRAME_BYTES = 1 << 20  # of a file of states beside them
STATE_ERROR = 0.1  # of a state's norm, on the mean; a layer mostly changes more
LOW_BITS_ERROR = 0.5  # the same for engines that compute in few bits; what one of 4 gives errs by 0.1 to 0.2

T = TypeVar("T")


@dataclass
class Logprobs:
    """The log-probability of the token that follows a text."""

    token_logprobs: Annotated[list[FiniteFloat], One]


@dataclass
class TokenChoice:
    """The one token that follows a text."""

    token_ids: Annotated[list[StrictInt], One]
    logprobs: Logprobs


@dataclass
class Transfer:
    """The file that the server wrote the hidden states to."""

    hidden_states_path: Name


@dataclass
class TextAnswer:
    """The answer at /v1/completions to a text whose hidden states are wanted."""

    choices: Annotated[list[TokenChoice], One]
    kv_transfer_params: Transfer


@dataclass
class TokenLogprob:
    """The log-probability of a token."""

    logprob: FiniteFloat


@dataclass
class ImageLogprobs:
    """The log-probability of the token that follows a text with images."""

    content: Annotated[list[TokenLogprob], One]


@dataclass
class ImageTokenChoice:
    """The one token that follows a text with images."""

    token_ids: Annotated[list[StrictInt], One]
    logprobs: ImageLogprobs


@dataclass
class Placeholders:
    """The place of an image's tokens among those that the target read."""

    offset: Annotated[StrictInt, Field(ge=0)]


@dataclass
class ImageTextAnswer:
    """The answer to a text with images whose hidden states are wanted."""

    choices: Annotated[list[ImageTokenChoice], One]
    prompt_token_ids: list[StrictInt]
    mm_placeholders: Annotated[dict[Name, Annotated[list[Placeholders], Field(min_length=1)]], Field(min_length=1)]
    kv_transfer_params: Transfer


@dataclass
class TextStates:
    """The states that the server computed on a text."""

    states: Tensor  # [T, A + 1, H], the last ones before the final norm
    num_before_images: int  # tokens before the first image, T where there is none
    token: int  # the likeliest to follow
    logprob: float  # of that token


class FeatureServer:
    """A vLLM that gives the states of a plan's samples. It is to be checked before it is believed.

    Raises `UserError` where nothing answers at `url`, or what answers does not take such texts. `read_sample` and
    `check` raise `PassingError` for what another attempt may mend, and `UserError` for a server that gives no hidden
    states.
    """

    def __init__(
        self,
        url: str,
        target: Target,
        layer_ids: tuple[int, ...],
        plan: BatchPlan,
        folder: Path,
        files_url: str | None = None,
    ) -> None:
        """`folder` has the samples. `files_url` is where the files are given that the server writes."""
        self.target, self.layer_ids, self.plan, self.folder = target, layer_ids, plan, folder
        options = serve_options([*layer_ids, target.num_layers], "/dev/shm/hidden_states")
        if plan.samples.has_images.any():
            options.append(OPTION)
        self.command = shlex.join(["vllm", "serve", shell_path(target.name), *options])
        self.endpoint = Endpoint(url, target, 1, setting=SETTING, command=self.command)
        self.name = self.endpoint.server.name
        if plan.samples.has_images.any():
            self.endpoint.check_takes_images()
        sent_whole = plan.samples.has_images
        longest = max(int(plan.samples.lengths[i]) if sent_whole[i] else plan.lengths[i] for i in plan.read)
        if longest >= self.endpoint.context:
            raise UserError(
                f"{self.name} takes {self.endpoint.context} tokens, and it writes one after the longest sample's "
                f"{longest}: serve with --max-model-len {longest + 1}, or give data.max_length="
                f"{self.endpoint.context - 1}"
            )
        self.files: Server | None = None
        if files_url is not None:
            mend = "see to the file service"
            largest = FRAME_BYTES + 2 * longest * token_bytes(len(layer_ids) + 1, target.hidden_size, "float32")
            self.files = Server(files_url, FILES_SETTING, mend, self.endpoint.server.timeout, largest)

    def read_sample(self, index: int) -> Tensor:
        """Return the states [T, A + 1, H] of a sample, as far as the plan reads it."""
        return self._read(self._sent(self.plan.samples[index])).states[: self.plan.lengths[index]]

    def _sent(self, sample: Sample) -> Sample:
        """Return a sample as far as the plan reads it; one with images whole, since these are sent with all of it."""
        return sample if sample.images else replace(sample, token_ids=sample.token_ids[: self.plan.max_length])

    def _read(self, sample: Sample) -> TextStates:
        """Return what the server computes on a sample."""
        return self.read_with_images(sample) if sample.images else self.read(sample.token_ids)

    def read(self, token_ids: list[int]) -> TextStates:
        """Return what the server computes on a text."""
        body = {"model": self.endpoint.model, "prompt": token_ids, "max_tokens": 1, "temperature": 0.0, "logprobs": 1}

        def read(answer: Any) -> TextStates:
            written = self._typed(TextAnswer, answer)
            (choice,) = written.choices
            (token,), (logprob,) = choice.token_ids, choice.logprobs.token_logprobs
            return self._states(written.kv_transfer_params, token_ids, len(token_ids), token, logprob)

        return self.endpoint.server.ask_once("/v1/completions", {**body, "return_token_ids": True}, read)

    def read_with_images(self, sample: Sample) -> TextStates:
        """Return what the server computes on a sample with images, the whole of it."""
        images = [kept_image(self.folder, name).url for name in sample.images]
        sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1}

        def read(answer: Any) -> TextStates:
            written = self._typed(ImageTextAnswer, answer)
            if written.prompt_token_ids != sample.token_ids:
                raise UserError(
                    f"{self.name} reads other tokens for the images of prompt {sample.prompt_index + 1} than the "
                    "server that answered it: serve with the same version, processor and options, or prepare again"
                )
            (choice,) = written.choices
            (token,), (logprob,) = choice.token_ids, choice.logprobs.content
            before = min(place.offset for places in written.mm_placeholders.values() for place in places)
            return self._states(written.kv_transfer_params, sample.token_ids, before, token, logprob.logprob)

        return self.endpoint.server.ask_once(
            PATH, request_with_images(self.endpoint.model, sample.sent_ids, images, sampling), read
        )

    def _typed(self, kind: type[T], answer: Any) -> T:
        """Return an answer as a value of its type. Raises `UserError` where the server gives no hidden states."""
        try:
            return from_json(kind, answer)
        except UserError:
            raise UserError(f"{self.name} gives no hidden states: start it as `{self.command}`") from None

    def _states(
        self, transfer: Transfer, token_ids: list[int], num_before: int, token: int, logprob: float
    ) -> TextStates:
        """Return what an answer tells. Raises `PassingError` where it is not about this text."""
        path = Path(transfer.hidden_states_path)
        if not 0 <= token < self.target.vocab_size:
            raise UserError(
                f"{self.name} writes token {token}, which {self.target.name} has not: serve this target, as "
                f"`{self.command}`"
            )
        if self.files is not None:
            states = self._fetch_states(self.files, path.name, token_ids)
        else:
            wait_until_written(path, self.endpoint.server.timeout)
            states = self._read_states(path, token_ids)
            file_service.remove(path)
        return TextStates(states, num_before, token, logprob)

    def _fetch_states(self, files: Server, name: str, token_ids: list[int]) -> Tensor:
        """Return the states that a file of the server's holds, by its name; nothing but the service is asked for it."""
        if not file_service.NAME.fullmatch(name):
            raise UserError(f"{self.name} writes hidden states to {name!r}, which is no name of such a file")
        try:
            content = files.content(f"/{name}", {})
        except NoAnswer as error:  # of the service, which says nothing of the server
            raise PassingError(f"{files.name}: {first_line(error)}") from None
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(content)
            file.flush()
            return self._read_states(Path(file.name), token_ids)

    def _read_states(self, path: Path, token_ids: list[int]) -> Tensor:
        """Return the states [T, A + 1, H] of a text that a file holds.

        A server may name any file: what holds another text is not read. Raises `PassingError` or `UserError` for it.
        """
        expected = [len(token_ids), len(self.layer_ids) + 1, self.target.hidden_size]
        states = None
        try:
            with open_tensors(path) as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no dict)
                same_length = shapes.get("token_ids") == expected[:1]
                same_text = same_length and file.get_tensor("token_ids").tolist() == token_ids
                if same_text and shapes.get("hidden_states") == expected:
                    states = file.get_tensor("hidden_states")
        except (UserError, SafetensorError, OSError) as error:
            raise PassingError(f"the hidden states cannot be read: {first_line(error)}") from None
        if not same_text:
            raise PassingError(f"{path} holds hidden states of another text")
        if states is None:
            raise UserError(
                f"{self.name} gives hidden states of shape {shapes.get('hidden_states')} and not {expected}: tokens, "
                f"layers {list(self.layer_ids)} and the last one, width; start it as `{self.command}`"
            )
        if not (states.is_floating_point() and states.isfinite().all()):
            raise UserError(f"{self.name} gives hidden states in {path} that are no finite numbers: see to the server")
        return states

    # --- what is checked before anything is kept

    @torch.no_grad()
    def check(self) -> None:
        """Raise `UserError` for states that are not the target's.

        The server's probabilities, the first layer and the samples show it.
        """
        samples = [self._sent(self.plan.samples[index]) for index in self.plan.trained[:CHECKED_TEXTS]]
        readings = [self._read(sample) for sample in samples]
        last = [self._logits(reading.states[-1:])[0].log_softmax(-1) for reading in readings]
        errors = [
            abs(logprobs[reading.token] - reading.logprob) for logprobs, reading in zip(last, readings, strict=True)
        ]
        error = float(torch.stack(errors).mean())
        if not error < LOGPROB_ERROR:
            raise UserError(
                f"{self.name}: the head of {self.target.name} makes other probabilities of the last hidden states "
                f"than the server does (they differ by a factor of e^{error:.2g}): serve this target, as "
                f"`{self.command}`"
            )
        is_inner = bool(self.layer_ids) and self.layer_ids[0] < self.target.num_layers  # the head shows the last one
        if is_inner and why_not_read(self.target.name) is None:  # no layers can be had of the others
            self._check_first_layer(samples, readings)
        greedy = [self._sent(sample) for sample in greedy_samples(self.plan.samples)]
        share = agreement(greedy, lambda sample: self._choices(self._read(sample).states))
        if share < AGREEMENT:
            raise UserError(
                f"{self.name} would write {share:.0%} of the greedy tokens of the samples; the target that wrote "
                f"them writes {AGREEMENT:.0%} or more: serve that one, or prepare again"
            )

    def _logits(self, states: Tensor) -> Tensor:
        """Return the target's fp32 logits [T, V] of what follows states [T, A + 1, H]."""
        last = states[:, -1].to(self.target.device, self.target.dtype)
        return self.target.logits(self.target.final_norm(last)).float()

    def _choices(self, states: Tensor) -> Tensor:
        """Return the likeliest token [T] behind each of the states [T, A + 1, H]. Logits are never whole in memory."""
        return torch.cat([self._logits(part).argmax(-1).cpu() for part in states.split(CHECKED_TOKENS)])

    def _check_first_layer(self, samples: list[Sample], readings: list[TextStates]) -> None:
        """Raise `UserError` where the states of the first layer come out of another layer of the target.

        They are compared with the target's own, on the sample with the most tokens before an image, which the target's
        first layers do not know. States that are not exact may come from an engine that computes in few bits: then they
        have to be nearer to this layer's than to the next ones', as they are whatever the size of a random error.
        """
        layer_id = self.layer_ids[0]
        sample, reading = max(zip(samples, readings, strict=True), key=lambda pair: pair[1].num_before_images)
        number = min(reading.num_before_images, CHECKED_TOKENS)  # attention takes memory with its square
        if not number:
            return
        token_ids, given = sample.token_ids[:number], reading.states[:number, 0].float()
        (error,) = self._layer_errors(token_ids, given, (layer_id,))
        if error < STATE_ERROR:
            return
        if error < LOW_BITS_ERROR:
            near = tuple(range(max(1, layer_id - 1), min(layer_id + 1, self.target.num_layers) + 1))
            _, nearest = min(zip(self._layer_errors(token_ids, given, near), near, strict=True))
            if nearest == layer_id:
                return
        raise UserError(
            f"{self.name}: what it gives as layer {layer_id} is not what comes out of that layer of "
            f"{self.target.name} (relative error {error:.1e}): start it as `{self.command}`"
        )

    def _layer_errors(self, token_ids: list[int], states: Tensor, layer_ids: tuple[int, ...]) -> list[float]:
        """Return how far the server's states [T, H] lie from each of these layers', as a share of their own norm.

        The target's own first layers are read for this alone.
        """
        target = self.target
        first = Target.first_layers_from_pretrained(target.name, layer_ids[-1], target.device, target.dtype)
        row = torch.tensor([token_ids], device=target.device)
        own = first.features(Batch(row, torch.ones_like(row, dtype=torch.bool)), layer_ids).layers
        assert own is not None
        distances = (states[:, None] - own[0].float().cpu().unflatten(-1, (len(layer_ids), -1))).norm(dim=-1)
        errors: list[float] = (distances / states.norm(dim=-1, keepdim=True).clamp(min=1e-6)).mean(0).tolist()
        return errors


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


def wait_until_written(path: Path, seconds: float) -> None:
    """Return when the server has unlocked a file. Raises `UserError` where no such file is seen here."""
    try:
        file_service.wait_until_written(path, seconds)
    except TimeoutError as error:
        raise PassingError(str(error)) from None
    except FileNotFoundError as error:
        raise UserError(
            f"the server writes hidden states to {path}, but {error.filename} is not there: give it a "
            "shared_storage_path that this process sees, too, and leave its use_synchronization_lock on; or give "
            f"{FILES_SETTING}"
        ) from None
    except (OSError, ValueError) as error:  # `ValueError`: a path that holds a null byte
        raise UserError(f"the server writes hidden states to {path}: {first_line(error)}") from None
