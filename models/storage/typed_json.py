"""Dataclasses to JSON and back: their fields are the fields of the file, in the same order.

`from_json(kind, to_json(value))` equals the value. A field is marked with `optional()` where the file leaves it out,
and with `flat()` where its own fields stand in the file beside those of its owner.
"""

from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar

from pydantic import BeforeValidator

from draftsmith.models.errors import UserError
from draftsmith.models.ranges import checked

T = TypeVar("T")


def optional(beside: str | None = None, compare: bool = True) -> Any:
    """Return a field that the file leaves out where it is None.

    `beside` names another field: this one is then left out where that one is None, and written as null where only this
    one is. `compare` says whether the field counts where two values are compared.
    """
    return field(default=None, compare=compare, metadata={"optional": True, "beside": beside})


def flat() -> Any:
    """Return a field whose own fields stand in the file beside those of its owner."""
    return field(metadata={"flat": True})


def to_json(value: Any) -> Any:
    """Return what a JSON file holds of a value; where its type has a method `to_json`, that decides."""
    if hasattr(value, "to_json"):
        return to_json(value.to_json())
    if is_dataclass(value) and not isinstance(value, type):
        return _fields_to_json(value)
    if isinstance(value, dict):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(part) for part in value]
    return value


def _fields_to_json(value: Any) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for entry in fields(value):
        part = getattr(value, entry.name)
        if entry.metadata.get("flat"):
            content |= to_json(part)
        elif not entry.metadata.get("optional") or getattr(value, entry.metadata["beside"] or entry.name) is not None:
            content[entry.name] = to_json(part)
    return content


def from_json(kind: type[T], content: Any, place: str = "") -> T:
    """Return the value of a type from what a JSON file holds of it; fields that the type does not have are left out.

    Raises `UserError` for content that is no such value, naming `place`, such as the file, and the first wrong field.
    """
    try:
        return checked(kind, content)
    except UserError as error:
        raise UserError(f"{place}: {error}" if place else str(error)) from None


def with_flat_parts(kind: type) -> BeforeValidator:
    """Return the mark of a type with flat fields wherever it is read: `Annotated[Kind, with_flat_parts(Kind)]`."""
    names = [entry.name for entry in fields(kind) if entry.metadata.get("flat")]
    return BeforeValidator(lambda row: {**row, **dict.fromkeys(names, row)} if isinstance(row, dict) else row)
