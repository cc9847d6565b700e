"""Giving a model the vocabulary of another tokenizer, so that it can draft for a target that has that one.

Every token of the new vocabulary is cut into tokens of the model's own: itself where the model has it, else the longest
ones that its bytes begin with. Its rows of embedding and head start as the mean of theirs (Fast Vocabulary Transfer,
arXiv 2402.09977).

Shapes: V tokens of the new vocabulary, W tokens of the model's own, H hidden width.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftsmith.models.errors import UserError
from draftsmith.models.storage.reading import parse_json

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space


def token_bytes(tokenizer: PreTrainedTokenizerBase, name: str) -> dict[int, bytes]:
    """Return the bytes that each token of a tokenizer stands for, by its id; tokens that are no text are left out.

    Raises `UserError` for a tokenizer that is neither byte-level nor made by sentencepiece.
    """
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None
    kinds = set() if decoder is None else set(_kinds(parse_json(decoder.__getstate__(), name)))
    added = tokenizer.added_tokens_decoder
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}

        def read(token: str) -> bytes:
            return bytes(byte_of[character] for character in token)
    elif kinds & {"ByteFallback", "Metaspace"}:

        def read(token: str) -> bytes:
            if len(token) == 6 and token.startswith("<0x"):
                return bytes([int(token[3:5], 16)])
            return token.replace(SPACE, " ").encode()
    else:
        raise UserError(f"the tokens of {name} cannot be read as bytes: give a model of the target's own tokenizer")
    texts = {token_id: read(token) for token, token_id in tokenizer.get_vocab().items() if token_id not in added}
    plain = {token_id: token.content.encode() for token_id, token in added.items() if not token.special}
    return {token_id: text for token_id, text in {**texts, **plain}.items() if text}


def _kinds(decoder: Any) -> Iterator[str]:
    """Yield the types of a decoder and of its parts."""
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def pieces(text: bytes, own: dict[bytes, int], longest: int) -> list[int]:
    """Return tokens of a vocabulary whose bytes make up a text, the longest first at each place.

    Bytes that the vocabulary lacks are passed over.
    """
    tokens, place = [], 0
    while place < len(text):
        ends = range(min(len(text), place + longest), place, -1)
        end = next((end for end in ends if text[place:end] in own), None)
        if end is not None:
            tokens.append(own[text[place:end]])
        place = end or place + 1
    return tokens


def specials(own: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase) -> dict[int, int]:
    """Return the own tokens that do what special tokens of a new one do: begin or end a text, or have its name."""
    vocabulary = own.get_vocab()
    named = {
        token_id: vocabulary[token.content]
        for token_id, token in new.added_tokens_decoder.items()
        if token.special and token.content in vocabulary
    }
    roles = {new.bos_token_id: own.bos_token_id, new.eos_token_id: own.eos_token_id}
    return {new_id: own_id for new_id, own_id in roles.items() if None not in (new_id, own_id)} | named


class OtherTokenizer:
    """The tokens of a target's tokenizer by those of a model's own.

    `same` has the token that stands for the same bytes, and `parts` the tokens whose bytes make up one that the model
    lacks; both by the target's ids.
    """

    def __init__(self, own: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase, name: str) -> None:
        """`name` is the model's, for errors."""
        own_bytes, new_bytes = token_bytes(own, name), token_bytes(new, "the target")
        ids = {text: token_id for token_id, text in sorted(own_bytes.items(), reverse=True)}  # of equal texts the first
        longest = max(map(len, ids))
        self.same = {token_id: ids[text] for token_id, text in new_bytes.items() if text in ids} | specials(own, new)
        self.parts = {
            token_id: pieces(text, ids, longest) for token_id, text in new_bytes.items() if token_id not in self.same
        }

    def common(self, vocab_size: int) -> Tensor:
        """Return which tokens of the new vocabulary the model has as they are: bool [V]."""
        shared = torch.zeros(vocab_size, dtype=torch.bool)
        shared[list(self.same)] = True
        return shared

    def rows(self, weight: Tensor, vocab_size: int) -> Tensor:
        """Return the rows of the new vocabulary [V, H] by those of the model's own [W, H]."""
        rows = weight.mean(0).expand(vocab_size, -1).clone()
        rows[list(self.same)] = weight[list(self.same.values())]
        for token_id, own in self.parts.items():
            if own:
                rows[token_id] = weight[own].mean(0)
        return rows


@torch.no_grad()
def take_vocabulary(model: PreTrainedModel, other: OtherTokenizer, new_config: PretrainedConfig) -> None:
    """Give a model embedding and head of the new vocabulary, in which it reads and writes from now on."""
    embedding, head = (
        cast(nn.Linear, layer) for layer in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    rows, head_rows = (other.rows(layer.weight, new_config.vocab_size) for layer in (embedding, head))
    model.resize_token_embeddings(new_config.vocab_size, mean_resizing=False)
    cast(nn.Linear, model.get_output_embeddings()).weight.copy_(head_rows)
    cast(nn.Linear, model.get_input_embeddings()).weight.copy_(rows)  # after the head, which may be the same
    model.tie_weights()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config.get_text_config(), name, getattr(new_config, name, None))
