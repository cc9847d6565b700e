"""Prompts from files: what is read, and what is refused with the line that is wrong."""

import json
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from itertools import repeat
from pathlib import Path

import pytest
from chats import FAMILIES, chat_target

from draftsmith.data.progress import notice_once
from draftsmith.data.prompts.conversations import opened_chat
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import check_lengths, encode_prompts, read_prompt_set, read_prompts
from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.target import chat_template
from draftsmith.models.target.chat_template import set_chat
from draftsmith.models.target.target import ChatSettings

CHATS = {name: chat_target(family) for name, family in FAMILIES.items()}
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


TOLD = (
    "{{ strftime_now('%d %B %Y') }}{% if reasoning_effort is defined %} {{ reasoning_effort }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_a_template_is_told_what_was_asked_for() -> None:
    """Of another date it would print today's, and a prompt would be another one tomorrow."""
    target = chat_target(replace(FAMILIES["chatml"], template=TOLD))
    set_chat(target, ChatSettings({"reasoning_effort": "high"}, date="2020-02-29"))
    assert target.tokenizer is not None
    (ids,) = encode_prompts([Prompt(messages=MESSAGES[-1:])], target)
    assert target.tokenizer.decode(ids) == f"29 February 2020 high{MESSAGES[-1]['content']}"
    set_chat(target, ChatSettings())
    (ids,) = encode_prompts([Prompt(messages=MESSAGES[-1:])], target)
    assert str(target.tokenizer.decode(ids)).startswith(f"{date.today():%d %B %Y}h")


@pytest.mark.parametrize("name", ["enable_thinking", "messages", "strftime_now", "effort"])
def test_what_a_template_does_not_read_is_refused(name: str) -> None:
    target = chat_target(replace(FAMILIES["chatml"], template=TOLD))
    with pytest.raises(UserError, match=f"the chat template of tiny-chat reads no '{name}'"):
        set_chat(target, ChatSettings({name: True}))


def test_no_template_reads_nothing(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="has no chat template; leave them out"):
        set_chat(tiny_target, ChatSettings({"reasoning_effort": "high"}))


def test_the_decoder_puts_a_text_into_the_chat() -> None:
    target = chat_target(FAMILIES["chatml"])
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    asked = opened_chat(Prompt(messages=[{"role": "user", "content": "hot?"}]), target)
    assert decoder.token_ids(["hot?", [1, 2]], 4) == [asked, [1, 2]]
    assert decoder.token_ids(["hot?"], 4, chat=False) == [target.encode("hot?")]
    in_chat, raw = decoder.generate(["hot?"], 8), decoder.generate(["hot?"], 8, chat=False)
    assert in_chat.token_ids == decoder.generate([asked], 8).token_ids
    assert raw.token_ids != in_chat.token_ids


def test_chats_need_a_chat_template(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="prompt 2 .*no chat template"):
        encode_prompts([Prompt("x"), Prompt(messages=MESSAGES)], tiny_target)


def test_chat_is_opened_for_the_answer() -> None:
    """Without the opened turn the target would continue the user's. Byte-level tokens decode to the exact text."""
    target = CHATS["chatml"]
    assert target.tokenizer is not None
    [ids] = encode_prompts([Prompt(messages=MESSAGES)], target)
    opened = "<|im_start|>user\nheat the iron<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(ids) == opened


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.missing.name }}", "{{ messages + 1 }}", "{% if %}"])
def test_a_template_that_fails_is_named(template: str) -> None:
    """It comes with the target, and what it does with messages raises errors of its own."""
    with pytest.raises(UserError, match="prompt 1: the chat template of .* refuses it"):
        encode_prompts([Prompt(messages=MESSAGES)], chat_target(replace(FAMILIES["chatml"], template=template)))


def target_with(template: str) -> Target:
    return chat_target(replace(FAMILIES["chatml"], template=template))


