"""The speculative decoder and what measures it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.inference.decoding.decoder import Output, SpeculativeDecoder

__all__ = ["Output", "SpeculativeDecoder"]


def __getattr__(name: str) -> Any:
    """Return what the decoder's file holds under a name. It is imported now: schedules are read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module("draftsmith.inference.decoding.decoder"), name)
