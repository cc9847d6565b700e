"""What every entry of `DRAFTERS` promises, and what each family must get right by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import TRAINABLE, assert_trained_as_decoded, build, first_round, loss_of, random_batch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter, save_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_parts.drafts import NO_TOKEN
from draftsmith.models.drafters.eagle3 import Eagle3, Eagle3Config
from draftsmith.models.drafters.medusa import Medusa, MedusaConfig
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain
from draftsmith.models.training_free.ngram import longest_match

every_trainable = pytest.mark.parametrize("kind", TRAINABLE)


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind != "lookahead"])  # which drafts a tree of its own
def test_a_draft_is_a_chain_of_tokens_with_their_probabilities(kind: str, tiny_target: Target) -> None:
    drafter = build(kind, tiny_target)
    token_ids = random_batch(tiny_target).token_ids
    for sample_drafts in (False, True) if drafter.can_sample else (False,):
        with torch.no_grad():
            draft = drafter.propose(first_round(drafter, tiny_target, token_ids, sample_drafts), Chain(3))
        rows, num = draft.tokens.shape
        assert rows == 3
        assert num <= 3
        assert draft.is_chain
        assert ((draft.tokens >= 0) | (draft.tokens == NO_TOKEN)).all()
        assert (draft.tokens < tiny_target.vocab_size).all()
        if sample_drafts:
            assert draft.logits is not None
            assert draft.logits.shape == (rows, num, tiny_target.vocab_size)
            assert draft.logits.dtype == torch.float32
            assert (draft.logits.gather(-1, draft.tokens[..., None]) > float("-inf")).all()
        else:
            assert draft.logits is None


@every_trainable
def test_a_checkpoint_gives_the_same_drafter(kind: str, tiny_target: Target, tmp_path: Path) -> None:
    drafter = build(kind, tiny_target)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, tiny_target)
    assert loaded.config == drafter.config
    batch = random_batch(tiny_target)
    found, expected = (loss_of(d, batch, tiny_target)["loss"][0] for d in (loaded, drafter))
    assert torch.equal(found, expected)


@every_trainable
def test_training_touches_the_drafter_alone(kind: str, tiny_target: Target) -> None:
    drafter = build(kind, tiny_target).train()
    batch = random_batch(tiny_target)
    total, count = loss_of(drafter, batch, tiny_target)["loss"]
    assert count == batch.loss_mask.sum()
    total.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())
    assert all(parameter.grad is None for parameter in tiny_target.model.parameters())


@every_trainable
def test_padding_changes_nothing(kind: str, tiny_target: Target) -> None:
    drafter = build(kind, tiny_target)
    batch = random_batch(tiny_target)
    padding = torch.zeros(3, 4, dtype=torch.int64)
    padded = Batch(torch.cat([batch.token_ids, padding], 1), torch.cat([batch.loss_mask, padding.bool()], 1))
    with torch.no_grad():
        expected = loss_of(drafter, batch, tiny_target)
        found = loss_of(drafter, padded, tiny_target)
    for name, (total, count) in expected.items():
        torch.testing.assert_close(found[name][0], total)
        assert found[name][1] == count


@every_trainable
def test_packing_changes_nothing(kind: str, tiny_target: Target) -> None:
    """Documents of 7, 12 and 9 tokens side by side, and each in a row of its own."""
    assert_alike_when_packed(build(kind, tiny_target), tiny_target)


@pytest.mark.parametrize(("kind", "fields"), [("eagle3", {"num_layers": 2}), ("hydra", {"prefix_layer": True})])
def test_further_layers_see_one_document(kind: str, fields: dict[str, Any], tiny_target: Target) -> None:
    assert_alike_when_packed(build(kind, tiny_target, **fields), tiny_target)


def assert_alike_when_packed(drafter: Drafter, tiny_target: Target) -> None:
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
        found = loss_of(drafter, packed, tiny_target)
        parts = [loss_of(drafter, one, tiny_target) for one in apart]
    for name, (total, count) in found.items():
        torch.testing.assert_close(total, sum(part[name][0] for part in parts))
        assert count == sum(part[name][1] for part in parts)


@every_trainable
def test_another_target_is_refused(kind: str, tiny_target: Target, make_target_dir, tmp_path: Path) -> None:
    save_drafter(build(kind, tiny_target), tmp_path)
    other = Target.from_pretrained(make_target_dir(vocab_size=310), "cpu")
    with pytest.raises(UserError, match="310"):
        load_drafter(tmp_path, other)


@every_trainable
def test_a_batch_is_the_sum_of_its_rows(kind: str, tiny_target: Target) -> None:
    """Values and gradients: how a step is cut into micro-batches changes nothing."""
    drafter = build(kind, tiny_target)
    batch = random_batch(tiny_target)
    rows = [Batch(batch.token_ids[i : i + 1], batch.loss_mask[i : i + 1]) for i in range(3)]
    sums: list[dict[str, list[Tensor]]] = []
    gradients = []
    for batches in ([batch], rows):
        drafter.zero_grad()
        losses = [loss_of(drafter, one, tiny_target) for one in batches]
        sum(loss["loss"][0] for loss in losses).backward()
        sums.append({name: [sum(loss[name][part] for loss in losses) for part in (0, 1)] for name in losses[0]})
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    torch.testing.assert_close(sums[1], sums[0])
    torch.testing.assert_close(gradients[1], gradients[0], atol=5e-5, rtol=1e-4)  # DFlash2 agrees to 1e-10 in fp64
    assert {"loss", "simulated_acceptance_length"} <= set(sums[0])  # which every run's learning curve shows


@every_trainable
def test_training_predicts_what_decoding_drafts(kind: str, tiny_target: Target) -> None:
    assert_trained_as_decoded(build(kind, tiny_target), tiny_target)


class InFp64(TorchFunctionMode):
    """Whatever asks for fp32, or for no dtype, gets fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*tree_map(doubled, args), **tree_map(doubled, kwargs or {}))

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(torch.float32)


