"""Reading of JSON, YAML and safetensors, for the whole project, from files that anybody may have written.

Whatever stands in a file, reading it ends with its content or with a `UserError` of one line that names the file, and
the line of it where it has lines. No code runs, and what is read stays bounded in size and depth.
"""

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, NoReturn, TypeVar

import yaml
from pydantic import BeforeValidator
from safetensors import SafetensorError, safe_open

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.storage.typed_json import from_json

LARGEST_FILE = 1 << 30  # bytes of a file of text that is read as a whole
PIECE = 1 << 20  # bytes that are read at a time
LARGEST_JSON = 1 << 25  # bytes of a JSON file; a hostile one takes fifty times as much memory
MOST_BRACKETS = 10_000_000  # lists and objects of a JSON text, each of which takes a hundred bytes of memory or more
LARGEST_LINE = 1 << 25  # bytes of a line of a file that is read line by line
LARGEST_YAML = 1 << 18  # bytes of a YAML file, of which PyYAML reads so many in seconds
MOST_YAML_VALUES = 1_000_000  # values of a YAML file, each counted as often as its aliases repeat it
DEEPEST = 100  # levels of lists and objects in each other, which whoever walks through them recursively can follow
MANY_BRACKETS = re.compile(rf"([\[{{]\s*){{{DEEPEST + 1}}}")  # in a row, of which PyYAML reads a thousand in seconds
SURROGATE_ESCAPE = re.compile(r"\\(u|U0000)[dD][89a-fA-F]")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which no encoding has
STAND_INS = {  # how files begin that stand for another one: what they are, and what to do
    rb"version https://git-lfs": "is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository",
    rb"(\.\.[/\\])+blobs[/\\]": "is the text of a link into the Hub's cache: copy the folder by `cp -rL`",
    rb"\s*<(!doctype|html)": "is a web page, not the file itself: download it anew",
}
PICKLE, ZIP = b"\x80", b"PK"  # beginnings of the two forms of PyTorch's own files

T = TypeVar("T")


def read_text(path: Path, limit: int = LARGEST_FILE) -> str:
    """Return the text of a file in UTF-8, without its byte-order mark.

    Raises `UserError` where it cannot be read, has more than `limit` bytes, or is no UTF-8 text.
    """
    try:
        content = bytearray()
        with open_regular(path) as file:
            while len(content) <= limit and (piece := file.read(PIECE)):  # reading all at once takes `limit` of memory
                content += piece
    except (OSError, ValueError) as error:  # `ValueError`: a path that holds a null byte
        raise _unreadable(path, error) from None
    if len(content) > limit:
        raise UserError(f"{path} has more than {limit:,} bytes: it is no such file, or too large to be read")
    return _decoded(content, str(path))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. Raises `UserError` where it cannot be read or is not JSON."""
    refuse_stand_in(path)
    return parse_json(read_text(path, LARGEST_JSON), str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises `UserError` where it cannot be read, is not JSON or no object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object, as such a file must: get it anew")
    return content


def read_typed(kind: type[T], path: Path) -> T:
    """Return the value of a type that a JSON file holds, as `from_json` makes it.

    Raises `UserError` naming the file where it holds no such value.
    """
    return from_json(kind, read_json(path), str(path))


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the place, "FILE line N", and the text of each line that is not blank.

    Only line feeds end a line: JSON may hold other breaks. Raises `UserError` where the file cannot be read, is no
    UTF-8 text, or has a line of more than `LARGEST_LINE` bytes.
    """
    try:
        with open_regular(path) as file:
            yield from lines_of(file, str(path))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise _unreadable(path, error) from None


def lines_of(file: IO[bytes], name: str) -> Iterator[tuple[str, str]]:
    """Yield the place, "NAME line N", and the text of each line of an opened file, as `read_lines` does."""
    number = 0
    while line := file.readline(LARGEST_LINE + 1):
        number += 1
        place = f"{name} line {number}"
        if len(line) > LARGEST_LINE:
            raise UserError(f"{place} has more than {LARGEST_LINE:,} bytes: put each entry on its own line")
        text = _decoded(line, place).rstrip("\r\n")
        if text.strip():
            yield place, text


