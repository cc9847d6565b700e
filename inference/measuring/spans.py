"""The parts of what a target writes: thinking, answers, tool calls, by the tokenizer's own markers."""

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pydantic import Field

from draftsmith.inference.decoding.counters import Round, Stats
from draftsmith.models.target.target import Target

Index = Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]

# How a part begins and ends ("": it lasts to the end of the turn), and its label. Each begins with a token of its own.
MARKERS = (
    ("<think>", "</think>", "thinking"),
    ("<thinking>", "</thinking>", "thinking"),
    ("[THINK]", "[/THINK]", "thinking"),
    ("<|begin_of_thought|>", "<|end_of_thought|>", "thinking"),
    ("<seed:think>", "</seed:think>", "thinking"),
    ("<|channel|>analysis", "<|end|>", "thinking"),  # harmony, the format of gpt-oss
    ("<tool_call>", "</tool_call>", "tool_call"),
    ("<|tool_call|>", "<|/tool_call|>", "tool_call"),
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "tool_call"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "tool_call"),
    ("<|channel|>commentary", "<|end|>", "tool_call"),  # a call itself ends the turn
    ("[TOOL_CALLS]", "", "tool_call"),
    ("<|python_tag|>", "", "tool_call"),
)


FENCE = "```"  # begins and ends code in an answer


class Span(NamedTuple):
    """A stretch of tokens, from start to end - 1, which the target generated."""

    start: Index
    end: Index
    label: str = "answer"  # or "thinking", "tool_call"


@dataclass
class Markers:
    """The token ids at which labels begin and end; empty where the tokenizer has no such tokens."""

    opening: dict[tuple[int, ...], str] = field(default_factory=dict)
    closing: set[tuple[int, str]] = field(default_factory=set)  # the token, and the label that it ends

    @classmethod
    def of_target(cls, target: Target) -> "Markers":
        """Return the markers that the target's tokenizer has as tokens of their own."""
        assert target.tokenizer is not None
        added = target.tokenizer.get_added_vocab()
        markers = cls()
        for opening, closing, label in MARKERS:
            ids = target.encode(opening, add_special_tokens=False)
            if ids[0] in added.values() and (not closing or closing in added):
                markers.opening[tuple(ids)] = label
                if closing:
                    markers.closing.add((added[closing], label))
        return markers

    def spans(self, ids: list[int], start: int, label: str) -> list[Span]:
        """Return the tokens from `start` on, cut where labels change; markers belong to what they enclose."""
        spans, begin = [], start
        for place in range(start, len(ids)):
            if label == "answer" and (opened := self.opened_at(ids, place)):
                spans.append(Span(begin, place, label))
                begin, label = place, opened
            elif (ids[place], label) in self.closing:
                spans.append(Span(begin, place + 1, label))
                begin, label = place + 1, "answer"
        spans.append(Span(begin, len(ids), label))
        return [span for span in spans if span.end > span.start]

    def opened_at(self, ids: list[int], place: int) -> str | None:
        """Return the label that begins at a place, if one does."""
        return next((label for key, label in self.opening.items() if tuple(ids[place : place + len(key)]) == key), None)

    def open_label(self, context: list[int], ends: list[int]) -> str:
        """Return the label that an answer begins in: some templates open the thinking themselves."""
        closing, closed_labels = {token for token, _ in self.closing}, {label for _, label in self.closing}
        for place in reversed(range(len(context))):
            if context[place] in ends or context[place] in closing:
                return "answer"
            if (label := self.opened_at(context, place)) in closed_labels:
                return str(label)
        return "answer"

    def labels(self, prompt: list[int], answer: list[int], target: Target) -> list[str]:
        """Return the label of each token of an answer; what stands between fences in it is "code"."""
        assert target.tokenizer is not None
        token_ids, opened = prompt + answer, self.open_label(prompt, target.eos_token_ids)
        labels = [span.label for span in self.spans(token_ids, len(prompt), opened) for _ in range(*span[:2])]
        text, fenced = "", False
        for place, token in enumerate(answer):
            if labels[place] != "answer":
                text, fenced = "", False
                continue
            text += str(target.tokenizer.decode([token]))
            closes = fenced and FENCE in text
            if FENCE in text:
                text, fenced = text.rpartition(FENCE)[2], not fenced
            labels[place] = "code" if fenced or closes else "answer"
            text = text[1 - len(FENCE) :]  # a fence may lie in two tokens
        return labels

    @property
    def thinks(self) -> bool:
        """Whether the target marks thinking."""
        return "thinking" in self.opening.values()


def stats_by_label(rounds: list[Round], labels: list[str], draft_length: int) -> dict[str, Stats]:
    """Return the counters of one request by the label of the token that each round began with."""
    by_label: dict[str, Stats] = {}
    for start, num_drafted, num_accepted in rounds:
        if start >= len(labels):  # behind the end of the text
            break
        stats = by_label.setdefault(labels[start], Stats(draft_length))
        stats.count_round(num_drafted, num_accepted)
        stats.num_emitted_tokens += min(num_accepted + 1, len(labels) - start)
    return by_label
