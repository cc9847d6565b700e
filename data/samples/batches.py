"""Batches of samples in an order that is a function of the seed and the step alone, so that resuming is exact.

A step trains on `batch_size` samples, or on about as many tokens. Samples lie in rows, one in each or packed side by
side; rows of similar length make micro-batches that fit the memory budget, as many on every rank.
"""

import bisect
import itertools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from draftsmith.data.samples.samples import Samples
from draftsmith.models.batch import Batch

GPU_WIDTH = 128  # rows are padded to a multiple of it on a GPU, where attention plans anew for each new shape
LENGTH_GROUPS = 8  # so many batches at a time are made from samples sorted by length, to pad less

T = TypeVar("T")
MicroBatch = list[list[int]]  # the samples of each row, by their place in the list of samples


@dataclass
class BatchPlan:
    """The samples that each step trains on. All ranks hold the same plan and take their own share of each step.

    Samples of which `max_length` leaves nothing to train on are left out.
    """

    samples: Samples
    batch_size: int  # samples a step, or tokens that it trains on, over all ranks and micro-batches
    max_length: int  # tokens of a row; longer samples are cut
    tokens_per_micro_batch: int  # rows x longest row, padding included; at least `max_length`
    seed: int
    packing: bool = False  # several samples a row, as many as fit `max_length`
    width_multiple: int = 1  # of which the width of a micro-batch is one, or else `max_length`
    in_tokens: bool = False  # whether `batch_size` counts tokens; whole samples come as near to it as they can
    num_ranks: int = 1  # that share a step in tokens; each needs as many samples as the others
    held_out: frozenset[int] = frozenset()  # samples that are not trained on, but read to see what training brings

    def __post_init__(self) -> None:
        assert self.max_length <= self.tokens_per_micro_batch
        self.lengths: list[int] = self.samples.lengths.clip(max=self.max_length).tolist()
        # tokens of each sample; a first one is predicted by nothing
        self.num_trained: list[int] = self.samples.num_generated(1, self.max_length).tolist()
        self.read = [i for i, number in enumerate(self.num_trained) if number]  # samples of which a part is left
        self.trained = [i for i in self.read if i not in self.held_out]
        self.steps_per_epoch = len(self.trained) // self.batch_size
        if self.in_tokens:
            most = len(self.trained) // self.num_ranks
            self.steps_per_epoch = min(
                most, max(1, round(sum(self.num_trained[i] for i in self.trained) / self.batch_size))
            )
        self._epoch_order: tuple[int, list[list[int]]] | None = None

    @property
    def row_length(self) -> int:
        """The most tokens of a row: what training reads hangs on it, and not on how rows make micro-batches."""
        return self.max_length if self.packing else max(self.lengths)

    def indices(self, step: int) -> list[int]:
        """Return the samples of a step, counted from 0 over all epochs; every epoch is shuffled anew."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        order = self._epoch_order  # a copy: another thread may ask for another epoch
        if order is None or order[0] != epoch:
            order = self._epoch_order = (epoch, self._shuffle(epoch))
        return order[1][offset]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        """Return the samples of each step of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = [self.trained[i] for i in torch.randperm(len(self.trained), generator=generator).tolist()]
        batches = self._by_tokens(order) if self.in_tokens else self._by_number(order)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def _by_number(self, order: list[int]) -> list[list[int]]:
        """Return steps of `batch_size` samples, those of similar length together."""
        group = self.batch_size * LENGTH_GROUPS
        batches = []
        for start in range(0, self.steps_per_epoch * self.batch_size, group):
            members = order[start : min(start + group, self.steps_per_epoch * self.batch_size)]
            members.sort(key=lambda index: self.lengths[index])
            batches += [members[i : i + self.batch_size] for i in range(0, len(members), self.batch_size)]
        return batches

    def _by_tokens(self, order: list[int]) -> list[list[int]]:
        """Return steps of about as many trained tokens each, samples of similar length together."""
        steps = [
            min(LENGTH_GROUPS, self.steps_per_epoch - done) for done in range(0, self.steps_per_epoch, LENGTH_GROUPS)
        ]
        batches = []
        for members, num_steps in zip(self._cut(order, steps), steps, strict=True):
            members.sort(key=lambda index: self.lengths[index])
            batches += self._cut(members, [1] * num_steps)
        return batches

    def _cut(self, samples: list[int], shares: list[int]) -> list[list[int]]:
        """Return the samples in parts of about these shares of their tokens, in multiples of `num_ranks` samples."""
        size = self.num_ranks
        units = [samples[i : i + size] for i in range(0, len(samples) - size + 1, size)]  # the rest is left out
        parts = split(units, [sum(self.num_trained[index] for index in unit) for unit in units], shares)
        return [list(itertools.chain(*part)) for part in parts]

    def micro_batches(self, step: int, rank: int, num_ranks: int) -> list[MicroBatch]:
        """Return this rank's share of a step: micro-batches within the budget, as many as every other rank has.

        `batch_size` must be a multiple of `num_ranks`.
        """
        chosen = self.indices(step)
        rows = pack(chosen, self.lengths, self.max_length) if self.packing else [[index] for index in chosen]
        groups = group_rows(rows, self.lengths, self.tokens_per_micro_batch, self.width_multiple)
        return share_equally(groups, self.lengths, num_ranks)[rank::num_ranks]

    def held_out_batches(self) -> list[MicroBatch]:
        """Return micro-batches of the held-out samples, one a row, the longest first."""
        rows = [[index] for index in self.read if index in self.held_out]
        return group_rows(rows, self.lengths, self.tokens_per_micro_batch, self.width_multiple)

    def collate(self, micro_batch: MicroBatch) -> Batch:
        """Return the token ids and loss masks of a micro-batch, [rows, longest row or more]."""
        longest = max(width(row, self.lengths) for row in micro_batch)
        length = min(rounded_up(longest, self.width_multiple), max(longest, self.max_length))
        token_ids = torch.zeros(len(micro_batch), length, dtype=torch.int64)
        loss_mask = torch.zeros_like(token_ids, dtype=torch.bool)
        documents = torch.full_like(token_ids, -1)
        for number, row in enumerate(micro_batch):
            start = 0
            for document, index in enumerate(row):
                end = start + self.lengths[index]
                token_ids[number, start:end] = torch.tensor(self.samples.token_ids(index)[: end - start])
                for first, last in self._trained_spans(index):
                    loss_mask[number, start + first : start + last] = True
                documents[number, start:end] = document
                start = end
        return Batch(token_ids, loss_mask, documents if self.packing else None)

    def num_tokens(self, micro_batch: MicroBatch) -> int:
        """Return the number of tokens of a micro-batch, without padding."""
        return sum(width(row, self.lengths) for row in micro_batch)

    def _trained_spans(self, index: int) -> list[tuple[int, int]]:
        """Return the stretches of a sample that are trained on; not a first token, which nothing predicts."""
        spans = self.samples.spans(index)
        return [(max(start, 1), min(end, self.max_length)) for start, end in spans if start < self.max_length]

    def written(self, index: int) -> np.ndarray:
        """Return the tokens that the target wrote in a sample and that it is trained on, [N] int32."""
        token_ids = self.samples.token_ids(index)
        return np.concatenate([token_ids[start:end] for start, end in self._trained_spans(index)])

    def describe_cut(self) -> str:
        """Return in words how much `max_length` cuts from the samples; empty where it cuts nothing."""
        num_cut = int((self.samples.lengths > self.max_length).sum())
        if not num_cut:
            return ""
        share = 100 * (1 - sum(self.lengths) / int(self.samples.lengths.sum()))
        num_left_out = len(self.samples) - len(self.read)
        left_out = f"; {num_left_out} are left out, their answers begin beyond it" if num_left_out else ""
        return (
            f"{num_cut} of {len(self.samples)} samples are longer than data.max_length={self.max_length} and are cut "
            f"there, {share:.1f} % of all tokens{left_out}"
        )


