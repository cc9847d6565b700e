"""The draft vocabulary: the target's tokens that a drafter can propose, where that is not all of them."""

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.models.drafter_configs import ReducedVocabulary
from draftsmith.models.errors import UserError
from draftsmith.models.target.target import Target

SIZE_UNIT = 64  # engines pad the matrix of a head to a multiple of it anyway


def too_large(draft_vocab_size: int, vocab_size: int) -> str:
    return (
        f"drafter.draft_vocab_size={draft_vocab_size}: the target's vocabulary has {vocab_size} tokens, give fewer, or "
        "null for all of them"
    )


def with_size(config: ReducedVocabulary, counts: Tensor, eos_token_ids: list[int]) -> ReducedVocabulary:
    """Return the config with the size that its coverage asks for, by how often the target wrote each token, [V]."""
    coverage = config.draft_vocab_coverage
    if coverage is None:
        return config
    if config.draft_vocab_size is not None:
        raise UserError(
            f"drafter.draft_vocab_size={config.draft_vocab_size} and drafter.draft_vocab_coverage={coverage}: one "
            "decides, set the other to null"
        )
    ranked = torch.sort(ranking(counts, eos_token_ids), descending=True, stable=True).indices
    covered = counts[ranked].cumsum(0) / counts.sum()
    size = int((covered < coverage).sum()) + 1
    return replace(config, draft_vocab_size=min(len(counts), -(-size // SIZE_UNIT) * SIZE_UNIT))


def ranking(counts: Tensor, eos_token_ids: list[int]) -> Tensor:
    """Return the counts [V] by which tokens are chosen: those that end a text come first, written or not.

    A drafter that cannot propose them is wrong at the end of every text, and answers that were all cut do not show it.
    """
    ranks = counts.clone()
    ranks[eos_token_ids] = counts.max() + 1
    return ranks


def vocabulary_hash(token_ids: Tensor) -> str:
    """Return 16 hex digits of the target ids of a draft vocabulary [Vd]."""
    return hashlib.sha256(token_ids.to("cpu", torch.int64).numpy().tobytes()).hexdigest()[:16]


def draft_ids(ids: Tensor, token_ids: Tensor) -> Tensor:
    """Return the places of tokens [S] in the draft vocabulary of target ids [Vd]; -1 for tokens that it lacks."""
    ordered, order = ids.sort()
    nearest = torch.searchsorted(ordered, token_ids).clamp(max=len(ids) - 1)
    return torch.where(ordered[nearest] == token_ids, order[nearest], -1)


def mask_token_of(token_id: int | None, target: Target) -> int:
    """Return the token whose embedding mask slots read: the one that is asked for, else the end of text.

    That one is never an anchor. Raises `UserError` for an id that the target does not have.
    """
    if token_id is None:
        if not target.eos_token_ids:
            raise UserError(f"{target.name} names no end of text for mask slots: give drafter.mask_token_id")
        return target.eos_token_ids[0]
    if not 0 <= token_id < target.vocab_size:
        raise UserError(f"drafter.mask_token_id {token_id}: give an id from 0 to {target.vocab_size - 1}")
    return token_id
