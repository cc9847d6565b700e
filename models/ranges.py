"""The types of settings: what a number, a name or a path may be, on the command line and in YAML alike.

`checked` reads a value as such a type. Nothing slow is imported here, so that a mistake is reported at once.
"""

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from draftsmith.models.errors import UserError, shown

MOST = 10**9  # of whatever is counted: far beyond what anybody needs, and safe in 64 bits after a multiplication
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes that file systems take
LEAST_TEMPERATURE = 1e-5  # logits are divided by it

T = TypeVar("T")


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
Precision = Literal["bf16", "fp32"]  # of matrix products

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


def checked(kind: Any, value: Any, name: str = "", strict: bool = False) -> Any:
    """Return a value as its type takes it, a nested dict as a dataclass; no number may be infinite or NaN.

    `strict`: nothing is converted, and 1 is no text. Raises `UserError` for the first part that its type refuses, with
    its dotted name, which begins with `name`, and the reason.
    """
    try:
        return _adapter(kind).validate_python([value], strict=strict or None)[0]  # None: as strict as the types are
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(own := first.get("ctx", {}).get("error"), UserError):  # of the dataclass itself, which says all
            raise own from None
        key = ".".join(map(str, (*([name] if name else []), *first["loc"][1:])))
        value = "" if first["type"] == "missing" else f"={shown(first['input'])}"  # else that of what lacks it
        raise UserError(f"{key}{value}: {_reason(first)}" if key else _reason(first)) from None


def checked_fields(kind: Any, values: Mapping[str, Any], prefix: str, strict: bool = False) -> dict[str, Any]:
    """Return those of the values that are fields of a dataclass, each as the field's type takes it.

    A dataclass may check its own values so, as Python checks no types. `strict` and the `UserError` are those of
    `checked`; names begin with `prefix`.
    """
    hints = _types(kind)
    return {name: checked(hints[name], values[name], prefix + name, strict) for name in hints if name in values}


@cache  # making an adapter takes longer than using it
def _adapter(kind: Any) -> TypeAdapter[list[Any]]:
    """Return what checks a list of one value: the config of a list holds for the dataclasses in it, too."""
    return TypeAdapter(list[kind], config=ConfigDict(allow_inf_nan=False))


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields by their names."""
    hints = get_type_hints(kind, include_extras=True)
    return {entry.name: hints[entry.name] for entry in fields(kind)}


def named(what: str, name: Any) -> str:
    """Return a Hub name or a path as text. Raises `UserError`, which begins with `what`, for anything else."""
    return checked(Name, str(name) if isinstance(name, Path) else name, what)


def _reason(error: ErrorDetails) -> str:
    if error["type"] == "list_type":
        return f"give a list, such as [{shown(error['input'])}]"
    pattern = REASONS.get(error["type"])
    message = error["msg"]
    return pattern.format(**error["ctx"]) if pattern and "{" in pattern else pattern or message[0].lower() + message[1:]