@pytest.mark.parametrize("body", ["", "x", "{% set y = i * j %}"])
def test_a_template_without_end_is_stopped(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whichever thread it is rendered; jinja's sandbox bounds a range, and not how often it is gone through."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}" + body + "{% endfor %}{% endfor %}"
    target = target_with(loop)
    with ThreadPoolExecutor(1) as pool:
        for encode in (encode_prompts, lambda *chat: pool.submit(encode_prompts, *chat).result()):
            with pytest.raises(UserError, match=r"prompt 1: the chat template of .* takes more than 0.2 s"):
                encode([Prompt(messages=MESSAGES)], target)


def test_a_template_in_time_is_left_alone() -> None:
    """Its timer raises nothing in what comes later."""
    with chat_template.time_limit(0.5):
        pass
    time.sleep(0.7)
    with pytest.raises(chat_template.TimeUp), chat_template.time_limit(0.05):
        sum(1 for _ in repeat(0))


def test_a_template_that_makes_too_much_is_refused() -> None:
    with pytest.raises(UserError, match="the chat template of .* makes 20,000,000 characters of one chat"):
        encode_prompts([Prompt(messages=MESSAGES)], target_with("{{ 'x' * 20000000 }}"))


DOUBLED = "{% set s = namespace(x='x') %}{% for i in range(40) %}{% set s.x = s.x ~ s.x %}{% endfor %}"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the memory of a process")
@pytest.mark.parametrize("template", ["{{ 'x' * 10**10 }}", "{{ [0] * 10**9 }}", "{{ 'x'.ljust(10**10) }}", DOUBLED])
def test_a_template_cannot_take_all_memory(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused while it asks for the memory, before it has it; afterwards the process has its own limit again."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(
        UserError, match="the chat template of .* takes more than 1,024 MB for one chat: mend its loops"
    ):
        encode_prompts([Prompt(messages=MESSAGES)], target_with(template))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ lipsum.__globals__['os'].getcwd() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_reaches_nothing_but_the_chat(template: str) -> None:
    """It is rendered in jinja's sandbox, and its values cannot be changed."""
    with pytest.raises(UserError, match=r"refuses it: (access to|.*is undefined|.*is not safely callable)"):
        encode_prompts([Prompt(messages=MESSAGES)], target_with(template))


def test_chat_that_the_template_refuses_is_named() -> None:
    """Templates raise on roles that do not alternate, for one; that is no traceback out of jinja."""
    refusing = replace(FAMILIES["chatml"], template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="prompt 2.*roles must alternate"):
        encode_prompts([Prompt("x"), Prompt(messages=MESSAGES)], chat_target(refusing))


def test_lengths_are_checked_to_the_token(tiny_target: Target) -> None:
    """A prompt and its answer may fill the context and no more."""
    room = tiny_target.context - 8
    two = [Prompt("x"), Prompt("y", where="p.txt line 3")]
    check_lengths(two, [[1], [1] * room], 8, tiny_target)
    with pytest.raises(UserError, match=f"p.txt line 3 has {room + 1} tokens.*context of {tiny_target.context}"):
        check_lengths(two, [[1], [1] * (room + 1)], 8, tiny_target)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        check_lengths(two[:1], [[]], 8, tiny_target)


def test_a_prompt_set_keeps_the_domains_of_the_prompts_it_picks(tiny_target: Target, tmp_path: Path) -> None:
    """Parallel lists that drift apart would report one domain's acceptance as another's."""
    lines = [{"prompt": text, "domain": text[0]} for text in ("aa", "bb", "cc", "dd", "ee")]
    source = write(tmp_path / "p.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    prompts = read_prompt_set(source, tiny_target, 3, 8)
    assert prompts.name == "p"
    assert len(prompts.token_ids) == 3
    assert prompts.domains == [tiny_target.tokenizer.decode(ids[-1:]) for ids in prompts.token_ids]


def test_a_mixture_stands_for_a_source(tiny_target: Target, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "aa\nbb\n")
    mixture = write(tmp_path / "mix.yaml", f"sources:\n  - source: {tmp_path}/a.txt\n")
    assert read_prompts(mixture) == [Prompt("aa", domain="a"), Prompt("bb", domain="a")]


@pytest.mark.parametrize("text", ["hot?", "<|begin_of_text|>hot?"])
def test_a_doubled_beginning_of_text_is_refused(text: str) -> None:
    """The text had been rendered with its BOS, and the tokenizer put another one before it."""
    prompts = [Prompt(text, where="p.txt line 3")]
    if text == "hot?":
        assert encode_prompts(prompts, CHATS["llama3"])
        return
    with pytest.raises(UserError, match="p.txt line 3 begins with the beginning-of-text token twice"):
        encode_prompts(prompts, CHATS["llama3"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_that_was_rendered_before_is_refused(name: str) -> None:
    target = CHATS[name]
    assert target.tokenizer is not None
    rendered = str(target.tokenizer.decode(opened_chat(Prompt(messages=MESSAGES), target)))
    twice = Prompt(messages=[{"role": "user", "content": rendered}], where="p.jsonl line 3")
    with pytest.raises(UserError, match="p.jsonl line 3: message 1 begins with .* rendered before"):
        encode_prompts([twice], target)


def test_an_answer_may_begin_with_a_thought() -> None:
    """Its markers are tokens of their own, and no sign of a chat that was rendered twice."""
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>\n\n</think>\n\nYes."}, *MESSAGES]
    assert encode_prompts([Prompt(messages=messages)], CHATS["qwen3"])


def test_bare_texts_for_a_target_that_chats_are_mentioned_once(capsys: pytest.CaptureFixture[str]) -> None:
    notice_once.cache_clear()
    encode_prompts([Prompt("hot?"), Prompt(messages=MESSAGES)], CHATS["chatml"])
    assert "1 of 2 prompts are bare texts" in capsys.readouterr().err
    encode_prompts([Prompt("cold?"), Prompt(messages=MESSAGES)], CHATS["chatml"])
    encode_prompts([Prompt(messages=MESSAGES)], CHATS["chatml"])
    assert not capsys.readouterr().err


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    """A tokenizer that was given tokens after the target's embedding was made."""
    target = chat_target(FAMILIES["chatml"])
    assert target.tokenizer is not None
    target.tokenizer.add_tokens(["<|new|>"])
    assert encode_prompts([Prompt("hot?")], target)
    with pytest.raises(UserError, match="p.txt line 3 holds token id 260.*ends at 259"):
        encode_prompts([Prompt("<|new|>", where="p.txt line 3")], target)
