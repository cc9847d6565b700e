"""Hostile values, and damage to files: each is drawn from a seeded generator, so that a case can be had again.

`hostile_value` is any value that JSON or YAML can hold, `hostile_text` any text, `near` a value like the one given.
`damaged_json` puts such values into a healthy content, place by place, so that all fields of a file are reached without
a list of them. `damage_file` damages a file as its suffix says.
"""

import io
import json
import math
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from schemas import FIELDS_OF_FILES, FIELDS_OF_MODELS

CANARY = "CANARY"  # name of the file that must never come to be

NUMBERS: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, -1, 0, -0.0, 1, 2, 3, 0.5, -0.5, 1.5, 1e308, 5e-324, 1e-9, -1e9, 127, 128, 129),
    *(2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**7, 10**9, 10**30),
)
TEXTS = (
    *("", " ", "\t", "\n", "a\nb", "\r", "\0", "a\0b", "\x85", "\u2028", "\ufeff", "\u202e", "\ud800", "x\udfff", "é"),
    *(
        "\x1b[31mred\x1b[0m",
        "\x1b]0;title\x07",
        "\x1b[2J",
        "\x9b31m",
        "\x08\x08\x7f",
        "名前",
        "\U0001f525",
        "\U0010ffff",
    ),
    *("..", "../../escape", "/", "/etc/passwd", "~", "C:\\x", ".", "a/b", "-", "--", "-dash", "--flag=1", "a=b", "a:b"),
    *(
        "[red]markup[/red]",
        "[/]",
        "[v1]",
        "[link=http://x]y[/link]",
        "$x_{",
        "$\\frac$",
        "%s%n",
        "{0}",
        "{",
        "{{ 7 * 7 }}",
    ),
    *(
        "<script>hostile()</script>",
        '"><img src=x onerror=hostile()>',
        "&lt;",
        "]]>",
        "-->",
        "|a|b|",
        "`x`",
        "# x",
        "***",
    ),
    *(f"$(touch {CANARY})", f"`touch {CANARY}`", f"; touch {CANARY} #", f"' ; touch {CANARY} '", f"\n touch {CANARY}"),
    *("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for i in range(10**9) %}x{% endfor %}", "{% raise %}"),
    *("nan", "NaN", "inf", "null", "None", "true", "1e999", "-1", "0", "1.5", "0x10", "1_000", "9" * 5000, "x" * 300),
    *("x" * 70_000, "http://[", "http://localhost:99999", "file:///etc/passwd", "cuda:999", "meta", "auto", "ngram"),
)
PICKLED_CODE = f"c__builtin__\nopen\n(V{CANARY}\nVw\ntR."


class Raw(str):
    """Text that stands in a JSON file as it is, for what `json.dumps` does not write."""


DEEP, MANY_DIGITS = Raw("[" * 100_000 + "]" * 100_000), Raw("9" * 5000)
RAW_JSON = (
    *(DEEP, MANY_DIGITS, Raw("-" + "9" * 5000), Raw("1e999999"), Raw('{"a":' * 5000 + "1" + "}" * 5000)),
    *(Raw('"\\ud800"'), Raw('"\\u0000"'), Raw('{"a": 1, "a": 2}'), Raw("0" * 100), Raw("Infinity"), Raw("[1,]")),
)


def hostile_text(random: Random) -> str:
    """Return a text that somebody may trip over, now and then two of them joined."""
    text = random.choice(TEXTS)
    return text + random.choice(TEXTS) if random.random() < 0.15 else text


def hostile_value(random: Random) -> Any:
    """Return any value that a file may hold where another is expected."""
    draw = random.random()
    if draw < 0.4:
        return random.choice(NUMBERS)
    if draw < 0.65:
        return hostile_text(random)
    if draw < 0.75:
        return random.choice(RAW_JSON)
    return random.choice(
        (None, True, False, [], {}, [[]], [None], [{}], {"": ""}, [0] * 20, [-1], ["x"], {"a": {"b": []}}, [1, "x"],
         [math.nan], [10**30], {"x" * 300: 1}, {"\x1b[31m": 1}, [[0], [0]], [0, 1], [1, 0], [0.5], [2**63])
    )  # fmt: skip


