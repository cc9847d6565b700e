"""Make the flags of a command from its settings dataclass, and the settings from the flags that a user gave."""

import argparse
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from draftsmith.models.errors import UserError, shown
from draftsmith.models.ranges import checked
from draftsmith.recipes.configs.command_settings import GROUPS, OUTPUT

Settings = TypeVar("Settings")


def add_flags(parser: argparse.ArgumentParser, settings_class: type) -> None:
    """Add a flag or a positional argument for each field of a dataclass, group by group, the required ones first.

    A field's metadata are those that `option` of command_settings.py gives it.
    """
    settings = sorted(fields(settings_class), key=lambda setting: setting.default is not MISSING)  # type: ignore[arg-type]
    hints = get_type_hints(settings_class, include_extras=True)
    usage = [parser.prog]
    for name in GROUPS:
        members = [setting for setting in settings if setting.metadata["group"] == name]
        group = parser.add_argument_group(name) if members or name == OUTPUT else parser
        for setting in members:
            positional, metavar = setting.metadata["positional"], setting.metadata["metavar"]
            flag = setting.name if positional else f"--{setting.name.replace('_', '-')}"
            group.add_argument(
                flag, default=argparse.SUPPRESS, help=help_of(setting), **values_of(setting, hints[setting.name])
            )
            if setting.default is MISSING:
                usage.append(metavar if positional else f"{flag} {metavar}")
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
    group.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    # The description goes with the usage, without the blank line in between that argparse leaves.
    parser.usage = f"{' '.join(usage)} [options]\n{parser.description}".replace("%", "%%")
    parser.description = None


def values_of(setting: "Field[Any]", hint: Any) -> dict[str, Any]:
    """Return how argparse reads the values of a field, by its type."""
    kind = next(kind for kind in get_args(hint) if kind is not NoneType) if NoneType in get_args(hint) else hint
    if kind is bool:
        return {"action": "store_true"}
    positional, repeatable = setting.metadata["positional"], setting.metadata["repeatable"]
    reading: dict[str, Any] = {"metavar": setting.metadata["metavar"]}
    if not positional:
        reading["required"] = setting.default is MISSING
    if get_origin(kind) is Literal:
        return reading | {"choices": get_args(kind)}
    if get_origin(kind) is not tuple:
        return reading | {"type": reader(kind)}
    types = get_args(kind)
    if repeatable:
        return reading | {"type": reader(types[0]), "action": "append"}
    number = len(types) if ... not in types else "*" if positional and setting.default is not MISSING else "+"
    # A flag that is given twice has the values of both.
    return reading | {"type": reader(types[0]), "nargs": number} | ({} if positional else {"action": "extend"})


def reader(kind: Any) -> Callable[[str], Any]:
    """Return a function that reads one value of a type."""

    def read(text: str) -> Any:
        try:
            return checked(kind, text)
        except UserError as error:
            raise argparse.ArgumentTypeError(f"{shown(text)}: {error}") from None

    return read


def help_of(setting: "Field[Any]") -> str:
    """Return the help of a field as argparse takes it, with its default where there is one to name."""
    default, help = setting.default, setting.metadata["help"].replace("%", "%%")
    if default is MISSING or default is None or default is False or default == ():
        return help
    values = default if isinstance(default, tuple) else (default,)
    text = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{help} ({text})"


def settings_from(settings_class: type[Settings], parsed: argparse.Namespace) -> Settings:
    """Return the settings that were parsed; those that were not given have the defaults of the dataclass."""
    names = {setting.name for setting in fields(settings_class)}  # type: ignore[arg-type]
    values = {name: value for name, value in vars(parsed).items() if name in names}
    return settings_class(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
