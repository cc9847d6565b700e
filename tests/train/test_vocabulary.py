"""The draft vocabulary: how it is chosen from what the target wrote, and the bound that it sets to acceptance."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters import build, loss_of, random_batch

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.features.vocabulary import MEASURED, choosing_and_held_out, measure_vocabulary, token_counts
from draftsmith.data.samples.batches import BatchPlan, MicroBatch
from draftsmith.data.samples.folder import read_samples, write_samples
from draftsmith.data.samples.sample import Sample
from draftsmith.data.samples.samples import Samples
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.spans import Span
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.vocabulary import SIZE_UNIT, ranking, with_size
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.target.target import Features
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import train
from draftsmith.train.config import resolve
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.tracking import read_metrics
from draftsmith.train.run_folder.vocabulary import read_vocabulary


@pytest.mark.parametrize("coverage", [0.5, 0.9, 0.99, 0.9999])
def test_coverage_takes_the_fewest_tokens_that_reach_it(coverage: float) -> None:
    """Up to the unit that sizes are rounded to; deterministic where counts tie."""
    counts = (10_000 / torch.arange(1, 1001)).long()
    config = with_size(Eagle3Config(draft_vocab_coverage=coverage), counts, [])
    assert config.draft_vocab_size is not None
    assert config.draft_vocab_size % SIZE_UNIT == 0 or config.draft_vocab_size == 1000
    share = counts.sort(descending=True).values.cumsum(0) / counts.sum()
    assert share[config.draft_vocab_size - 1] >= coverage
    assert config.draft_vocab_size <= SIZE_UNIT or share[config.draft_vocab_size - SIZE_UNIT - 1] < coverage


def test_size_and_coverage_exclude_each_other() -> None:
    counts = torch.ones(100)
    assert with_size(Eagle3Config(draft_vocab_size=10), counts, []).draft_vocab_size == 10
    with pytest.raises(UserError, match="one decides"):
        with_size(Eagle3Config(draft_vocab_size=10, draft_vocab_coverage=0.9), counts, [])


def test_the_end_of_a_text_can_always_be_proposed(tiny_target: Target) -> None:
    """The target never wrote the end of text where every answer was cut."""
    counts = torch.arange(tiny_target.vocab_size)
    counts[tiny_target.eos_token_ids] = 0
    drafter = Eagle3.from_target(Eagle3Config(draft_vocab_size=20), tiny_target)
    drafter.fit_vocabulary(ranking(counts, tiny_target.eos_token_ids))
    ids = drafter.draft_to_target()
    assert ids is not None
    assert set(tiny_target.eos_token_ids) <= set(ids.tolist())
    assert torch.isin(counts.topk(19).indices, ids).all()


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "medusa"])
def test_chains_that_cannot_be_drafted_are_not_trained(kind: str, tiny_target: Target) -> None:
    """A depth counts where every token before the predicted one, but for the root, is in the draft vocabulary."""
    drafter, batch = build(kind, tiny_target, draft_vocab_size=150).eval(), random_batch(tiny_target, length=40)
    drafter.fit_vocabulary(torch.rand(tiny_target.vocab_size, generator=torch.Generator().manual_seed(0)))
    inside = torch.isin(batch.token_ids, drafter.draft_to_target())
    expected = [
        sum(
            bool(written[t + 1 : t + 3 + k].all() and known[t + 2 : t + 2 + k].all())
            for written, known in zip(batch.loss_mask, inside, strict=True)
            for t in range(40 - 2 - k)
        )
        for k in range(3)
    ]
    assert expected[0] > expected[1] > expected[2] > 0
    sums = loss_of(drafter, batch, tiny_target)
    assert [int(sums[f"accuracy_{k}"][1]) for k in range(3)] == expected


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "medusa", "dflash", "domino", "dspark"])
def test_loss_does_not_hang_on_whether_acceptance_is_told(kind: str, tiny_target: Target) -> None:
    """Only what is accepted takes the rows of the target's head outside of the draft vocabulary."""
    drafter, batch = build(kind, tiny_target, draft_vocab_size=150).train(), random_batch(tiny_target, length=40)
    drafter.fit_vocabulary(torch.rand(tiny_target.vocab_size, generator=torch.Generator().manual_seed(0)))
    found = {}
    for told in (True, False):
        torch.manual_seed(0)  # of slots that are drawn
        drafter.tells_acceptance = told
        total, count = (sums := loss_of(drafter, batch, tiny_target))["loss"]
        assert ("accuracy_0" in sums) == ("simulated_acceptance_length" in sums) == (told or kind == "dspark")
        gradient = torch.autograd.grad(total / count, [p for p in drafter.parameters() if p.requires_grad])
        found[told] = [total, count, *gradient]
    torch.testing.assert_close(found[False], found[True])
    assert "accuracy_0" in loss_of(drafter.eval(), batch, tiny_target)  # held-out samples


