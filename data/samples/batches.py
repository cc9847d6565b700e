"""Batches of samples in an order that is a function of the seed and the step alone, so that resuming is exact.

A step trains on `batch_size` samples. They lie in rows, one a row or packed side by side; rows of similar length make
micro-batches that fit the memory budget, as many on every rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.data.samples.samples import Sample, loss_mask
from draftsmith.models.batch import Batch

LENGTH_GROUPS = 8  # batches are drawn from groups of so many batches sorted by length, to pad less

MicroBatch = list[list[int]]  # the samples of each row of a micro-batch, by their place in the list of samples


@dataclass
class BatchPlan:
    """Which samples each step trains on. All ranks hold the same plan and take their own share of each step.

    Samples of which `max_length` leaves nothing to train on are left out.
    """

    samples: list[Sample]
    batch_size: int  # samples a step, over all ranks and micro-batches
    max_length: int  # tokens of a row; longer samples are cut
    tokens_per_micro_batch: int  # rows x longest row, padding included; at least `max_length`
    seed: int
    packing: bool = False  # several samples a row, as many as fit `max_length`

    def __post_init__(self) -> None:
        assert self.max_length <= self.tokens_per_micro_batch
        self.lengths = [min(len(sample.token_ids), self.max_length) for sample in self.samples]
        self.trained = [i for i, sample in enumerate(self.samples) if self._mask(sample).any()]
        self.steps_per_epoch = len(self.trained) // self.batch_size
        self._epoch_order: tuple[int, list[list[int]]] | None = None

    def indices(self, step: int) -> list[int]:
        """The samples of a step, counted from 0 over all epochs; every epoch is shuffled anew."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        order = self._epoch_order  # a copy: another thread may ask for another epoch
        if order is None or order[0] != epoch:
            order = self._epoch_order = (epoch, self._shuffle(epoch))
        return order[1][offset]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = [self.trained[i] for i in torch.randperm(len(self.trained), generator=generator).tolist()]
        group = self.batch_size * LENGTH_GROUPS
        batches = []
        for start in range(0, self.steps_per_epoch * self.batch_size, group):
            members = order[start : min(start + group, self.steps_per_epoch * self.batch_size)]
            members.sort(key=lambda index: self.lengths[index])
            batches += [members[i : i + self.batch_size] for i in range(0, len(members), self.batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def micro_batches(self, step: int, rank: int, num_ranks: int) -> list[MicroBatch]:
        """This rank's share of a step: micro-batches within the budget, as many as every other rank has.

        `batch_size` must be a multiple of `num_ranks`.
        """
        chosen = self.indices(step)
        rows = pack(chosen, self.lengths, self.max_length) if self.packing else [[index] for index in chosen]
        groups = group_rows(rows, self.lengths, self.tokens_per_micro_batch)
        return share_equally(groups, self.lengths, num_ranks)[rank::num_ranks]

    def collate(self, rows: MicroBatch) -> Batch:
        """Token ids and loss masks of a micro-batch."""
        length = max(width(row, self.lengths) for row in rows)
        token_ids = torch.zeros(len(rows), length, dtype=torch.int64)
        loss_mask = torch.zeros(len(rows), length, dtype=torch.bool)
        documents = torch.full((len(rows), length), -1, dtype=torch.int64)
        for number, row in enumerate(rows):
            start = 0
            for document, index in enumerate(row):
                end = start + self.lengths[index]
                sample = self.samples[index]
                token_ids[number, start:end] = torch.tensor(sample.token_ids[: end - start])
                loss_mask[number, start:end] = self._mask(sample)
                documents[number, start:end] = document
                start = end
        return Batch(token_ids, loss_mask, documents if self.packing else None)

    def num_tokens(self, rows: MicroBatch) -> int:
        """Of a micro-batch, without padding."""
        return sum(width(row, self.lengths) for row in rows)

    def _mask(self, sample: Sample) -> Tensor:
        """The tokens that the target wrote, but for the first, which nothing predicts; cut at `max_length`."""
        mask = loss_mask(sample)[: self.max_length]
        mask[:1] = False
        return mask

    def written(self, index: int) -> Tensor:
        """The tokens that the target wrote in a sample."""
        sample = self.samples[index]
        return torch.tensor(sample.token_ids[: self.max_length])[self._mask(sample)]

    def cut(self) -> str:
        """What `max_length` takes from the samples, for the user; empty where it takes nothing."""
        num_cut = sum(len(sample.token_ids) > self.max_length for sample in self.samples)
        if not num_cut:
            return ""
        num_tokens = sum(len(sample.token_ids) for sample in self.samples)
        share = 100 * (1 - sum(self.lengths) / num_tokens)
        without = len(self.samples) - len(self.trained)
        left_out = f"; {without} are left out, their answers begin beyond it" if without else ""
        return (
            f"{num_cut} of {len(self.samples)} samples are longer than data.max_length={self.max_length} and are cut "
            f"there, {share:.1f} % of all tokens{left_out}"
        )


def width(row: list[int], lengths: list[int]) -> int:
    """Tokens of a row, which holds the samples `row`."""
    return sum(lengths[index] for index in row)


def size(rows: MicroBatch, lengths: list[int]) -> int:
    """Tokens of a micro-batch, padding included."""
    return len(rows) * max(width(row, lengths) for row in rows)


def pack(chosen: list[int], lengths: list[int], capacity: int) -> MicroBatch:
    """Samples side by side in few rows of at most `capacity` tokens: the longest first, into the first row with room.

    First-fit decreasing takes at most 11/9 of the fewest rows possible, and one more.
    """
    rows: MicroBatch = []
    room: list[int] = []
    for index in sorted(chosen, key=lambda index: -lengths[index]):
        row = next((row for row, left in enumerate(room) if left >= lengths[index]), None)
        if row is None:
            row = len(rows)
            rows.append([])
            room.append(capacity)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def group_rows(rows: MicroBatch, lengths: list[int], budget: int) -> list[MicroBatch]:
    """Rows in groups of similar length, each of at most `budget` tokens with its padding."""
    groups: list[MicroBatch] = []
    for row in sorted(rows, key=lambda row: -width(row, lengths)):
        if groups and (len(groups[-1]) + 1) * width(groups[-1][0], lengths) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def share_equally(groups: list[MicroBatch], lengths: list[int], num_ranks: int) -> list[MicroBatch]:
    """The groups, some of them halved, so that their number is a multiple of `num_ranks`; the largest first.

    As the number of samples is such a multiple too, there is always one left to halve.
    """
    groups = list(groups)
    while len(groups) % num_ranks:
        largest = max((rows for rows in groups if sum(map(len, rows)) > 1), key=lambda rows: size(rows, lengths))
        groups.remove(largest)
        groups += halves(largest)
    return sorted(groups, key=lambda rows: -size(rows, lengths))


def halves(rows: MicroBatch) -> list[MicroBatch]:
    """Two micro-batches out of one: half of the rows each, or half of the samples of the only one."""
    if len(rows) > 1:
        middle = len(rows) // 2
        return [rows[:middle], rows[middle:]]
    return [[rows[0][0::2]], [rows[0][1::2]]]
