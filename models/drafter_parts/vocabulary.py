"""The draft vocabulary: the target's tokens that a drafter can propose, where that is not all of them."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from draftsmith.models.drafter_configs import ReducedVocabulary
from draftsmith.models.errors import UserError
from draftsmith.models.target.scaled_head import times_factor, with_scaling
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


def highest_ranked(counts: Tensor, size: int) -> Tensor:
    """Return the ids of the `size` tokens with the highest counts [V], rising; of equal counts the lower ids."""
    return torch.sort(counts, descending=True, stable=True).indices[:size].sort().values


def add_map(drafter: nn.Module, size: int, vocab_size: int) -> None:
    """Give a drafter the two buffers by which engines map a draft vocabulary, of the first `size` tokens at first.

    `d2t` [Vd] int64 holds target id less draft id, and `t2d` [V] bool marks the tokens of the draft vocabulary.
    """
    drafter.register_buffer("d2t", torch.zeros(size, dtype=torch.int64))
    drafter.register_buffer("t2d", torch.arange(vocab_size) < size)


def mapped_ids(d2t: Tensor) -> Tensor:
    """Return the target ids [Vd] of a draft vocabulary by its map."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def fit_map(drafter: nn.Module, head: nn.Linear, counts: Tensor, target: Target) -> None:
    """Choose the tokens with the highest counts [V]; the head starts as their rows of the target's own."""
    d2t, t2d = drafter.get_buffer("d2t"), drafter.get_buffer("t2d")
    token_ids = highest_ranked(counts, len(d2t)).cpu()
    d2t.copy_(token_ids - torch.arange(len(d2t)))
    t2d.zero_()[token_ids.to(t2d.device)] = True
    copy_head(head, target, token_ids)


@torch.no_grad()
def copy_head(head: nn.Linear, target: Target, token_ids: Tensor | None) -> None:
    """Copy the target's output matrix, or its rows of some tokens [Vd], into a head, times the factor of its logits."""
    weight = target.head_weight()
    rows = weight if token_ids is None else weight[token_ids.to(weight.device)]
    head.weight.copy_(times_factor(rows, target.text_config))


def head_of_tokens(target: Target, token_ids: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a head that makes the target's logits of some tokens alone, [..., H] -> [..., Vd].

    None where the target's head is more than one matrix.
    """
    whole = target.head_module
    if type(whole) is not nn.Linear or whole.bias is not None:
        return None
    with torch.device("meta"):
        part = nn.Linear(whole.in_features, len(token_ids), bias=False)
    part.weight = nn.Parameter(whole.weight.detach()[token_ids], requires_grad=False)
    return with_scaling(part, target.text_config)


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
