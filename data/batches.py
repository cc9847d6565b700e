"""Batches of samples in an order that is a function of the seed and the step alone, so that resuming is exact."""

from dataclasses import dataclass

import torch

from draftsmith.data.samples import Sample
from draftsmith.models.batch import Batch

LENGTH_GROUPS = 8  # batches are drawn from groups of so many batches sorted by length, to pad less


@dataclass
class BatchPlan:
    """Which samples each step trains on. All ranks hold the same plan and take their own share of each step."""

    samples: list[Sample]
    batch_size: int  # samples a step, over all ranks and micro-batches
    max_length: int  # longer samples are cut
    seed: int

    def __post_init__(self) -> None:
        self.steps_per_epoch = len(self.samples) // self.batch_size
        assert self.steps_per_epoch > 0, "fewer samples than a batch"
        self._epoch_order: tuple[int, list[list[int]]] | None = None

    def indices(self, step: int) -> list[int]:
        """Sample indices of a step, counted from 0 over all epochs; every epoch is shuffled anew."""
        epoch, offset = divmod(step, self.steps_per_epoch)
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = (epoch, self._shuffle(epoch))
        return self._epoch_order[1][offset]

    def _shuffle(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.samples), generator=generator).tolist()
        group = self.batch_size * LENGTH_GROUPS
        batches = []
        for start in range(0, self.steps_per_epoch * self.batch_size, group):
            members = order[start : min(start + group, self.steps_per_epoch * self.batch_size)]
            members.sort(key=lambda index: len(self.samples[index].token_ids))
            batches += [members[i : i + self.batch_size] for i in range(0, len(members), self.batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def micro_batches(self, step: int, rank: int, num_ranks: int, micro_batch_size: int) -> list[Batch]:
        """This rank's share of a step, in micro-batches of at most `micro_batch_size` samples."""
        own = self.indices(step)[rank::num_ranks]
        return [self._collate(own[i : i + micro_batch_size]) for i in range(0, len(own), micro_batch_size)]

    def _collate(self, indices: list[int]) -> Batch:
        chosen = [self.samples[index] for index in indices]
        length = min(self.max_length, max(len(sample.token_ids) for sample in chosen))
        token_ids = torch.zeros(len(chosen), length, dtype=torch.int64)
        loss_mask = torch.zeros(len(chosen), length, dtype=torch.bool)
        for row, sample in enumerate(chosen):
            ids = torch.tensor(sample.token_ids[:length])
            token_ids[row, : len(ids)] = ids
            loss_mask[row, sample.prompt_length : len(ids)] = True
        return Batch(token_ids, loss_mask)


def token_counts(samples: list[Sample], vocab_size: int) -> torch.Tensor:
    """How often the target wrote each token, [V]."""
    written = [token for sample in samples for token in sample.token_ids[sample.prompt_length :]]
    return torch.bincount(torch.tensor(written), minlength=vocab_size)
