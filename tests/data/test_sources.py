"""Sources of prompts: every form that is accepted, and what is refused, by file and line."""

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile

from draftsmith.data.prompts import sources
from draftsmith.data.prompts.prompt_formats import Prompt, to_prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.sources import parts, remote_rows
from draftsmith.models.errors import UserError

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hot?"}]
TOOLS = [{"type": "function", "function": {"name": "heat"}}]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "hot?"},
    {"from": "gpt", "value": "Red."},
    {"from": "observation", "value": "800"},
]
ROLES = [*MESSAGES, {"role": "assistant", "content": "Red."}, {"role": "tool", "content": "800"}]

FORMS: dict[str, tuple[dict[str, Any], Prompt]] = {
    "text": ({"prompt": "a\nb", "id": 7}, Prompt("a\nb")),
    "messages": ({"messages": MESSAGES}, Prompt(messages=MESSAGES)),
    "messages as prompt": ({"prompt": MESSAGES}, Prompt(messages=MESSAGES)),
    "ShareGPT": ({"id": "x", "conversations": SHAREGPT}, Prompt(messages=ROLES)),
    "ShareGPT as messages": ({"messages": SHAREGPT}, Prompt(messages=ROLES)),
    "conversations with roles": ({"conversations": ROLES}, Prompt(messages=ROLES)),
    "OpenAI batch": (
        {"custom_id": "1", "url": "/v1/chat/completions", "body": {"model": "m", "messages": MESSAGES}},
        Prompt(messages=MESSAGES),
    ),
    "OpenAI batch of completions": ({"custom_id": "1", "body": {"prompt": "a"}}, Prompt("a")),
    "parts of text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
        Prompt(messages=[{"role": "user", "content": "a\nb"}]),
    ),
    "tools": ({"messages": MESSAGES, "tools": TOOLS}, Prompt(messages=MESSAGES, tools=TOOLS)),
    "tools as JSON": ({"messages": MESSAGES, "tools": json.dumps(TOOLS)}, Prompt(messages=MESSAGES, tools=TOOLS)),
    "domain": ({"prompt": "a", "domain": "code"}, Prompt("a", domain="code")),
    "domain of a batch": ({"custom_id": "1", "body": {"prompt": "a"}, "domain": 3}, Prompt("a", domain="3")),
    "nulls, as tables have them": ({"prompt": None, "messages": MESSAGES, "tools": None}, Prompt(messages=MESSAGES)),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, suffix: str, tmp_path: Path) -> None:
    """Alike in every kind of file that holds rows."""
    row, prompt = FORMS[form]
    path = write_rows(tmp_path / f"p{suffix}", [row, row])
    assert read_prompts(path) == [prompt, prompt]
    kind = "line" if suffix == ".jsonl" else "row"
    assert [prompt.where for prompt in read_prompts(path)] == [f"{path} {kind} 1", f"{path} {kind} 2"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows))
    return str(path)


IMAGE = {"type": "image_url", "image_url": {"url": "a.png"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two prompts": ({"prompt": "a", "messages": MESSAGES}, "name the column to read"),
    "an unknown speaker": ({"conversations": [{"from": "narrator", "value": "x"}]}, "'narrator'"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "neither text nor images",
    ),
    "an image in an answer": ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "image in an answer"),
    "a role that is no text": ({"conversations": [{"role": ["user"], "content": "x"}]}, "from"),
    "a speaker that is no text": ({"conversations": [{"from": ["human"], "value": "x"}]}, "'human'"),
    "a role that is a number": ({"messages": [{"role": 1, "content": "x"}]}, "role"),
    "more than any context": ({"prompt": "x" * (1 << 22)}, "4,194,304 characters"),
    "a text deep within": ({"prompt": json.loads("[" * 90 + "]" * 90)}, "not a list of objects"),
    "tools that are no list": ({"messages": MESSAGES, "tools": {"name": "heat"}}, "tools"),
    "tools that are no JSON": ({"messages": MESSAGES, "tools": "heat"}, "tools"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_are_refused_by_their_line(case: str, tmp_path: Path) -> None:
    row, reason = REFUSED[case]
    path = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}, row])
    with pytest.raises(UserError, match=f"p.jsonl line 2.*{reason}"):
        read_prompts(path)


