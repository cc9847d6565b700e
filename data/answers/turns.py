"""A prompt while the target answers it, turn by turn.

What the target sees before a turn is, as long as the chat template leaves history alone, what it saw and wrote before,
token by token, and the template's own tokens after that. Where the template rewrites what was written (thinking taken
out of earlier turns, blanks trimmed), the target sees something else than what stands in the sample so far. That
sample then ends, and the turn begins a new one with what the target sees.
"""

import re
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

from draftsmith.data.prompts.conversations import Chat
from draftsmith.data.prompts.prompt_formats import Prompt, image_urls
from draftsmith.data.samples.images import Image, read_image
from draftsmith.data.samples.sample import FinishReason, Sample
from draftsmith.inference.measuring.spans import Markers, Span
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.target import Target

Message = dict[str, Any]

# A message of harmony, the format of gpt-oss: its channel, what stands behind that, and its text.
HARMONY = re.compile(
    r"<\|channel\|>(\w+)([^<]*)(?:<\|constrain\|>[^<]*)?<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|$)", re.DOTALL
)


@dataclass
class Turn:
    """Messages that the target answers."""

    messages: list[Message]
    kept_answer: Message | None  # what history keeps in place of the target's answer


def split_turns(messages: list[Message]) -> list[Turn]:
    """Return the turns that the target answers. Answers that stand there already are left out: it writes them anew.

    One answer stays in history: a call whose result, a tool's message, follows, since the result belongs to no other
    call. What the assistant says before anybody else stays, too. Of several answers in a row all are left out.
    """
    turns: list[Turn] = []
    unanswered: list[Message] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        is_answer = message["role"] == "assistant"
        has_result = following is not None and following["role"] == "tool"
        if is_answer and any(other["role"] not in ("system", "assistant") for other in unanswered):
            turns.append(Turn(unanswered, message if has_result else None))
            unanswered = []
        elif not is_answer or has_result or not turns:
            unanswered.append(message)
    if unanswered and unanswered[-1]["role"] != "assistant":
        turns.append(Turn(unanswered, None))
    return turns


def answer_message(text: str) -> Message | None:
    """Return what the target wrote in a turn as a message of history.

    Harmony's thoughts go into a field of their own: its template refuses them in the content. None for a turn in it
    without a final message, which calls a tool: what follows it would be the tool's result, which nobody has.
    """
    parts = HARMONY.findall(text)
    if not parts:
        return {"role": "assistant", "content": text}
    texts = {name: "".join(body for channel, _, body in parts if channel == name) for name in ("analysis", "final")}
    if not any(channel == "final" for channel, _, _ in parts):
        return None
    return {"role": "assistant", "content": texts["final"], "thinking": texts["analysis"]}


class Dialogue:
    """A prompt while it is answered: `context` is answered next, until `finished`; then `samples` is complete.

    `index` is the place of the prompt, and `number` that of the answer, which keys its noise.
    """

    def __init__(
        self, prompt: Prompt, index: int, number: int, sampling: Sampling, target: Target, markers: Markers
    ) -> None:
        self.prompt, self.index, self.number = prompt, index, number
        self.sampling, self.target, self.markers = sampling, target, markers
        self.where = prompt.where or f"prompt {index + 1}"
        self.samples: list[Sample] = []
        self.finished = False
        self.num_answers = 0
        self.num_tokens = 0  # generated
        self.images: list[Image] = []  # of the turns so far, in the order of the text
        self._history: list[Message] = []
        self._turns: deque[Turn] = deque()
        self._spans: list[Span] = []
        self._read_ids: list[int] = []  # what the target read and wrote so far
        self._sent_ids: list[int] = []  # the same as it was sent, with each image as the template writes it
        self._num_images = 0  # in them
        self._rendered = ""
        if prompt.messages is None:
            self.context = target.encode(cast(str, prompt.text))
            return
        self._turns.extend(split_turns(prompt.messages))
        if not self._turns:
            raise UserError(f"{self.where} has nothing to answer: its messages are all the assistant's")
        self._open_turn()
        self.context = self._encode(self._rendered)

    @property
    def request_id(self) -> int:
        """The number that keys the noise of the next answer."""
        return self.number + (self.num_answers << 32)

    def take(self, new_ids: list[int], most: int, read_ids: list[int] | None = None) -> None:
        """Go on with the target's answer to `context`. `most`: tokens that the next context may have.

        `read_ids`: the context as a target with towers read it, with the placeholder tokens of its images.
        """
        ends = self.target.eos_token_ids
        read_ids = self.context if read_ids is None else read_ids
        if self._spans and read_ids[: len(self._read_ids)] != self._read_ids:
            self._close("eos")
        self._read_ids, self._sent_ids, ended = read_ids + new_ids, self.context + new_ids, new_ids[-1] in ends
        self._num_images = len(self.images)
        label = self.markers.open_label(read_ids, ends)
        self._spans += self.markers.spans(self._read_ids, len(read_ids), label)
        self.num_answers += 1
        self.num_tokens += len(new_ids)
        answered = self._turns.popleft() if self._turns else None
        assert self.target.tokenizer is not None
        text = str(self.target.tokenizer.decode(new_ids[:-1], skip_special_tokens=False))
        message = (answered and answered.kept_answer) or answer_message(text)
        if not ended or not self._turns or not message:
            self.stop("eos" if ended else "length")
            return

        self._history.append(message)
        written = self._rendered + text
        self._open_turn()
        added = self._encode(self._rendered[len(written) :]) if self._rendered.startswith(written) else []
        if added[:1] == new_ids[-1:]:  # the template goes on where the target ended its turn
            self.context = self._sent_ids + added[1:]
        else:
            self._close("eos")
            self.context = self._encode(self._rendered)
        if len(self.context) + len(self._read_ids) - len(self._sent_ids) > most:
            self.stop()

    def check_later_turns(self) -> None:
        """Raise `UserError` where the chat template refuses a turn behind the first, whatever the target answers."""
        history = list(self._history)
        for turn, following in pairwise(self._turns):
            history += [turn.kept_answer or {"role": "assistant", "content": "an answer"}, *following.messages]
            self._render(history)

    def _open_turn(self) -> None:
        turn = self._turns[0].messages
        self.images += [read_image(url, self.where) for url in image_urls(turn)]
        self._history += turn
        self._rendered = self._render(self._history)

    def _render(self, history: list[Message]) -> str:
        """Return messages as the chat template writes them before an answer."""
        seen = replace(self.prompt, messages=history, where=self.where)
        return Chat(seen, self.target).text(len(history), opened=True)

    def _encode(self, text: str) -> list[int]:
        return self.target.encode(text, add_special_tokens=False)

    def stop(self, finish_reason: FinishReason = "eos") -> None:
        """Close the sample that is open, if one is, and tell in the last one how many turns are left."""
        if self._spans:
            self._close(finish_reason)
        if self.samples:
            self.samples[-1].unanswered_turns = len(self._turns)
        self.finished = True

    def _close(self, finish_reason: FinishReason) -> None:
        drawn = self.sampling.temperature, self.sampling.top_p, self.sampling.top_k
        sample = Sample(self._read_ids, self._spans, finish_reason, *drawn, self.index, self.prompt.domain)
        if self._num_images:
            sample.images = [image.name for image in self.images[: self._num_images]]
            sample.sent_ids = self._sent_ids
        self.samples.append(sample)
        self._spans = []
