"""The two ends of a verification, in plain PyTorch: what the target reads, and what is kept of what it said.

`round_kernels` does each in one launch on a GPU, under the same names.

Shapes: B rows, M slots a row, N drafted tokens, T = N + 1 columns of the window, D nodes on the longest path,
C columns of the features that a state keeps, E ids that end a text.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftsmith.inference.verification.acceptance_rules import Verified
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, DecodingState, Draft
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.models.target.target import Features


class Ends(NamedTuple):
    """Limits and tokens at which the texts of the rows end, and which rows have ended."""

    limits: Tensor  # [B] int64 lengths at which a text is cut
    eos: Tensor  # [E] int64 ids that end a text
    finished: Tensor  # [B] bool, changed in place


def open_round(token_ids: Tensor, lengths: Tensor, draft: Draft) -> tuple[Tensor, Window]:
    """Return what the target reads of committed tokens [B, M], `lengths` [B] of them, and of a draft.

    These are the newest committed token of each row, at slot length - 1, and the nodes behind it: tokens int64 [B, T]
    and their window. Where nothing was drafted, token 0 is read.
    """
    prefix = lengths - 1
    newest = token_ids.gather(1, prefix[:, None])
    tokens = torch.cat([newest, draft.tokens.clamp(min=0)], 1)
    window = chain_window(prefix, tokens.shape[1])
    if draft.is_chain:
        return tokens, window
    assert draft.parents is not None
    positions = prefix[:, None] + node_depths(draft.parents, draft.depth)
    return tokens, Window(window.slots, positions, prefix, ancestor_words(draft.parents, draft.depth))


def close_round(state: DecodingState, ends: Ends, draft: Draft, verified: Verified, features: Features) -> Tensor:
    """Append the accepted tokens to the rows that have not ended, and keep what the next round reads.

    `features` [B, T, ...] are those of the window. Returns the record, int64 [B, 5 + D]: how many tokens were emitted,
    drafted and accepted, whether the row has ended, and the tokens.
    """
    num_accepted, tokens = verified.num_accepted, draft.tokens
    prefix = state.lengths - 1
    if not draft.is_chain:
        features = features.gather(torch.cat([torch.zeros_like(verified.path[:, :1]), verified.path], 1))
        tokens = tokens.gather(1, (verified.path - 1).clamp(min=0))
    tokens = torch.cat([tokens.clamp(min=0), verified.next_token[:, None]], 1)  # [B, D + 1]
    tokens.scatter_(1, num_accepted[:, None], verified.next_token[:, None])
    columns = torch.arange(state.positions.shape[1], device=tokens.device)  # [C]
    positions = prefix[:, None] + columns
    columns = columns[: tokens.shape[1]]
    # tokens past the new length are written over later
    state.token_ids.scatter_(1, state.lengths[:, None] + columns, tokens)

    ends_text = ends_a_text(tokens, ends.eos) & (columns <= num_accepted[:, None])
    until_end = torch.where(ends_text, columns + 1, tokens.shape[1] + 1).amin(1)  # [B] tokens up to an EOS
    num_emitted = torch.minimum(num_accepted + 1, until_end)
    num_emitted = torch.minimum(num_emitted, ends.limits - state.lengths) * ~ends.finished
    num_drafted = (draft.tokens != NO_TOKEN).sum(1)

    state.lengths += num_emitted
    ends.finished.logical_or_(ends_text.any(1) | (state.lengths >= ends.limits))
    state.features.put(features)
    state.positions.copy_(positions)
    state.next_ids[:, : tokens.shape[1]] = tokens
    state.newest_column.copy_(num_accepted)
    head = [num_emitted, num_drafted, torch.minimum(num_accepted, until_end), ends.finished.long()]
    return torch.cat([torch.stack(head, 1), tokens], 1)


def ends_a_text(tokens: Tensor, eos: Tensor) -> Tensor:
    """Return which tokens end a text, by ids [E]; `isin` would sort many ids and wait for the device."""
    return (tokens[..., None] == eos).any(-1)
