"""The speculative decoder and what measures it."""

from draftsmith.inference.decoder import Output, SpeculativeDecoder

__all__ = ["Output", "SpeculativeDecoder"]