def split(units: list[T], weights: list[int], shares: list[int]) -> list[list[T]]:
    """Return units in parts whose weights are to each other as the shares, as near as whole units allow.

    Each part has at least as many units as its share says.
    """
    total, done, start = [0, *itertools.accumulate(weights)], 0, 0
    parts = []
    for place, share in enumerate(shares):
        done += share
        aim = total[-1] * done / sum(shares)
        end = bisect.bisect_left(total, aim)
        end -= total[end] - aim > aim - total[end - 1]  # the nearer of the two edges
        end = min(max(end, start + share), len(units) - sum(shares[place + 1 :]))
        parts.append(units[start:end])
        start = end
    return parts


def width(row: list[int], lengths: list[int]) -> int:
    """Return the number of tokens of a row."""
    return sum(lengths[index] for index in row)


def padded_size(micro_batch: MicroBatch, lengths: list[int]) -> int:
    """Return the number of tokens of a micro-batch, padding included."""
    return len(micro_batch) * max(width(row, lengths) for row in micro_batch)


def pack(chosen: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Lay samples side by side in few rows of at most `capacity` tokens: the longest first, in the first row with room.

    First-fit decreasing takes at most 11/9 of the fewest rows possible, and one more.
    """
    rows: list[list[int]] = []
    room: list[int] = []  # of each row, in tokens
    for index in sorted(chosen, key=lambda index: -lengths[index]):
        row = next((row for row, tokens in enumerate(room) if tokens >= lengths[index]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def group_rows(rows: list[list[int]], lengths: list[int], budget: int, multiple: int = 1) -> list[MicroBatch]:
    """Return the rows in micro-batches of similar length, each of at most `budget` tokens with its padding.

    Widths are padded to a multiple of `multiple`.
    """
    groups: list[MicroBatch] = []
    for row in sorted(rows, key=lambda row: -width(row, lengths)):
        if groups and (len(groups[-1]) + 1) * rounded_up(width(groups[-1][0], lengths), multiple) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def share_equally(groups: list[MicroBatch], lengths: list[int], num_ranks: int) -> list[MicroBatch]:
    """Return the micro-batches, the largest first, some of them halved so that `num_ranks` divides their number.

    As it divides the number of samples too, there is always one that can be halved.
    """
    groups = list(groups)
    while len(groups) % num_ranks:
        divisible = [group for group in groups if sum(map(len, group)) > 1]
        largest = max(divisible, key=lambda group: padded_size(group, lengths))
        groups.remove(largest)
        groups += halves(largest)
    return sorted(groups, key=lambda group: -padded_size(group, lengths))


def halves(micro_batch: MicroBatch) -> list[MicroBatch]:
    """Return two micro-batches out of one: half of the rows in each, or half of the samples of the only row."""
    if len(micro_batch) > 1:
        middle = len(micro_batch) // 2
        return [micro_batch[:middle], micro_batch[middle:]]
    return [[micro_batch[0][0::2]], [micro_batch[0][1::2]]]
