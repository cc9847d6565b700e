"""A vLLM that reads images, as far as draftsmith talks to one, and a target whose chat template writes them."""

import base64
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from states_server import HiddenStatesServer
from transformers import AutoTokenizer

from draftsmith.models import Target

PNG = b"\x89PNG\r\n\x1a\n"  # how the file of an image begins
IMAGE = "\x01"  # what the template writes for an image; one token
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.content is string %}{{- message.role + ': ' + message.content }}
    {%- else %}
        {{- message.role + ': ' }}
        {%- for part in message.content %}{{- '\x01' if part.type == 'image' else part.text }}{%- endfor %}
    {%- endif %}
    {{- eos_token if message.role == 'assistant' else '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""


def give_template(target_dir: Path) -> Path:
    """Put a chat template that knows images beside a target."""
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target_dir)
    return target_dir


def image_url(pixels: bytes) -> str:
    """Return an image whose patches are these bytes: as many tokens."""
    return "data:image/png;base64," + base64.b64encode(PNG + pixels).decode()


def expanded(body: dict, placeholder: int) -> tuple[list[int], list[int], list[int]]:
    """What the target reads: its token ids, the place of each image in them, and what the images are seen as."""
    read_ids: list[int] = []
    seen_ids: list[int] = []
    places = []
    contents = [base64.b64decode(part["url"].partition(",")[2])[len(PNG) :] for part in body.get("content_parts", [])]
    assert body["token_ids"].count(placeholder) == len(contents)
    for token in body["token_ids"]:
        seen = [token]
        if token == placeholder:
            places.append(len(read_ids))
            seen = list(contents[len(places) - 1])
        read_ids += [token] * len(seen)
        seen_ids += seen
    return read_ids, places, seen_ids


class ImageServer(HiddenStatesServer):
    """A server whose target reads each byte of an image, as a tower's output, at a placeholder token."""

    def __init__(self, target: Target, folder: Path) -> None:
        super().__init__(target, folder)
        (self.placeholder,) = target.encode(IMAGE, add_special_tokens=False)
        self.takes_images = True
        self.ends = True  # whether it ends its answers, which the target itself would not
        self.asked_with_images: list[dict] = []

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if path != "/inference/v1/generate":
            return super().post(path, body)
        if not self.takes_images:
            return 404, {"detail": "Not Found"}
        with self._lock:
            self.asked_with_images.append(body)
            read_ids, places, seen_ids = self.expanded(body)
            if len(read_ids) >= self.models[0]["max_model_len"]:
                return 400, {"error": {"message": "This model's maximum context length is 100 tokens."}}
            return 200, self.answer_to_seen(body, read_ids, seen_ids) | {
                "prompt_token_ids": read_ids,
                "mm_placeholders": {"image": [{"offset": place, "length": 1} for place in places]},
            }

    def answer_to_seen(self, body: dict, read_ids: list[int], seen_ids: list[int]) -> dict[str, Any]:
        """The answer to a text in which each placeholder token is what the tower makes of the image there."""
        if "logprobs" not in body["sampling_params"]:
            new_ids = self.written(seen_ids)
            reason = "stop" if new_ids[-1] in self.target.eos_token_ids else "length"
            return {"choices": [{"token_ids": new_ids, "finish_reason": reason}]}
        token, logprob, file = self.write_states(read_ids, seen_ids)
        choice = {"token_ids": [token], "finish_reason": "length", "logprobs": {"content": [{"logprob": logprob}]}}
        return {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(file)}}

    def written(self, seen_ids: list[int]) -> list[int]:
        """What the target writes: three tokens, and the end of text where it shall end."""
        (new_ids,) = self.decoder.generate([seen_ids], 3).token_ids
        return [*new_ids, self.target.eos_token_ids[0]] if self.ends else new_ids

    def expanded(self, body: dict) -> tuple[list[int], list[int], list[int]]:
        """What the target reads of a request, as the function of this name tells."""
        return expanded(body, self.placeholder)


class ImageEngine(FakeEngine):
    """An engine whose target reads images likewise, in which drafters are swapped and counted."""

    def post(self, path: str, body: dict) -> tuple[int, dict]:
        if path != "/inference/v1/generate":
            return super().post(path, body)
        (placeholder,) = self.target.encode(IMAGE, add_special_tokens=False)
        read_ids, _, seen_ids = expanded(body, placeholder)
        sampling = body["sampling_params"]
        with self._lock:
            (new_ids,) = self.decoder.generate([seen_ids], sampling["max_tokens"]).token_ids
        choice: dict[str, Any] = {"token_ids": new_ids, "finish_reason": "length"}
        if "logprobs" in sampling:
            choice["logprobs"] = {"content": [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -0.75}]}]}
        return 200, {"choices": [choice], "prompt_token_ids": read_ids}
