"""What an evaluation says: its fields, its ratio and interval, its check of the output."""

import pytest
import torch

from draftsmith.inference.lossless import LosslessCheck, compare
from draftsmith.inference.measure import MeasureSettings, PromptSet, bootstrap_ratio, measure, pick_prompts
from draftsmith.inference.stats import Stats
from draftsmith.models import Target, load_drafter

DESIGN_FIELDS = {
    *("prompt_set", "num_prompts", "temperature", "top_p", "verification_mode", "batch_size", "draft_length"),
    *("tree_nodes", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"),
    *("mean_acceptance_length", "draft_acceptance_rate", "per_position_acceptance_rates"),
    *("conditional_acceptance_rates", "acceptance_histogram", "baseline_tokens_per_second", "tokens_per_second"),
    *("speedup", "speedup_ci95", "repeats", "ttft_ms", "tpot_ms", "baseline_tpot_ms", "milliseconds_per_round"),
    *("step_cost_ratio", "lossless"),
}


def test_rates_are_vllms() -> None:
    """Ten drafts of up to three tokens: 4 accepted nothing, 3 one, 2 two, 1 three."""
    stats = Stats(3, num_drafts=10, num_draft_tokens=30, num_accepted_tokens=10, acceptance_histogram=[4, 3, 2, 1])
    assert stats.mean_acceptance_length == 2.0
    assert stats.draft_acceptance_rate == pytest.approx(1 / 3)
    assert stats.per_position_acceptance_rates == [0.6, 0.3, 0.1]
    assert stats.mean_acceptance_length == pytest.approx(1 + sum(stats.per_position_acceptance_rates))
    assert stats.conditional_acceptance_rates == [6 / 10, 3 / 6, 1 / 3]


@pytest.mark.parametrize(("temperature", "mode"), [(0.0, "greedy"), (0.9, "one_hot")])
def test_a_row_has_every_field_and_agrees_with_itself(temperature: float, mode: str, tiny_target: Target) -> None:
    prompts = PromptSet("some", [tiny_target.encode(text) for text in ("a b a b a b", "def f(", "iron")])
    drafters = {name: load_drafter(name, tiny_target) for name in ("ngram", "none")}
    settings = MeasureSettings(temperature, batch_size=2, draft=3, max_new_tokens=12, repeats=2)
    calls: list[int] = []
    rows = measure(tiny_target, drafters, prompts, settings, lambda: calls.append(1))
    assert len(calls) == 2 * 2  # two batches, two repeats
    row = rows["ngram"]
    assert set(row) >= DESIGN_FIELDS
    assert row["verification_mode"] == mode
    assert row["lossless"] == {"checked": 3, "identical": 3, "near_tie_divergences": 0, "divergences": 0}
    assert row["speedup"] == pytest.approx(row["tokens_per_second"] / row["baseline_tokens_per_second"])
    assert row["step_cost_ratio"] == pytest.approx(row["mean_acceptance_length"] / row["speedup"])
    assert sum(row["acceptance_histogram"]) == row["num_drafts"]
    assert len(row["acceptance_histogram"]) == 4
    assert row["speedup_ci95"][0] <= row["speedup_ci95"][1]
    plain = rows["none"]
    assert plain["speedup"] == 1.0
    assert plain["mean_acceptance_length"] == 1.0
    assert plain["num_emitted_tokens"] == row["num_emitted_tokens"]


def test_the_interval_is_paired() -> None:
    """Twice as fast on every prompt, however the prompts differ: no width at all."""
    tokens, seconds = [10, 40, 20, 30], [1.0, 2.0, 9.0, 4.0]
    low, high = bootstrap_ratio(tokens, seconds, tokens, [2 * s for s in seconds])
    assert low == pytest.approx(2)
    assert high == pytest.approx(2)
    low, high = bootstrap_ratio(tokens, seconds, tokens, [3 * seconds[0], seconds[1], *seconds[2:]])
    assert low == pytest.approx(1)
    assert high > 1


def test_differences_are_told_apart(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny_target.encode("The smith")
    gap = {"size": 0.0}

    def logits(self: Target, hidden: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(1, 1, 300)
        values[..., 7] = 10.0
        values[..., 8] = 10.0 - gap["size"]
        return values

    monkeypatch.setattr(Target, "logits", logits)
    assert compare(tiny_target, [prompt], [[1, 7]], [[1, 7]]) == LosslessCheck(1, 1, 0, 0)
    assert compare(tiny_target, [prompt], [[1, 7]], [[1, 8]]) == LosslessCheck(1, 0, 1, 0)
    gap["size"] = 0.01
    assert compare(tiny_target, [prompt], [[1, 7]], [[1, 8]]) == LosslessCheck(1, 0, 0, 1)
    assert compare(tiny_target, [prompt], [[1, 7]], [[1]]) == LosslessCheck(1, 0, 0, 1)  # stopped too early


def test_the_same_prompts_are_picked_each_time() -> None:
    ids = [[i] for i in range(50)]
    assert pick_prompts(ids, 8) == pick_prompts(ids, 8)
    assert pick_prompts(ids, 8) == sorted(pick_prompts(ids, 8))
    assert pick_prompts(ids, 99) == ids
