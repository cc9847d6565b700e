"""Tests that whatever stands in a file, reading it ends with its content or with one line that names the file."""

import json
import math
import os
import pickle
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from draftsmith.models.errors import UserError, one_line
from draftsmith.models.storage import reading
from draftsmith.models.storage.reading import (
    open_tensors,
    parse_json,
    parse_yaml,
    read_json,
    read_lines,
    read_text,
    read_typed,
    read_yaml,
)

DEEP = 100_000
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))
BAD_JSON = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "deep": b"[" * DEEP,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "nan": b'{"a": NaN}',
    "infinity": b"[-Infinity]",
    "beyond all numbers": b'{"a": 1e999}',
    "deep objects": b'{"a":' * 101 + b"1" + b"}" * 101,
    "twice": b'{"a": 1, "a": 2}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "latin-1": '{"ä": 1}'.encode("latin-1"),
    "null bytes": b"\0" * 100,
}
BAD_YAML = {
    "deep": b"[" * 5000,
    "deep lists of lines": b"- " * 5000 + b"x",
    "bomb": BOMB.encode(),
    "loop": b"a: &a [*a]",
    "long": b"a: 1 #" + b"x" * (1 << 20),
    "twice": b"a: 1\na: 2",
    "code": b"!!python/object/apply:os.system ['true']",
    "digits": b"a: " + b"9" * 5000,
    "date": b"a: 2026-99-99",
    "control": b"a: \x01",
    "not UTF-8": b"a: \xff",
    "key": b"? [a]\n: 1",
}


def refusal(read, path: Path) -> str:
    """Return the one line with which reading a file is refused; it names the file."""
    with pytest.raises(UserError) as caught:
        read(path)
    text = str(caught.value)
    assert one_line(str(path)) in text
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none_is_one_line(tmp_path, name):
    (path := tmp_path / "x.json").write_bytes(BAD_JSON[name])
    assert refusal(read_json, path)


@pytest.mark.parametrize("name", sorted(BAD_JSON.keys() - {"empty"}))
def test_a_bad_line_is_named(tmp_path, name):
    (path := tmp_path / "x.jsonl").write_bytes(b'{"good": 1}\n\n' + BAD_JSON[name] + b"\n")
    assert f"{path} line 3" in refusal(lambda path: [parse_json(line, place) for place, line in read_lines(path)], path)


@pytest.mark.parametrize("name", BAD_YAML)
def test_yaml_that_is_none_is_one_line(tmp_path, name):
    (path := tmp_path / "x.yaml").write_bytes(BAD_YAML[name])
    assert refusal(read_yaml, path)


def test_yaml_that_merges_over_and_over_has_each_key_once(tmp_path):
    """PyYAML before 6.0.4 repeats each key 9 ** 11 times."""
    (path := tmp_path / "x.yaml").write_text(MERGES)
    assert read_yaml(path) == {f"a{i}": {"x": 1} for i in range(12)}


@pytest.mark.parametrize("text", ["[" * 101, "[ {\n" * 51])
def test_yaml_of_many_open_brackets_is_not_parsed(text, monkeypatch):
    """PyYAML takes a second for a thousand of them, and a config has many values."""
    monkeypatch.setattr(yaml, "load", lambda *_: pytest.fail("it is parsed"))
    with pytest.raises(UserError, match="nested too deeply"):
        parse_yaml(text, "x")


def test_what_cannot_be_opened_is_one_line(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "folder", tmp_path / ("x" * 300), Path("null\0byte")):
        for read in (
            read_json,
            read_yaml,
            open_tensors,
            lambda path: [parse_json(line, place) for place, line in read_lines(path)],
        ):
            assert refusal(read, path)


@pytest.mark.parametrize("read", [read_json, read_yaml, read_text, open_tensors, lambda path: list(read_lines(path))])
def test_what_never_ends_is_not_read(tmp_path, read):
    """Opening a pipe would wait for somebody who writes into it, and a device gives zeros for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        assert "is no regular file" in refusal(read, tmp_path / name)


def test_a_file_larger_than_its_limit_is_refused_unread(tmp_path):
    with (path := tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)  # a file of zeros that takes no space
    assert "1,000 bytes" in refusal(lambda path: read_text(path, limit=1000), path)


def test_more_lists_than_memory_holds_are_refused_unread(monkeypatch):
    monkeypatch.setattr(reading, "MOST_BRACKETS", 10)
    assert parse_json("[" + "[]," * 8 + "[]]", "here") == [[]] * 9
    with pytest.raises(UserError, match="here has more than 10 lists and objects"):
        parse_json("[" + "{}," * 9 + "[]]", "here")


def test_what_is_written_is_read_back(tmp_path):
    """The byte-order mark that some editors write is no part of the text; aliases of YAML are values like others."""
    content = {"a": [1, 2.5, None, True, "ü\u2028"], "b": {"c": {}}}
    for read, text in ((read_json, json.dumps(content)), (read_yaml, yaml.safe_dump(content))):
        for mark in ("", "\ufeff"):
            (path := tmp_path / "x").write_text(mark + text, encoding="utf-8")
            assert read(path) == content
    (path := tmp_path / "x").write_text("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}")
    assert read_yaml(path) == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_any_bytes_are_read_or_refused(tmp_path, read):
    """Texts with a few bytes changed, removed or repeated: some are read, and the others cost one line."""
    text = json.dumps({"name": ["a", "b"], "size": 12, "deep": {"rate": 0.5, "on": None}}).encode()
    path, refusals = tmp_path / "x", list[str]()
    for seed in range(300):
        rng, content = random.Random(seed), bytearray(text)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(content))
            content[place : place + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3)) or b"["
        path.write_bytes(content)
        try:
            read(path)
        except UserError as error:
            refusals.append(str(error))
    assert 0 < len(refusals) < 300
    assert all("\n" not in refusal and str(path) in refusal for refusal in refusals)


@dataclass
class Point:
    """A type without limits of its own."""

    x: float
    y: tuple[float, ...]


@pytest.mark.parametrize("number", ["nan", "inf", "-Infinity", "1e999"])
def test_a_text_is_no_way_to_write_nan(tmp_path, number):
    """Types take texts of numbers, and JSON has no NaN: its name in quotes would come in by that door."""
    (path := tmp_path / "x").write_text(json.dumps([{"x": 1, "y": [2.5]}, {"x": "3", "y": []}]))
    assert read_typed(list[Point], path) == [Point(1.0, (2.5,)), Point(3.0, ())]
    for content in ([{"x": number, "y": []}], [{"x": 1, "y": [0, number]}]):
        path.write_text(json.dumps(content))
        assert "give a finite number" in refusal(lambda path: read_typed(list[Point], path), path)


def test_tensors_are_read_and_other_kinds_of_file_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(6.0).view(2, 3)}, path)
    with open_tensors(path) as file:
        assert torch.equal(file.get_tensor("weight"), torch.arange(6.0).view(2, 3))
    whole = path.read_bytes()
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refusal(open_tensors, path)
    path.write_bytes(math.inf.hex().encode() + whole)
    refusal(open_tensors, path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS" in refusal(open_tensors, path)
    path.write_bytes(pickle.dumps({"weight": 1}))
    assert "pickle" in refusal(open_tensors, path)
    torch.save({"weight": torch.ones(1)}, path)
    assert "pickle" in refusal(open_tensors, path)
