"""Attention within whole rows of text, in memory that grows with their length and not with its square.

Where flash attention can serve, it reads no pairs but those that are seen. Elsewhere the queries take turns: for some
of them at a time there are scores or a mask, which a gradient makes anew.

Shapes: B rows, T tokens, C queries of a part, M keys that a part reads, Hq query heads, Hkv key-value heads, D head
width of queries and keys, Dv that of values (most often D).
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from draftsmith.models.kernels import has_flash_attention
from draftsmith.models.layers import as_computed, fused_attention, made_anew

MOST_PAIRS = 1 << 28  # of a query and a key that a mask holds at once: 256 MiB of bool
MOST_SCORES = 1 << 28  # of a query, a key and a head that exist at once: 1 GiB of fp32


@dataclass(frozen=True)
class Sight:
    """The tokens that each token of B rows of T sees: of those up to itself in its document, all or the last ones."""

    shape: tuple[int, int]  # B, T
    edges: Tensor | None = None  # int64 where documents begin among B * T tokens, and the end; None: one a row
    sliding_window: int | None = None  # so many of the last ones
    chunk: int | None = None  # those of its own chunk, of so many tokens, of the document

    @property
    def is_causal(self) -> bool:
        """Whether each token sees all before it in its row."""
        return self.edges is None and self.reach is None

    @property
    def reach(self) -> int | None:
        """The most tokens that one sees; None: as many as there are."""
        return min((limit for limit in (self.sliding_window, self.chunk) if limit is not None), default=None)

    def edges_on(self, device: torch.device) -> Tensor:
        """Return where documents begin among all tokens, and the end, int32."""
        if self.edges is not None:
            return self.edges.int()
        rows, length = self.shape
        return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)

    def begins(self, device: torch.device) -> Tensor:
        """Return the columns where the document of each token begins, int64 [B or 1, T]."""
        rows, length = self.shape
        if self.edges is None:
            return torch.zeros(1, length, dtype=torch.int64, device=device)
        places = torch.arange(rows * length, device=device)
        begins = self.edges[torch.searchsorted(self.edges, places, right=True) - 1].view(rows, length)
        return begins - places.view(rows, length)[:, :1]

    def mask(self, queries: slice, keys: slice, device: torch.device) -> Tensor:
        """Return which of some tokens of a row others see, bool [B or 1, 1, C, M]."""
        columns = torch.arange(self.shape[1], device=device)
        query, key = columns[queries, None], columns[None, keys]
        begins = self.begins(device)[:, queries, None]  # [B or 1, C, 1]
        if self.chunk is not None:
            begins = begins + (query - begins) // self.chunk * self.chunk
        if self.sliding_window is not None:
            begins = torch.maximum(begins, query - self.sliding_window + 1)
        return ((key <= query) & (key >= begins))[:, None]


def attend_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sight: Sight,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [B, T, Hq, Dv] of query [B, Hq, T, D] over key [B, Hkv, T, D] and value [B, Hkv, T, Dv].

    `softcap` and `sinks` as for `slot_attention`.
    """
    unfused = softcap is not None or sinks is not None
    if sight.is_causal and not unfused:
        output = fused_attention(query, key, widened(value, key), scale=scale, is_causal=True)
        return output[..., : value.shape[-1]].transpose(1, 2)
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    narrow = value.shape[-1] <= key.shape[-1]
    flash_serves = narrow and softcap is None and sight.chunk is None and not (with_gradient and sinks is not None)
    if flash_serves and query.is_cuda and has_flash_attention(as_computed(query)):
        return flash_attention(query, key, value, scale, sight, sinks)
    compute = partial(masked_attention, scale=scale)
    if unfused:
        compute = partial(unfused_attention, scale=scale, softcap=softcap, sinks=sinks)

    def part(queries: slice, keys: slice) -> Tensor:
        mask = sight.mask(queries, keys, query.device)
        return compute(query[:, :, queries], key[:, :, keys], value[:, :, keys], mask=mask)

    heads, most = (query.shape[1], MOST_SCORES) if unfused else (1, MOST_PAIRS)
    parts = parts_of(sight, most // (len(query) * heads))
    if len(parts) == 1:
        return part(*parts[0])
    return torch.cat([made_anew(part, *slices) for slices in parts], 1)


def parts_of(sight: Sight, most_pairs: int) -> list[tuple[slice, slice]]:
    """Return parts of the queries of a row, and the keys that each part reads, with at most so many pairs."""
    length, reach = sight.shape[1], sight.reach
    size = max(1, most_pairs // length, 0 if reach is None else part_size(most_pairs, reach))
    parts = []
    for first in range(0, length, size):
        queries = slice(first, min(first + size, length))
        parts.append((queries, slice(0 if reach is None else max(0, first - reach + 1), queries.stop)))
    return parts


def part_size(most_pairs: int, reach: int) -> int:
    """Return how many queries may read `reach` keys and each other with at most so many pairs, at least one."""
    return max(1, int((math.sqrt(reach**2 + 4 * most_pairs) - reach) / 2))


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight, sinks: Tensor | None
) -> Tensor:
    """Return the attention of `attend_in_rows` on a GPU, in half precision.

    A sink is a key that every token sees and that has no value: it takes a share of the weights, which the log-sum-exp
    of the others tells. There are no gradients through that.
    """
    starts, window = sight.edges_on(query.device), sight.sliding_window
    length, reach = sight.shape[1], None if window is None else window - 1
    heads = (query, key, widened(value, key))
    in_a_row = [as_computed(x).transpose(1, 2).flatten(0, 1) for x in heads]  # [B * T, H, D]
    output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        *in_a_row, starts, starts, length, length, 0.0, True, False, scale=scale, window_size_left=reach
    )
    if sinks is not None:
        output = output * (log_sum.t() - sinks.float()).sigmoid()[..., None].to(output.dtype)
    return output.unflatten(0, sight.shape)[..., : value.shape[-1]]


def widened(value: Tensor, key: Tensor) -> Tensor:
    """Return values that are as wide as keys, as flash attention wants them: narrower ones are filled up with zeros."""
    missing = key.shape[-1] - value.shape[-1]
    return F.pad(value, (0, missing)) if missing > 0 else value


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention [B, C, Hq, Dv] by a mask, bool [B or 1, 1, C, M]."""
    attended = fused_attention(query, key, widened(value, key), mask, scale)
    return attended[..., : value.shape[-1]].transpose(1, 2)


def unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention [B, C, Hq, Dv] with all scores in memory, which a soft cap and attention sinks [Hq] change.

    `mask` is bool [B or 1, 1, C, M].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query.float() @ key.float().transpose(2, 3) * scale  # [B, Hq, C, M]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype).transpose(1, 2)
