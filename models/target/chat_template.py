"""The chat template of a target, which anybody may have written: it is rendered within limits of time and size.

transformers renders it in jinja's sandbox (`ImmutableSandboxedEnvironment`), where it reaches nothing but the chat.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from draftsmith.models.errors import UserError, first_line
from draftsmith.models.target.target import Target

SECONDS = 10.0  # of rendering one chat, which takes a good template a millisecond
LONGEST_CHAT = 1 << 24  # characters


class TimeUp(Exception):
    """The time for a block of code is over."""


def rendered(target: Target, messages: list[dict[str, Any]], tools: Any = None, opened: bool = False) -> str:
    """Return the text of a chat; `opened` adds the beginning of the answer that follows it.

    Raises `UserError` where the template refuses the chat, or takes longer or makes more of it than it may.
    """
    return apply_template(target, messages, tools, tokenize=False, add_generation_prompt=opened)


def rendered_ids(target: Target, messages: list[dict[str, Any]], tools: Any = None, opened: bool = False) -> list[int]:
    """Return the token ids of a chat, as `rendered` makes it. The template has written all special tokens itself."""
    text = rendered(target, messages, tools, opened)
    assert target.tokenizer is not None
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def apply_template(target: Target, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
    """Return what transformers' `apply_chat_template` does with these options, within the limits."""
    try:
        with time_limit(SECONDS):  # cast: the result is typed for every form of the output
            output = cast(Any, target.tokenizer).apply_chat_template(messages, tools=tools, **options)
    except TimeUp:
        raise UserError(
            f"the chat template of {target.name} takes more than {SECONDS:g} s for one chat: mend its loops"
        ) from None
    except Exception as error:  # templates fail in their own ways
        raise UserError(f"the chat template of {target.name} refuses it: {first_line(error)}") from None
    if isinstance(output, str) and len(output) > LONGEST_CHAT:
        raise UserError(
            f"the chat template of {target.name} makes {len(output):,} characters of one chat, more than "
            f"{LONGEST_CHAT:,}: mend its loops"
        )
    return output


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` in the block where its Python code takes longer, in whichever thread it runs."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), False

    def end() -> None:
        with lock:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeUp))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended = True
        timer.cancel()
