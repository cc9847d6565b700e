"""Training's prediction of the acceptance, beside what the decoder counts on the same texts."""

from typing import Any

import pytest
from drafters import TEXTS, TRAINABLE, trained, untrained
from families import target_and_plain_model

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.inference.measuring.results import Result, TeacherForcedGap
from draftsmith.inference.measuring.teacher_forcing import gap_to_training, gap_warning, teacher_forced_traces
from draftsmith.inference.replay.replay import expected_stats, record
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.drafters.eagle3 import Eagle3
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, StaticTree
from draftsmith.models.storage.typed_json import to_json

NUM_TOKENS, DRAFT_LENGTH = 24, 4


@pytest.fixture(scope="module")
def prompts(tiny_target: Target) -> list[list[int]]:
    return [tiny_target.encode(text) for text in TEXTS]


@pytest.fixture(scope="module", params=TRAINABLE)
def drafter(request: pytest.FixtureRequest, tiny_target: Target, prompts: list[list[int]]) -> Drafter:
    return trained(request.param, tiny_target, prompts)


def test_training_counts_what_the_decoder_counts(
    drafter: Drafter, tiny_target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every counter of every prompt, in fp32: texts that are cut, and texts that end by themselves."""
    decoder = SpeculativeDecoder(tiny_target, drafter)
    cut = decoder.generate(prompts, NUM_TOKENS).token_ids
    ends = cut[0][NUM_TOKENS // 2], cut[1][0]  # the second text is its end alone
    for draft_length, eos in ((DRAFT_LENGTH, ()), (1, ()), (DRAFT_LENGTH, ends)):
        monkeypatch.setattr(Target, "eos_token_ids", list(eos))
        output = SpeculativeDecoder(tiny_target, drafter).generate(prompts, NUM_TOKENS, draft_length=draft_length)
        assert any(len(answer) < NUM_TOKENS for answer in output.token_ids) == bool(eos)
        assert 0 < output.stats.total.draft_acceptance_rate < 1
        found = predicted(tiny_target, drafter, prompts, output.token_ids, draft_length)
        assert found == output.stats.requests


def test_answers_may_end_where_the_context_does() -> None:
    """GPT-2 has no position behind its last one. Drafts may reach beyond it, in measuring and in a recording."""
    target, _ = target_and_plain_model("gpt2", {})
    prompts = [[5 + i % 7 for i in range(target.context - length)] for length in (NUM_TOKENS, NUM_TOKENS + 2)]
    settings = MeasureSettings(draft=DRAFT_LENGTH, max_new_tokens=NUM_TOKENS, repeats=1)
    row = measure(target, {"medusa": untrained("medusa", target)}, PromptSet("p", prompts), settings)["medusa"]
    assert row.teacher_forced
    assert row.teacher_forced.mean_acceptance_length <= row.acceptance.mean_acceptance_length
    recording = record(target, prompts, Sampling(0.0), NUM_TOKENS, DRAFT_LENGTH)
    assert [len(answer) for answer in recording.answers] == [NUM_TOKENS, NUM_TOKENS + 2]


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("eagle", {"unroll_steps": 1, "bias": True}),  # depths beyond the trained ones
        ("eagle3", {"unroll_steps": 1}),
        ("eagle3", {"draft_vocab_size": 32}),
        ("eagle3", {"num_layers": 2}),
        ("hydra", {"prefix_layer": True}),
    ],
)
def test_variants_are_counted_alike(
    kind: str, config: dict[str, Any], tiny_target: Target, prompts: list[list[int]]
) -> None:
    drafter = trained(kind, tiny_target, prompts, **config)
    output = SpeculativeDecoder(tiny_target, drafter).generate(prompts, NUM_TOKENS, draft_length=DRAFT_LENGTH)
    found = predicted(tiny_target, drafter, prompts, output.token_ids, DRAFT_LENGTH)
    assert sum(output.stats.total.acceptance_histogram[2:]) > 0
    assert found == output.stats.requests


def test_a_decoder_that_sees_other_features_is_flagged(
    tiny_target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sign turned around while drafting: the text stays right, only the acceptance falls."""
    drafter = trained("eagle3", tiny_target, prompts)
    settings = MeasureSettings(draft=DRAFT_LENGTH, max_new_tokens=NUM_TOKENS, repeats=1)

    def row() -> Result:
        return measure(tiny_target, {"d": drafter}, PromptSet("some", prompts * 2), settings)["d"]

    sound = row()
    assert to_json(sound.teacher_forced).items() <= to_json(sound.acceptance).items()
    assert sound.teacher_forced_gap == TeacherForcedGap(0, (0, 0), flagged=False)
    assert gap_warning(sound) is None

    propose = Eagle3.propose

    def wrong(self: Eagle3, state: Any, shape: Any) -> Any:
        state.features.layers = -state.features.layers
        draft = propose(self, state, shape)
        state.features.layers = -state.features.layers
        return draft

    monkeypatch.setattr(Eagle3, "propose", wrong)
    faulty = row()
    assert faulty.lossless.divergences == 0
    assert faulty.teacher_forced_gap.flagged
    assert faulty.teacher_forced_gap.difference < -0.1
    warning = gap_warning(faulty)
    assert warning is not None
    assert "different features" in warning


def test_only_greedy_chains_of_trained_drafters_are_predicted(tiny_target: Target, prompts: list[list[int]]) -> None:
    medusa = trained("medusa", tiny_target, prompts, num_steps=1)
    ngram = DRAFTERS["ngram"].from_target(DRAFTERS["ngram"].config_class(kind="ngram"), tiny_target)
    for temperature, draft in ((1.0, 2), (0.0, StaticTree(((0,), (1,), (0, 0))))):
        settings = MeasureSettings(temperature, draft=draft, max_new_tokens=4, repeats=1)
        row = measure(tiny_target, {"medusa": medusa}, PromptSet("some", prompts[:1]), settings)["medusa"]
        assert row.teacher_forced is None
    settings = MeasureSettings(draft=2, max_new_tokens=4, repeats=1)
    assert measure(tiny_target, {"n": ngram}, PromptSet("some", prompts[:1]), settings)["n"].teacher_forced is None


@pytest.mark.parametrize(
    ("accepted", "flagged"),
    [
        ([8] * 16, False),  # as predicted
        ([7] * 16, True),  # fewer on each prompt
        ([9, 7] * 8, False),  # in either direction
        ([2, 8, 8, 8] + [8] * 12, False),  # on one prompt only
        ([7.9] * 16, False),  # on each, but less than 2 % of the acceptance length
        ([4] * 3, False),  # of three prompts
    ],
)
def test_a_gap_is_flagged_beyond_chance(accepted: list[float], flagged: bool) -> None:
    def stats(number: float) -> Stats:
        return Stats(2, num_drafts=100, num_draft_tokens=200, num_accepted_tokens=round(10 * number))

    gap = gap_to_training([stats(8) for _ in accepted], [stats(number) for number in accepted])
    assert gap.flagged == flagged
    assert gap.difference == pytest.approx((sum(accepted) / len(accepted) - 8) / 10)


def predicted(
    target: Target, drafter: Drafter, prompts: list[list[int]], answers: list[list[int]], draft_length: int
) -> list[Stats]:
    """Training's counters of each prompt."""
    traces = teacher_forced_traces(target, {"d": drafter}, prompts, answers, draft_length, NUM_TOKENS)
    return [expected_stats(trace, Chain(draft_length), "greedy") for trace in traces["d"]]