def test_sharegpt_as_it_is_passed_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its public files hold empty conversations, and ones cut out of longer ones so that an answer comes first."""
    answer = {"from": "gpt", "value": "Red."}
    conversations = [[], [answer], [answer, SHAREGPT[1]]]
    path = write_rows(tmp_path / "p.json", [{"conversations": one} for one in conversations])
    assert read_prompts(path) == [Prompt(messages=MESSAGES[1:])]
    assert "left out 2 conversations in which no user speaks, the first at " + f"{path} row 1" in said(capsys)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_column_by_its_name(suffix: str, tmp_path: Path) -> None:
    rows = [{"question": "a", "prompt": "b", "turns": MESSAGES}]
    path = write_rows(tmp_path / f"p{suffix}", rows)
    assert read_prompts(write_rows(tmp_path / f"p:question{suffix}", [{"prompt": "c"}])) == [Prompt("c")]
    assert read_prompts(f"{path}:question") == [Prompt("a")]
    assert read_prompts(f"{path}:turns") == [Prompt(messages=MESSAGES)]
    with pytest.raises(UserError, match="1 has nothing in a column 'answer'; its columns are question, prompt, turns"):
        read_prompts(f"{path}:answer")


def test_files_that_are_not_what_they_are_called(tmp_path: Path) -> None:
    for suffix, reason in ((".parquet", "not a parquet file"), (".json", "not JSON")):
        path = tmp_path / f"p{suffix}"
        path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
        with pytest.raises(UserError, match=reason):
            read_prompts(str(path))


def test_a_hub_name_a_path_or_nothing(tmp_path: Path) -> None:
    """An empty name was the current folder; names beyond 255 characters and null bytes were tracebacks.

    Of a path with a column, all that lies below it was looked through for a data set.
    """
    for source in (
        "",
        ":prompt",
        "/no/such:prompt",
        "../../no:prompt",
        "x" * 300,
        "x" * 300 + ".jsonl",
        "null\0byte.jsonl",
        "null\0byte",
    ):
        with pytest.raises(UserError, match="prompts|Hub|source files"):
            read_prompts(source)
    for wrong in (5, None, ["p.jsonl"]):
        with pytest.raises(UserError, match="give a file, a folder"):
            read_prompts(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [0.1, 0.3, 0.5])
def test_a_damaged_parquet_file_is_one_line(cut: float, tmp_path: Path) -> None:
    """Cut, or with a stretch of zeros in its rows."""
    whole = Path(write_rows(tmp_path / "p.parquet", [{"prompt": f"strike {i}"} for i in range(1000)])).read_bytes()
    size = int(cut * len(whole))
    for content in (whole[:size], whole[:size] + b"\0" * 40 + whole[size + 40 :]):
        (tmp_path / "p.parquet").write_bytes(content)
        with pytest.raises(UserError, match="p.parquet"):
            read_prompts(tmp_path / "p.parquet")


# --- folders


def test_a_folder_of_source_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part ends at the first blank line after 32 lines; its first half is the prompt."""
    first, second = [f"first {i}" for i in range(40)], [f"second {i}" for i in range(6)]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "b.py").write_text("\n".join([*first, "", *second]))
    (tmp_path / "a.md").write_text("# Title\n\none\ntwo\n")
    (tmp_path / "short.py").write_text("x = 1\n")
    (tmp_path / "data.bin").write_bytes(b"\xff")
    (tmp_path / ".hidden.py").write_text("\n".join(first))
    (tmp_path / "latin.py").write_bytes(b"# \xff\n" * 20)
    (tmp_path / "packed.js").write_text("x" * 5000)
    os.mkfifo(tmp_path / "pipe.py")  # which nobody writes into
    prompts = read_prompts(str(tmp_path))
    assert prompts == [
        Prompt("# Title", domain="md"),
        Prompt("\n".join(first[:20]), domain="py"),
        Prompt("\n".join(second[:3]), domain="py"),
    ]
    assert prompts[2].where == f"{tmp_path / 'src' / 'b.py'} line 42"
    assert "left out 3 files" in said(capsys)
    assert {prompt.domain for prompt in read_prompts(f"{tmp_path}:md")} == {"md"}
    with pytest.raises(UserError, match="no source files.*of .rs"):
        read_prompts(f"{tmp_path}:rs")


