"""Replayed counters beside the decoder's own, and beside a walk over every outcome."""

import copy
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_teacher_forcing import TEXTS, TRAINABLE, trained

from draftsmith.inference import SpeculativeDecoder, replay
from draftsmith.inference.calibration import calibration_fields
from draftsmith.inference.replay import Recording, Track, check_replayed, expected_stats, paired_difference, record
from draftsmith.inference.stats import Stats
from draftsmith.models import Drafter, Target, UserError, load_drafter
from draftsmith.models.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.sampling import Sampling
from draftsmith.models.scores import draft_ids, ranks
from draftsmith.models.trees import Chain, DynamicTree, StaticTree

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
NUM_TOKENS, LONGEST = 20, 4


@pytest.fixture(scope="module")
def prompts(tiny_target: Target) -> list[list[int]]:
    return [tiny_target.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def drafters(tiny_target: Target, prompts: list[list[int]]) -> dict[str, Drafter]:
    torch.set_num_threads(1)
    kinds = {"reduced": ("eagle3", {"draft_vocab_size": 192}), **{kind: (kind, {}) for kind in TRAINABLE}}
    made = {name: trained(kind, tiny_target, prompts, 12, **config) for name, (kind, config) in kinds.items()}
    return {**made, "ngram": load_drafter("ngram", tiny_target)}


@pytest.mark.parametrize("ends", [False, True], ids=["cut", "ended"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counters_are_the_decoders(
    temperature: float,
    ends: bool,
    drafters: dict[str, Drafter],
    tiny_target: Target,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every prompt, drafter and shape, in fp32: what is drafted without chance is replayed exactly."""
    sampling, mode = Sampling(temperature, 0.95 if temperature else 1.0), "one_hot" if temperature else "greedy"
    monkeypatch.setattr(Target, "eos_token_ids", [])
    if ends:
        cut = record(tiny_target, prompts, sampling, NUM_TOKENS, LONGEST, seed=3).answers
        monkeypatch.setattr(Target, "eos_token_ids", [cut[0][NUM_TOKENS // 2], cut[1][NUM_TOKENS], cut[2][0]])
    recording = record(tiny_target, prompts, sampling, NUM_TOKENS, LONGEST, seed=3, batch_size=4)
    tracks = replay.replay(tiny_target, recording, drafters, LONGEST)
    for name, drafter in drafters.items():
        for shape in [Chain(1), Chain(LONGEST), *([TREE] if drafter.can_branch else [])]:
            draft = {"draft_length": shape.depth} if isinstance(shape, Chain) else {"tree": shape}
            output = SpeculativeDecoder(tiny_target, drafter).generate(
                prompts, NUM_TOKENS, temperature, sampling.top_p, verification_mode=mode, seed=3, **draft
            )
            assert output.token_ids == [answer[:NUM_TOKENS] for answer in recording.answers]
            assert [expected_stats(track, shape, mode) for track in tracks[name]] == output.stats.requests, (
                name,
                shape,
            )
            assert name == "ngram" or output.stats.total.num_accepted_tokens > 0


def z_score(live: list[Stats], expected: list[Stats]) -> float:
    """Of the accepted tokens that were counted beyond those expected on the same texts."""
    beyond = [one.num_accepted_tokens - other.num_accepted_tokens for one, other in zip(live, expected, strict=True)]
    return float(np.mean(beyond) / np.std(beyond) * len(beyond) ** 0.5)


def near_target(target: Target) -> Drafter:
    """A draft model that is the target with a noisy head."""
    model = copy.deepcopy(target.model)
    model.lm_head.weight.data += 0.3 * torch.randn_like(model.lm_head.weight)
    return DraftModel(DraftModelConfig(), model, target).eval()


@pytest.mark.parametrize(("name", "sampling"), [("near", Sampling(0.8, 0.7)), ("reduced", Sampling(2.0, 0.8))])
def test_sampled_drafts_are_replayed_in_expectation(
    name: str,
    sampling: Sampling,
    drafters: dict[str, Drafter],
    tiny_target: Target,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Live counters of many requests, on the very texts they wrote; two wrong expectations are told apart."""
    monkeypatch.setattr(Target, "eos_token_ids", [])
    many, drafter = prompts * 30, near_target(tiny_target) if name == "near" else drafters[name]
    live = SpeculativeDecoder(tiny_target, drafter).generate(
        many, NUM_TOKENS, sampling.temperature, sampling.top_p, draft_length=LONGEST, seed=2, batch_size=60
    )
    so_far = [prompt + answer for prompt, answer in zip(many, live.token_ids, strict=True)]
    beyond = record(tiny_target, so_far, sampling, LONGEST, 0, seed=1, batch_size=60).answers
    answers = [answer + more for answer, more in zip(live.token_ids, beyond, strict=True)]
    recording = Recording(many, answers, NUM_TOKENS, sampling)

    def z_of(tracks: list[Track]) -> float:
        expected = [expected_stats(track, Chain(LONGEST), "probabilistic") for track in tracks]
        return abs(z_score(live.stats.requests, expected))

    tracks = replay.replay(tiny_target, recording, {"d": drafter}, LONGEST)["d"]
    assert z_of(tracks) < 4
    for track in tracks:
        track.accept["probabilistic"] = np.roll(track.accept["probabilistic"], 1, 0)
    print(name, live.stats.total.draft_acceptance_rate, z_of(tracks))
    assert z_of(tracks) > 6  # shifted by one
    score = replay.score_drafter
    monkeypatch.setattr(replay, "score_drafter", lambda *args: score(*args[:4], Sampling(sampling.temperature)))
    uncut = replay.replay(tiny_target, recording, {"d": drafter}, LONGEST)["d"]
    print(z_of(uncut))
    assert z_of(uncut) > 6  # q before top-p, from which no draft was drawn


def made_up(accept: np.ndarray, limit: int) -> Track:
    empty: Any = np.zeros_like(accept)
    return Track({"greedy": accept}, *[empty] * 6, num_drafted=np.full(len(accept), accept.shape[1]), limit=limit)


def test_expected_counters_are_those_of_all_outcomes() -> None:
    """Every way in which the coins can fall, one by one."""
    places, depth, limit = 5, 2, 4
    accept = np.random.default_rng(0).random((places, depth))
    expected = Stats(depth)
    for coins in itertools.product([True, False], repeat=places * depth):
        right = np.array(coins).reshape(places, depth)
        chance = float(np.where(right, accept, 1 - accept).prod())
        length, stats = 1, Stats(depth)
        while length < limit:
            num_accepted = int(right[length - 1].cumprod().sum())
            stats.count_round(depth, num_accepted)
            length += num_accepted + 1
        expected.num_drafts += chance * stats.num_drafts
        expected.num_accepted_tokens += chance * stats.num_accepted_tokens
        for j, number in enumerate(stats.acceptance_histogram):
            expected.acceptance_histogram[j] += chance * number
    found = expected_stats(made_up(accept, limit), Chain(depth), "greedy")
    assert found.num_drafts == pytest.approx(expected.num_drafts)
    assert found.num_accepted_tokens == pytest.approx(expected.num_accepted_tokens)
    assert found.acceptance_histogram == pytest.approx(expected.acceptance_histogram)


def test_a_known_rate_gives_its_known_length() -> None:
    """Leviathan et al., equation 1: (1 - a^(K + 1)) / (1 - a) tokens a round."""
    track = made_up(np.full((400, 3), 0.7), 397)
    assert expected_stats(track, Chain(3), "greedy").mean_acceptance_length == pytest.approx((1 - 0.7**4) / 0.3)


def test_calibration_counts_what_the_rows_count(
    drafters: dict[str, Drafter], tiny_target: Target, prompts: list[list[int]]
) -> None:
    recording = record(tiny_target, prompts, Sampling(), NUM_TOKENS, LONGEST)
    tracks = replay.replay(tiny_target, recording, {"d": drafters["eagle3"]}, LONGEST)["d"]
    stats = [expected_stats(track, Chain(3), "greedy") for track in tracks]
    total, fields = sum(stats[1:], stats[0]), calibration_fields(tracks, 3, "greedy")
    for bins, rate in zip(fields["calibration"], total.conditional_acceptance_rates, strict=True):
        count = sum(one["count"] for one in bins)
        assert sum(one["count"] * one["accepted"] for one in bins) / count == pytest.approx(rate)
    assert sum(one["count"] for one in fields["calibration"][0]) == total.num_drafts
    sure = made_up(np.repeat([[1.0], [0.0]], 20, 0), 41)
    sure.confidence = np.full((40, 1), 0.9)  # twenty times right, 20 times wrong: rounds start at all but every second
    assert calibration_fields([sure], 1, "greedy")["calibration_error"] == [pytest.approx(0.9 - 10 / 30)]


def test_the_difference_is_paired() -> None:
    few, many = (
        [Stats(2, n, 2 * n, accepted) for n, accepted in zip((10, 30), pair, strict=True)]
        for pair in ((5, 3), (15, 33))
    )
    assert paired_difference(many, few)["difference"] == pytest.approx(1)
    assert paired_difference(many, few)["ci95"] == pytest.approx([1, 1])


def test_what_cannot_be_replayed_is_refused(drafters: dict[str, Drafter], tiny_target: Target) -> None:
    for refused in (
        (load_drafter("none", tiny_target), None, None),
        (drafters["eagle3"], DynamicTree(8, 3, 4), None),
        (drafters["eagle3"], Chain(2), "block"),
        (drafters["eagle3"], TREE, "without_replacement"),
        (drafters["eagle3"], Chain(2), "typical"),
    ):
        with pytest.raises(UserError, match="replayed"):
            check_replayed(*refused)


def test_recordings_are_kept(tiny_target: Target, prompts: list[list[int]], tmp_path: Path) -> None:
    recording = record(tiny_target, prompts[:2], Sampling(0.7, 0.9), 4, 2, seed=5)
    recording.write(tmp_path / "recording.json")
    assert Recording.read(tmp_path / "recording.json") == recording


def test_ranks_and_draft_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(4, 4)
    assert ranks(logits, torch.arange(4)[:, None]).tolist() == [3, 0, 1, 2]
    assert draft_ids(torch.tensor([7, 2, 9]), torch.tensor([2, 3, 7, 9, 11, 0])).tolist() == [1, -1, 0, 2, -1, -1]
