"""The cost of a reduced draft vocabulary: how much of what the target would write lies outside it.

A drafter never proposes a token outside its vocabulary, so the share inside bounds the rate at which its drafts can be
accepted. It is measured on samples that had no part in choosing the vocabulary.

Shapes: R rows of hidden states, H hidden width, V target vocabulary, Vd draft vocabulary.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.features.stored import FeatureSource
from draftsmith.data.samples.batches import BatchPlan, MicroBatch, group_rows
from draftsmith.models import Target
from draftsmith.models.layers import shift_left

HELD_OUT = 16  # one sample in so many has no part in choosing the vocabulary
COUNTED = 1024  # samples whose tokens are counted at a time
MEASURED = 64  # of them, at most, of each domain
CHUNK_ELEMENTS = 1 << 24  # rows x vocabulary of probabilities that exist at once


@dataclass
class Coverage:
    """The shares of the target's text that a draft vocabulary holds."""

    num_tokens: int = 0
    written: float = 0.0  # share of the tokens that it wrote
    greedy: float = 0.0  # share of its likeliest tokens: no more is accepted at temperature 0
    sampled: float = 0.0  # share of its probability: no more is accepted at temperature 1

    def __add__(self, other: "Coverage") -> "Coverage":
        total = self.num_tokens + other.num_tokens
        means = (
            (own * self.num_tokens + new * other.num_tokens) / max(1, total)
            for own, new in zip(self._shares(), other._shares(), strict=True)
        )
        return Coverage(total, *means)

    def _shares(self) -> tuple[float, float, float]:
        return self.written, self.greedy, self.sampled


def choosing_and_held_out(trained: list[int]) -> tuple[list[int], list[int]]:
    """Return the samples that choose the vocabulary, and samples held out to measure it on."""
    held_out = trained[HELD_OUT - 1 :: HELD_OUT] or trained[-1:]
    choosing = sorted(set(trained) - set(held_out))
    return choosing or trained, held_out


def token_counts(plan: BatchPlan, vocab_size: int) -> Tensor:
    """Return how often the target wrote each token in the samples that choose the vocabulary, [V]."""
    counts, choosing = np.zeros(vocab_size, np.int64), choosing_and_held_out(plan.trained)[0]
    for start in range(0, len(choosing), COUNTED):
        written = [plan.written(index) for index in choosing[start : start + COUNTED]]
        counts += np.bincount(np.concatenate(written), minlength=vocab_size)
    return torch.from_numpy(counts)


@torch.no_grad()
def measure_vocabulary(
    token_ids: Tensor, plan: BatchPlan, source: FeatureSource, target: Target
) -> dict[str, Coverage]:
    """Return the shares that a draft vocabulary [Vd] holds, by domain, on held-out samples."""
    chosen: dict[str, list[int]] = defaultdict(list)
    held_out = choosing_and_held_out(plan.trained)[1]
    for index, domain in zip(held_out, plan.samples.column("domain")[held_out], strict=True):
        chosen[domain].append(index)
    inside = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
    inside[token_ids] = True
    coverage: dict[str, Coverage] = {}
    for domain, indices in sorted(chosen.items()):
        rows = [[index] for index in indices[:MEASURED]]
        micro_batches = group_rows(rows, plan.lengths, plan.tokens_per_micro_batch, plan.width_multiple)
        parts = [_coverage(inside, micro_batch, plan, source, target) for micro_batch in micro_batches]
        coverage[domain] = sum(parts, start=Coverage())
    return coverage


def _coverage(
    inside: Tensor, micro_batch: MicroBatch, plan: BatchPlan, source: FeatureSource, target: Target
) -> Coverage:
    """Return the shares on one micro-batch of a draft vocabulary, given as a mask [V]."""
    batch = plan.collate(micro_batch).to(target.device)
    counted = shift_left(batch.loss_mask, 1)  # slots whose next token the target wrote
    hidden = source(micro_batch, batch).last_hidden[counted]  # [R, H]
    written = inside[shift_left(batch.token_ids, 1)[counted]]  # [R]
    greedy = sampled = 0.0
    for chunk in hidden.split(max(1, CHUNK_ELEMENTS // len(inside))):
        probabilities = target.logits(chunk).float().softmax(-1)  # [R, V]
        greedy += float(inside[probabilities.argmax(-1)].sum())
        sampled += float(probabilities[:, inside].sum())
    count = len(hidden)
    return Coverage(count, float(written.float().mean()), greedy / count, sampled / count)
