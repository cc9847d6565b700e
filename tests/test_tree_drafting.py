"""Drafted trees: the output stays the target's, and a tree finds at least what the chain inside it finds."""

import pytest
import torch

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.errors import UserError
from draftsmith.models.trees import DynamicTree, StaticTree

PROMPTS = ["The smith heats the iron", "def strike(iron):", "A draft is cheap, a draft is cheap, a", "x"]
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
DYNAMIC = DynamicTree(num_nodes=9, depth=3, width=3)
BRANCHING = [kind for kind in DRAFTERS if DRAFTERS[kind].can_branch]


def drafter_of(kind: str, target: Target) -> Drafter:
    """Untrained; the draft model, two of the target's four layers, is right now and then."""
    torch.manual_seed(1)
    if kind == "draft_model":
        return DraftModel.from_target(DraftModelConfig(num_layers=2), target).eval()
    return DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), target).eval()


@pytest.mark.parametrize("tree", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", BRANCHING)
def test_trees_leave_the_output_as_it_is(kind: str, tree: StaticTree | DynamicTree, tiny_target: Target) -> None:
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    decoder = SpeculativeDecoder(tiny_target, drafter_of(kind, tiny_target))
    for settings in ({}, {"temperature": 0.8, "top_k": 50, "seed": 3}):
        expected = plain.generate(PROMPTS, max_new_tokens=24, **settings)
        found = decoder.generate(PROMPTS, max_new_tokens=24, tree=tree, **settings)
        assert found.token_ids == expected.token_ids
    mode = "without_replacement"
    if tree == DYNAMIC:
        with pytest.raises(UserError, match="no sample"):
            decoder.generate(PROMPTS, temperature=0.8, tree=tree, verification_mode=mode)
    else:
        decoder.generate(PROMPTS, max_new_tokens=8, temperature=0.8, tree=tree, verification_mode=mode)


@pytest.mark.parametrize("tree", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_tree_accepts_more_than_its_chain(tree: StaticTree | DynamicTree, tiny_target: Target) -> None:
    """Both trees hold the likeliest chain of three, and more."""
    decoder = SpeculativeDecoder(tiny_target, drafter_of("draft_model", tiny_target))
    chain, found = (
        decoder.generate(PROMPTS, max_new_tokens=60, stop_at_eos=False, **draft).stats.total
        for draft in ({"draft_length": 3}, {"tree": tree})
    )
    assert 1 < chain.mean_acceptance_length < found.mean_acceptance_length


def test_an_ngram_drafts_no_trees(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="drafts chains only"):
        SpeculativeDecoder(tiny_target, load_drafter("ngram", tiny_target)).generate(PROMPTS, tree=STATIC)
