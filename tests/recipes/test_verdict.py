"""The verdict says what was measured, in every case, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports import choice_content, result, slower, write_grid, write_results

from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.inference.planning.costs import Costs, HeldOutErrors, RoundTimes
from draftsmith.models.storage.typed_json import to_json
from draftsmith.recipes.report_data.reading import read_report_data
from draftsmith.recipes.reports.speed import break_even
from draftsmith.recipes.reports.verdict import Verdict, verdict_of
from draftsmith.recipes.reports.what_if import predictions_of, profiles_of, speedups

FITTED_ON = [RoundTimes(4, 1, 64, 4, False, 1, 10, 11)]


def verdict_on(folder: Path, *rows: dict[str, Any], **extras: Any) -> Verdict:
    write_results(folder / "evaluation.json", list(rows), "runs/eagle3/checkpoints/step-000400", "eagle3")
    for name, content in extras.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return verdict_of(read_report_data(folder))


def paying(batch_size: int = 1, length: int = 4) -> dict[str, Any]:
    return result(0.75, 4.0, batch_size=batch_size, length=length)


def losing(batch_size: int = 1) -> dict[str, Any]:
    return slower(paying(batch_size), 3.0)


@pytest.mark.parametrize(
    ("rows", "title", "tone"),
    [
        ([paying()], "2.03× at batch size 1: use eagle3.", "good"),
        ([paying(), paying(4)], "2.03× at batch size 1, still 2.03× at batch size 4: use eagle3.", "good"),
        ([paying(), losing(4)], "2.03× at batch size 1, break-even near batch size 3: use eagle3.", "good"),
        (
            [paying(), {**paying(4), "speedup": 1.02, "speedup_ci95": [0.97, 1.08]}],
            "2.03× at batch size 1, no measurable gain at batch size 4: use eagle3.",
            "good",
        ),
        ([paying(), paying(length=1)], "2.03× at batch size 1: use eagle3 with draft length 4.", "good"),
        ([losing()], "Speculation does not pay at batch size 1: the best drafter, eagle3, reaches 0.68×.", "bad"),
        ([result(0.3, 3.0)], "No measurable gain at batch size 1: the best drafter, eagle3, reaches 1.02×.", ""),
        (
            [result(0.75, 4.0, divergences=1)],
            "There is no speedup to report: no drafter leaves the output of plain decoding as it is.",
            "alarm",
        ),
    ],
)
def test_title(rows: list[dict[str, Any]], title: str, tone: str, tmp_path: Path) -> None:
    found = verdict_on(tmp_path, *rows)
    assert (found.title, found.tone) == (title, tone)
    assert bool(found.broken) == (tone == "alarm")


def test_a_draft_that_ends_by_confidence_is_named_as_such(tmp_path: Path) -> None:
    confident = {**paying(length=8), "speedup": 2.5, "schedule": {"confident": {"longest": 8, "least": 0.4}}}
    assert "eagle3 with draft length up to 8, by confidence 0.4." in verdict_on(tmp_path, paying(), confident).title


def test_a_choice_made_on_other_prompts_comes_before_the_fastest_row(tmp_path: Path) -> None:
    choice = choice_content("runs/eagle3/checkpoints/step-000400", 1)
    assert "with draft length 4" in verdict_on(tmp_path, paying(), paying(length=1)).title
    chosen, row = verdict_on(tmp_path, paying(), paying(length=1), choice=choice), paying(length=1)
    assert chosen.title == f"{row['speedup']:.2f}× at batch size 1: use eagle3 with draft length 1."
    other = {**choice, "drafter": "runs/medusa/checkpoints/step-000400"}
    assert "with draft length 4" in verdict_on(tmp_path, paying(), paying(length=1), choice=other).title


def test_says_where_it_pays_though_not_at_the_smallest_batch(tmp_path: Path) -> None:
    assert "It does pay at batch size 4 (2.03×)." in verdict_on(tmp_path, losing(), paying(4)).text


def unclear(length: int) -> dict[str, Any]:
    """A row that is fastest by its mean, with an interval that holds 1."""
    return {**paying(length=length), "speedup": 2.5, "speedup_ci95": [0.9, 4.1]}


def test_the_title_and_the_text_never_say_opposite_things_of_one_batch_size(tmp_path: Path) -> None:
    """A draft that was chosen on other prompts shows no gain, and another one does: it said that it does pay there."""
    choice = choice_content("runs/eagle3/checkpoints/step-000400", 1)
    found = verdict_on(tmp_path, unclear(1), paying(), choice=choice)
    assert found.title == (
        "No measurable gain at batch size 1: the best drafter, eagle3 with draft length 1, reaches 2.50×."
    )
    assert "It does pay" not in found.text
    assert "flattered" in found.text


def test_a_gain_that_is_shown_leads_before_a_higher_one_that_is_not(tmp_path: Path) -> None:
    assert verdict_on(tmp_path, unclear(1), paying()).title.startswith("2.03× at batch size 1")
    at_four = {**unclear(1), "batch_size": 4}
    assert "still 2.03× at batch size 4" in verdict_on(tmp_path, paying(), at_four, paying(4)).title


@pytest.mark.parametrize(("num_tokens", "told"), [(16 * 60, True), (16 * 40, False)])
def test_says_that_answers_were_cut(num_tokens: int, told: bool, tmp_path: Path) -> None:
    """Sixteen answers of up to 64 tokens."""
    text = verdict_on(tmp_path, {**paying(), "num_emitted_tokens": num_tokens}).text
    assert ("Most answers were cut at 64 tokens" in text) == told


def test_sampled_outputs_are_not_said_to_be_identical(tmp_path: Path) -> None:
    text = verdict_on(tmp_path, result(0.75, 4.0, temperature=1.0)).text
    assert "Outputs were not compared" in text
    assert "identical" not in text


def test_says_that_an_engine_computes_with_the_quantised_weights(tmp_path: Path) -> None:
    write_results(tmp_path / "evaluation.json", [paying()])
    path = tmp_path / "evaluation.json"
    content = json.loads(path.read_text())
    assert not any("quantised" in caveat for caveat in verdict_of(read_report_data(tmp_path)).caveats)
    content["environment"]["quantisation"] = "compressed-tensors (nvfp4-pack-quantized)"
    path.write_text(json.dumps(content))
    told = [caveat for caveat in verdict_of(read_report_data(tmp_path)).caveats if "nvfp4-pack" in caveat]
    assert "its speed is another: measure it there" in told[0]


def test_break_even_lies_on_the_line_over_the_logarithm(tmp_path: Path) -> None:
    above = {**paying(2), "speedup": 1.5, "speedup_ci95": [1.4, 1.6]}
    below = {**paying(32), "speedup": 0.5, "speedup_ci95": [0.4, 0.6]}
    write_results(tmp_path / "evaluation.json", [above, below, {**below, "speedup_ci95": [0.4, 1.1]}])
    first, second, unclear = read_evaluation(tmp_path / "evaluation.json").results
    crossing = break_even([first, second])
    assert crossing is not None
    assert crossing.batch_size == pytest.approx(8.0)
    assert (crossing.last_above, crossing.first_below) == (2, 32)
    assert break_even([first, unclear]) is None
    assert break_even([first]) is None
    assert break_even([second, first]) is None


def test_predictions_are_the_measured_speedups_where_costs_lie_on_a_line(tmp_path: Path) -> None:
    """The costs of the grid are straight lines, so every measured point has to lie on the predicted curve."""
    write_grid(tmp_path)
    for profile in profiles_of(read_report_data(tmp_path)):
        for point in profile.measured:
            costs = next(costs for costs in profile.costs if costs.batch_size == point.batch_size)
            assert speedups(profile, costs)[point.draft_length - 1] == pytest.approx(point.speedup, rel=0.01)


def test_predictions_count_the_rounds_without_a_draft(tmp_path: Path) -> None:
    """A drafter that is mostly idle, whose rounds cost 1.2 plain steps: from its own rounds, and from costs.json."""
    row = idle(result(0.9, 1.0))
    write_results(tmp_path / "evaluation.json", [row], "ngram", "ngram")
    (profile,) = profiles_of(read_report_data(tmp_path))
    assert speedups(profile, profile.costs[0])[3] == pytest.approx(row["speedup"])
    costs = Costs("", "", "ngram", "ngram", {"first: pass": 1.0}, {"pass": 10.0, "drafts": 1.0}, host=0.0)
    costs = replace(costs, held_out=HeldOutErrors(settings=1), fitted_on=FITTED_ON)
    (tmp_path / "costs.json").write_text(json.dumps(to_json(costs)))
    data = read_report_data(tmp_path)
    (prediction,) = predictions_of(data)
    assert prediction.predicted == pytest.approx(row["speedup"])
    (profile,) = profiles_of(data)
    assert speedups(profile, profile.costs[0])[3] == pytest.approx(row["speedup"])


def test_the_panel_goes_on_along_the_fitted_curve(tmp_path: Path) -> None:
    """It ended at the longest measured draft, and its slider of batch sizes had one place."""
    write_results(tmp_path / "evaluation.json", [paying(length=2)], "ngram", "ngram")
    costs = Costs("", "", "ngram", "ngram", {"step: pass": 1.0}, {"pass": 8.0, "token": 1.0}, host=1.0)
    times = replace(costs, held_out=HeldOutErrors(settings=1), fitted_on=FITTED_ON)
    (tmp_path / "costs.json").write_text(json.dumps(to_json(times)))
    (profile,) = profiles_of(read_report_data(tmp_path))
    assert (profile.known, profile.known_batch) == (4, 1)
    assert [of_size.batch_size for of_size in profile.costs] == [1, 2]
    emitted = 1 + sum(profile.rates[0] * profile.rates[1] ** place for place in range(8))
    for of_size in profile.costs:
        size = of_size.batch_size
        assert len(speedups(profile, of_size)) == 8
        round_ms = 8 * 1.0 + 8.0 + 9 * size + 1.0
        assert speedups(profile, of_size)[7] == pytest.approx(emitted * (8.0 + size + 1.0) / round_ms)


def idle(row: dict[str, Any]) -> dict[str, Any]:
    """The row with three rounds without a draft beside each that has one; a round costs what it did."""
    num_rounds = 4 * row["num_drafts"]
    speedup = row["speedup"] * (1 + row["num_accepted_tokens"] / num_rounds) / row["mean_acceptance_length"]
    ratio = row["mean_acceptance_length"] / speedup
    interval = [0.95 * speedup, 1.05 * speedup]
    changed = {"speedup": speedup, "speedup_ci95": interval, "step_cost_ratio": ratio}
    return {**row, "num_rounds": num_rounds, **changed}


def test_rounds_without_a_draft_count_in_what_a_round_emits_and_costs(tmp_path: Path) -> None:
    row, plain_steps = result(0.9, 1.0), 1.2
    found = verdict_on(tmp_path, idle(row))
    tokens = 1 + (row["mean_acceptance_length"] - 1) / 4
    facts = {fact.name: fact for fact in found.facts}
    assert (facts["Tokens a round"].value, facts["Cost of a round"].value) == (f"{tokens:.2f}", f"{plain_steps:.2f}")
    assert "25 % with a draft" in facts["Tokens a round"].note