def doubled(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@every_trainable
def test_training_and_drafting_agree_to_the_bit(kind: str, tiny_target_dir: Path) -> None:
    """In fp64 they differ in its last bits at most, so in no bit of fp32.

    It is the order of their sums alone that parts them in fp32.
    """
    with InFp64():
        target = Target.from_pretrained(tiny_target_dir, "cpu", torch.float64)
        assert_trained_as_decoded(build(kind, target).double(), target, tolerance=1e-14)


def test_variants_of_eagle3_train_as_they_draft(tiny_target: Target) -> None:
    """Those that public heads come in (tests/models/test_layouts.py holds the drafts themselves)."""
    drafter = build("eagle3", tiny_target, norm_before_residual=True)
    assert isinstance(drafter, Eagle3)
    drafter.embed_tokens = nn.Embedding(tiny_target.vocab_size, tiny_target.hidden_size)
    assert_trained_as_decoded(drafter, tiny_target)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle3", {"feature_norm": "each", "norm_output": True}),
        ("eagle3", {"feature_norm": "all"}),
        ("eagle3", {"num_layers": 3}),
        ("eagle3", {"num_layers": 2, "norm_output": True}),
        ("p_eagle", {"feature_norm": "each"}),
        ("hydra", {"prefix_layer": True}),
    ],
)
def test_norms_and_layers_train_as_they_draft(kind: str, settings: dict[str, Any], tiny_target: Target) -> None:
    assert_trained_as_decoded(build(kind, tiny_target, **settings), tiny_target)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_recomputed_steps_have_the_same_gradient(num_layers: int, tiny_target: Target) -> None:
    drafter = build("eagle3", tiny_target, num_layers=num_layers)
    batch = random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)
    gradients = []
    for recompute in (False, True):
        drafter.config.recompute = recompute
        drafter.zero_grad()
        drafter.loss(batch, features)["loss"][0].backward()
        gradients.append([parameter.grad for parameter in drafter.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, kept)


def test_a_detached_step_teaches_those_before_it_nothing(tiny_target: Target) -> None:
    """A loss of the last step alone reaches `fc` through keys and values of the text, and not otherwise."""
    drafter = build("eagle3", tiny_target)
    assert isinstance(drafter, Eagle3)
    batch = random_batch(tiny_target)
    layers = tiny_target.features(batch, drafter.layer_ids).layers
    assert layers is not None
    slots = DraftingSlots.from_counted(batch.loss_mask, batch.positions)
    for detach in (False, True):
        drafter.config.detach = detach
        first, *_, last = drafter.unroll(batch, layers, slots, drafter.config.unroll_steps)
        (gradient,) = torch.autograd.grad(last.sum(), first, allow_unused=True)
        assert (gradient is None) == detach


def test_lk_after_kl(tiny_target: Target) -> None:
    """The divergence changes when its share of the training is over, and is the later one outside of training."""
    drafter, batch = build("eagle3", tiny_target).train(), random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)

    def loss(divergence: str, kl_share: float, progress: float) -> Tensor:
        drafter.config.divergence, drafter.config.kl_share, drafter.progress = divergence, kl_share, progress
        return drafter.loss(batch, features)["loss"][0]

    assert torch.equal(loss("lk_hybrid", 0.5, 0.49), loss("forward_kl", 0.0, 0.0))
    assert torch.equal(loss("lk_hybrid", 0.5, 0.5), loss("lk_hybrid", 0.0, 0.0))
    assert not torch.equal(loss("lk_hybrid", 0.5, 0.5), loss("forward_kl", 0.0, 0.0))
    drafter.eval()
    assert torch.equal(loss("lk_hybrid", 0.5, 0.0), loss("lk_hybrid", 0.0, 0.0))


