"""Ending chains by confidence: the rounds that a rule is weighed by are the decoder's own."""

import numpy as np
import pytest
import torch

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.schedule import Confident
from draftsmith.inference.planning.confidence import Drafts, choose_confidence, draft_everywhere, predict
from draftsmith.inference.planning.costs import Costs
from draftsmith.models import DRAFTERS, Target, load_drafter
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.training_free.draft_model_cascade import DraftModelCascade

COSTS = Costs("", "", "", "", draft_ms={"step: pass": 0.5}, verify_ms={"pass": 2.0}, host=0.0)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dspark", "draft_model"])
def test_rounds_are_the_decoders(kind: str, tiny_target: Target) -> None:
    """Drafted and accepted tokens of every round, but for the last ones, whose drafts may reach beyond the text."""
    torch.manual_seed(2)
    drafter = DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), tiny_target).eval()
    prompts = [tiny_target.encode(text) for text in ("The smith heats", "def", "iron iron iron")]
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    answers = plain.generate(prompts, 24, stop_at_eos=False).token_ids
    found = draft_everywhere(drafter, tiny_target, list(zip(prompts, answers, strict=True)), 3, batch_size=2)
    for least in (*np.quantile(found[0].confidence[:, :2], (0.3, 0.7)), 1.0):
        rule = Confident(3, float(least))
        for prompt, drafts in zip(prompts, found, strict=True):
            decoder = SpeculativeDecoder(tiny_target, drafter)
            stats = decoder.generate([prompt], 24, schedule=rule, stop_at_eos=False).stats.total
            rounds = drafts.rounds(drafts.lengths(rule))
            assert stats.num_drafts == len(rounds)
            assert stats.num_draft_tokens == pytest.approx(sum(drafted for drafted, _ in rounds), abs=2)
            assert stats.num_accepted_tokens == pytest.approx(sum(accepted for _, accepted in rounds), abs=3)


def test_a_cascade_of_draft_models_may_cut_its_drafts(tiny_target: Target) -> None:
    """Its rounds differ in how many tokens they draft at most, as few as the models agree on."""
    torch.manual_seed(2)
    small, large = (
        DraftModel.from_target(DraftModelConfig(num_layers=layers), tiny_target).eval()
        for layers in (1, tiny_target.num_layers - 1)
    )
    prompt = tiny_target.encode("The smith heats")
    answers = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target)).generate([prompt], 24).token_ids
    (drafts,) = draft_everywhere(DraftModelCascade(small, large), tiny_target, [(prompt, answers[0])], 8)
    (alone,) = draft_everywhere(large, tiny_target, [(prompt, answers[0])], 8)
    assert (drafts.num_right <= alone.num_right).all()
    assert (np.minimum(drafts.num_right, 1) == np.minimum(alone.num_right, 1)).all()  # the first is the large one's


def test_a_short_answer_stands_beside_a_longer_one(tiny_target: Target) -> None:
    """Behind the longest prompt, too: the drafts of each are those that it has alone."""
    drafter = DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), tiny_target).eval()
    texts = [(list(range(5, 45)), [7, 8, 9]), ([5, 6, 7], list(range(5, 30)))]
    together = draft_everywhere(drafter, tiny_target, texts, 3)
    for text, drafts in zip(texts, together, strict=True):
        (alone,) = draft_everywhere(drafter, tiny_target, [text], 3)
        assert drafts.num_right.tolist() == alone.num_right.tolist()
        assert drafts.confidence == pytest.approx(alone.confidence, rel=1e-4)


def test_lengths_and_rounds_of_a_rule() -> None:
    drafts = Drafts(np.array([2, 0, 0, 1, 0]), np.array([[0.9, 0.8, 0.7], [0.3, 0.2, 0.1]] + 3 * [[0.5, 0.4, 0.1]]))
    assert drafts.lengths(Confident(3, 0.5)).tolist() == [3, 1, 2, 2, 2]
    assert drafts.lengths(Confident(2, 0.5)).tolist() == [2, 1, 2, 2, 2]
    assert drafts.rounds(drafts.lengths(Confident(3, 0.5))) == [(3, 2), (2, 1)]
    assert drafts.rounds(drafts.lengths(Confident(3, 0.8))) == [(3, 2), (1, 1)]


def test_a_batch_drafts_as_long_as_its_surest_row() -> None:
    """Half of the rounds draft one token, half three: of two rows three quarters of the rounds draft three."""
    drafts = Drafts(np.array([0, 0, 0, 0]), np.zeros((4, 3)))
    lengths = np.array([1, 3, 1, 3])
    for batch, share in ((1, 0.5), (2, 0.75)):
        speedup, length = predict([(drafts, lengths)], COSTS, batch, 10)
        assert length == 1
        assert speedup == pytest.approx(2 / ((1 - share) * 2.5 + share * 3.5))


def test_confidence_pays_where_it_knows() -> None:
    """A drafter that is right where it is sure, and knows it: long drafts there, one token elsewhere."""
    right = np.array([3, 0, 0, 0, 0, 3, 0, 0, 0, 0])
    sure = np.where(right[:, None] > 0, 0.9, 0.01) * np.ones((1, 3))
    found = choose_confidence([Drafts(right, sure)], COSTS, 1, 10)
    assert found.pays
    assert found.rule.longest == 3
    assert found.rule.least > 0.01
    knows_nothing = choose_confidence([Drafts(right, np.full((10, 3), 0.5))], COSTS, 1, 10)
    assert not knows_nothing.pays
    assert knows_nothing.speedup == pytest.approx(knows_nothing.chain_speedup)