def near(random: Random, value: Any) -> Any:
    """Return a value of the same type that may just not fit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice(
            (value + 1, value - 1, -value, 2 * value, value // 2, 0, value * 10**6, float(value) + 0.5)
        )
    if isinstance(value, float):
        return random.choice((-value, 2 * value, 1e12 * value, value + 1, 0.0, math.nan, math.inf))
    if isinstance(value, str):
        place = random.randrange(len(value) + 1)
        part = hostile_text(random)
        return random.choice((value[:place], value[:place] + part + value[place:], value.upper(), value + "x", part))
    if isinstance(value, list) and value:
        place = random.randrange(len(value))
        return random.choice(
            (value[:place], value[:place] + value[place + 1 :], value + [value[place]], value[::-1], value * 50,
             [*value[:place], hostile_value(random), *value[place + 1 :]])
        )  # fmt: skip
    if isinstance(value, dict) and value:
        name = random.choice(list(value))
        rest = {key: part for key, part in value.items() if key != name}
        return random.choice((rest, {**rest, name + "x": value[name]}, {**value, "extra": hostile_value(random)}))
    return hostile_value(random)


def places(content: Any) -> list[tuple[Any, Any]]:
    """Return the container and the key of every value in a content."""
    keys: Any = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    found = [(content, key) for key in keys]
    return found + [place for key in keys for place in places(content[key])]


def damaged_json(random: Random, content: Any, names: Sequence[str] = ()) -> Any:
    """Return the content with one to three of its values replaced, or with values for other fields of its schema."""
    content = json.loads(json.dumps(content))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        found = places(content)
        if not found or random.random() < 0.03:
            return hostile_value(random)
        owner, key = random.choice(found)
        draw = random.random()
        if draw < 0.15 and isinstance(owner, dict):
            del owner[key]
        elif draw < 0.3 and isinstance(owner, dict) and names:
            owner[random.choice(names)] = hostile_value(random)
        else:
            owner[key] = near(random, owner[key]) if draw < 0.5 else hostile_value(random)
    return content


def json_text(content: Any) -> str:
    """Return JSON, also of what `json.dumps` refuses to write."""
    raw: list[str] = []

    def marked(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: marked(part) for key, part in value.items()}
        return [marked(part) for part in value] if isinstance(value, list) else value

    text = json.dumps(marked(content))
    for number, part in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', part)
    return text


# --- text and bytes


def yaml_bombs() -> tuple[str, ...]:
    """Return YAML that takes memory or time, or would run code."""
    layers = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    return (
        "a0: &a0 [lol]\n" + layers,
        f"!!python/object/apply:os.system ['touch {CANARY}']\n",
        "a: &a [*a]\n",
        "&a {*a : 1}\n",
        "[" * 20_000,
        "- " * 5_000 + "x",
        "a: " + "9" * 5000 + "\n",
        "run.steps: 12:30:45\n",
        "? [1, 2]\n: 3\n",
        "{[1]: 2}\n",
        "2001-01-01: 2001-01-01\n",
        "a: !!binary x\n",
        "--- 1\n--- 2\n",
        "<<: {a: 1}\n",
        "a: !!float nan\nb: .inf\n",
        "\t- x\n",
        "!!set {a, b}\n",
        "%YAML 3.0\n---\na: 1\n",
    )


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """Return the content with a damage that knows nothing of its format."""
    start = random.randrange(len(content) + 1)
    end = min(len(content), start + random.choice((1, 1, 8, 100, 4096)))
    if content and random.random() < 0.35:
        flipped = bytearray(content)
        for _ in range(random.choice((1, 1, 4, 64))):
            flipped[random.randrange(len(flipped))] ^= 1 << random.randrange(8)
        return bytes(flipped)
    damages: tuple[Callable[[], bytes], ...] = (
        lambda: b"",
        lambda: content[:start],
        lambda: content[start:],
        lambda: content[:start] + content[end:],
        lambda: content[:end] + content[start:],
        lambda: content[:start] + random.randbytes(end - start) + content[end:],
        lambda: content[:start] + bytes(end - start) + content[end:],
        lambda: content + random.randbytes(random.choice((1, 8, 1000))),
        lambda: content + content,
        lambda: b"\xef\xbb\xbf" + content,
        lambda: content.decode("utf-8", "replace").encode("utf-16"),
        lambda: content.decode("utf-8", "replace").encode("utf-32-be"),
        lambda: content.replace(b"\n", b"\r\n"),
        lambda: content.replace(b"\n", b""),
        lambda: content.replace(b'"', b"'"),
        lambda: content[:start] + b"\0" + content[start:],
        lambda: content[:start] + b"\xff\xfe" + content[start:],
        lambda: content[:start] + random.choice(TEXTS).encode("utf-8", "surrogatepass") + content[start:],
        lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n",
        lambda: pickled_code(random),
        lambda: b"\x1f\x8b" + content,
        lambda: b"PK\x03\x04" + content,
        lambda: b"<!DOCTYPE html><html><body>404</body></html>",
        lambda: random.randbytes(100),
    )
    return random.choice(damages)()


class Opens:
    """An object whose pickle makes the canary where it is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (CANARY, "w")


