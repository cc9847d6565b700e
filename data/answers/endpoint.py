"""A server that runs the target answers prompts: vLLM by /v1/completions, SGLang by its own /generate.

Token ids go out and token ids come back; no text is tokenised again, and a server that cannot do that is refused.
What fails for a while (too many requests, overload, time-outs, a lost connection) is asked again after waits that
double.
"""

import hashlib
import http.client
import json
import os
import queue
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from draftsmith.data.answers.turns import Dialogue
from draftsmith.models.errors import UserError, first_line
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.target import Target

ATTEMPTS = 8
FIRST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds before an attempt, doubling, times a random factor of 0.5 to 1
TIMEOUT, TIMEOUT_A_TOKEN = 120.0, 0.25  # seconds for an answer to begin, and for each token that it may have
PASSING = (408, 425, 429, 500, 502, 503, 504)  # HTTP states that may be gone at the next attempt
TOKENIZER_CHECK = (
    'def f(x):\n\treturn {"\u00e9": 3.14, "\u6f22\u5b57": [1234567]}  # \U0001f642 \u00dcml\u00e4ut\n\n   end'
)


class PassingError(Exception):
    """Worth another attempt, after `wait` seconds at least."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class Endpoint:
    """A server at `url` that runs the target. `context`: most tokens of prompt and answer that both take.

    `setting`: where the user gave the URL; `command`: what starts such a server.

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
        self._name = f"{setting} {url}"
        self._command = command or f"vllm serve {target.name}"
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{self._name}: give a URL such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.target, self.max_new_tokens, self.seed = target, max_new_tokens, seed
        self._timeout = TIMEOUT + TIMEOUT_A_TOKEN * max_new_tokens
        self._stopped = threading.Event()
        self.model, served_context = self._served_model()
        self.context = min(target.context, served_context or target.context)
        self._is_sglang = not self._returns_token_ids()

    def answers(self, dialogues: Iterator[Dialogue], most_at_a_time: int) -> Iterator[Dialogue]:
        """Answer all turns of the dialogues, so many requests at a time, once; they come as they finish."""
        lock = threading.Lock()  # tokenizers are not made for threads
        results: queue.Queue[Dialogue | Exception | None] = queue.Queue()

        def work() -> None:
            try:
                while not self._stopped.is_set():
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
            threading.Thread(target=work, daemon=True).start()
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
            self._stopped.set()  # nobody asks again

    def complete(self, prompt: list[int], sampling: Sampling, request_id: int) -> list[int]:
        """The server's answer to a prompt, its end of text included."""
        seed = int(hashlib.sha256(f"{self.seed}/{request_id}".encode()).hexdigest()[:7], 16)
        how: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,  # from here on: said so that no default of the server's comes in
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "skip_special_tokens": False,
            "stop_token_ids": self.target.eos_token_ids,
        }
        limit = self.max_new_tokens
        body: dict[str, Any]
        if self._is_sglang:
            path, body = "/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": limit, **how}}
        else:
            path, body = "/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": limit, **how}
            body |= {"seed": seed, "return_token_ids": True}
        return self.ask(path, body, lambda answer: self._read(answer, prompt))

    def _read(self, answer: Any, prompt: list[int]) -> list[int]:
        """The token ids of an answer to `prompt`; `PassingError` where it is none."""
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
                f"{self.url} ends texts at token {new_ids[-1]}, which is none of the target's ends of text "
                f"{self.target.eos_token_ids}: serve the same generation_config.json that --target has"
            )
        return new_ids

    # --- what is checked before the first prompt

    def _served_model(self) -> tuple[str, int | None]:
        """The name under which the target is served, and the most tokens that the server takes."""
        try:
            models = {row["id"]: row.get("max_model_len") for row in self._once("/v1/models", None)["data"]}
        except (PassingError, KeyError, TypeError) as error:
            raise UserError(
                f"{self._name}: no model server answers there ({first_line(error)}); start one, such as "
                f"`{self._command}`"
            ) from None
        if self.target.name in models:
            return self.target.name, models[self.target.name]
        if len(models) != 1:
            raise UserError(
                f"{self._name} serves {', '.join(models) or 'nothing'}: serve {self.target.name} alone, "
                "or under that name"
            )
        return next(iter(models.items()))

    def _returns_token_ids(self) -> bool:
        """Whether /v1/completions does, rather than /generate; both are asked to tokenise a text."""
        expected = self.target.encode(TOKENIZER_CHECK)
        body = {"model": self.model, "prompt": TOKENIZER_CHECK, "max_tokens": 1, "temperature": 0.0}
        answer = self.ask("/v1/completions", {**body, "return_token_ids": True}, lambda answer: answer)
        choice = answer["choices"][0] if isinstance(answer, dict) and answer.get("choices") else {}
        seen = choice.get("prompt_token_ids") if choice.get("token_ids") else None
        in_completions = seen is not None
        if not in_completions:
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            asked = {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            try:
                answer = self.ask("/generate", {"text": TOKENIZER_CHECK, **asked}, lambda answer: answer)
                seen = answer["output_ids"] and [token[1] for token in answer["meta_info"]["input_token_logprobs"]]
            except (UserError, KeyError, TypeError, IndexError):
                raise UserError(
                    f"{self._name} returns text without token ids, and text tokenised again is not what was "
                    "sampled: serve with vLLM 0.10.2 or later, or SGLang"
                ) from None
        if seen != expected:
            raise UserError(
                f"{self._name} serves {self.model}, whose tokenizer is not that of {self.target.name}: "
                "give the --target that is served"
            )
        return in_completions

    # --- requests

    def ask(self, path: str, body: dict[str, Any], read: Any) -> Any:
        """What `read` makes of the server's answer, in so many attempts."""
        reason = ""
        for attempt in range(ATTEMPTS):
            try:
                return read(self._once(path, body))
            except PassingError as error:
                reason = first_line(error)
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * random.uniform(0.5, 1)
                if self._stopped.wait(max(wait, error.wait) if attempt + 1 < ATTEMPTS else 0):
                    break
        raise UserError(
            f"{self._name} failed {ATTEMPTS} times in a row, at last with: {reason}; what is written is kept: "
            "see to the server and give the same command again"
        )

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            if error.code in PASSING:
                after = error.headers.get("Retry-After", "")
                raise PassingError(f"HTTP {error.code}", float(after) if after.isdigit() else 0.0) from None
            reason = " ".join(said.split())[:300]
            raise UserError(f"{self._name}{path} refuses: HTTP {error.code}: {reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and time-outs are OSErrors
            raise PassingError(f"{type(error).__name__}: {first_line(error)}") from None
