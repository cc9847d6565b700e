"""A server that runs the target answers prompts: vLLM by /v1/completions, SGLang by its own /generate.

Token ids go out and token ids come back; no text is tokenised again, and a server that cannot do that is refused.
"""

import hashlib
import queue
import shlex
import threading
from collections.abc import Iterator
from typing import Any

from draftsmith.data.answers.turns import Dialogue
from draftsmith.data.console import shell_path
from draftsmith.data.http import PassingError, Server
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.target import Target

TIMEOUT, TIMEOUT_PER_TOKEN = 120.0, 0.25  # seconds for an answer to begin, and for each token that it may have
TOKENIZER_CHECK = (
    'def f(x):\n\treturn {"\u00e9": 3.14, "\u6f22\u5b57": [1234567]}  # \U0001f642 \u00dcml\u00e4ut\n\n   end'
)


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
        self.server = Server(url, f"{setting} {url}", mend, TIMEOUT + TIMEOUT_PER_TOKEN * max_new_tokens)
        self.target, self.max_new_tokens, self.seed = target, max_new_tokens, seed
        self.model, served_context = self._served_model()
        self.context = min(target.context, served_context or target.context)
        self._is_sglang = not self._completes_in_token_ids()

    def answers(self, dialogues: Iterator[Dialogue], most_at_a_time: int) -> Iterator[Dialogue]:
        """Answer all turns of the dialogues and yield each as it finishes; then the server is asked no more.

        `most_at_a_time`: number of requests that are open at once.
        """
        lock = threading.Lock()  # tokenizers are not made for threads
        results: queue.Queue[Dialogue | Exception | None] = queue.Queue()

        def answer_dialogues() -> None:
            try:
                while not self.server.stopped.is_set():
                    with lock:
                        dialogue = next(dialogues, None)
                    if dialogue is None:
                        break
                    while not dialogue.finished:
                        new_ids = self.complete(dialogue.context, dialogue.sampling, dialogue.request_id)
                        with lock:
                            dialogue.take(new_ids, self.context - self.max_new_tokens)
                    results.put(dialogue)
                results.put(None)
            except Exception as error:
                results.put(error)

        for _ in range(most_at_a_time):
            threading.Thread(target=answer_dialogues, daemon=True).start()
        running = most_at_a_time
        try:
            while running:
                result = results.get()
                if isinstance(result, Exception):
                    raise result
                if result is None:
                    running -= 1
                else:
                    yield result
        finally:
            self.server.stopped.set()

    def complete(self, prompt: list[int], sampling: Sampling, request_id: int) -> list[int]:
        """Return the token ids of the server's answer to a prompt, its end of text included."""
        seed = int(hashlib.sha256(f"{self.seed}/{request_id}".encode()).hexdigest()[:7], 16)
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,  # this and the following are sent so that no default of the server's comes in
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "skip_special_tokens": False,
            "stop_token_ids": self.target.eos_token_ids,
        }
        limit = self.max_new_tokens
        body: dict[str, Any]
        if self._is_sglang:
            path, body = "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": limit, **settings}}
        else:
            path, body = "/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": limit, **settings}
            body |= {"seed": seed, "return_token_ids": True}
        return self.server.ask(path, body, lambda answer: self._read(answer, prompt))

    def _read(self, answer: Any, prompt: list[int]) -> list[int]:
        """Return the token ids of an answer to `prompt`. Raises `PassingError` where it is no answer to that."""
        try:
            if self._is_sglang:
                new_ids, reason = list(answer["output_ids"]), answer["meta_info"]["finish_reason"]
                matched, reason = reason.get("matched"), reason["type"]
                if reason == "stop" and isinstance(matched, int) and new_ids[-1:] != [matched]:
                    new_ids.append(matched)
            else:
                (choice,) = answer["choices"]
                new_ids, reason = list(choice["token_ids"]), choice["finish_reason"]
                if list(choice["prompt_token_ids"]) != prompt:
                    raise PassingError("an answer to another prompt")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PassingError(f"an answer that is no completion ({type(error).__name__}: {error})") from None
        if reason not in ("stop", "length"):
            raise PassingError(f"an answer that ended by {reason!r}")
        known = all(isinstance(token, int) and 0 <= token < self.target.vocab_size for token in new_ids)
        if not (known and 1 <= len(new_ids) <= self.max_new_tokens):
            raise PassingError(f"{len(new_ids)} tokens, of at most {self.max_new_tokens} of the target's vocabulary")
        if reason == "stop" and new_ids[-1] not in self.target.eos_token_ids:
            raise UserError(
                f"{self.server.name} ends texts at token {new_ids[-1]}, which is none of the target's ends of text "
                f"{self.target.eos_token_ids}: serve the same generation_config.json that --target has"
            )
        return new_ids

    # --- what is checked before the first prompt

    def _served_model(self) -> tuple[str, int | None]:
        """Return the name under which the target is served, and the most tokens that the server takes."""
        try:
            models = {row["id"]: row.get("max_model_len") for row in self.server.json("/v1/models")["data"]}
        except (KeyError, TypeError):
            raise UserError(f"{self.server.name} does not say which model it serves; {self.server.mend}") from None
        if self.target.name in models:
            return self.target.name, models[self.target.name]
        if len(models) != 1:
            raise UserError(
                f"{self.server.name} serves {', '.join(models) or 'nothing'}: serve {self.target.name} alone, "
                "or under that name"
            )
        return next(iter(models.items()))

    def _completes_in_token_ids(self) -> bool:
        """Return whether /v1/completions does, as vLLM's, rather than /generate. Both are asked to tokenise a text."""
        token_ids, completes = self._tokenised_by_completions(), True
        if token_ids is None:
            token_ids, completes = self._tokenised_by_generate(), False
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
        return completes

    def _tokenised_by_completions(self) -> list[int] | None:
        body = {"model": self.model, "prompt": TOKENIZER_CHECK, "max_tokens": 1, "temperature": 0.0}
        answer = self.server.ask("/v1/completions", {**body, "return_token_ids": True}, lambda answer: answer)
        choice = answer["choices"][0] if isinstance(answer, dict) and answer.get("choices") else {}
        return choice.get("prompt_token_ids") if choice.get("token_ids") else None

    def _tokenised_by_generate(self) -> list[int] | None:
        body = {"text": TOKENIZER_CHECK, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        try:
            answer = self.server.ask(
                "/generate", {**body, "return_logprob": True, "logprob_start_len": 0}, lambda answer: answer
            )
            return [token[1] for token in answer["meta_info"]["input_token_logprobs"]] if answer["output_ids"] else None
        except (UserError, KeyError, TypeError, IndexError):
            return None
