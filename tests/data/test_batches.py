"""The order of training text: every sample once an epoch, nothing but seed and step decides which comes when, and all
ranks get as many micro-batches.
"""

import random
from dataclasses import replace

import pytest

from draftsmith.data.samples.batches import LENGTH_GROUPS, BatchPlan, pack, padded_size, split, width
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples, held_out_samples
from draftsmith.inference.measuring.spans import Span


def make_samples(count: int) -> Samples:
    """Sample i is i + 1 written three times or more, so that a token tells where it came from; some have two turns."""
    return Samples.of([make_sample([i + 1] * (3 + 7 * i % 11), 1 + i % 2) for i in range(count)])


def make_sample(token_ids: list[int], prompt_length: int) -> Sample:
    """Return a sample; in one of more than six tokens the last token but one is the user's."""
    end = len(token_ids)
    if end <= 6:
        return Sample(token_ids, [Span(prompt_length, end)])
    return Sample(token_ids, [Span(prompt_length, end - 2), Span(end - 1, end)])


def make_plan(
    num_samples: int = 70,
    batch_size: int = 4,
    max_length: int = 100,
    budget: int = 10_000,
    seed: int = 0,
    packing: bool = False,
) -> BatchPlan:
    return BatchPlan(make_samples(num_samples), batch_size, max_length, budget, seed, packing)


@pytest.mark.parametrize("num_samples", [4, 7, 64, 70])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_takes_no_sample_twice(num_samples: int, epoch: int) -> None:
    """The rest that fills no batch is left out, another one each epoch."""
    plan = make_plan(num_samples)
    first = epoch * plan.steps_per_epoch
    taken = [index for step in range(first, first + plan.steps_per_epoch) for index in plan.indices(step)]
    assert len(taken) == len(set(taken)) == num_samples // 4 * 4
    assert set(taken) <= set(range(num_samples))


@pytest.mark.parametrize("in_tokens", [False, True])
def test_held_out_samples_are_read_but_not_trained_on(in_tokens: bool) -> None:
    held_out = frozenset((2, 3, 40))
    batch_size = 60 if in_tokens else 4
    plan = BatchPlan(make_samples(70), batch_size, 100, 200, 0, in_tokens=in_tokens, held_out=held_out)
    taken = {index for step in range(3 * plan.steps_per_epoch) for index in plan.indices(step)}
    assert not taken & held_out
    assert taken <= set(plan.trained)
    micro_batches = plan.held_out_batches()
    assert sorted(index for micro_batch in micro_batches for (index,) in micro_batch) == [2, 3, 40]
    assert all(padded_size(micro_batch, plan.lengths) <= 200 for micro_batch in micro_batches)


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (1, 1), (2, 2), (64, 3)])
def test_prompts_are_held_out_whole(asked: int, found: int) -> None:
    """At most one prompt in 32, and the same ones in whatever order the samples lie."""
    samples = [replace(sample, prompt_index=i % 100) for i, sample in enumerate(make_samples(250))]
    held_out = held_out_samples(Samples.of(samples), asked)
    prompts = {samples[i].prompt_index for i in held_out}
    assert len(prompts) == found
    assert held_out == {i for i, sample in enumerate(samples) if sample.prompt_index in prompts}
    backwards = held_out_samples(Samples.of(samples[::-1]), asked)
    assert {samples[::-1][i].prompt_index for i in backwards} == prompts


def token_plan(num_ranks: int = 1, tokens: int = 60, packing: bool = False, budget: int = 10_000) -> BatchPlan:
    return BatchPlan(make_samples(70), tokens, 100, budget, 0, packing, in_tokens=True, num_ranks=num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("epoch", [0, 1])
def test_steps_hold_as_many_tokens(num_ranks: int, epoch: int) -> None:
    """As near as whole samples allow; by number of samples, the largest step has thrice the tokens of the smallest."""
    plan = token_plan(num_ranks)
    first = epoch * plan.steps_per_epoch
    steps = [plan.indices(step) for step in range(first, first + plan.steps_per_epoch)]
    tokens = [sum(plan.num_trained[index] for index in step) for step in steps]
    assert max(abs(number - 60) for number in tokens) <= 1.5 * num_ranks * max(plan.num_trained)
    taken = [index for step in steps for index in step]
    assert len(taken) == len(set(taken)) > 70 - num_ranks * -(-plan.steps_per_epoch // LENGTH_GROUPS)
    assert all(len(step) % num_ranks == 0 and step for step in steps)
    resumed = token_plan(num_ranks)
    assert [resumed.indices(step) for step in reversed(range(first, first + len(steps)))] == steps[::-1]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("budget", [100, 10_000])
def test_ranks_share_a_step_of_tokens_evenly(packing: bool, budget: int) -> None:
    plan = token_plan(3, packing=packing, budget=budget)
    for step in range(plan.steps_per_epoch):
        shares = [plan.micro_batches(step, rank, 3) for rank in range(3)]
        assert len({len(share) for share in shares}) == 1
        found = [index for share in shares for rows in share for row in rows for index in row]
        assert sorted(found) == sorted(plan.indices(step))


@pytest.mark.parametrize(
    ("weights", "shares", "lengths"),
    [
        ([1, 1, 1, 1], [1, 1], [2, 2]),
        ([1, 1, 1, 1, 1, 1], [2, 1], [4, 2]),
        ([9, 1, 1, 1], [1, 1, 1], [1, 1, 2]),  # none is empty
        ([1, 1, 1, 9], [1, 1, 1], [2, 1, 1]),
        ([5, 4, 3], [1], [3]),
    ],
)
def test_split(weights: list[int], shares: list[int], lengths: list[int]) -> None:
    parts = split(list(range(len(weights))), weights, shares)
    assert [len(part) for part in parts] == lengths
    assert [unit for part in parts for unit in part] == list(range(len(weights)))


def test_order_is_a_function_of_seed_and_step() -> None:
    """A resumed run asks for step n first; it must get what the uninterrupted run got there."""
    plan = make_plan()
    in_order = [plan.indices(step) for step in range(40)]
    assert [make_plan().indices(step) for step in reversed(range(40))] == in_order[::-1]
    assert [make_plan(seed=1).indices(step) for step in range(40)] != in_order
    assert in_order[: plan.steps_per_epoch] != in_order[plan.steps_per_epoch : 2 * plan.steps_per_epoch]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 12])