def test_a_folder_of_too_many_files_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--prompts /` is."""
    monkeypatch.setattr(sources, "MOST_SOURCES", 2)
    for name in ("a.py", "b.py", "c.txt", ".hidden.py"):
        (tmp_path / name).write_text("one\ntwo\n\nthree\nfour\n")
    assert len(read_prompts(f"{tmp_path}:py")) == 2
    with pytest.raises(UserError, match="more than 2 source files: give a folder further down"):
        read_prompts(str(tmp_path))


@pytest.mark.parametrize("lines", [["x"] * 200, (["x"] * 9 + [""]) * 20, [""] * 50, []])
def test_parts_cover_a_file_once(lines: list[str]) -> None:
    """No line twice, no line of text left out, none longer than 64 lines."""
    covered = [i for start, end in parts(lines) for i in range(start, end)]
    assert covered == sorted(set(covered))
    assert {i for i, line in enumerate(lines) if line} <= set(covered)
    assert all(end - start <= 64 for start, end in parts(lines))


# --- the Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """`datasets` with a file in the place of the Hub; returns how it was asked."""
    import datasets

    rows = [{"question": f"q{i}", "chat": MESSAGES, "domain": "math"} for i in range(10)]
    files = {"train": write_rows(tmp_path / "rows.parquet", rows)}
    asked: list[dict[str, Any]] = []
    load = datasets.load_dataset

    def load_dataset(path: str, name: str | None, split: str, streaming: bool = False) -> Any:
        asked.append({"path": path, "name": name, "split": split, "streaming": streaming})
        return load("parquet", data_files=files, split=split, streaming=streaming, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_hub_columns(hub: list[dict[str, Any]]) -> None:
    prompts = read_prompts("org/name:question")
    assert prompts == [Prompt(f"q{i}", domain="math") for i in range(10)]
    assert prompts[3].where == "org/name:question:train row 4"
    assert read_prompts("org/name:chat:train[2:4]") == [Prompt(messages=MESSAGES, domain="math")] * 2
    assert [call["streaming"] for call in hub] == [True, False]
    with pytest.raises(UserError, match="row 1 has nothing in a column 'answer'; its columns are question, chat, dom"):
        read_prompts("org/name:answer")
    with pytest.raises(UserError, match="does not load"):
        read_prompts("org/name:question:test")


def test_hub_limits_stream(hub: list[dict[str, Any]]) -> None:
    assert read_prompts("org/name/main:question:train[:3]") == [Prompt(f"q{i}", domain="math") for i in range(3)]
    assert hub == [{"path": "org/name", "name": "main", "split": "train", "streaming": True}]


def test_a_named_domain_column_must_be_there() -> None:
    assert to_prompt({"prompt": "a", "category": "code"}, "x", domain_column="category") == Prompt("a", domain="code")
    with pytest.raises(UserError, match="nothing in a column 'category'"):
        to_prompt({"prompt": "a"}, "x", domain_column="category")


@pytest.fixture
def store() -> Iterator[Any]:
    """An object store, in memory."""
    import fsspec

    files = fsspec.filesystem("memory")
    yield files
    files.rm("/bucket", recursive=True)


def test_files_of_an_object_store_are_read_as_local_ones(store: Any, tmp_path: Path) -> None:
    """Lines, columns and parquet; what is compressed is unpacked, and a place in it is told as in a file."""
    rows = [{"prompt": f"strike {number}", "other": f"heat {number}", "domain": "forge"} for number in range(5)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    local = write_rows(tmp_path / "rows.parquet", rows)
    store.pipe("/bucket/rows.jsonl.gz", gzip.compress(lines))
    store.pipe("/bucket/rows.parquet", Path(local).read_bytes())
    for column in ("", ":other"):
        expected = read_prompts(local + column)
        for name in ("rows.jsonl.gz", "rows.parquet"):
            assert read_prompts(f"memory://bucket/{name}{column}") == expected
    assert read_prompts("memory://bucket/rows.jsonl.gz")[2].where == "memory://bucket/rows.jsonl.gz line 3"
    (tmp_path / "mixture.yaml").write_text("sources: [{source: 'memory://bucket/rows.jsonl.gz', domain_column: other}]")
    assert [prompt.domain for prompt in read_prompts(tmp_path / "mixture.yaml")] == [row["other"] for row in rows]


def test_an_object_store_streams(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is used before the next one is asked for."""
    store.pipe("/bucket/rows.jsonl", b'{"prompt": "strike"}\n' * 100)
    sent, read_line = [], MemoryFile.readline
    monkeypatch.setattr(MemoryFile, "readline", lambda file, size: sent.append(size) or read_line(file, size))
    place, row = next(iter(remote_rows("memory://bucket/rows.jsonl")))
    assert (place, row) == ("memory://bucket/rows.jsonl line 1", '{"prompt": "strike"}')
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://bucket/nothing.jsonl", "nothing.jsonl cannot be read"),
        ("memory://bucket/rows.csv", "give the URL of a .jsonl, .txt, .parquet file"),
        ("nowhere://bucket/rows.jsonl", "cannot be read: Protocol not known: nowhere"),
        ("https://[bucket/rows.jsonl", r"is no URL \(Invalid IPv6 URL\)"),
        ("https://me:secret@bucket/rows.jsonl", "https://...: the URL holds a password"),
        ("memory://bucket/damaged.jsonl", "damaged.jsonl line 1 is not JSON"),
        ("memory://bucket/damaged.jsonl.gz", "damaged.jsonl.gz cannot be read: Not a gzipped file"),
        ("memory://bucket/damaged.parquet", "damaged.parquet is not a parquet file"),
    ],
)
def test_what_an_object_store_lacks_is_one_line(url: str, message: str, store: Any) -> None:
    for name in ("damaged.jsonl", "damaged.jsonl.gz", "damaged.parquet"):
        store.pipe(f"/bucket/{name}", b"{")
    with pytest.raises(UserError, match=message):
        read_prompts(url)
