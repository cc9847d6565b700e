"""Attention of unrolled training steps, in memory linear in the text.

A slot that drafts sees the text of its own document up to itself, as step 0 left it, and of each later step only its
own entry, the chain that it drafted itself. Slots that draft nothing are keys and values at step 0 and nothing more.

Shapes: S slots, all rows of a batch one after another; R of them draft; N query heads, Nkv key-value heads, D head
width.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftsmith.models.batch import send
from draftsmith.models.devices import large_products
from draftsmith.models.kernels import has_flash_attention
from draftsmith.models.text_team import TextPart

KeyValue = tuple[Tensor, Tensor]

# Rows of a span that flash attention takes at once on a CPU. Of a longer part it computes more scores that no row sees.
MOST_ROWS = 192
WIDE_HEAD = 128  # width of a head from which attention of so many rows counts as large products


@dataclass
class DraftingSpan:
    """Slots `first` to `last` - 1 draft; their document begins at slot `text`."""

    text: int
    first: int
    last: int


@dataclass
class SpanTable:
    """The spans as flash attention on a GPU reads them, which takes each with the text from where its document begins.

    Its causal mask ends queries and keys of a span at the same slot.
    """

    text: Tensor  # [P] slots of the spans' texts, one span after another
    query_starts: Tensor  # [spans + 1] int32 where the queries of each begin, then the end
    key_starts: Tensor  # [spans + 1] int32
    longest_query: int
    longest_key: int

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.query_starts, self.key_starts, self.longest_query, self.longest_key


@dataclass
class DraftingSlots:
    """From the first slot of each document that is counted to its last one, in order, in one part of all slots."""

    spans: list[DraftingSpan]
    index: Tensor  # [R] int64 their places among all slots
    part: TextPart

    @classmethod
    def from_counted(cls, counted: Tensor, positions: Tensor, part: TextPart | None = None) -> "DraftingSlots":
        """Return the spans of the slots counted [B, T] bool, given positions in the document [B or 1, T].

        Both are in the host's memory, and so is the index. No slot outside of the part is counted; None: all slots.
        """
        places = torch.arange(counted.numel(), device=counted.device)
        begins = (places.view_as(counted) - positions)[counted]  # where the document of each counted slot begins
        counted_places = places[counted.flatten()]
        texts, sizes = torch.unique_consecutive(begins, return_counts=True)
        ends = sizes.cumsum(0)
        edges = torch.stack([texts, counted_places[ends - sizes], counted_places[ends - 1] + 1], 1).tolist()
        spans = [DraftingSpan(*edge) for edge in edges]
        index = torch.cat([places[span.first : span.last] for span in spans] or [places[:0]])
        return cls(spans, index, TextPart.whole(counted.numel()) if part is None else part)

    def to(self, device: torch.device) -> "DraftingSlots":
        return replace(self, index=send(self.index, device))

    @property
    def index_in_part(self) -> Tensor:
        """The same places, counted from where the part begins."""
        return self.index - self.part.first

    @cached_property
    def table(self) -> SpanTable:
        text = torch.cat([torch.arange(span.text, span.last) for span in self.spans])
        sizes = [[span.last - span.first for span in self.spans], [span.last - span.text for span in self.spans]]
        starts = [[0, *itertools.accumulate(of_one)] for of_one in sizes]
        query_starts, key_starts = send(torch.tensor(starts, dtype=torch.int32), self.index.device)
        return SpanTable(send(text, self.index.device), query_starts, key_starts, max(sizes[0]), max(sizes[1]))


class UnrolledSteps:
    """The attention of all steps of one layer of transformers, which calls it in place of its own (`slot_attention`).

    At step 0 every slot reads the texts; later steps are of the slots that draft alone.
    """

    def __init__(self, texts: DraftingSlots, drafting: DraftingSlots) -> None:
        """`texts`: all slots, as if all drafted."""
        self.texts, self.drafting = texts, drafting
        self.pairs: list[KeyValue] = []  # of each step so far

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return attention [1, R, N, D] of query [1, N, R, D]; key and value [1, Nkv, R, D] are the step's own."""
        query = query * (scale * query.shape[-1] ** 0.5)  # `unrolled_attention` scales by the width of a head
        query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
        self.pairs.append((key, value))
        text, *own = self.pairs
        return unrolled_attention(query, text, own, self.drafting if own else self.texts)[None]


