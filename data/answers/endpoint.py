"""A server that runs the target answers prompts: vLLM by /v1/completions, SGLang by its own /generate.

Token ids go out and token ids come back; no text is tokenised again, and a server that cannot do that is refused. Texts
with images go to another path of vLLM's (with_images.py).
"""

import hashlib
import queue
import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, StrictInt

from draftsmith.data.answers import sglang
from draftsmith.data.answers.turns import Dialogue
from draftsmith.data.answers.with_images import (
    OPTION,
    PATH,
    TOO_LONG,
    ImageAnswer,
    Name,
    One,
    check_takes_images,
    gap_with_images,
    read_answer,
    request_with_images,
)
from draftsmith.data.console import shell_path
from draftsmith.data.http import LARGEST_PAGE, PassingError, Server
from draftsmith.models.errors import UserError, shown
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.typed_json import from_json
from draftsmith.models.target.target import Target

TIMEOUT, TIMEOUT_PER_TOKEN = 120.0, 0.25  # seconds for an answer, and for each token that it may have
TOKENIZER_CHECK = (
    'def f(x):\n\treturn {"\u00e9": 3.14, "\u6f22\u5b57": [1234567]}  # \U0001f642 \u00dcml\u00e4ut\n\n   end'
)

BYTES_PER_TOKEN = 64  # of an answer: ids of prompt and answer, and its text
MOST_REQUESTS = 1024  # that are open at once; each has a thread


# --- what a server answers


@dataclass
class ServedModel:
    """A model that a server has."""

    id: Name
    owned_by: Name = ""  # SGLang gives its own name
    max_model_len: Annotated[StrictInt, Field(gt=0)] | None = None  # most tokens of prompt and answer


@dataclass
class ServedModels:
    """The answer at /v1/models."""

    data: list[ServedModel]


@dataclass
class Choice:
    """A text of a completion. A server without vLLM's `return_token_ids` gives no ids."""

    finish_reason: Name | None = None
    token_ids: list[StrictInt] | None = None
    prompt_token_ids: list[StrictInt] | None = None


@dataclass
class Completion:
    """The answer at /v1/completions."""

    choices: Annotated[list[Choice], One]


@dataclass
class TopLogprobs:
    """The log-probabilities of the likeliest tokens, by their text, of the one token that was asked for."""

    top_logprobs: Annotated[list[Annotated[dict[str, FiniteFloat], Field(min_length=2)]], One]


@dataclass
class RatedChoice:
    """A text of a completion with the likeliest tokens beside each of its own."""

    logprobs: TopLogprobs


@dataclass
class Rated:
    """The answer at /v1/completions where the likeliest tokens are asked for, too."""

    choices: Annotated[list[RatedChoice], One]


@dataclass
class Answer:
    """An answer of a server, and the text before it as the target read it."""

    new_ids: list[int]
    read_ids: list[int]
    told: sglang.GeneratedInfo | None = None  # what an SGLang tells of it


