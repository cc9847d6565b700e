"""The speculative decoder and what measures it."""

from draftsmith.inference.decoding.decoder import Output, SpeculativeDecoder

__all__ = ["Output", "SpeculativeDecoder"]
