"""The order of training text: every sample once an epoch, and nothing but seed and step decides which comes when."""

import pytest
import torch

from draftsmith.data.batches import BatchPlan, token_counts
from draftsmith.data.samples import Sample, Span


def make_samples(count: int) -> list[Sample]:
    """Sample i is i + 1 written three times or more, so that a row tells where it came from; some have two turns."""
    return [make_sample([i + 1] * (3 + 7 * i % 11), 1 + i % 2) for i in range(count)]


def make_sample(token_ids: list[int], prompt_length: int) -> Sample:
    """Of texts longer than six tokens, the last but one was the user's."""
    end = len(token_ids)
    if end <= 6:
        return Sample(token_ids, [Span(prompt_length, end)])
    return Sample(token_ids, [Span(prompt_length, end - 2), Span(end - 1, end)])


def make_plan(num_samples: int = 70, batch_size: int = 4, max_length: int = 100, seed: int = 0) -> BatchPlan:
    return BatchPlan(make_samples(num_samples), batch_size, max_length, seed)


@pytest.mark.parametrize("num_samples", [4, 7, 64, 70])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_takes_no_sample_twice(num_samples: int, epoch: int) -> None:
    """The rest that fills no batch is left out, another one each epoch."""
    plan = make_plan(num_samples)
    first = epoch * plan.steps_per_epoch
    taken = [index for step in range(first, first + plan.steps_per_epoch) for index in plan.indices(step)]
    assert len(taken) == len(set(taken)) == num_samples // 4 * 4
    assert set(taken) <= set(range(num_samples))


def test_order_is_a_function_of_seed_and_step() -> None:
    """A resumed run asks for step n first; it must get what the uninterrupted run got there."""
    plan = make_plan()
    in_order = [plan.indices(step) for step in range(40)]
    assert [make_plan().indices(step) for step in reversed(range(40))] == in_order[::-1]
    assert [make_plan(seed=1).indices(step) for step in range(40)] != in_order
    assert in_order[: plan.steps_per_epoch] != in_order[plan.steps_per_epoch : 2 * plan.steps_per_epoch]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_and_micro_batches_partition_a_step(num_ranks: int) -> None:
    """A sample seen by two ranks counts twice in the gradient, one seen by none is lost."""
    plan = make_plan(batch_size=8)
    for step in range(3):
        shares = [plan.micro_batches(step, rank, num_ranks, micro_batch_size=3) for rank in range(num_ranks)]
        assert all(len(batch.token_ids) <= 3 for share in shares for batch in share)
        found = [int(row[0]) - 1 for share in shares for batch in share for row in batch.token_ids]
        assert sorted(found) == sorted(plan.indices(step))


@pytest.mark.parametrize("max_length", [1, 2, 5, 100])
def test_mask_covers_exactly_what_the_target_wrote(max_length: int) -> None:
    """Neither the prompt nor the padding is trained on, and a cut sample is trained up to the cut."""
    plan = make_plan(max_length=max_length)
    for step in range(plan.steps_per_epoch):
        batch = plan.micro_batches(step, 0, 1, 4)[0]
        chosen = [plan.samples[index] for index in plan.indices(step)]
        assert batch.token_ids.shape[1] == min(max_length, max(len(sample.token_ids) for sample in chosen))
        for row, mask, sample in zip(batch.token_ids, batch.loss_mask, chosen, strict=True):
            kept = sample.token_ids[:max_length]
            assert row[: len(kept)].tolist() == kept
            written = {place for span in sample.spans for place in range(span.start, span.end)}
            assert set(mask.nonzero()[:, 0].tolist()) == {place for place in written if place < len(kept)}


def test_batches_pad_little() -> None:
    """Samples of like length share a batch: with lengths 1 to 64 in groups of 8 batches, far less than at random."""
    samples = [Sample([1] * (1 + i), []) for i in range(64)]
    plan = BatchPlan(samples, batch_size=8, max_length=64, seed=0)
    batches = [plan.micro_batches(step, 0, 1, 8)[0] for step in range(plan.steps_per_epoch)]
    assert sum(batch.token_ids.numel() for batch in batches) == 8 * sum(range(8, 65, 8))  # sorted, all in one group


def test_token_counts_leave_prompts_out() -> None:
    samples = [make_sample([5, 5, 1, 2], 2), make_sample([5, 2, 2, 5, 5, 5, 2], 1)]
    assert torch.equal(token_counts(samples, 6), torch.tensor([0, 1, 4, 0, 0, 2]))
