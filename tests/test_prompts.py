"""Prompts from files: what is read, and what is refused with the line that is wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftsmith.data.prompts import Prompt, check_lengths, encode_prompts, read_prompts
from draftsmith.models import Target
from draftsmith.models.errors import UserError

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES = [{"role": "user", "content": "heat the iron"}]


def write(path: Path, content: str) -> str:
    path.write_text(content, "utf-8")
    return str(path)


def test_jsonl_holds_texts_and_chats(tmp_path: Path) -> None:
    lines = [{"prompt": "a\nb", "id": 7}, {"messages": MESSAGES}]
    source = write(tmp_path / "p.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert read_prompts(source) == [Prompt(text="a\nb"), Prompt(messages=MESSAGES)]


def test_txt_holds_a_prompt_a_line(tmp_path: Path) -> None:
    """Leading blanks belong to the prompt: in code they are its indentation."""
    assert read_prompts(write(tmp_path / "p.txt", "  one\ntwo, ünï\n")) == [Prompt("  one"), Prompt("two, ünï")]


@pytest.mark.parametrize(("suffix", "line"), [(".txt", "x"), (".jsonl", '{"prompt": "x"}')])
def test_blank_lines_are_skipped(suffix: str, line: str, tmp_path: Path) -> None:
    source = write(tmp_path / f"p{suffix}", f"\n{line}\n  \n\r\n{line}")
    assert read_prompts(source) == [Prompt("x"), Prompt("x")]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_only_line_feeds_end_a_line(separator: str, tmp_path: Path) -> None:
    """`str.splitlines` also cuts at these, which JSON allows inside a text: valid lines would be called malformed."""
    line = json.dumps({"prompt": f"a{separator}b"}, ensure_ascii=False)
    assert read_prompts(write(tmp_path / "p.jsonl", line + "\n")) == [Prompt(f"a{separator}b")]


def test_malformed_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    """Blank lines count: editors number them too."""
    with pytest.raises(UserError, match="line 3 is not JSON"):
        read_prompts(write(tmp_path / "p.jsonl", '{"prompt": "x"}\n\n{"prompt": "y"\n'))


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        '["x"]',
        '{"text": "x"}',
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"messages": []}',
        '{"messages": "x"}',
        '{"messages": ["x"]}',
        '{"messages": [{"content": "x"}]}',
    ],
)
def test_line_without_a_prompt_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 2"):
        read_prompts(write(tmp_path / "p.jsonl", '{"prompt": "x"}\n' + line))


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_files_without_prompts_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"p{suffix}"
    with pytest.raises(UserError, match="no prompts file"):
        read_prompts(str(path))
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(write(path, " \n\n"))
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(str(path))


def test_anything_else_must_name_a_column() -> None:
    with pytest.raises(UserError, match="NAME:COLUMN"):
        read_prompts("prompts.csv")


def test_text_is_encoded_as_it_is(tiny_target: Target) -> None:
    ids = encode_prompts([Prompt("heat the iron")], tiny_target)[0]
    assert tiny_target.tokenizer is not None
    assert ids[0] == tiny_target.tokenizer.bos_token_id
    assert tiny_target.tokenizer.decode(ids[1:]) == "heat the iron"


def test_chats_need_a_chat_template(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="prompt 2 .*no chat template"):
        encode_prompts([Prompt("x"), Prompt(messages=MESSAGES)], tiny_target)


@pytest.fixture
def chat_target(tiny_target: Target) -> Iterator[Target]:
    """The tiny target with a chat template; taken away again, for it is shared."""
    assert tiny_target.tokenizer is not None
    tiny_target.tokenizer.chat_template = TEMPLATE
    yield tiny_target
    tiny_target.tokenizer.chat_template = None


def test_chat_is_opened_for_the_answer(chat_target: Target) -> None:
    """Without the opened turn the target would continue the user's. Byte-level tokens decode to the exact text."""
    ids = encode_prompts([Prompt(messages=MESSAGES)], chat_target)[0]
    assert chat_target.tokenizer is not None
    assert chat_target.tokenizer.decode(ids).replace("<|endoftext|>", "") == "[user]heat the iron[assistant]"


def test_chat_that_the_template_refuses_is_named(chat_target: Target) -> None:
    """Templates raise on roles that do not alternate, for one; that is no traceback out of jinja."""
    assert chat_target.tokenizer is not None
    chat_target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="prompt 2.*roles must alternate"):
        encode_prompts([Prompt("x"), Prompt(messages=MESSAGES)], chat_target)


def test_lengths_are_checked_to_the_token(tiny_target: Target) -> None:
    """A prompt and its answer may fill the context and no more."""
    room = tiny_target.context - 8
    check_lengths([[1], [1] * room], 8, tiny_target, "p.txt")
    with pytest.raises(UserError, match=f"p.txt: prompt 2 has {room + 1} tokens.*context of {tiny_target.context}"):
        check_lengths([[1], [1] * (room + 1)], 8, tiny_target, "p.txt")
    with pytest.raises(UserError, match="prompt 1 is empty"):
        check_lengths([[]], 8, tiny_target, "p.txt")