class Endpoint:
    """A server at `url` that runs the target. `context`: most tokens of prompt and answer that both take.

    `setting` is where the user gave the URL, and `command` what starts such a server; messages name both.

    Raises `UserError` where nothing answers, the server runs another model, tokenises otherwise, or returns no token
    ids.
    """

    def __init__(
        self,
        url: str,
        target: Target,
        max_new_tokens: int,
        seed: int = 0,
        setting: str = "--endpoint",
        command: str | None = None,
    ) -> None:
        mend = f"start one, such as `{command or shlex.join(['vllm', 'serve', shell_path(target.name)])}`"
        timeout = TIMEOUT + TIMEOUT_PER_TOKEN * max_new_tokens
        self.server = Server(url, setting, mend, timeout, LARGEST_PAGE + BYTES_PER_TOKEN * target.context)
        self.target, self.max_new_tokens, self.seed = target, max_new_tokens, seed
        served = self._served_model()
        self.model = served.id
        self.context = min(target.context, served.max_model_len or target.context)
        self.is_sglang = self._is_sglang(served.owned_by == "sglang")

    def answers(self, dialogues: Iterator[Dialogue], most_at_a_time: int) -> Iterator[Dialogue]:
        """Answer all turns of the dialogues and yield each as it finishes; then the server is asked no more.

        `most_at_a_time`: number of requests that are open at once.
        """
        lock = threading.Lock()  # tokenizers are not made for threads
        results: queue.Queue[Dialogue | BaseException | None] = queue.Queue()

        def answer_dialogues() -> None:
            try:
                while not self.server.stopped.is_set():
                    with lock:
                        dialogue = next(dialogues, None)
                    if dialogue is None:
                        break
                    while not dialogue.finished:
                        answer = self._answer(dialogue)
                        with lock:
                            if answer is None:
                                dialogue.stop()
                            else:
                                dialogue.take(answer.new_ids, self.context - self.max_new_tokens, answer.read_ids)
                    results.put(dialogue)
                results.put(None)
            except BaseException as error:  # panics of the Rust tokenizers are no `Exception`
                results.put(error)

        for _ in range(most_at_a_time):
            threading.Thread(target=answer_dialogues, daemon=True).start()
        running = most_at_a_time
        try:
            while running:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    running -= 1
                else:
                    yield result
        finally:
            self.server.stopped.set()

    def _answer(self, dialogue: Dialogue) -> Answer | None:
        """Return the answer to a dialogue; None where its images make it longer than the context."""
        context, sampling, request_id = dialogue.context, dialogue.sampling, dialogue.request_id
        if not dialogue.images:
            return self.complete(context, sampling, request_id)
        try:
            urls = [image.url for image in dialogue.images]
            return self.complete_with_images(context, urls, sampling, request_id)
        except UserError as error:
            if TOO_LONG in str(error):
                return None
            raise UserError(f"{dialogue.where}: {error}") from None

    def complete(self, prompt: list[int], sampling: Sampling, request_id: int, images: Sequence[str] = ()) -> Answer:
        """Return the server's answer to a prompt, its end of text included. `images`: data: URLs."""
        if images:
            return self.complete_with_images(prompt, images, sampling, request_id)
        if self.is_sglang:
            return self._generate(prompt, sampling)
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.max_new_tokens, **self._settings(sampling)}
        body |= {"seed": self._seed(request_id), "return_token_ids": True}

        def read(answer: Any) -> Answer:
            (choice,) = read_answer(Completion, answer).choices
            if choice.prompt_token_ids != prompt:
                raise PassingError("an answer to another prompt")
            return Answer(self._checked(choice.token_ids or [], choice.finish_reason), prompt)

        return self.server.ask("/v1/completions", body, read)

    def _generate(self, prompt: list[int], sampling: Sampling) -> Answer:
        """Return SGLang's answer to a prompt."""
        settings = {"max_new_tokens": self.max_new_tokens, **self._settings(sampling)}

        def read(answer: Any) -> Answer:
            generated = read_answer(sglang.Generated, answer)
            return Answer(self._checked(*sglang.ending_of(generated)), prompt, generated.meta_info)

        return self.server.ask(sglang.PATH, {"input_ids": prompt, "sampling_params": settings}, read)

    def complete_with_images(
        self, prompt: list[int], images: Sequence[str], sampling: Sampling, request_id: int
    ) -> Answer:
        """Return vLLM's answer to a prompt with images, in which each stands as the chat template writes it."""
        settings = {"max_tokens": self.max_new_tokens, "seed": self._seed(request_id), **self._settings(sampling)}

        def read(answer: Any) -> Answer:
            written = read_answer(ImageAnswer, answer)
            (choice,) = written.choices
            self._check_tokens(written.prompt_token_ids, self.context)
            return Answer(self._checked(choice.token_ids, choice.finish_reason), written.prompt_token_ids)

        return self.server.ask(PATH, request_with_images(self.model, prompt, images, settings), read)

    def check_takes_images(self) -> None:
        """Raise `UserError` where the server takes no images beside token ids."""
        if self.is_sglang:
            raise UserError(
                f"{self.server.name} is an SGLang, which does not tell the tokens that the target reads for an image: "
                f"serve with vLLM 0.32 or later and {OPTION}"
            )
        check_takes_images(self.server, self.model, self.target.eos_token_ids[0])

    def _settings(self, sampling: Sampling) -> dict[str, Any]:
        """Return what tells a server how to draw, and nothing of which is left to its own defaults."""
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "skip_special_tokens": False,
            "stop_token_ids": self.target.eos_token_ids,
        }

    def _seed(self, request_id: int) -> int:
        return int(hashlib.sha256(f"{self.seed}/{request_id}".encode()).hexdigest()[:7], 16)

    def top_two_gap(self, text: list[int], images: Sequence[str] = ()) -> float:
        """Return how far apart the server holds the log-probabilities of the two likeliest tokens behind a text."""
        if self.is_sglang:
            return sglang.top_two_gap(self.server, text)
        if images:
            settings = {"max_tokens": 1, "temperature": 0.0, "logprobs": 2}
            return self.server.ask(PATH, request_with_images(self.model, text, images, settings), gap_with_images)
        body = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0.0, "logprobs": 2}

        def read(answer: Any) -> float:
            ((likeliest,),) = (choice.logprobs.top_logprobs for choice in read_answer(Rated, answer).choices)
            first, second = sorted(likeliest.values(), reverse=True)[:2]
            return first - second

        return self.server.ask("/v1/completions", {**body, "return_tokens_as_token_ids": True}, read)

    def _checked(self, new_ids: list[int], reason: str | None) -> list[int]:
        """Return the token ids of an answer. Raises `PassingError` for none that a target gives."""
        if reason not in ("stop", "length"):
            raise PassingError(f"an answer that ended by {reason!r}")
        self._check_tokens(new_ids, self.max_new_tokens)
        if reason == "stop" and new_ids[-1] not in self.target.eos_token_ids:
            raise UserError(
                f"{self.server.name} ends texts at token {new_ids[-1]}, which is none of the target's ends of text "
                f"{self.target.eos_token_ids}: serve the same generation_config.json that --target has"
            )
        return new_ids

    def _check_tokens(self, token_ids: list[int], most: int) -> None:
        known = all(0 <= token < self.target.vocab_size for token in token_ids)
        if not (known and 1 <= len(token_ids) <= most):
            raise PassingError(f"{len(token_ids)} tokens, of at most {most} of the target's vocabulary")

    # --- what is checked before the first prompt

    def _served_model(self) -> ServedModel:
        """Return the model under which the target is served."""
        answer = self.server.json("/v1/models")
        try:
            models = {model.id: model for model in from_json(ServedModels, answer).data}
        except UserError as error:
            raise UserError(
                f"{self.server.name} does not say which model it serves ({error}); {self.server.mend}"
            ) from None
        if self.target.name in models:
            return models[self.target.name]
        if len(models) != 1:
            raise UserError(
                f"{self.server.name} serves {shown(list(models))}: serve {self.target.name} alone, or under that name"
            )
        return next(iter(models.values()))

    def _is_sglang(self, says_so: bool) -> bool:
        """Return whether texts are asked for at SGLang's /generate, which all versions have, or at /v1/completions.

        Both are asked to tokenise a text. `says_so`: the server says that it is an SGLang.
        """
        token_ids = None if says_so else self._tokenised_by_completions()
        generates = token_ids is None
        if generates:
            token_ids = sglang.tokenised(self.server, TOKENIZER_CHECK)
        if token_ids is None:
            raise UserError(
                f"{self.server.name} returns text without token ids, and text tokenised again is not what was "
                "sampled: serve with vLLM 0.10.2 or later, or SGLang"
            )
        if token_ids != self.target.encode(TOKENIZER_CHECK):
            raise UserError(
                f"{self.server.name} serves {self.model}, whose tokenizer is not that of {self.target.name}: "
                "give the --target that is served"
            )
        return generates

    def _tokenised_by_completions(self) -> list[int] | None:
        body = {"model": self.model, "prompt": TOKENIZER_CHECK, "max_tokens": 1, "temperature": 0.0}
        answer = self.server.ask("/v1/completions", {**body, "return_token_ids": True}, lambda answer: answer)
        try:
            (choice,) = from_json(Completion, answer).choices
        except UserError:
            return None
        return choice.prompt_token_ids if choice.token_ids else None
