"""Replayed counters beside the decoder's own, and beside a walk over every outcome."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import TEXTS, TRAINABLE, trained

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, paired_difference, total_of
from draftsmith.inference.diagnosis.replayed_drafter import Reference
from draftsmith.inference.measuring.calibration import calibration_bins, calibration_error
from draftsmith.inference.measuring.environment import environment
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.inference.measuring.results import Evaluation, Result, write_evaluation
from draftsmith.inference.replay import replay as replay_module
from draftsmith.inference.replay.replay import (
    AcceptanceTrace,
    Recording,
    check_replayed,
    check_replayed_as,
    expected_stats,
    record,
    replay,
)
from draftsmith.inference.replay.token_scores import ranks
from draftsmith.models import Drafter, Target, UserError, load_drafter, save_drafter
from draftsmith.models.drafter_parts.vocabulary import draft_ids
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DynamicTree, StaticTree
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.evaluation.diagnoses import reference_of, with_diagnoses
from draftsmith.recipes.reports.acceptance import diagnosis_lines

TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
NUM_TOKENS, LONGEST = 20, 4


@pytest.fixture(scope="module")
def prompts(tiny_target: Target) -> list[list[int]]:
    return [tiny_target.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def drafters(tiny_target: Target, prompts: list[list[int]]) -> dict[str, Drafter]:
    torch.set_num_threads(1)
    kinds = {"reduced": ("eagle3", {"draft_vocab_size": 192}), **{kind: (kind, {}) for kind in TRAINABLE}}
    made = {name: trained(kind, tiny_target, prompts, 10, **config) for name, (kind, config) in kinds.items()}
    return {**made, "ngram": load_drafter("ngram", tiny_target)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counters_are_the_decoders(
    temperature: float,
    drafters: dict[str, Drafter],
    tiny_target: Target,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of every prompt, drafter and shape, in fp32, cut or ended: what is drafted without chance is replayed exactly."""
    sampling, mode = Sampling(temperature, 0.95 if temperature else 1.0), "one_hot" if temperature else "greedy"
    monkeypatch.setattr(Target, "eos_token_ids", [])
    cut = record(tiny_target, prompts, sampling, NUM_TOKENS, LONGEST, seed=3).answers
    ends = [cut[0][NUM_TOKENS // 2], cut[1][NUM_TOKENS], cut[2][0]]  # amid, behind the limit, at once
    monkeypatch.setattr(Target, "eos_token_ids", ends)
    recording = record(tiny_target, prompts, sampling, NUM_TOKENS, LONGEST, seed=3, batch_size=4)
    assert {recording.answers[i][:NUM_TOKENS][-1] in ends for i in range(len(prompts))} == {True, False}
    traces = replay(tiny_target, recording, drafters, LONGEST)
    for name, drafter in drafters.items():
        num_accepted = 0
        shorter = [Chain(2)] if temperature == 0 and name in ("reduced", "ngram") else []
        for shape in [*shorter, Chain(LONGEST), *([TREE] if drafter.can_branch else [])]:
            draft = {"draft_length": shape.depth} if isinstance(shape, Chain) else {"tree": shape}
            output = SpeculativeDecoder(tiny_target, drafter).generate(
                prompts, NUM_TOKENS, temperature, sampling.top_p, verification_mode=mode, seed=3, **draft
            )
            assert output.token_ids == [answer[:NUM_TOKENS] for answer in recording.answers]
            assert [expected_stats(trace, shape, mode) for trace in traces[name]] == output.stats.requests, (
                name,
                shape,
            )
            num_accepted += output.stats.total.num_accepted_tokens
        assert name == "ngram" or num_accepted > 0


def z_score(live: list[Stats], expected: list[Stats]) -> float:
    """Of the accepted tokens that were counted beyond those expected on the same texts."""
    beyond = [one.num_accepted_tokens - other.num_accepted_tokens for one, other in zip(live, expected, strict=True)]
    return float(np.mean(beyond) / np.std(beyond) * len(beyond) ** 0.5)


def near_target(target: Target) -> Drafter:
    """A draft model that is the target with a noisy head."""
    model = copy.deepcopy(target.model)
    model.lm_head.weight.data += 0.1 * torch.randn_like(model.lm_head.weight)
    return DraftModel(DraftModelConfig(), model, target).eval()


def test_sampled_drafts_are_replayed_in_expectation(
    tiny_target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live counters of many requests, on the very texts they wrote; two wrong expectations are told apart."""
    monkeypatch.setattr(Target, "eos_token_ids", [])
    many, drafter, sampling = prompts * 20, near_target(tiny_target), Sampling(1.0, 0.7)
    decoder = SpeculativeDecoder(tiny_target, drafter)
    live = decoder.generate(many, NUM_TOKENS, 1.0, 0.7, draft_length=LONGEST, seed=2, batch_size=120)
    so_far = [prompt + answer for prompt, answer in zip(many, live.token_ids, strict=True)]
    beyond = record(tiny_target, so_far, sampling, LONGEST, 0, seed=1, batch_size=120).answers
    answers = [answer + more for answer, more in zip(live.token_ids, beyond, strict=True)]
    recording = Recording(many, answers, NUM_TOKENS, sampling)

    def z_of(traces: list[AcceptanceTrace]) -> float:
        expected = [expected_stats(trace, Chain(LONGEST), "probabilistic") for trace in traces]
        return abs(z_score(live.stats.requests, expected))

    traces = replay(tiny_target, recording, {"d": drafter}, LONGEST)["d"]
    assert z_of(traces) < 3
    for trace in traces:
        trace.accept["probabilistic"] = np.roll(trace.accept["probabilistic"], 1, 0)
    assert z_of(traces) > 4  # shifted by one
    score = replay_module.score_drafter
    monkeypatch.setattr(replay_module, "score_drafter", lambda *args: score(*args[:4], Sampling(1.0)))
    uncut = replay(tiny_target, recording, {"d": drafter}, LONGEST)["d"]
    assert z_of(uncut) > 6  # q before top-p, from which no draft was drawn


def made_up(accept: np.ndarray, limit: int) -> AcceptanceTrace:
    empty: Any = np.zeros_like(accept)
    return AcceptanceTrace(
        {"greedy": accept}, *[empty] * 5, num_drafted=np.full(len(accept), accept.shape[1]), limit=limit
    )


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
    trace = made_up(np.full((400, 3), 0.7), 397)
    assert expected_stats(trace, Chain(3), "greedy").mean_acceptance_length == pytest.approx((1 - 0.7**4) / 0.3)


def test_calibration_counts_what_the_rows_count(
    drafters: dict[str, Drafter], tiny_target: Target, prompts: list[list[int]]
) -> None:
    recording = record(tiny_target, prompts, Sampling(), NUM_TOKENS, LONGEST)
    traces = replay(tiny_target, recording, {"d": drafters["eagle3"]}, LONGEST)["d"]
    stats = [expected_stats(trace, Chain(3), "greedy") for trace in traces]
    total, depths = total_of(stats), calibration_bins(traces, 3, "greedy")
    for bins, rate in zip(depths, total.conditional_acceptance_rates, strict=True):
        count = sum(part.count for part in bins)
        assert sum(part.count * part.accepted for part in bins) / count == pytest.approx(rate)
    assert sum(part.count for part in depths[0]) == total.num_drafts
    sure = made_up(np.repeat([[1.0], [0.0]], 20, 0), 41)
    sure.confidence = np.full((40, 1), 0.9)  # twenty times right, 20 times wrong: rounds start at all but every second
    (bins,) = calibration_bins([sure], 1, "greedy")
    assert calibration_error(bins) == pytest.approx(0.9 - 10 / 30)


def test_the_difference_is_paired() -> None:
    few, many = (
        [Stats(2, n, 2 * n, accepted) for n, accepted in zip((10, 30, 20), accepted_tokens, strict=True)]
        for accepted_tokens in ((5, 3, 9), (15, 33, 29))
    )
    assert paired_difference(many, few).difference == pytest.approx(1)
    assert paired_difference(many, few).ci95 == pytest.approx([1, 1])
    assert paired_difference(many[:2], few[:2]).ci95 is None


def test_what_cannot_be_replayed_is_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="none cannot be replayed"):
        check_replayed(load_drafter("none", tiny_target))
    refused: list[tuple[Any, Any]] = [
        (DynamicTree(8, 3, 4), "one_hot"),
        (Chain(2), "block"),
        (Chain(2), "typical"),
        (TREE, "without_replacement"),
        (TREE, "probabilistic"),
    ]
    for shape, mode in refused:
        with pytest.raises(UserError, match="replayed"):
            check_replayed_as(shape, mode)


def test_the_command(
    drafters: dict[str, Drafter], tiny_target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every drafter, draft length, tree and mode, with the difference from the first drafter."""
    save_drafter(drafters["medusa"], tmp_path / "medusa")
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    command = ["replay", "--target", str(tiny_target_dir), "--prompts", str(tmp_path / "prompts.txt")]
    command += ["--drafter", str(tmp_path / "medusa"), "--temperature", "0", "1", "--max-new-tokens", "8"]
    command += ["--tree", str(tmp_path / "tree.json"), "--draft-length", "3", "--out", str(tmp_path / "out")]
    assert main([*command, "--drafter", "ngram"]) == 0
    rows = json.loads((tmp_path / "out" / "replay.json").read_text())["results"]
    found = {(Path(r["drafter"]).name, r["verification_mode"], r["draft_length"], r["tree_nodes"]) for r in rows}
    chains = {("medusa", mode, k, None) for mode in ("greedy", "one_hot", "probabilistic") for k in (1, 2, 3)}
    trees = {("medusa", mode, 2, 3) for mode in ("greedy", "one_hot")}
    assert found == chains | trees | {("ngram", mode, k, None) for mode in ("greedy", "one_hot") for k in (1, 2, 3)}
    assert len(rows) == len(found)
    for row in rows:
        low, high = row["mean_acceptance_length_ci95"]
        assert low <= row["mean_acceptance_length"] <= high
        assert ("difference" in row) == (row["drafter"] == "ngram")
    assert "acceptance length by draft length" in capsys.readouterr().out


def test_low_acceptance_is_diagnosed_in_evaluations(
    drafters: dict[str, Drafter], tiny_target: Target, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Chains of trained drafters only; and what the checkpoint accepted before."""
    few = PromptSet("some", prompts)
    names = {"eagle3": drafters["eagle3"], "ngram": drafters["ngram"]}
    rows: dict[str, list[Result]] = {name: [] for name in names}
    for temperature in (0.0, 1.0):
        settings = MeasureSettings(temperature, batch_size=len(prompts), draft=2, max_new_tokens=8, repeats=1)
        for name, row in measure(tiny_target, names, few, settings).items():
            rows[name].append(row)
    assert len(rows["eagle3"][0].calibration) == 2
    evaluations = [
        Evaluation(
            target="t", drafter=name, drafter_kind=name, environment=environment(tiny_target), results=rows[name]
        )
        for name in names
    ]
    eagle3, ngram = with_diagnoses(evaluations, list(names.values()), tiny_target, [few])
    greedy = eagle3.results[0]
    assert greedy.diagnosis is not None
    assert diagnosis_lines(greedy.diagnosis)
    assert all(row.diagnosis is None for row in ngram.results)

    checkpoint = tmp_path / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    assert reference_of(str(checkpoint)) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "accuracy_0": 0.25}\n{"step": 10, "accuracy_0": 0.5}\n')
    assert reference_of(str(checkpoint)) == Reference(0.5, str(tmp_path / "metrics.jsonl"), in_training=True)
    write_evaluation(checkpoint / "evaluation.json", eagle3)
    found = reference_of(str(checkpoint))
    assert found is not None
    assert (found.first_accepted, found.in_training) == (greedy.acceptance.conditional_acceptance_rates[0], False)


def test_ranks_and_draft_ids() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(4, 4)
    assert ranks(logits, torch.arange(4)[:, None]).tolist() == [3, 0, 1, 2]
    assert draft_ids(torch.tensor([7, 2, 9]), torch.tensor([2, 3, 7, 9, 11, 0])).tolist() == [1, -1, 0, 2, -1, -1]