def pickled_code(random: Random) -> bytes:
    """Return a pickle, as it is or as torch saves one, that makes the canary where it is loaded."""
    if random.random() < 0.5:
        return pickle.dumps({"weight": Opens()})
    import torch

    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2), "code": Opens()}, buffer)
    return buffer.getvalue()


def damaged_safetensors(random: Random, content: bytes) -> bytes:
    """Return a .safetensors file whose header or values are changed; some of them can still be opened."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    name = random.choice(names)
    entry = header[name]
    start, end = entry["data_offsets"]
    draw = random.randrange(10)
    if draw == 0:
        header[name] = damaged_json(random, entry)
    elif draw == 1:
        header = damaged_json(random, header)
    elif draw == 2:
        entry["dtype"] = random.choice(("F32", "F16", "BF16", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3", "X", "F4"))
    elif draw == 3:
        entry["shape"] = random.choice(([], [0], [-1], [2**40, 2**40], [*entry["shape"], 1], entry["shape"][::-1], [1]))
    elif draw == 4:
        header[f"{name}{random.choice(('x', '.0', '', hostile_text(random)))}"] = header.pop(name)
    elif draw == 5:
        other = random.choice(names)
        header[name], header[other] = header[other], header[name]
    elif draw == 6:
        size_told = random.choice((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", size_told) + content[8:]
    elif draw == 7:
        value = random.choice((math.nan, math.inf, -math.inf, 3e38))
        if entry["dtype"] == "F32":
            data = data[:start] + struct.pack("<f", value) * ((end - start) // 4) + data[end:]
    elif draw == 8:
        header["__metadata__"] = random.choice(({"format": "tf"}, {}, {"format": hostile_text(random)}, 3, None))
    else:
        kept = {other: header[other] for other in header if other != name}
        header = kept if random.random() < 0.5 else {"__metadata__": {"format": "pt"}}
    text = json_text(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def damage_file(random: Random, path: Path) -> None:
    """Damage a file: what it holds, or now and then what it is."""
    names = FIELDS_OF_MODELS if "config" in path.name else FIELDS_OF_FILES
    content = path.read_bytes()
    draw = random.random()
    if draw < 0.03:
        path.unlink()
        links = (path, "nowhere/at/all", "/dev/zero")
        replacements = (
            lambda: None,
            path.mkdir,
            lambda: os.mkfifo(path),
            lambda: path.symlink_to(random.choice(links)),
        )
        random.choice(replacements)()
    elif path.suffix == ".safetensors" and draw < 0.7:
        path.write_bytes(damaged_safetensors(random, content))
    elif path.suffix == ".json" and draw < 0.8:
        path.write_text(json_text(damaged_json(random, json.loads(content), names)))
    elif path.suffix == ".jsonl" and draw < 0.8:
        lines = content.splitlines()
        number = random.randrange(len(lines))
        lines[number] = json_text(damaged_json(random, json.loads(lines[number]), names)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    elif path.suffix == ".yaml" and draw < 0.2:
        path.write_text(random.choice(yaml_bombs()))
    else:
        path.write_bytes(damaged_bytes(random, content))
