"""What every entry of `DRAFTERS` promises, and what each family must get right by itself."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter, save_drafter
from draftsmith.models.base import NO_TOKEN, DecodingState
from draftsmith.models.batch import Batch
from draftsmith.models.eagle3 import Eagle3, Eagle3Config, unrolled_attention
from draftsmith.models.errors import UserError
from draftsmith.models.medusa import Medusa
from draftsmith.models.ngram import latest_match
from draftsmith.models.sampling import Noise, Sampling
from draftsmith.models.slots import SlotCache, chain_window
from draftsmith.models.trees import Chain

TRAINABLE = ["eagle3", "medusa", "draft_model"]


def build(kind: str, target: Target) -> Drafter:
    torch.manual_seed(1)
    return DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), target)


def random_batch(target: Target, rows: int = 3, length: int = 12) -> Batch:
    token_ids = torch.randint(1, target.vocab_size, (rows, length), generator=torch.Generator().manual_seed(2))
    loss_mask = torch.arange(length)[None] >= torch.tensor([3, 5, 4])[:rows, None]
    return Batch(token_ids, loss_mask)


def first_round(drafter: Drafter, target: Target, token_ids: Tensor, sample_drafts: bool = False) -> DecodingState:
    """The state after the target read all but the last of the tokens [B, T]."""
    window = chain_window(torch.zeros(len(token_ids), dtype=torch.int64), token_ids.shape[1] - 1)
    features = target.run(token_ids[:, :-1], window, SlotCache(*token_ids.shape), drafter.layer_ids)
    lengths = torch.full((len(token_ids),), token_ids.shape[1])
    padded = torch.cat([token_ids, torch.zeros(len(token_ids), 8, dtype=torch.int64)], 1)
    sampling = Sampling(1.0 if sample_drafts else 0.0)
    noise = Noise(0, torch.arange(len(token_ids)))
    memory = drafter.new_memory(*padded.shape, Chain(4))
    drafter.read(memory, token_ids, features, window)
    return DecodingState(
        padded, lengths, features, window.positions, lengths - 1, sampling, noise, sample_drafts, memory
    )


@pytest.mark.parametrize("kind", list(DRAFTERS))
def test_a_draft_is_a_chain_of_tokens_with_their_probabilities(kind: str, tiny_target: Target) -> None:
    drafter = build(kind, tiny_target)
    token_ids = random_batch(tiny_target).token_ids
    for sample_drafts in (False, True) if drafter.can_sample else (False,):
        with torch.no_grad():
            draft = drafter.propose(first_round(drafter, tiny_target, token_ids, sample_drafts), Chain(3))
        rows, num = draft.tokens.shape
        assert rows == 3
        assert num <= 3
        assert draft.depth == num
        assert draft.parents.tolist() == [list(range(-1, num - 1))] * 3
        assert ((draft.tokens >= 0) | (draft.tokens == NO_TOKEN)).all()
        assert (draft.tokens < tiny_target.vocab_size).all()
        if sample_drafts:
            assert draft.logits is not None
            assert draft.logits.shape == (rows, num, tiny_target.vocab_size)
            assert draft.logits.dtype == torch.float32
            assert (draft.logits.gather(-1, draft.tokens[..., None]) > float("-inf")).all()
        else:
            assert draft.logits is None


@pytest.mark.parametrize("kind", TRAINABLE)
def test_a_checkpoint_gives_the_same_drafter(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    drafter = build(kind, tiny_target)
    for parameter in drafter.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, tiny_target)
    assert loaded.config == drafter.config
    batch = random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)
    assert torch.equal(loaded.loss(batch, features)["loss"][0], drafter.loss(batch, features)["loss"][0])


@pytest.mark.parametrize("kind", TRAINABLE)
def test_training_touches_the_drafter_alone(kind: str, tiny_target: Target) -> None:
    drafter = build(kind, tiny_target)
    batch = random_batch(tiny_target)
    total, count = drafter.loss(batch, tiny_target.features(batch, drafter.layer_ids))["loss"]
    assert count == batch.loss_mask.sum()
    total.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    assert all(parameter.grad is None for parameter in tiny_target.model.parameters())


@pytest.mark.parametrize("kind", TRAINABLE)
def test_padding_changes_nothing(kind: str, tiny_target: Target) -> None:
    drafter = build(kind, tiny_target)
    batch = random_batch(tiny_target)
    padding = torch.zeros(3, 4, dtype=torch.int64)
    padded = Batch(torch.cat([batch.token_ids, padding], 1), torch.cat([batch.loss_mask, padding.bool()], 1))
    with torch.no_grad():
        expected = drafter.loss(batch, tiny_target.features(batch, drafter.layer_ids))
        found = drafter.loss(padded, tiny_target.features(padded, drafter.layer_ids))
    for name, (total, count) in expected.items():
        torch.testing.assert_close(found[name][0], total)
        assert found[name][1] == count


@pytest.mark.parametrize("kind", TRAINABLE)
def test_packing_changes_nothing(kind: str, tiny_target: Target) -> None:
    """Documents of 7, 12 and 9 tokens side by side, and each in a row of its own."""
    drafter = build(kind, tiny_target)
    batch = random_batch(tiny_target)
    lengths = (7, 12, 9)
    apart = [
        Batch(batch.token_ids[i : i + 1, :length], batch.loss_mask[i : i + 1, :length])
        for i, length in enumerate(lengths)
    ]
    documents = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * 3)[None]
    pad = torch.zeros(1, 3, dtype=torch.int64)
    packed = Batch(
        torch.cat([*(one.token_ids for one in apart), pad], 1),
        torch.cat([*(one.loss_mask for one in apart), pad.bool()], 1),
        documents,
    )
    with torch.no_grad():
        found = drafter.loss(packed, tiny_target.features(packed, drafter.layer_ids))
        parts = [drafter.loss(one, tiny_target.features(one, drafter.layer_ids)) for one in apart]
    for name, (total, count) in found.items():
        torch.testing.assert_close(total, sum(part[name][0] for part in parts))
        assert count == sum(part[name][1] for part in parts)


@pytest.mark.parametrize("kind", TRAINABLE)
def test_another_target_is_refused(kind: str, tiny_target: Target, make_target_dir, tmp_path: Path) -> None:
    save_drafter(build(kind, tiny_target), tmp_path)
    other = Target.from_pretrained(make_target_dir(vocab_size=310), "cpu")
    with pytest.raises(UserError, match="310"):
        load_drafter(tmp_path, other)


def test_unrolled_training_sees_what_drafting_sees(tiny_target: Target) -> None:
    """Step k of slot t in training against reading slots 0..t and drafting k tokens on the cache."""
    drafter = build("eagle3", tiny_target)
    assert isinstance(drafter, Eagle3)
    batch = random_batch(tiny_target)
    token_ids, layers = batch.token_ids, tiny_target.features(batch, drafter.layer_ids).layers
    assert layers is not None
    with torch.no_grad():
        steps = list(drafter.unroll(batch, layers))
        fused = drafter.fc(layers)
        for t in (0, 3, 6):
            memory = drafter.new_memory(3, 16, Chain(4))
            window = chain_window(torch.zeros(3, dtype=torch.int64), t + 1)
            query = memory.write(token_ids[:, 1 : t + 2], fused[:, : t + 1], window)
            hidden = memory.finish(query, fused[:, : t + 1], window)[:, -1:]
            for k, step in enumerate(steps):
                if k:
                    next_ids = token_ids[:, t + 1 + k : t + 2 + k]
                    window = chain_window(torch.full((3,), t + k), 1)
                    hidden = memory.finish(memory.write(next_ids, hidden, window), hidden, window)
                torch.testing.assert_close(step[:, t], hidden[:, 0], atol=1e-5, rtol=1e-4)


def test_unrolled_attention_is_attention_with_the_mask_written_out() -> None:
    generator = torch.Generator().manual_seed(0)
    steps, length = 3, 5
    keys = [torch.randn(2, 2, length, 8, generator=generator) for _ in range(steps)]
    values = [torch.randn(2, 2, length, 8, generator=generator) for _ in range(steps)]
    query = torch.randn(2, 4, length, 8, generator=generator)
    own = torch.eye(length, dtype=torch.bool)
    for k in range(1, steps + 1):
        mask = torch.cat([torch.ones(length, length, dtype=torch.bool).tril(), *[own] * (k - 1)], 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, torch.cat(keys[:k], 2), torch.cat(values[:k], 2), attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(unrolled_attention(query, keys[:k], values[:k]), expected)


def test_untrained_medusa_heads_repeat_the_target(tiny_target: Target) -> None:
    """Identity blocks and the target's head: head i at t holds the target's distribution of x_{t+1}."""
    drafter = build("medusa", tiny_target)
    assert isinstance(drafter, Medusa)
    token_ids = random_batch(tiny_target).token_ids
    state = first_round(drafter, tiny_target, token_ids)
    expected = tiny_target.logits(state.features.last_hidden[:, -1]).argmax(-1)
    assert drafter.propose(state, Chain(4)).tokens.tolist() == [[token] * 4 for token in expected.tolist()]


def test_labels_of_each_head_and_step(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step or head i at t is compared with the target at t + 1 + i: the off-by-one that loss curves do not show."""
    length = 12
    mask = torch.arange(length)[None] >= 4
    batch = Batch(torch.arange(1, length + 1)[None], mask)
    features = tiny_target.features(batch)
    marked = torch.arange(length, dtype=torch.float32)[None, :, None].expand(1, length, 32)  # says its position
    seen: list[list[int]] = []

    def record(drafter_hidden, drafter_head, target_hidden, *rest):
        seen.append(target_hidden[:, 0].int().tolist())
        return original(drafter_hidden, drafter_head, target_hidden, *rest)

    for kind in ("eagle3", "medusa"):
        module = __import__(f"draftsmith.models.{kind}", fromlist=["divergence_over_rows"])
        original = module.divergence_over_rows
        monkeypatch.setattr(module, "divergence_over_rows", record)
        drafter = build(kind, tiny_target)
        features.layers = torch.zeros(1, length, 32 * len(drafter.layer_ids))
        features.last_hidden = marked
        seen.clear()
        drafter.loss(batch, features)
        # x_4..x_11 are the target's; roots are t = 3..; the last prediction is x_11, which the target gave at 10
        assert seen == [list(range(4 + i, 11)) for i in range(4)]


