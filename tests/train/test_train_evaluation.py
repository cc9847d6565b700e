"""Evaluation while training: what a share of the time buys, when to stop, and one evaluation on several processes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports import typed_result
from runs import base_of, make_config, write_held_out

from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.inference.measuring.results import DomainResult, EvaluationCost, Result, read_evaluation
from draftsmith.inference.planning import costs_after_evaluation as costs_beside
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.planning.predictions import predicted_speedup
from draftsmith.models import Target, load_drafter
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.train import train
from draftsmith.train.config import EvaluationConfig
from draftsmith.train.evaluation import evaluate
from draftsmith.train.evaluation.budget import Amount, affordable, checkpoints_without_gain
from draftsmith.train.evaluation.pooling import pool, share_of, subset
from draftsmith.train.run_folder.checkpoint import checkpoints
from draftsmith.train.run_folder.tracking import read_metrics


@pytest.fixture(scope="module")
def base(tiny_target_dir: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return {**base_of(tiny_target_dir, tiny_target, folder), "evaluation.prompts": write_held_out(folder)}


# --- the share of the time


def test_evaluations_take_their_share_of_the_time() -> None:
    """An evaluation of which each prompt costs 3 s a repeat: over the run all of them take what they may."""
    config = EvaluationConfig(time_share=0.1, repeats=5)
    costs: list[EvaluationCost] = []
    for interval in range(1, 41):
        trained = interval * 1000.0
        amount = affordable(config, 16, costs, trained)
        costs.append(
            EvaluationCost(3.0 * amount.num_prompts * amount.repeats, trained, amount.num_prompts, amount.repeats, 0.1)
        )
    assert (costs[0].num_prompts, costs[0].repeats) == (8, 2)  # the least, while nothing is known of the time
    spent = sum(cost.seconds for cost in costs)
    assert 0.09 * trained < spent <= 0.1 * trained
    assert all(cost.num_prompts == 16 for cost in costs[4:])  # 100 s are 33 prompts: it is repeats that give way


@pytest.mark.parametrize(
    ("num_prompts", "repeats", "seconds", "expected"),
    [
        (32, 5, 1.0, Amount(32, 5)),  # all of it: 160 s of 200
        (32, 5, 2.0, Amount(32, 3)),  # 100 of 160
        (32, 5, 5.0, Amount(20, 2)),  # 40 of 160: no fewer than two repeats
        (32, 5, 100.0, Amount(8, 2)),  # the least
        (3, 1, 100.0, Amount(3, 1)),  # all that was asked for is less than that
    ],
)
def test_what_is_affordable(num_prompts: int, repeats: int, seconds: float, expected: Amount) -> None:
    """200 s are left, and a prompt takes `seconds` each time."""
    earlier = [EvaluationCost(10 * seconds, 0.0, 10, 1, 0.2)]
    config = EvaluationConfig(time_share=0.2, repeats=repeats)
    assert affordable(config, num_prompts, earlier, (200 + 10 * seconds) / 0.2) == expected
    assert affordable(EvaluationConfig(time_share=None, repeats=repeats), num_prompts, earlier, 0.0) == Amount(
        num_prompts, repeats
    )


def test_a_tight_share_is_kept_and_stated(base: dict[str, Any], tmp_path: Path) -> None:
    evaluation = {"max_new_tokens": 4, "repeats": 4, "time_share": 1e-6}
    run = train(make_config("medusa", base, tmp_path, run={"steps": 4, "checkpoint_every": 2}, evaluation=evaluation))
    contents = [json.loads((path / "evaluation.json").read_text()) for path in checkpoints(run)]
    assert [content["cost"]["repeats"] for content in contents] == [2, 2]  # the first one, too: it took four
    assert [content["results"][0]["repeats"] for content in contents] == [2, 2]
    first, second = (content["cost"]["training_seconds"] for content in contents)
    assert 0 < first < second
    assert not (run / "costs.json").exists()  # for which no time was left
    for path in checkpoints(run):
        texts = json.loads((path / "samples.json").read_text())
        assert [text["drafter"] for text in texts] == [str(path)] * 3
        assert all(sum(one["num_tokens"] for one in text["rounds"]) <= 4 for text in texts)


def test_fewer_prompts_are_spread_over_all(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 16 prompts, which may be sorted by their domain, every second one."""
    shares: list[list[int]] = []

    def recorded(prompts: PromptSet, share: list[int]) -> PromptSet:
        shares.append(share)
        return subset(prompts, share)

    monkeypatch.setattr(evaluate, "subset", recorded)
    (tmp_path / "prompts.txt").write_text("".join(f"strike {i}\n" for i in range(16)))
    evaluation = {"prompts": tmp_path / "prompts.txt", "max_new_tokens": 2, "time_share": 1e-6, "baselines": []}
    run = {"steps": 1, "checkpoint_every": 1}
    train(make_config("medusa", base, tmp_path / "run", run=run, evaluation=evaluation))
    assert shares == [list(range(0, 16, 2))]