def test_the_unroll_grows_in_its_warm_up(tiny_target: Target) -> None:
    """One step of three in the first half of a warm-up, then two. Behind it and outside of training there are all."""
    drafter, batch = build("eagle3", tiny_target, unroll_steps=3).train(), random_batch(tiny_target)
    features = tiny_target.features(batch, drafter.layer_ids)

    def loss(warmup: float, progress: float, depth: int = 3) -> Tensor:
        drafter.config.unroll_warmup, drafter.progress, drafter.training_depth = warmup, progress, depth
        return drafter.loss(batch, features)["loss"][0]

    for progress, depth in ((0.0, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (1.0, 3)):
        assert torch.equal(loss(0.6, progress), loss(0.0, 0.0, depth)), progress
    depths = []
    for step in range(1000):
        drafter.progress = (step + 0.5) / 1000
        depths.append(drafter.depth_now)
    assert drafter.training_passes == pytest.approx(sum(depths) / 1000)
    drafter.eval()
    assert torch.equal(loss(0.6, 0.0), loss(0.0, 0.0))


@every_trainable
def test_a_batch_that_teaches_nothing_still_has_gradients(kind: str, tiny_target: Target) -> None:
    """Zeros for all that trains: wrappers for several devices wait for every parameter."""
    drafter, batch = build(kind, tiny_target), random_batch(tiny_target)
    batch.loss_mask[:] = False
    drafter.loss(batch, tiny_target.features(batch, drafter.layer_ids))["loss"][0].backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in drafter.parameters())


def test_untrained_medusa_heads_repeat_the_target(tiny_target: Target) -> None:
    """Identity blocks and the target's head: head i at t holds the target's distribution of x_{t+1}."""
    drafter = Medusa.from_target(MedusaConfig(), tiny_target)
    token_ids = random_batch(tiny_target).token_ids
    state = first_round(drafter, tiny_target, token_ids)
    expected = tiny_target.logits(state.features.last_hidden[:, -1]).argmax(-1)
    assert drafter.propose(state, Chain(4)).tokens.tolist() == [[token] * 4 for token in expected.tolist()]


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
    start, matched = longest_match(torch.tensor(texts), lengths, longest=4, shortest=2)
    assert start.tolist() == [7, 5, -1, 3]
    assert matched.tolist() == [3, 2, 0, 3]
