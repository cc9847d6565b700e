"""The types of settings: what a number, a name or a path may be, on the command line and in YAML alike.

`checked` reads a value as such a type. Nothing slow is imported here, so that a mistake is told at once.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from draftsmith.models.errors import UserError, shown

MOST = 10**9  # of whatever is counted: far beyond what anybody needs, and safe in 64 bits after a multiplication
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
LEAST_TEMPERATURE = 1e-5  # logits are divided by it

T = TypeVar("T")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)  # making one takes longer than using it


def _no_bool(value: T) -> T:
    if isinstance(value, bool):
        raise ValueError("give a number")
    return value


def _temperature(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"give 0 (greedy), or {LEAST_TEMPERATURE} or more")
    return value


def _path(value: T) -> T:
    text = str(value)
    try:
        lengths = [len(os.fsencode(part)) for part in (text, *text.split(os.sep))]
    except UnicodeEncodeError:
        raise ValueError("it holds characters that no file name has") from None
    if "\0" in text:
        raise ValueError("it holds a null character, which no file name has")
    if lengths[0] > LONGEST_PATH or max(lengths[1:]) > LONGEST_NAME:
        raise ValueError(f"a name in it is longer than {LONGEST_NAME} bytes, or all of it than {LONGEST_PATH}")
    return value


def _not_empty(value: T) -> T:
    if value == "":
        raise ValueError("it is empty; give a name, or leave it out")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool), Field(le=MOST)]
Count = Annotated[Whole, Field(ge=1)]
Depth = Annotated[Whole, Field(ge=1, le=1000)]  # tokens, layers or heads, one behind the other
BatchSize = Annotated[Whole, Field(ge=1, le=4096)]  # texts that are decoded at a time
TwoOrMore = Annotated[Whole, Field(ge=2)]
Natural = Annotated[Whole, Field(ge=0)]
Seed = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, lt=2**32)]

Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False), Field(le=MOST)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]
AboveZero = Annotated[Number, Field(gt=0, le=1)]  # also a share
Temperature = Annotated[NonNegative, AfterValidator(_temperature)]

Name = Annotated[str, BeforeValidator(_not_empty), AfterValidator(_path)]  # of the Hub, or a path
FilePath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(_path)]

# Reasons by pydantic's names of errors; the others are told in pydantic's own words.
REASONS = {
    "greater_than_equal": "give at least {ge:.10g}",
    "greater_than": "give more than {gt:.10g}",
    "less_than_equal": "give at most {le:.10g}",
    "less_than": "give less than {lt:.10g}",
    "finite_number": "give a finite number",
    "literal_error": "give {expected}",
    "string_type": "give a text, in quotes where it would be read as something else",
    "value_error": "{error}",
    "dataclass_type": "give settings by their names",
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "give a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "give a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "give true or false"),
}


def checked(kind: Any, value: Any, prefix: str = "") -> Any:
    """Return a value as its type takes it, a nested dict as a dataclass.

    Raises `UserError` for the first part that its type refuses, with its dotted name behind `prefix`, and the reason.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(own := first.get("ctx", {}).get("error"), UserError):  # of the dataclass itself, which says all
            raise own from None
        key = prefix + ".".join(map(str, first["loc"]))
        value = "" if first["type"] == "missing" else f"={shown(first['input'])}"  # else that of what lacks it
        raise UserError(f"{key}{value}: {_reason(first)}" if key else _reason(first)) from None


def check_values(kind: Any, values: Mapping[str, Any], prefix: str) -> None:
    """Refuse values that are not of the types of a dataclass's fields; nothing is converted, and 1 is no text.

    Raises `UserError` as `checked` does. Names that the dataclass does not have are passed over.
    """
    for name, adapter in _strict_types(kind).items():
        if name in values:
            try:
                adapter.validate_python(values[name])
            except ValidationError as error:
                raise UserError(f"{prefix}{name}={shown(values[name])}: {_reason(error.errors()[0])}") from None


@cache
def _strict_types(kind: Any) -> dict[str, TypeAdapter[Any]]:
    hints, config = get_type_hints(kind, include_extras=True), ConfigDict(strict=True, allow_inf_nan=False)
    return {entry.name: TypeAdapter(hints[entry.name], config=config) for entry in fields(kind)}


def named(what: str, name: Any) -> str:
    """Return a Hub name or a path as text. Raises `UserError`, which says what it names, for anything else."""
    return checked(Name, str(name) if isinstance(name, Path) else name, what)


def check_fields(value: Any, prefix: str) -> None:
    """Read each field of a dataclass as its type; for `__post_init__`, as Python checks no types."""
    for name, kind in get_type_hints(type(value), include_extras=True).items():
        object.__setattr__(value, name, checked(kind, getattr(value, name), f"{prefix}: {name}"))


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "list_type":
        return f"give a list, such as [{shown(error['input'])}]"
    pattern = REASONS.get(error["type"])
    message = error["msg"]
    return pattern.format(**error["ctx"]) if pattern and "{" in pattern else pattern or message[0].lower() + message[1:]
