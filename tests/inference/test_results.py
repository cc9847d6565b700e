"""Measured results are types: the file and the types say the same, and older files are read."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reports import ENVIRONMENT, result, typed_result, write_results

from draftsmith.inference.decoding.schedule import Adaptive, Confident, Schedule
from draftsmith.inference.measuring.results import (
    BaselineResult,
    DomainResult,
    Evaluation,
    Finding,
    RequestCounts,
    Result,
    read_evaluation,
    write_evaluation,
)
from draftsmith.models.errors import UserError
from draftsmith.models.storage.typed_json import to_json
from draftsmith.train.run_folder.run_folder import place_of_best

ROOT = Path(__file__).parents[2]


@pytest.fixture
def evaluation(tmp_path: Path) -> Evaluation:
    write_results(tmp_path / "evaluation.json", [result(0.6, 1.0), result(0.6, 1.0, temperature=1.0)])
    return read_evaluation(tmp_path / "evaluation.json")


def changed(evaluation: Evaluation, **changes: object) -> Evaluation:
    """Return the evaluation with other fields of its first row."""
    first, *others = evaluation.results
    return replace(evaluation, results=[replace(first, **changes), *others])  # type: ignore[arg-type]


def read_back(evaluation: Evaluation, path: Path) -> Evaluation:
    write_evaluation(path, evaluation)
    return read_evaluation(path)


def test_what_is_written_is_read_back_byte_for_byte(evaluation: Evaluation, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_evaluation(first, evaluation)
    write_evaluation(second, read_evaluation(first))
    assert first.read_bytes() == second.read_bytes()
    assert read_evaluation(first) == evaluation


def test_counts_stay_whole_numbers_and_fractions_stay_fractions(evaluation: Evaluation, tmp_path: Path) -> None:
    stats = evaluation.results[0].acceptance
    again = read_back(evaluation, tmp_path / "whole.json").results[0].acceptance
    assert (repr(again.num_drafts), again.acceptance_histogram) == ("1000", stats.acceptance_histogram)
    expected = replace(stats, num_drafts=1000.0, acceptance_histogram=[400.0, 240.0, 144.0, 86.0, 130.0])
    again = read_back(changed(evaluation, acceptance=expected), tmp_path / "fractions.json").results[0].acceptance
    assert repr(again.num_drafts) == "1000.0"
    assert all(isinstance(count, float) for count in again.acceptance_histogram)


def test_figures_follow_from_the_counters(evaluation: Evaluation) -> None:
    row, written = evaluation.results[0], result(0.6, 1.0)
    content = to_json(row)
    assert {name: content[name] for name in written if name != "lossless"} == {
        name: value for name, value in written.items() if name != "lossless"
    }


def test_the_fields_of_a_row_stand_side_by_side_in_the_file(evaluation: Evaluation) -> None:
    content = to_json(evaluation.results[0])
    assert list(content)[:3] == ["prompt_set", "num_prompts", "temperature"]
    assert not {"setting", "acceptance", "speed"} & content.keys()


def test_what_was_not_measured_is_left_out(evaluation: Evaluation, tmp_path: Path) -> None:
    content = to_json(evaluation)
    assert not {"certificate", "seconds", "cost"} & content.keys()
    assert not {"domains", "baselines", "schedule", "diagnosis", "timed_prompts"} & content["results"][0].keys()
    assert content["results"][0]["bandwidth_floor_share"] is None
    nothing_found = changed(evaluation, diagnosis=[])
    assert to_json(nothing_found)["results"][0]["diagnosis"] == []
    assert read_back(nothing_found, tmp_path / "e.json").results[0].diagnosis == []


def test_a_domain_that_was_timed_says_that_it_has_no_interval(evaluation: Evaluation, tmp_path: Path) -> None:
    counts = {"num_drafts": 4, "num_draft_tokens": 16, "num_accepted_tokens": 8, "num_emitted_tokens": 12}
    rates = {"mean_acceptance_length": 3.0, "mean_acceptance_length_ci95": None, "draft_acceptance_rate": 0.5}
    counted = DomainResult(num_prompts=1, **counts, **rates)  # type: ignore[arg-type]
    timed = replace(counted, speedup=1.5, timed_prompts=0)
    assert to_json(counted) == {"num_prompts": 1, **counts, **rates}
    assert to_json(timed) == {**to_json(counted), "speedup": 1.5, "speedup_ci95": None, "timed_prompts": 0}
    both = changed(evaluation, domains={"a": counted, "b": timed})
    assert read_back(both, tmp_path / "e.json") == both


@pytest.mark.parametrize(
    "schedule",
    [Schedule(((1, 4), (8, 0))), Adaptive((0, 2, 4), ((1, (1.0, 1.2, 1.4)),)), Confident(8, 0.4)],
    ids=lambda schedule: type(schedule).__name__,
)
def test_schedules_are_read_back(
    schedule: Schedule | Adaptive | Confident, evaluation: Evaluation, tmp_path: Path
) -> None:
    with_it = changed(evaluation, setting=replace(evaluation.results[0].setting, schedule=schedule))
    assert to_json(with_it)["results"][0]["schedule"] == json.loads(json.dumps(schedule.to_json()))
    assert read_back(with_it, tmp_path / "e.json").results[0].setting.schedule == schedule


def test_what_is_no_schedule_is_refused(evaluation: Evaluation, tmp_path: Path) -> None:
    content = to_json(evaluation)
    content["results"][0]["schedule"] = 5
    (tmp_path / "e.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="schedule"):
        read_evaluation(tmp_path / "e.json")


def test_everything_that_a_row_may_hold_is_read_back(evaluation: Evaluation, tmp_path: Path) -> None:
    baseline = BaselineResult(
        num_emitted_tokens=5, tokens_per_second=1.0, speedup_over_plain=0.5, speedup_over_plain_ci95=None, identical=2
    )
    finding = Finding("too deep", {"kept": {"1": 0.5}}, "evidence", "mend", 0.25)
    full = changed(evaluation, baselines={"generate": baseline}, diagnosis=[finding], timed_prompts=8)
    assert read_back(full, tmp_path / "e.json") == full


def test_older_files_are_read(tmp_path: Path) -> None:
    row = result(0.6, 1.0)
    plain = {**result(0.0, 0.0), "num_drafts": 0, "num_emitted_tokens": 1000, "acceptance_histogram": [0] * 5}
    plain["num_accepted_tokens"] = plain["num_draft_tokens"] = 0
    for older in (row, plain):
        del older["num_rounds"]
    write_results(tmp_path / "evaluation.json", [row, plain])
    old, old_plain = read_evaluation(tmp_path / "evaluation.json").results
    assert old.plain_step_ms == 10.0
    assert old.speed.ttft_parts_ms.prefill is None
    assert old.lossless.first_differences[0].share_gap_fp32 is None
    assert old.acceptance.num_rounds == row["num_drafts"]
    assert old_plain.acceptance.num_rounds == 1000 - plain["num_prompts"]
    assert old_plain.tokens_a_round == 1


def test_settings_are_comparable_keys(evaluation: Evaluation) -> None:
    greedy, sampled = (row.setting for row in evaluation.results)
    assert greedy != sampled
    assert greedy.differs_only_in(sampled, "temperature")
    assert not greedy.differs_only_in(sampled, "batch_size")
    assert greedy == replace(greedy, verification_mode="typical")
    assert len({greedy, replace(greedy, verification_mode="typical"), sampled}) == 2


def test_a_round_of_each_setting_has_its_own_cost() -> None:
    """A longer draft emits more tokens a round and costs more: the rows of each setting share one cost, not all."""
    short, long = typed_result(0.7, 1.0, length=2), typed_result(0.7, 30.0, length=8)
    assert short.tokens_a_round < long.tokens_a_round
    assert short.speed.speedup > long.speed.speedup
    assert place_of_best([short, long]) == 0
    noisy = replace(short, speed=replace(short.speed, speedup=9.0))
    better = typed_result(0.72, 1.0, length=2)
    assert place_of_best([noisy, better, long]) == 1


def test_an_earlier_checkpoint_is_the_best_where_it_is_shown_to_be() -> None:
    """What is ahead by chance is not preferred to a later checkpoint; what is ahead on nearly all prompts is."""

    def row(rounds: list[int]) -> Result:
        requests = [RequestCounts(10, 61, count) for count in rounds]
        made, total = typed_result(0.5, 1.0), sum(rounds)
        accepted = sum(request.num_tokens - 1 for request in requests) - total
        counts = replace(made.acceptance, num_rounds=total, num_drafts=total, num_accepted_tokens=accepted)
        setting = replace(made.setting, num_prompts=len(rounds))
        return replace(made, setting=setting, acceptance=counts, requests=requests)

    better_by_chance, last = row([20, 40, 30, 29]), row([40, 20, 29, 31])
    assert better_by_chance.tokens_a_round > last.tokens_a_round
    assert place_of_best([better_by_chance, last]) == 1
    better = row([20, 30, 25, 22])
    assert place_of_best([better, row([30, 40, 36, 31]), row([29, 41, 36, 33])]) == 0
    assert place_of_best([better, row([30, 40, 36, 31]), row([20, 31, 25, 22])]) == 2
    assert place_of_best([row([20, 30]), row([30, 40])]) == 1  # two prompts show nothing
    few = replace(better, requests=better.requests[:2] if better.requests else None)
    assert place_of_best([few, last]) == 0  # of several processes: the counts of all prompts decide


def test_ranks_by_soundness_then_speedup(evaluation: Evaluation) -> None:
    fast = evaluation.results[0]
    slow = replace(fast, speed=replace(fast.speed, speedup=1.0))
    broken = replace(fast, lossless=replace(fast.lossless, divergences=1))
    assert max([slow, broken, fast], key=lambda row: row.rank_key) is fast
    assert max([slow, broken], key=lambda row: row.rank_key) is slow
    assert not broken.is_sound
    assert not replace(fast, setting=replace(fast.setting, verification_mode="typical")).is_sound


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[]", "holds no evaluation: "),
        (
            json.dumps({"target": "t", "drafter": "d", "environment": ENVIRONMENT, "results": []}),
            "holds no evaluation: drafter_kind: field",
        ),
    ],
    ids=["no JSON", "no object", "a field is missing"],
)
def test_says_which_file_holds_no_evaluation(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "e.json").write_text(content)
    with pytest.raises(UserError, match=rf"e\.json {told}"):
        read_evaluation(tmp_path / "e.json")


def test_says_which_field_of_which_row_is_wrong(tmp_path: Path) -> None:
    write_results(tmp_path / "e.json", [result(0.6, 1.0), {**result(0.6, 1.0), "repeats": "five"}])
    with pytest.raises(UserError, match=r"results\.1\..*repeats"):
        read_evaluation(tmp_path / "e.json")


def test_mypy_rejects_a_misspelt_field(tmp_path: Path) -> None:
    """The point of the types: what is found when it is written down need not be found at run time."""
    (tmp_path / "misspelt.py").write_text(
        "from draftsmith.inference.measuring.results import Result\n\n"
        "def good(row: Result) -> float:\n    return row.acceptance.mean_acceptance_length\n\n"
        "def bad(row: Result) -> float:\n    return row.acceptance.mean_acceptance_lenght\n"
    )
    (tmp_path / "mypy.ini").write_text(  # without reading torch's own sources, which take half a minute
        f"[mypy]\nmypy_path = {ROOT / '.typing'}\nnamespace_packages = True\nexplicit_package_bases = True\n"
        "ignore_missing_imports = True\nfollow_imports = silent\n"
        + "".join(f"[mypy-{package}.*]\nfollow_imports = skip\n" for package in ("torch", "transformers", "numpy"))
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "misspelt.py"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in found.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, found.stdout + found.stderr
    assert 'misspelt.py:7: error: "Stats" has no attribute "mean_acceptance_lenght"' in errors[0]


def test_rows_may_not_be_changed(evaluation: Evaluation) -> None:
    with pytest.raises(AttributeError):
        evaluation.results[0].timed_prompts = 3  # type: ignore[misc]
    assert isinstance(evaluation.results[0], Result)
