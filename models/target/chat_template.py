"""The chat template of a target, which anybody may have written: it is rendered within limits of time and memory.

transformers renders it in jinja's sandbox (`ImmutableSandboxedEnvironment`), where it reaches nothing but the chat.
"""

import ctypes
import re
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from draftsmith.models.errors import UserError, first_line, shown
from draftsmith.models.target.target import ChatSettings, Target

SECONDS = 10.0  # of rendering one chat, which takes a good template a millisecond
LONGEST_CHAT = 1 << 24  # characters
MOST_MEMORY = 1 << 30  # bytes that rendering one chat may add
RENDERING = threading.Lock()  # limits of memory are those of the whole process
# Arguments of `apply_chat_template`, which are no variables of a template.
TAKEN = (
    *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("padding", "truncation", "max_length", "sanitize_control_tokens", "strftime_now"),
)
TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>[^"']*)(?P=quote)\s*\)""")


class TimeUp(Exception):
    """The time for a block of code is over."""


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether a target has a chat template."""
    return bool(tokenizer and tokenizer.chat_template)


def set_chat(target: Target, chat: ChatSettings) -> None:
    """Render the target's chats with these settings from now on. `UserError` for what its template does not read."""
    if chat.kwargs and not has_template(target.tokenizer):
        raise UserError(
            f"chat_template_kwargs {shown(chat.kwargs)}: {target.name} has no chat template; leave them out"
        )
    for key in chat.kwargs:
        assert target.tokenizer is not None
        if key in TAKEN or not re.search(rf"\b{re.escape(key)}\b", str(target.tokenizer.chat_template)):
            raise UserError(
                f"chat_template_kwargs: the chat template of {target.name} reads no {shown(key)}: its model card names "
                "what it reads, such as enable_thinking or reasoning_effort"
            )
    target.chat = chat


def dated(template: str, day: str | None) -> str:
    """Return a template that prints a day, YYYY-MM-DD, wherever it asks for today's date; unchanged without one."""
    if day is None:
        return template
    return TODAY.sub(lambda asked: f"'{date.fromisoformat(day).strftime(asked['format'])}'", template)


def opened_question(target: Target, text: str) -> list[int]:
    """Return the token ids of a text as the user's only turn, opened for the answer. Errors as of `rendered`."""
    return rendered_ids(target, [{"role": "user", "content": text}], opened=True)


def rendered(target: Target, messages: list[dict[str, Any]], tools: Any = None, opened: bool = False) -> str:
    """Return the text of a chat; `opened` adds the beginning of the answer that follows it.

    Raises `UserError` where the template refuses the chat, or takes longer or makes more of it than it may.
    """
    return apply_template(target, messages, tools, tokenize=False, add_generation_prompt=opened)


def rendered_ids(target: Target, messages: list[dict[str, Any]], tools: Any = None, opened: bool = False) -> list[int]:
    """Return the token ids of a chat, as `rendered` makes it. The template has written all special tokens itself."""
    return target.encode(rendered(target, messages, tools, opened), add_special_tokens=False)


def apply_template(target: Target, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
    """Return what transformers' `apply_chat_template` does with these options, within the limits."""
    try:
        with memory_limit(MOST_MEMORY), time_limit(SECONDS):  # cast: the result is typed for every form of the output
            tokenizer = cast(Any, target.tokenizer)
            template = dated(tokenizer.get_chat_template(None, tools), target.chat.date)
            output = tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=template, **target.chat.kwargs, **options
            )
    except TimeUp:
        raise UserError(
            f"the chat template of {target.name} takes more than {SECONDS:g} s for one chat: mend its loops"
        ) from None
    except MemoryError:
        raise UserError(
            f"the chat template of {target.name} takes more than {MOST_MEMORY >> 20:,} MB for one chat: mend its loops"
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


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Raise `MemoryError` in the block where it asks for more memory than this. Blocks of several threads take turns.

    The system refuses memory to the process as a whole, so that other threads have this limit, too, meanwhile. Only
    Linux counts what a process has.
    """
    if sys.platform != "linux":
        yield
        return
    with RENDERING:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        allowed = [limit for limit in (soft, taken + num_bytes) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