def unrolled_attention(query: Tensor, text: KeyValue, own: list[KeyValue], slots: DraftingSlots) -> Tensor:
    """Return attention of query [R, N, D] over keys and values of the text [S, Nkv, D] and of each step [R, Nkv, D].

    On a CPU, and on a GPU that has it, by flash attention, else plainly. On a CPU it is in fp32: its gradient in bf16
    takes far longer there.
    """
    if query.device.type == "cpu":
        query, text, *own = query.float(), *((key.float(), value.float()) for key, value in (text, *own))
    if query.is_cuda and (not slots.spans or not has_flash_attention(query)):
        return plain_unrolled_attention(query, text, own, slots.spans)
    return _UnrolledAttention.apply(slots, query, *text, *[tensor for pair in own for tensor in pair])


def plain_unrolled_attention(query: Tensor, text: KeyValue, own: list[KeyValue], spans: list[DraftingSpan]) -> Tensor:
    """Compute all scores at once, R x S of them a head: the specification."""
    groups = query.shape[1] // text[0].shape[1]
    seen = torch.zeros(len(query), len(text[0]), dtype=torch.bool, device=query.device)
    row = 0
    for span in spans:
        size = span.last - span.first
        seen[row : row + size, span.text : span.last] = seen.new_ones(size, span.last - span.text).tril(
            span.first - span.text
        )
        row += size
    keys, values = (x.repeat_interleave(groups, 1) for x in text)
    query = query * query.shape[-1] ** -0.5
    scores = torch.einsum("rnd,snd->rns", query, keys).masked_fill(~seen[:, None], float("-inf"))
    own_scores = [(query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat([scores, *own_scores], -1).float().softmax(-1).to(query.dtype)
    output = torch.einsum("rns,snd->rnd", weights[..., : len(keys)], values)
    for step, (_, value) in enumerate(own):
        output = output + weights[..., len(keys) + step, None] * value.repeat_interleave(groups, 1)
    return output


class _UnrolledAttention(torch.autograd.Function):
    """Flash attention over the text, joined with the own chain by their log-sum-exps.

    The gradient needs no other kernel: flash attention's backward makes its probabilities from the log-sum-exp that it
    is given and subtracts what the output that it is given says. Given those of the whole attention, it returns
    the text's part of the whole gradient.
    """

    @staticmethod
    def forward(ctx: Any, slots: DraftingSlots, query: Tensor, key: Tensor, value: Tensor, *own: Tensor) -> Tensor:
        with large_products(query.shape[-1] >= WIDE_HEAD):
            output, log_sum = _flash(query, key, value, slots)
        weights = log_sum.new_empty(0)  # of each step's own entry in the whole attention
        if own:
            scores = torch.stack([_dot(query, own_key) for own_key in own[::2]])  # [k, R, N]
            whole = torch.logaddexp(log_sum, scores.logsumexp(0))
            output.mul_((log_sum - whole).exp()[..., None])
            weights = (scores - whole).exp()  # [k, R, N]
            for weight, own_value in zip(weights.to(output.dtype), own[1::2], strict=True):
                _grouped(output, own_value).addcmul_(_grouped(weight[..., None], own_value), own_value[:, :, None])
            log_sum = whole
        ctx.slots = slots
        ctx.save_for_backward(query, key, value, output, log_sum, weights, *own)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, log_sum, weights, *own = ctx.saved_tensors
        grad = grad.contiguous()
        with large_products(query.shape[-1] >= WIDE_HEAD):
            grad_query, grad_key, grad_value = _flash_backward(grad, query, key, value, output, log_sum, ctx.slots)
        if not own:
            return None, grad_query, grad_key, grad_value
        scale = query.shape[-1] ** -0.5
        through_output = (grad * output).sum(-1, dtype=torch.float32)  # [R, N]
        grad_own: list[Tensor] = []
        for weight, own_key, own_value in zip(weights, own[::2], own[1::2], strict=True):
            grad_weight = (_grouped(grad, own_value) * own_value[:, :, None]).sum(-1, dtype=torch.float32)
            grad_score = (weight * (grad_weight.flatten(1) - through_output) * scale)[..., None].to(query.dtype)
            _grouped(grad_query, own_key).addcmul_(_grouped(grad_score, own_key), own_key[:, :, None])
            grad_own.append(_grouped(grad_score * query, own_key).sum(2))
            grad_own.append(_grouped(weight[..., None].to(grad.dtype) * grad, own_value).sum(2))
        return None, grad_query, grad_key, grad_value, *grad_own


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """Return x [R, N, D] by groups of heads, [R, Nkv, N / Nkv, D], for a key or value [R, Nkv, D]."""
    return x.unflatten(1, (key.shape[1], -1))


def _dot(query: Tensor, key: Tensor) -> Tensor:
    """Return the score of each slot with its own key, [R, N] fp32."""
    dots = (_grouped(query, key) * key[:, :, None]).sum(-1, dtype=torch.float32)
    return dots.flatten(1) * query.shape[-1] ** -0.5


def _flash(query: Tensor, key: Tensor, value: Tensor, slots: DraftingSlots) -> tuple[Tensor, Tensor]:
    """Return the attention over the text alone: output [R, N, D], log-sum-exp [R, N] fp32."""
    if query.is_cuda:
        table = slots.table
        output, log_sum, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key.index_select(0, table.text),
            value.index_select(0, table.text),
            *table.lengths,
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
        )
        return output, log_sum.t()
    output, log_sum = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    for rows, pieces in _pieces(slots.spans):
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *_heads_first(query[rows], key[seen], value[seen]), is_causal=causal
            )
            for seen, causal in pieces
        ]
        outputs = [part[0][0].transpose(0, 1) for part in parts]
        log_sums = [part[1][0].t() for part in parts]
        if len(parts) == 1:
            output[rows], log_sum[rows] = outputs[0], log_sums[0]
            continue
        torch.logaddexp(*log_sums, out=log_sum[rows])
        shares = [(part - log_sum[rows]).exp_()[..., None] for part in log_sums]
        torch.mul(outputs[0], shares[0], out=output[rows]).addcmul_(outputs[1], shares[1])
    return output, log_sum


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor, slots: DraftingSlots
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value of the text's part in an attention with this output and log-sum-exp."""
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    if query.is_cuda:
        table = slots.table
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of dropout
        grad_query, key_grads, value_grads = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key.index_select(0, table.text),
            value.index_select(0, table.text),
            output,
            log_sum.t().contiguous(),
            *table.lengths,
            0.0,
            True,
            unused,
            unused,
        )
        grad_key.index_copy_(0, table.text, key_grads)
        grad_value.index_copy_(0, table.text, value_grads)
        return grad_query, grad_key, grad_value
    grad_query = torch.zeros_like(query)
    for rows, pieces in _pieces(slots.spans):
        for seen, causal in pieces:
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_heads_first(grad[rows], query[rows], key[seen], value[seen], output[rows]),
                log_sum[rows].t()[None],
                0.0,
                causal,
            )
            places = (grad_query[rows], grad_key[seen], grad_value[seen])
            for total, part in zip(places, grads, strict=True):
                total += part[0].transpose(0, 1)
    return grad_query, grad_key, grad_value


def _pieces(spans: list[DraftingSpan]) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """Return the rows of parts of the spans, and the slots they see: all before the part, and causally those in it."""
    pieces, row = [], 0
    for span in spans:
        for first in range(span.first, span.last, MOST_ROWS):
            last = min(first + MOST_ROWS, span.last)
            rows = slice(row, row + last - first)
            before, within = (slice(span.text, first), False), (slice(first, last), True)
            pieces.append((rows, [before, within] if first > span.text else [within]))
            row = rows.stop
    return pieces


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [R, N, D] as [1, N, R, D]."""
    return [tensor.transpose(0, 1)[None] for tensor in tensors]
