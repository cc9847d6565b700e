"""Given conversations: token by token what the target meets when it serves, or refused with the reason."""

from typing import Any

import pytest
from chats import FAMILIES, Family, changed, chat_target

from draftsmith.data.prompts.conversations import encode_conversation, opened_chat
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.models import Target
from draftsmith.models.errors import UserError

CHATML = FAMILIES["chatml"]
SYSTEM = {"role": "system", "content": "Be brief."}
TWO_TURNS = [
    {"role": "user", "content": "hot?"},
    {"role": "assistant", "content": "Red,\n\nnot white."},
    {"role": "user", "content": "now?"},
    {"role": "assistant", "content": "White."},
]

# Golden renderings: what the family's tokenizer makes of the conversation, the trained parts in brackets.
GOLDEN = {
    "chatml": (
        [SYSTEM, *TWO_TURNS],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhot?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Red,\n\nnot white.<|im_end|>⟧\n<|im_start|>user\nnow?<|im_end|>\n"
        "<|im_start|>assistant\n⟦White.<|im_end|>⟧\n",
    ),
    "llama3": (
        [SYSTEM, *TWO_TURNS],
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhot?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Red,\n\nnot white.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nnow?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦White.<|eot_id|>⟧",
    ),
    "qwen3": (
        [TWO_TURNS[0], {"role": "assistant", "content": "<think>\nlook\n</think>\n\nRed."}],
        "<|im_start|>user\nhot?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nlook\n</think>\n\nRed.<|im_end|>⟧\n",
    ),
}


def golden_tokens(target: Target, text: str) -> tuple[list[int], list[int]]:
    """Token ids and 0/1 mask of a golden text. Its pieces are cut apart as sampling cuts them: at an answer's edges."""
    ids: list[int] = []
    mask: list[int] = []
    assert target.tokenizer is not None
    for part in text.split("⟦"):
        answer, end, rest = part.partition("⟧") if ids else ("", "", part)
        for piece, trained in ((answer, 1), (rest, 0)):
            piece_ids = target.tokenizer(piece, add_special_tokens=False)["input_ids"]
            ids += piece_ids
            mask += [trained] * len(piece_ids)
    return ids, mask


def mask_of(ids: list[int], spans: list[tuple[int, int]]) -> list[int]:
    return [int(any(start <= i < end for start, end in spans)) for i in range(len(ids))]


@pytest.mark.parametrize("name", GOLDEN)
def test_tokens_and_masks_are_the_golden_ones(name: str) -> None:
    """One template with generation marks, one without and with BOS, one that strips thinking from earlier turns."""
    messages, text = GOLDEN[name]
    target = chat_target(FAMILIES[name])
    ids, spans = encode_conversation(Prompt(messages=messages), target)
    assert (ids, mask_of(ids, spans)) == golden_tokens(target, text)


def unmarked(family: Family) -> Family:
    return changed(changed(family, "{%- generation %}", ""), "{%- endgeneration %}", "")


def test_marks_and_prefixes_find_the_same_spans() -> None:
    """The same template with its marks taken out."""
    prompt = Prompt(messages=TWO_TURNS)
    assert encode_conversation(prompt, chat_target(unmarked(CHATML))) == encode_conversation(
        prompt, chat_target(CHATML)
    )


def test_an_end_of_turn_that_the_marks_leave_out_is_trained() -> None:
    """The target writes it, and a drafter that never saw it drafts past every answer's end."""
    marks = "message['content'] }}{%- endgeneration %}{{- '<|im_end|>' }}"
    family = changed(CHATML, "message['content'] + '<|im_end|>' }}{%- endgeneration %}", marks)
    prompt = Prompt(messages=TWO_TURNS)
    assert encode_conversation(prompt, chat_target(family)) == encode_conversation(prompt, chat_target(CHATML))


def test_marks_around_the_wrong_turn_are_refused() -> None:
    question = "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    family = changed(unmarked(CHATML), question, "{% generation %}" + question + "{% endgeneration %}")
    with pytest.raises(UserError, match="p.jsonl line 7: the generation marks .* cover tokens"):
        encode_conversation(Prompt(messages=TWO_TURNS, where="p.jsonl line 7"), chat_target(family))


REWRITTEN: dict[str, list[dict[str, Any]]] = {
    "a thought in the content": [
        TWO_TURNS[0], {"role": "assistant", "content": "<think>\nlook\n</think>\n\nRed."}, *TWO_TURNS[2:],
    ],
    "a thought of its own": [
        TWO_TURNS[0], {"role": "assistant", "content": "Red.", "reasoning_content": "look"}, *TWO_TURNS[2:],
    ],
    "no thought": TWO_TURNS,  # the last answer gets an empty one, which is taken away when the next turn follows
}  # fmt: skip


@pytest.mark.parametrize("case", REWRITTEN)
def test_rewritten_history_is_refused_with_the_reason(case: str) -> None:
    """A prefix that is not verified would train on an answer without its thought, as if the target had not thought."""
    prompt = Prompt(messages=REWRITTEN[case], where="p.jsonl line 7")
    with pytest.raises(UserError, match="p.jsonl line 7, message 2: .*rewrites history.*thinking is stripped"):
        encode_conversation(prompt, chat_target(FAMILIES["qwen3"]))


def test_marks_do_not_hide_rewritten_history() -> None:
    """With marks one pass would give spans, and a mask, without a word."""
    answer = "{{- '<|im_end|>\\n' }}\n    {%- endif %}"
    family = changed(FAMILIES["qwen3"], answer, "{%- endgeneration %}" + answer)
    family = changed(family, "assistant\\n' }}\n        {%- if", "assistant\\n' }}{%- generation %}\n        {%- if")
    encode_conversation(Prompt(messages=TWO_TURNS[:2]), chat_target(family))
    with pytest.raises(UserError, match="rewrites history"):
        encode_conversation(Prompt(messages=TWO_TURNS), chat_target(family))


def test_a_token_over_the_beginning_of_an_answer_is_refused() -> None:
    """ChatML opens a turn with a line break; an answer that begins with one, too, makes another token of both."""
    messages = [TWO_TURNS[0], {"role": "assistant", "content": "\nRed."}]
    with pytest.raises(UserError, match=r"message 2: the tokenizer joins .*'\\n' becomes '\\n\\nRed"):
        encode_conversation(Prompt(messages=messages), chat_target(CHATML))


@pytest.mark.parametrize("messages", [None, TWO_TURNS[:1], TWO_TURNS[1:2]])
def test_a_conversation_without_an_answer_is_refused(messages: list[dict[str, Any]] | None) -> None:
    prompt = Prompt("hot?" if messages is None else None, messages, where="p.jsonl line 7")
    with pytest.raises(UserError, match="p.jsonl line 7 has no answer"):
        encode_conversation(prompt, chat_target(FAMILIES["llama3"]))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_follows_the_last_answer_is_left_out(name: str) -> None:
    target = chat_target(FAMILIES[name])
    assert encode_conversation(Prompt(messages=TWO_TURNS[:3]), target) == encode_conversation(
        Prompt(messages=TWO_TURNS[:2]), target
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_follows_the_opened_turn(name: str) -> None:
    """Evaluation decodes from the opened turn; training on given text has to show the same tokens before an answer."""
    target = chat_target(FAMILIES[name])
    ids, [span] = encode_conversation(Prompt(messages=TWO_TURNS[:2]), target)
    assert opened_chat(Prompt(messages=TWO_TURNS[:1]), target) == ids[: span[0]]
    assert opened_chat(Prompt(messages=TWO_TURNS[:2]), target) == ids[: span[0]]  # the answer there is asked for anew