@pytest.mark.parametrize("budget", [13, 40, 10_000])
def test_ranks_share_a_step_evenly(packing: bool, num_ranks: int, budget: int) -> None:
    """A sample seen by two ranks counts twice in the gradient; a rank with one micro-batch more waits for ever."""
    plan = make_plan(batch_size=12, max_length=13, budget=budget, packing=packing)
    for step in range(plan.steps_per_epoch):
        shares = [plan.micro_batches(step, rank, num_ranks) for rank in range(num_ranks)]
        assert len({len(share) for share in shares}) == 1
        assert all(padded_size(rows, plan.lengths) <= budget for share in shares for rows in share)
        found = [index for share in shares for rows in share for row in rows for index in row]
        assert sorted(found) == sorted(plan.indices(step))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("max_length", [1, 2, 5, 13, 100])
def test_mask_covers_exactly_what_the_target_wrote(max_length: int, packing: bool) -> None:
    """Neither prompts nor padding are trained on, and a cut sample is trained up to the cut or, cut before its answer,
    not at all.
    """
    plan = make_plan(max_length=max_length, packing=packing)
    assert plan.row_length == (max_length if packing else min(max_length, plan.samples.lengths.max()))
    with_answers = [i for i, sample in enumerate(plan.samples) if sample.spans[0].start < max_length]
    assert plan.trained == with_answers
    for step in range(plan.steps_per_epoch):
        for rows in plan.micro_batches(step, 0, 1):
            batch = plan.collate(rows)
            for number, row in enumerate(rows):
                expected_ids, expected_mask, expected_documents = [], [], []
                for document, index in enumerate(row):
                    sample = plan.samples[index]
                    kept = sample.token_ids[:max_length]
                    expected_ids += kept
                    expected_mask += [
                        any(span.start <= place < span.end for span in sample.spans) for place in range(len(kept))
                    ]
                    expected_documents += [document] * len(kept)
                length = len(expected_ids)
                assert length <= max_length
                assert batch.token_ids[number, :length].tolist() == expected_ids
                assert batch.loss_mask[number, :length].tolist() == expected_mask
                assert not batch.loss_mask[number, length:].any()
                assert (batch.documents is not None) == packing
                if batch.documents is not None:
                    assert batch.documents[number, :length].tolist() == expected_documents
                    assert (batch.documents[number, length:] == -1).all()


@pytest.mark.parametrize("packing", [False, True])
def test_widths_of_a_gpu_are_few(packing: bool) -> None:
    """Attention plans anew for each new shape: widths are multiples, or `max_length`, beyond which no position is."""
    plan = replace(make_plan(max_length=11, budget=40, packing=packing), width_multiple=4)
    widths = set()
    for step in range(plan.steps_per_epoch):
        for rows in plan.micro_batches(step, 0, 1):
            batch = plan.collate(rows)
            widths.add(batch.token_ids.shape[1])
            assert batch.token_ids.numel() <= 40
            assert not batch.loss_mask[:, max(width(row, plan.lengths) for row in rows) :].any()
    assert widths == ({8, 11} if packing else {4, 8, 11})


def test_what_is_cut_is_said() -> None:
    samples = [
        Sample([1] * 10, [Span(2, 10)]),
        Sample([1] * 10, [Span(7, 10)]),
        Sample([1] * 5, [Span(2, 5)]),
    ]
    plans = [BatchPlan(Samples.of(samples), 1, length, length, 0) for length in (6, 10)]
    assert "2 of 3 samples" in plans[0].describe_cut()
    assert "1 are left out" in plans[0].describe_cut()
    assert "32.0 %" in plans[0].describe_cut()
    assert plans[1].describe_cut() == ""


def test_batches_pad_little() -> None:
    """Samples of like length share a batch: with lengths 1 to 64 in groups of 8 batches, far less than at random."""
    samples = [Sample([1] * (2 + i), [Span(1, 2 + i)]) for i in range(64)]
    plan = BatchPlan(Samples.of(samples), 8, 65, 10_000, seed=0)
    batches = [plan.collate(plan.micro_batches(step, 0, 1)[0]) for step in range(plan.steps_per_epoch)]
    assert sum(batch.token_ids.numel() for batch in batches) == 8 * sum(range(9, 66, 8))  # sorted, all in one group


def test_packed_rows_are_full() -> None:
    """First-fit decreasing needs at most 11/9 of the fewest rows and one more (Johnson 1973); no row overflows."""
    chance = random.Random(0)
    for _ in range(50):
        lengths = [chance.randint(1, 60) for _ in range(40)]
        rows = pack(list(range(40)), lengths, 64)
        assert sorted(index for row in rows for index in row) == list(range(40))
        assert all(sum(lengths[index] for index in row) <= 64 for row in rows)
        fewest = max(-(-sum(lengths) // 64), sum(length > 32 for length in lengths))
        assert len(rows) <= fewest * 11 / 9 + 1
