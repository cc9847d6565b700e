"""The one exception for mistakes of the user's, checks of single values that raise it, and words on other errors."""

import math
import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from types import FrameType
from typing import Any

LONGEST_LINE = 2000  # characters of a message
# Control characters of 7 and 8 bits, marks and overrides of the direction of writing, breaks, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text with escapes such as `\\x1b` in place of characters that steer a terminal or turn text around."""
    return UNPRINTABLE.sub(lambda match: match[0] if match[0] in kept else ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Return a text as one printable line; a long one is cut in its middle."""
    line, half = printable(text, kept=""), LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


class UserError(ValueError):
    """A mistake of the user's: in one line, what is wrong and what to do.

    The line is printable and not long, whatever foreign text it quotes. The command line prints it and exits with 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def require_at_least(name: str, value: float, least: float = 1) -> None:
    """Raise `UserError` for a setting below `least`, and for NaN."""
    if not value >= least:
        raise UserError(f"{name} {value}: give at least {least}")


def whole_number(name: str, value: Any, least: int = -(2**63)) -> int:
    """Return a setting that is a whole number of 64 bits, at least `least`. Raises `UserError`, also for a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not -(2**63) <= int(value) < 2**63:
        raise UserError(f"{name} {shown(value)}: give a whole number of at most 64 bits")
    require_at_least(name, int(value), least)
    return int(value)


def real_number(name: str, value: Any) -> float:
    """Return a setting that is a finite number. Raises `UserError`, also for a bool."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # of an integer
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{name} {shown(value)}: give a finite number")
    return number


def shown(value: Any) -> str:
    """Return a value for a message of one line, shortened where it is long."""
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:  # of the value's own `repr`, such as that of an integer of too many digits
        return f"of type {type(value).__name__}"


@contextmanager
def out_of_memory(mend: str) -> Iterator[None]:
    """Raise `UserError` with this mend where memory runs out inside the block, the device's or the machine's."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise UserError(f"out of memory: {mend}") from None
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python's, the system's, PyTorch's or CUDA's says that memory was short."""
    texts = (
        *("out of memory", "not enough memory", "can't allocate memory", "Cannot allocate memory"),
        "can't start new thread",  # whose stack has no room
    )
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def own_place(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Return module and line of the first of some frames that is of draftsmith; give the innermost frame first."""
    modules = ((frame.f_globals.get("__name__", ""), line) for frame, line in frames)
    return next((f"{name}:{line}" for name, line in modules if name.startswith("draftsmith.")), None)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that says anything, for a message of one line.

    Where that line only announces the next one, by a colon at its end, it is both.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


@contextmanager
def errors_of(what: str) -> Iterator[None]:
    """Put the name of what is wrong before the line of any `UserError` that is raised inside and does not name it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


@contextmanager
def library_errors(what: str, mend: str) -> Iterator[None]:
    """Turn whatever a library raises inside, over files that anybody may have written, into one `UserError`.

    `what` says what went wrong, as in "target 'x' does not load". The library's reason and the mend follow; its advice
    to switch safety off is left out. Memory that runs out stays what it is.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # panics of the Rust libraries are no `Exception`
        if is_out_of_memory(error):
            raise  # the command line knows which setting helps
        raise UserError(f"{what} ({_reason(error)[:400]}): {mend}") from None


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "it needs code that comes with it, and draftsmith runs none"
    if "weights_only" in str(error):
        return "its weights are a pickle that holds more than tensors, and no code of it is run"
    if isinstance(error, OSError | ValueError):
        return first_line(error).rstrip(".,")
    return f"{type(error).__name__}, {first_line(error).rstrip('.,')}"