def test_the_first_evaluation_is_done_in_full_where_there_is_time(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least amount shows how long one takes, and then an hour is left."""
    monkeypatch.setattr("draftsmith.train.evaluation.budget.seconds_left", lambda *_: 3600.0)
    evaluation = {"max_new_tokens": 4, "repeats": 3, "baselines": []}
    run = train(make_config("medusa", base, tmp_path, run={"steps": 2, "checkpoint_every": 2}, evaluation=evaluation))
    (path,) = checkpoints(run)
    content = json.loads((path / "evaluation.json").read_text())
    assert content["cost"]["repeats"] == content["results"][0]["repeats"] == 3


# --- stopping early


@pytest.mark.parametrize(
    ("lengths", "without_gain"),
    [
        ([1.0], 0),
        ([1.0, 1.3, 1.6], 0),
        ([1.0, 1.05, 1.08], 2),  # within 0.1 of the first
        ([1.0, 1.05, 1.15], 0),  # together they are beyond it
        ([1.0, 1.5, 1.4, 1.45, 1.3], 3),
        ([1.0, 1.5, 1.4, 1.7], 0),
    ],
)
def test_gain_is_what_lies_beyond_the_interval(lengths: list[float], without_gain: int) -> None:
    """Times play no part: they are noisier than counts."""
    rows = [row_with(length) for length in lengths]
    assert checkpoints_without_gain(rows) == without_gain
    rows.append(row_with(4.9, divergences=1))
    assert checkpoints_without_gain(rows) == without_gain + 1  # long, but not the target's text


def row_with(length: float, divergences: int = 0) -> Result:
    """Return a row of this acceptance length, with an interval of 0.1 to both sides."""
    row = typed_result(0.5, 1.0, divergences=divergences)
    accepted = round((length - 1) * row.acceptance.num_drafts)
    acceptance = replace(row.acceptance, num_accepted_tokens=accepted)
    return replace(row, acceptance=acceptance, mean_acceptance_length_ci95=(length - 0.1, length + 0.1))


def test_training_stops_when_nothing_is_gained(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so on the console and in the metrics; the same command again trains no further."""
    monkeypatch.setattr(evaluate, "checkpoints_without_gain", lambda rows: len(rows) - 1)
    monkeypatch.setattr(costs_beside, "MOST_SECONDS", 0.1)
    evaluation = {"max_new_tokens": 4, "repeats": 1, "patience": 2, "time_share": None}
    config = make_config("medusa", base, tmp_path, run={"steps": 20, "checkpoint_every": 1}, evaluation=evaluation)
    for patience, stop in ((2, 3), (2, 3), (4, 5)):  # more patience lets it go on
        config.evaluation.patience = patience
        run = train(config)
        assert f"training stops at step {stop}: no longer acceptance in the last {patience}" in " ".join(
            capsys.readouterr().out.split()
        )
        assert len(checkpoints(run)) == stop
        lines = read_metrics(run)
        assert max(line["step"] for line in lines) == stop
        assert [line["step"] for line in lines if "stopped_early" in line] == [stop]
        costs = from_json(Costs, json.loads((run / "costs.json").read_text()))
        assert costs.drafter in map(str, checkpoints(run))
        for checkpoint in checkpoints(run):
            for row in read_evaluation(checkpoint / "evaluation.json").results:
                assert row.predicted_speedup is not None
                assert row.predicted_speedup == predicted_speedup(row, costs)
        assert max(row.draft_length for row in costs.fitted_on) == config.evaluation.draft_length


# --- several processes


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize(("num_prompts", "num_ranks"), [(3, 2), (8, 2), (11, 2), (64, 4), (64, 1), (13, 8)])
def test_shares_are_all_prompts_once(num_prompts: int, num_ranks: int, batch_size: int) -> None:
    """In the batches of a single process; the first rank has at least 8 prompts, wherever they stand."""
    shares = [share_of(num_prompts, rank, num_ranks, batch_size) for rank in range(num_ranks)]
    assert sorted(index for share in shares for index in share) == list(range(num_prompts))
    batches = [share[i : i + batch_size] for share in shares for i in range(0, len(share), batch_size)]
    whole = range(num_prompts)
    assert sorted(batches) == [list(whole[i : i + batch_size]) for i in range(0, num_prompts, batch_size)]
    assert len(shares[0]) >= min(num_prompts, 8)


def test_a_part_of_the_prompts_has_all_that_they_have() -> None:
    prompts = PromptSet("p", [[1], [2], [3]], ["a", "b", "c"], [0.1, 0.2, 0.3], [["x"], [], ["y"]])
    assert subset(prompts, [2, 0]) == PromptSet("p", [[3], [1]], ["c", "a"], [0.3, 0.1], [["y"], ["x"]])


def test_the_timed_prompts_are_of_every_domain() -> None:
    """Of 64 prompts, sorted into four domains of 16, as many each."""
    domains = [index // 16 for index in share_of(64, 0, 4)]
    assert [domains.count(domain) for domain in range(4)] == [4, 4, 4, 4]


def test_pooled_counters_are_those_of_all_prompts(tiny_target: Target) -> None:
    """Greedy decoding gives the same counters whoever decodes; the speed is rank 0's."""
    texts = [f"strike {'the iron ' * (i % 5)}{i}" for i in range(11)]
    domains = ["rare" if i == 7 else "half" if i % 2 else "" for i in range(11)]
    prompts = PromptSet("prompts", [tiny_target.encode(text) for text in texts], domains)
    settings = MeasureSettings(draft=3, max_new_tokens=12, repeats=1)
    drafters = {"ngram": load_drafter("ngram", tiny_target)}
    whole = measure(tiny_target, drafters, prompts, settings)["ngram"]
    shares = [share_of(11, rank, 3) for rank in range(3)]
    assert 7 not in shares[0]
    rows = [measure(tiny_target, drafters, subset(prompts, share), settings)["ngram"] for share in shares]
    pooled = pool(rows, shares)
    assert whole.acceptance.num_accepted_tokens > 0
    assert (pooled.setting, pooled.acceptance, pooled.lossless) == (whole.setting, whole.acceptance, whole.lossless)
    assert pooled.speed == rows[0].speed
    assert pooled.timed_prompts == 8
    timed = {"": 5, "half": 3, "rare": 0}
    for domain, of_all in whole.domains.items():
        own = pooled.domains[domain]
        assert counts_of(own) == pytest.approx(counts_of(of_all))
        assert own.acceptance_histogram == of_all.acceptance_histogram
        assert own.timed_prompts == timed[domain]
        assert (own.speedup is not None) == (timed[domain] > 0)


def counts_of(domain: DomainResult) -> dict[str, float]:
    """Return all that several processes count together."""
    others = {"mean_acceptance_length_ci95": 0.0, "speedup": None, "timed_prompts": None, "acceptance_histogram": None}
    return to_json(replace(domain, **others))


def test_differences_name_their_prompt_of_the_whole_set() -> None:
    row = typed_result(0.5, 1.0, divergences=1)
    (difference,) = row.lossless.first_differences[:1]
    check = replace(row.lossless, first_differences=[replace(difference, request=1)])
    pooled = pool([replace(row, lossless=check)] * 2, [[0, 1], [2, 7]]).lossless
    assert pooled.divergences == 2
    assert [difference.request for difference in pooled.first_differences] == [1, 7]