def make_plan(num_samples: int = 64) -> BatchPlan:
    """Samples of two domains that the target may write."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(1, 300, (num_samples, 30), generator=generator).tolist()
    samples = [Sample(text, [Span(5, 30)], domain=("code", "chat")[i // 16 % 2]) for i, text in enumerate(texts)]
    return BatchPlan(Samples.of(samples), 4, 24, 100, seed=0)


def test_the_measured_samples_choose_nothing() -> None:
    for count in (1, 2, 15, 16, 40, 64):
        choosing, held_out = choosing_and_held_out(list(range(count)))
        assert choosing
        assert held_out
        assert count == 1 or not set(choosing) & set(held_out)
    plan = make_plan()
    expected = torch.zeros(300, dtype=torch.int64)
    for index in choosing_and_held_out(plan.trained)[0]:
        for token in plan.samples[index].token_ids[5:24]:
            expected[token] += 1
    assert torch.equal(token_counts(plan, 300), expected)


def test_bounds_by_enumeration(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each share against a plain sum over the held-out positions of its domain, whatever the chunks."""
    monkeypatch.setattr("draftsmith.data.features.vocabulary.CHUNK_ELEMENTS", 5 * tiny_target.vocab_size)
    plan, kept = make_plan(), torch.arange(20, tiny_target.vocab_size, 2)

    def source(rows: MicroBatch, batch: Batch) -> Features:
        return tiny_target.features(batch)

    found = measure_vocabulary(kept, plan, source, tiny_target)
    assert set(found) == {"code", "chat"}
    for domain, inside in found.items():
        sums, count = torch.zeros(3, dtype=torch.float64), 0
        indices = [i for i in choosing_and_held_out(plan.trained)[1] if plan.samples[i].domain == domain][:MEASURED]
        for index in indices:
            ids = torch.tensor([plan.samples[index].token_ids[:24]])
            p = tiny_target.model(input_ids=ids).logits[0].double().softmax(-1)  # [T, V]
            for place in range(5, 24):
                before = p[place - 1]
                sums += torch.stack(
                    [torch.isin(ids[0, place], kept), torch.isin(before.argmax(), kept), before[kept].sum()]
                )
                count += 1
        assert inside.num_tokens == count
        expected = (sums / count).tolist()
        assert [inside.written, inside.greedy, inside.sampled] == pytest.approx(expected, abs=1e-6)


def test_measuring_a_vocabulary_keeps_to_the_size_of_micro_batches(tiny_target: Target) -> None:
    """On a GPU, where widths are padded: three rows of 30 tokens would be 96."""
    plan = replace(make_plan(160), max_length=40, tokens_per_micro_batch=90, width_multiple=16)
    sizes = []

    def source(rows: MicroBatch, batch: Batch) -> Features:
        sizes.append(batch.token_ids.numel())
        return tiny_target.features(batch)

    measure_vocabulary(torch.arange(20), plan, source, tiny_target)
    assert set(sizes) == {32, 64}


def test_another_vocabulary_than_trained_with_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """d2t of another run loads without an error anywhere and makes every draft wrong."""
    drafter = Eagle3.from_target(Eagle3Config(draft_vocab_size=40), tiny_target)
    drafter.fit_vocabulary(torch.rand(tiny_target.vocab_size))
    save_drafter(drafter, tmp_path / "one")
    assert torch.equal(load_drafter(tmp_path / "one", tiny_target).draft_to_target(), drafter.draft_to_target())
    drafter.fit_vocabulary(torch.rand(tiny_target.vocab_size))
    save_drafter(drafter, tmp_path / "other")
    (tmp_path / "other" / "config.json").replace(tmp_path / "one" / "config.json")
    with pytest.raises(UserError, match="another draft vocabulary"):
        load_drafter(tmp_path / "one", tiny_target)


def test_a_run_tells_what_its_vocabulary_costs(
    tiny_target: Target, tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """In vocabulary.json by domain and on the console; the decoder accepts no more than the bound says."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"strike the iron {i}\n" for i in range(40)))
    prepare(tiny_target, str(prompts), tmp_path / "samples", PrepareSettings(16, (Sampling(0.0),)))
    marked = [replace(sample, domain="forge") for sample in read_samples(tmp_path / "samples")]
    write_samples(tmp_path / "samples", [marked], iter)
    arguments = {"target": tiny_target_dir, "data.samples": tmp_path / "samples", "run.dir": tmp_path / "run"}
    arguments |= {"drafter.draft_vocab_size": "null", "drafter.draft_vocab_coverage": 0.5, "run.device": "cpu"}
    arguments |= {"run.steps": 2, "run.log_every": 5, "data.batch_size": 8}
    run = train(resolve(RECIPES["eagle3"](), None, [f"{key}={value}" for key, value in arguments.items()]))
    (logged,) = [line for line in read_metrics(run) if "loss" in line]
    assert 0 <= logged["accuracy_0"] <= 1  # of the last step
    content = read_vocabulary(run)
    assert content is not None
    assert content.size == SIZE_UNIT
    assert set(content.domains) == {"forge"}
    assert "64 of 300 tokens" in " ".join(capsys.readouterr().out.split())

    drafter = load_drafter(checkpoints(run)[-1], tiny_target)
    own = json.loads((checkpoints(run)[-1] / "config.json").read_text())["draftsmith"]
    assert own["draft_vocab_hash"] == content.hash
    held_out = [read_samples(tmp_path / "samples")[i] for i in choosing_and_held_out(list(range(40)))[1]]
    output = SpeculativeDecoder(tiny_target, drafter).generate(
        [sample.token_ids[: sample.spans[0].start] for sample in held_out], max_new_tokens=16
    )
    assert output.stats.total.draft_acceptance_rate <= content.domains["forge"].greedy + 1e-6