def parse_json(text: str | bytes, place: str, with_lone_surrogates: bool = False) -> Any:
    """Return the content of a JSON text. Raises `UserError` that names `place`, such as a file and a line of it.

    Texts may hold lone surrogates, which cannot be written anywhere, only `with_lone_surrogates`.
    """
    if isinstance(text, bytes):
        text = _decoded(text, place)
    if (brackets := text.count("[") + text.count("{")) > MOST_BRACKETS:
        raise UserError(f"{place} has more than {MOST_BRACKETS:,} lists and objects: divide it")
    try:
        content = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep(place) from None
    except ValueError as error:  # also UTF-8 that is none, numbers with thousands of digits, and repeated keys
        raise UserError(f"{place} is not JSON: {first_line(error)}") from None
    if brackets > DEEPEST:
        _check_nesting(content, place)
    is_suspect = SURROGATE_ESCAPE.search(text) and not with_lone_surrogates  # two in a row are a whole character
    if is_suspect and LONE_SURROGATE.search(json.dumps(content, ensure_ascii=False)):
        raise UserError(f"{place} holds a lone surrogate, half of a character: mend its text")
    return content


def _finite(digits: str) -> float:
    """Return a number of JSON. One beyond the range of floats would become infinite."""
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is beyond all numbers")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. A key that stands twice is refused, for one of its values would be lost silently."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"the key {_repeated([name for name, _ in pairs])!r} stands twice in an object")
    return content


def _repeated(names: list[str]) -> str | None:
    """Return a name that stands in the list more than once, if any."""
    return next((name for name, number in Counter(names).items() if number > 1), None)


# --- YAML


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. Raises `UserError` where it cannot be read or is not YAML."""
    return parse_yaml(read_text(path, LARGEST_YAML), str(path))


def parse_yaml(text: str, place: str) -> Any:
    """Return the content of a YAML text, in which no key stands twice. Raises `UserError` that names `place`."""
    if SURROGATE_ESCAPE.search(text):  # of which YAML makes no whole characters
        raise UserError(f"{place} holds a surrogate, half of a character: write the character itself")
    if MANY_BRACKETS.search(text):
        raise _too_deep(place)
    try:
        content = yaml.load(text, _Loader)
    except RecursionError:
        raise _too_deep(place) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two of dates and numbers beyond all bounds
        mark, reason = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
        raise UserError(f"{place} is not YAML: {reason}" + (f" in line {mark.line + 1}" if mark else "")) from None
    _check_nesting(content, place, MOST_YAML_VALUES)
    return content


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which runs no code, and refuses keys that stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        if (name := _repeated(names)) is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _check_nesting(content: Any, place: str, most_values: float = math.inf) -> None:
    """Raise `UserError` for lists and objects in each other beyond `DEEPEST`, or, by aliases, without an end."""
    level: list[Any] = [[content]]
    number = 0
    for _ in range(DEEPEST + 1):
        number += sum(map(len, level))
        if number > most_values:
            raise UserError(f"{place} stands for more than {most_values:,} values: write it without such aliases")
        parts = (part for value in level for part in (value.values() if isinstance(value, dict) else value))
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise _too_deep(place)


def _too_deep(place: str) -> UserError:
    return UserError(f"{place} is nested too deeply to be read: more than {DEEPEST} lists or objects in each other")


# --- safetensors


def open_tensors(path: Path, mapped: bool = False) -> safe_open:
    """Return an opened safetensors file, also a context manager; its tensors stay on disk until they are asked for.

    `mapped`: they stay there even then, until they are used, and a limit on memory counts the whole file.
    Raises `UserError` where it cannot be read, is cut or damaged, or is another kind of file than its name says.
    """
    beginning = refuse_stand_in(path)
    try:
        return safe_open(path, "pt", backend="mmap" if mapped else "pread")
    except SafetensorError as error:
        if beginning.startswith((PICKLE, ZIP)):  # as the length at the beginning of a good file may happen to
            raise UserError(f"{path} is a pickle, which may run code when it is read: get it as safetensors") from None
        raise UserError(f"{path} is damaged ({first_line(error)}): get it or write it anew") from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def open_regular(path: Path) -> BinaryIO:
    """Return an opened file. Raises `OSError` where it cannot be opened, and for pipes and devices, which never end."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 (returned)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file")
    return file


def refuse_stand_in(path: Path) -> bytes:
    """Return the beginning of a file. Raises `UserError` for one that only stands for another, and says for which."""
    try:
        with open_regular(path) as file:
            beginning = file.read(64)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    for pattern, message in STAND_INS.items():
        if re.match(pattern, beginning, re.IGNORECASE):
            raise UserError(f"{path} {message}")
    return beginning


def _decoded(content: bytes | bytearray, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or first_line(error)}")


def _json_object(value: Any) -> Any:
    content = parse_json(value, "it") if isinstance(value, str) else value
    if not isinstance(content, dict):
        raise ValueError("""give a JSON object, such as '{"enable_thinking": false}'""")
    return content


JsonObject = Annotated[dict[str, Any], BeforeValidator(_json_object)]  # a setting gives its text