def test_reduced_vocabulary_proposes_the_frequent_tokens(tiny_target: Target) -> None:
    drafter = Eagle3.from_target(Eagle3Config(draft_vocab_size=40), tiny_target)
    counts = torch.zeros(tiny_target.vocab_size)
    frequent = torch.randperm(tiny_target.vocab_size, generator=torch.Generator().manual_seed(0))[:40]
    counts[frequent] = 5
    drafter.fit_vocabulary(counts)
    ids = drafter.draft_to_target()
    assert ids is not None
    assert torch.equal(ids, frequent.sort().values)
    assert torch.equal(drafter.t2d.nonzero()[:, 0], ids)
    assert torch.equal(drafter.lm_head.weight, tiny_target.head_weight()[ids])
    draft = drafter.propose(first_round(drafter, tiny_target, random_batch(tiny_target).token_ids), Chain(4))
    assert torch.isin(draft.tokens, ids).all()


def test_ngram_takes_the_latest_copy_of_the_longest_suffix() -> None:
    texts = [
        [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3],  # three tokens match twice: the later copy wins
        [5, 6, 7, 5, 6, 1, 7, 2, 3, 5, 6],  # only (5, 6): goes on with 1 at index 5
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11],  # nothing
        [4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0],  # a run of length 4 overlaps itself
    ]
    lengths = torch.tensor([11, 11, 11, 4])
    assert latest_match(torch.tensor(texts), lengths, longest=4, shortest=2).tolist() == [7, 5, -1, 3]
