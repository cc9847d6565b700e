"""The search for the best drafter: traffic that is divided cleanly, a race that is fair, and a search that goes on."""

import contextlib
import json
import os
import random
import shutil
import subprocess
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chats import FAMILIES, chat_target
from disk_faults import contents, recorded_changes, restore
from drafters import untrained
from reports import typed_result
from rich.console import Console
from safetensors.torch import load_file, save_file
from scipy.special import expit, logit

import draftsmith.recipes
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.schedule import Confident, Schedule
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.measuring.results import Certificate, Environment, Evaluation, Percentiles, read_evaluation
from draftsmith.inference.measuring.spans import Span
from draftsmith.inference.planning import tuning
from draftsmith.inference.planning.costs import Costs, DraftChances
from draftsmith.inference.traffic.stages import Sla
from draftsmith.models import Drafter, Target, save_drafter
from draftsmith.models.drafter_configs import Eagle3Config
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree
from draftsmith.models.storage.files import write_json
from draftsmith.models.storage.sealed_json import read_sealed
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.recipes.auto import auto, budget, result
from draftsmith.recipes.auto.auto import Auto
from draftsmith.recipes.auto.budget import (
    affordable_scores,
    affordable_tests,
    answering_share,
    measuring_share,
    prompts_to_answer,
)
from draftsmith.recipes.auto.contenders import served_kinds
from draftsmith.recipes.auto.folder import SearchFolder
from draftsmith.recipes.auto.race import Contender, Rung, decided, growth_to_come, ranked, run_rung, why_over
from draftsmith.recipes.auto.result import SearchResult
from draftsmith.recipes.auto.score import (
    Score,
    ScoredLookup,
    ServingLoad,
    best_draft_of,
    growth_per_doubling,
    needed_rate,
    plain_speedup,
    potential,
    potential_behind,
    rates_of,
    speedup_of,
)
from draftsmith.recipes.auto.service_level import chains_alone, fastest_first, sla_lines, within_sla
from draftsmith.recipes.auto.state import AutoState
from draftsmith.recipes.auto.traffic import (
    FEWEST,
    AnswerSummary,
    DividedPrompts,
    describe_answers,
    divide,
    mask,
    masked_text,
)
from draftsmith.recipes.auto.tuned_drafts import TunedDrafts
from draftsmith.recipes.cli.main import parse
from draftsmith.recipes.configs.training_settings import AutoSettings
from draftsmith.recipes.evaluation import comparison
from draftsmith.recipes.quickstart.budget import StepTime

LOAD = ServingLoad(1, 100)
LAUNCH = Path(draftsmith.recipes.__file__).parent / "launch"


# --- traffic


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail jane.doe+x@example.co.uk today", "mail <email> today"),
        ("call +49 170 1234567 or 555-123-4567", "call <number> or <number>"),
        ("card 4111 1111 1111 1111.", "card <number>."),
        ("key sk-abcdefghijklmnop1234 and hf_abcdefghijklmnopqrst", "key <key> and <key>"),
        ("host 192.168.17.4:80", "host <address>:80"),
        ("x = 3.14159 + 12345 * range(10)", "x = 3.14159 + 12345 * range(10)"),
        ("version 1.2.3, 2026-11-23", "version 1.2.3, 2026-11-23"),
    ],
)
def test_personal_data_is_masked(text: str, expected: str) -> None:
    assert masked_text(text) == expected
    chat = Prompt(messages=[{"role": "user", "content": [{"type": "text", "text": text}]}])
    assert mask(chat).messages == [{"role": "user", "content": [{"type": "text", "text": expected}]}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "send", "arguments": {"to": text}}}]}
    given = mask(Prompt(messages=[call])).messages
    assert given == [
        {"role": "assistant", "tool_calls": [{"function": {"name": "send", "arguments": {"to": expected}}}]}
    ]


def write_traffic(folder: Path, number: int = 120) -> Path:
    """Prompts of the tiny target's words, some of them twice, a few with personal data, one that is too long."""
    lines = [f"strike {'the iron ' * (i % 4)}{i}" for i in range(number)]
    rows = [{"prompt": line, "domain": "forge" if i % 3 else "mail"} for i, line in enumerate(lines)]
    rows += rows[:5] + [{"prompt": f"write to smith{i}@forge.org {i}"} for i in range(10)] + [{"prompt": "iron " * 400}]
    path = folder / "traffic.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_traffic_is_divided_into_parts_that_share_nothing(tiny_target: Target, tmp_path: Path) -> None:
    divided = DividedPrompts(tmp_path / "prompts")
    traffic = divide(str(write_traffic(tmp_path)), tiny_target, 100, False, divided)
    parts = [read_prompts(path) for path in (divided.training, divided.racing, divided.test)]
    texts = [str(prompt.text) for part in parts for prompt in part]
    assert len(set(texts)) == len(texts) == 130
    assert [len(part) for part in parts] == [traffic.num_training, traffic.num_racing, traffic.num_test]
    assert (traffic.num_prompts, traffic.num_masked, traffic.num_too_long) == (130, 10, 1)
    assert traffic.domains == {"forge": 80, "mail": 40, "": 10}
    assert not any("@" in text for text in texts)
    again = divide(str(write_traffic(tmp_path)), tiny_target, 100, False, divided)
    assert again == traffic


def test_prompts_that_are_alike_once_masked_are_one(tiny_target: Target, tmp_path: Path) -> None:
    """What differs by an address alone could else be trained on and tested."""
    rows = [{"prompt": f"write to smith{i}@forge.org"} for i in range(50)] + [
        {"prompt": f"strike {i}"} for i in range(90)
    ]
    (tmp_path / "traffic.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    traffic = divide(str(tmp_path / "traffic.jsonl"), tiny_target, 100, False, DividedPrompts(tmp_path / "masked"))
    assert (traffic.num_prompts, traffic.num_masked) == (91, 50)
    kept = divide(str(tmp_path / "traffic.jsonl"), tiny_target, 100, True, DividedPrompts(tmp_path / "kept"))
    assert (kept.num_prompts, kept.num_masked) == (140, 0)


def test_a_log_tells_temperature_and_rate(tiny_target: Target, tmp_path: Path) -> None:
    """Ninety requests in 89 seconds, two thirds of them at temperature 0.5; some words are not in Latin letters."""
    body = '{{"prompt": "strike {} мы", "temperature": {}}}'
    rows = [body.format(i, 0.5 if i % 3 else 0.0) for i in range(90)]
    line = "DEBUG 11-24 10:{:02}:{:02} [logger.py:1] Request N/A JSON body: {}\n"
    log = tmp_path / "server.log"
    log.write_text("".join(line.format(i // 60, i % 60, row) for i, row in enumerate(rows)))
    traffic = divide(str(log), tiny_target, 100, False, DividedPrompts(tmp_path / "prompts"))
    assert (traffic.temperature, traffic.requests_per_second) == (0.5, 1.0)
    assert traffic.scripts == {"Latin": 0.75, "Cyrillic": 0.25}
    assert "letters: Latin 75%, Cyrillic 25%; 1 requests a second; temperature 0.5)" in traffic.text


def test_what_came_last_in_a_log_tells_the_result(tmp_path: Path) -> None:
    """A conversation that goes on in the newest tenth is left out of the test: its beginning was trained on."""
    starts = [*range(180), *range(100, 110), *range(180, 190)]
    rows = [json.dumps({"messages": [{"role": "user", "content": f"strike {i}"}]}) for i in starts]
    rows[180:190] = [
        json.dumps({"messages": [{"role": "user", "content": f"strike {i}"}, {"role": "user", "content": "again"}]})
        for i in starts[180:190]
    ]
    log = tmp_path / "server.log"
    log.write_text("".join(f"DEBUG 12-31 10:00:00 [logger.py:1] Request N/A JSON body: {row}\n" for row in rows))
    divided = DividedPrompts(tmp_path / "prompts")
    traffic = divide(str(log), chat_target(FAMILIES["chatml"]), 100, False, divided)
    tested = {prompt.messages[0]["content"] for prompt in read_prompts(divided.test) if prompt.messages}
    assert tested == {f"strike {i}" for i in range(180, 190)}
    earlier = read_prompts(divided.training) + read_prompts(divided.racing)
    assert {prompt.messages[0]["content"] for prompt in earlier if prompt.messages} == {
        f"strike {i}" for i in range(180)
    }
    assert (traffic.num_prompts, traffic.num_test) == (190, 10)


def test_answers_are_described() -> None:
    """Two samples: one of two answers of 4 and 6 tokens, the first of which begins with thinking; one that is cut."""
    thought = Sample(list(range(20)), [Span(2, 5, "thinking"), Span(5, 6), Span(10, 16)], "eos")
    cut = Sample(list(range(20)), [Span(10, 20)])
    assert describe_answers([thought, cut]) == AnswerSummary(3, 20 / 3, 0.5, {"answer": 0.85, "thinking": 0.15})
    assert (
        describe_answers([cut]).text == "1 answers of 10 tokens on the mean, 0% thinking, 0% tool calls; 100% are cut"
    )


def test_the_winner_passes_four_times_over_the_answers() -> None:
    """The winner of four kinds trains alone after rungs of four and of two, in what answers leave of 1,000 seconds.

    An answer takes two seconds, and training on one takes one second.
    """
    share = answering_share(0.75, 2.0, 1.0, 4)
    training = 1000 * (0.75 - share)
    rung, final = budget.RACE_SHARE * training / 2, (1 - budget.RACE_SHARE) * training
    assert (rung / 4 + rung / 2 + final) / 1.0 == pytest.approx(budget.PASSES * 1000 * share / 2.0)
    assert answering_share(0.75, 0.001, 1.0, 4) == budget.LEAST_ANSWERING
    assert answering_share(0.75, 100.0, 1.0, 4) == budget.MOST_ANSWERING


def test_a_short_search_leaves_time_for_its_end() -> None:
    """At least 17 % of the time are for measuring; what takes longer gets what it takes, but no more than 45 %."""
    assert [measuring_share(needed) for needed in (0.01, 0.3, 2.0)] == [0.17, 0.3, 0.45]


def test_scores_are_of_as_many_prompts_as_time_allows() -> None:
    """Five kinds have 5 probes, 5 and 2 scores in two rungs, and 5 others: 17 of each prompt, for 15 % of the time."""
    assert affordable_scores(5, 64, 0.1, 1000.0) == (64, pytest.approx(64 * 17 * 0.1))
    assert affordable_scores(5, 64, 0.5, 1700.0) == (30, pytest.approx(0.15 * 1700))
    assert affordable_scores(5, 64, 0.5, 10.0) == (16, pytest.approx(16 * 17 * 0.5))


def test_a_short_search_is_told_by_fewer_prompts() -> None:
    """Four finalists, one of them with two more drafts, and plain decoding for 20 % of the time.

    There are never fewer prompts than a percentile needs.
    """
    assert affordable_tests(64, 0.1, 1000.0) == (64, pytest.approx(64 * 7 * 0.1))
    assert affordable_tests(64, 1.0, 1050.0) == (30, pytest.approx(0.2 * 1050))
    assert affordable_tests(64, 1.0, 10.0)[0] == 20
    assert affordable_tests(6, 1.0, 10.0)[0] == 6


def test_prompts_are_answered_again_where_there_is_time_for_all() -> None:
    """With time for all 64 prompts twice each has two answers, and never more than there are temperatures."""
    found = [prompts_to_answer(affordable, 64, 2) for affordable in (30, 127, 128, 1000)]
    assert found == [(30, 1), (64, 1), (64, 2), (64, 2)]


def test_too_few_prompts_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"too few to hold {2 * FEWEST} out: give about 80 or more"):
        divide(str(write_traffic(tmp_path, 20)), tiny_target, 100, False, DividedPrompts(tmp_path / "prompts"))


# --- scores


def costs_of(draft_ms: float) -> Costs:
    """A target whose pass takes 10 ms whatever it reads, and a drafter that takes so much for each token."""
    return Costs("cpu", "target", "name", "kind", {"step: pass": draft_ms}, {"pass": 10.0}, 0.0)


def give_costs(monkeypatch: pytest.MonkeyPatch, draft_ms: float) -> None:
    """Let all drafters of a search take so much for each token, without measuring them."""
    monkeypatch.setattr(
        auto, "measure_costs_in_turns", lambda _, drafters, __: dict.fromkeys(drafters, costs_of(draft_ms))
    )


def stats_of(*accepted: int) -> Stats:
    """Rounds of four drafted tokens, of which so many are accepted."""
    stats = Stats(4)
    for number in accepted:
        stats.count_round(4, number)
    return stats


def test_the_best_draft_is_the_one_that_theory_says() -> None:
    """Half of the drafts are accepted whole and half not at all: free drafts are best long, dear ones not at all."""
    stats = stats_of(4, 0, 4, 0)
    assert rates_of(stats) == [0.5, 1.0, 1.0, 1.0]
    free, dear = costs_of(0.0), costs_of(20.0)
    assert best_draft_of([stats], free, LOAD) == 4
    assert speedup_of([stats], 4, free, LOAD) == pytest.approx(3.0)
    assert best_draft_of([stats], dear, LOAD) == 0
    assert speedup_of([stats], 0, dear, LOAD) == 1.0


def test_a_kind_that_cannot_pay_is_known_before_training() -> None:
    """Free drafts pay at any rate; of 5 ms a token one pays when right in every second round; of 20 ms none does."""
    rates = [needed_rate(costs_of(draft_ms), 8, LOAD) for draft_ms in (0.0, 5.0, 20.0)]
    assert rates == [pytest.approx(0.0, abs=1e-9), pytest.approx(0.5), None]


def test_only_requests_within_the_sla_count() -> None:
    """A round takes 10 ms and brings one request five tokens, the other one: 2 and 10 ms a token, plain decoding 10."""
    requests, free = [stats_of(4, 4), stats_of(0, 0)], costs_of(0.0)
    for limit, speedup, plain in ((1.9, 0.0, 0.0), (2.1, 1.5, 0.0), (9.9, 1.5, 0.0), (10.1, 3.0, 1.0)):
        load = replace(LOAD, sla=Sla(tpot_ms=limit))
        assert speedup_of(requests, 4, free, load) == pytest.approx(speedup), limit
        assert plain_speedup(free, load) == speedup_of(requests, 0, free, load) == plain


def test_an_sla_asks_for_the_draft_that_keeps_it() -> None:
    """Long drafts are faster, but only a short one lets any request keep 5.8 ms: one with 2 tokens in 11 ms."""
    rare, often = stats_of(4, 0, 0), stats_of(1, 1, 1)
    costs = costs_of(1.0)
    assert best_draft_of([rare, rare, often], costs, LOAD) == 4
    assert best_draft_of([rare, rare, often], costs, replace(LOAD, sla=Sla(tpot_ms=5.8))) == 1


def test_a_forecast_counts_requests_that_come_to_keep_the_sla() -> None:
    load, costs = replace(LOAD, sla=Sla(tpot_ms=4.0)), costs_of(0.0)
    score = replace(score_of("eagle3", 0.5), rates_by_prompt=[[0.5] * 4, [0.75] * 4])
    emitted = [1 + sum(rate**n for n in range(1, 5)) for rate in (0.5, 0.75)]  # 1.94 and 3.05 tokens a round
    assert 10 / emitted[1] < 4.0 < 10 / emitted[0]
    assert potential(score, 0.0, costs, load) == pytest.approx(emitted[0] / 2)
    assert potential(score, 1.0, costs, load) == pytest.approx(potential(score, 1.0, costs, LOAD))


def score_of(name: str, rate: float, speedup: float = 1.5, steps: int = 100) -> Score:
    return Score(name, steps, [rate] * 4, 1.0, 4, 2.0, speedup, speedup - 0.1, speedup + 0.1)


def test_the_growth_of_a_run_is_told_by_two_scores() -> None:
    """Rates whose log-odds are higher by 0.6, after eight times the steps, are three doublings of 0.2."""
    rates = [float(expit(logit(0.3) + 0.6)), float(expit(logit(0.5) + 0.6))]
    before, after = (
        replace(score_of("hydra", 0.3), rates=[0.3, 0.5]),
        replace(score_of("hydra", 0.3, steps=800), rates=rates),
    )
    assert growth_per_doubling(before, after) == pytest.approx(0.2)
    nothing = replace(before, rates=[0.0, None])
    assert growth_per_doubling(nothing, replace(nothing, steps=800)) == pytest.approx(0.0, abs=1e-9)
    assert growth_per_doubling(nothing, replace(before, rates=[0.9, 0.9], steps=200)) > 6  # from next to nothing


def test_what_is_still_to_come_declines_with_each_doubling() -> None:
    """Three doublings after one of 0.4 bring 0.3, 0.225 and 0.169; at best a kind that stood still grows, too."""
    usual, best = growth_to_come(0.4, 8)
    assert usual == pytest.approx(0.4 * (0.75 + 0.75**2 + 0.75**3))
    assert best == pytest.approx(0.4 * (0.9 + 0.9**2 + 0.9**3))
    assert growth_to_come(-0.1, 8) == (0.0, pytest.approx(0.3 * (0.9 + 0.9**2 + 0.9**3)))


@pytest.mark.parametrize("num_kinds", range(1, 12))
def test_as_many_rungs_are_planned_as_leave_one_kind(num_kinds: int) -> None:
    contenders = [Contender(score_of(f"kind {number}", 0.5), 0.1, 1.0, 1.0) for number in range(num_kinds)]
    for _ in range(budget.num_rungs(num_kinds)):
        assert len(contenders) > 1 or num_kinds == 1  # nobody would be dropped
        kept = decided(1, contenders, []).kept
        contenders = [one for one in contenders if one.score.name in kept]
    assert len(contenders) == 1


def test_a_potential_is_what_grown_rates_would_bring() -> None:
    costs = costs_of(1.0)
    found = [potential(score_of("eagle3", 0.4), growth, costs, LOAD) for growth in (0.0, 0.5, 1.0)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(
        speedup_of([stats_with(0.4)], best_draft_of([stats_with(0.4)], costs, LOAD), costs, LOAD), rel=0.02
    )


@pytest.mark.parametrize(
    ("share", "brought", "expected"),
    [
        (1.0, 3.0, 3.0),  # all rounds are the lookup's, which costs nothing but the pass
        (0.0, 1.0, 10 * 2 / 14),  # all are the kind's, of two tokens in 14 ms
        (0.5, 2.0, 10 * (3 + 2) / (10 + 14)),  # the lookup brings three tokens where it finds any
    ],
)
def test_a_lookup_leaves_rounds_to_the_kind_behind_it(share: float, brought: float, expected: float) -> None:
    score = replace(score_of("ngram", 0.5), chances=DraftChances(share), acceptance_length=brought)
    lookup = ScoredLookup(score, costs_of(0.0))
    assert lookup.speedup_before(2.0, 14.0, LOAD) == pytest.approx(expected)
    behind = potential_behind(lookup, replace(score_of("hydra", 0.5), chances=DraftChances()), 0.0, costs_of(1.0), LOAD)
    assert behind >= lookup.speedup_before(1.5, 11.0, LOAD)  # chains of one token, at the least


def stats_with(rate: float) -> Stats:
    """Many rounds in which each token is accepted at one rate."""
    histogram = [round(1e6 * rate**n * (1 - rate if n < 4 else 1)) for n in range(5)]
    rounds = sum(histogram)
    accepted = sum(n * count for n, count in enumerate(histogram))
    return Stats(4, rounds, 4 * rounds, accepted, accepted + rounds, rounds, histogram)


# --- the race


def test_the_race_ends_where_a_lookup_is_out_of_reach() -> None:
    contenders = [Contender(score_of("eagle3", 0.3), 0.2, 1.4, 1.6), Contender(score_of("medusa", 0.3), 0.2, 1.2, 1.3)]
    assert why_over(contenders, [score_of("ngram", 0.5, speedup=1.65)]) is None  # its lower end is 1.55
    over = why_over(contenders, [score_of("ngram", 0.5, speedup=1.75)])
    assert over == (
        "ngram has at least 1.65×, and the best forecast of what training can still bring is 1.60× (eagle3): "
        "training ends here"
    )
    behind = [replace(contender, best_cascade=1.7) for contender in contenders]
    assert why_over(behind, [score_of("ngram", 0.5, speedup=1.75)]) is None
    assert "is 1.60× (eagle3), or 1.70× behind ngram" in str(why_over(behind, [score_of("ngram", 0.5, speedup=1.85)]))
    slow = [Contender(score_of("medusa", 0.3), 0.2, 0.8, 0.9)]
    assert str(why_over(slow, [score_of("ngram", 0.5, speedup=0.9)])).startswith("plain decoding has at least 1.00×")


def test_the_race_ends_where_the_sla_is_out_of_reach() -> None:
    lookups = [replace(score_of("ngram", 0.3), speedup=0.0, low=0.0, high=0.0)]
    hopeless = [Contender(score_of(name, 0.3), 0.2, 0.0, 0.0) for name in ("eagle3", "medusa")]
    assert why_over(hopeless, lookups, plain=0.0) == (
        "no kind is forecast to keep the SLA for any request, however much it grew: training ends here"
    )
    assert why_over(hopeless, lookups, plain=1.0) is not None  # plain decoding keeps it
    hopeful = [Contender(score_of("eagle3", 0.3), 0.2, 0.4, 0.9), hopeless[1]]
    assert why_over(hopeful, lookups, plain=0.0) is None
    assert "medusa is dropped: no request is forecast to keep the SLA" in decided(1, hopeful, lookups).decision


def measured(drafter: str, speedup: float, tpot_ms: float, num_prompts: int = 20) -> Evaluation:
    """Return an evaluation with so many milliseconds a token at the 95th percentile, plain decoding with 11."""
    row = typed_result(0.75, 4.0)
    times = Percentiles(tpot_ms / 2, tpot_ms, 2 * tpot_ms)
    setting, speed = replace(row.setting, num_prompts=num_prompts), replace(row.speed, tpot_ms=times, speedup=speedup)
    return Evaluation(
        target="t",
        drafter=drafter,
        drafter_kind=drafter,
        environment=Environment({}, "cpu", 1, "float32", None, None, ""),
        results=[replace(row, setting=setting, speed=speed)],
    )


def test_what_breaks_the_sla_is_not_chosen() -> None:
    """The fastest may break it where its slowest requests take long. Of nineteen requests nothing is judged."""
    evaluations = [measured("suffix", 2.0, 6.0), measured("medusa", 1.5, 4.0)]
    sla = Sla(ttft_ms=20.0, tpot_ms=5.0)
    assert [evaluation.drafter for evaluation in fastest_first(within_sla(evaluations, Sla()))] == ["suffix", "medusa"]
    assert [evaluation.drafter for evaluation in within_sla(evaluations, sla)] == ["medusa"]
    assert within_sla(evaluations, Sla(ttft_ms=5.0)) == []
    assert sla_lines(evaluations, Sla()) == []
    assert sla_lines(evaluations, sla) == [
        "suffix at draft length 4 breaks the SLA: 11 ms to the first token, of 20, 6 ms a token, of 5",
        "medusa at draft length 4 keeps the SLA: 11 ms to the first token, of 20, 4 ms a token, of 5",
        "plain decoding breaks the SLA: 11 ms a token, of 5",
    ]
    few = [measured("suffix", 2.0, 6.0, num_prompts=19)]
    assert within_sla(few, sla) == few
    assert "too few requests to judge the SLA (19, 20 needed)" in sla_lines(few, sla)[0]


def test_a_decision_says_who_goes_on_and_why() -> None:
    contenders = [
        Contender(score_of(name, 0.3), 0.2, 1.5 - i / 10, 2) for i, name in enumerate(("eagle3", "hydra", "medusa"))
    ]
    text = decided(2, contenders, [score_of("ngram", 0.3, speedup=1.1)]).decision
    assert text == (
        "rung 2: eagle3 goes on; hydra is dropped: forecast 1.40× after 1.50×, eagle3 1.50× after 1.50×; medusa is "
        "dropped: forecast 1.30× after 1.50×, eagle3 1.50× after 1.50×; ngram has 1.10× without training"
    )


def test_level_forecasts_are_ranked_by_what_was_reached() -> None:
    """A score is known to 0.1: of forecasts that lie as near, the kind wins that needs less growth to get there."""
    reached = {"medusa": (1.5, 1.05), "hydra": (1.45, 1.2), "eagle3": (1.3, 1.25)}
    contenders = [
        Contender(score_of(name, 0.3, speedup), 0.2, forecast, 2.0) for name, (forecast, speedup) in reached.items()
    ]
    for shuffled in permutations(contenders):
        assert [contender.score.name for contender in ranked(list(shuffled))] == ["hydra", "medusa", "eagle3"]


# --- the whole


@pytest.fixture
def settings(tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AutoSettings:
    """A search of some seconds."""
    monkeypatch.setattr(budget, "COST_SECONDS", (0.1, 0.1))
    monkeypatch.setattr(comparison, "with_certificates", lambda evaluations, *_: evaluations)  # half a minute
    monkeypatch.setattr(budget, "fastest_num_threads", lambda plain, prompts: (1, 0.01))
    return AutoSettings(
        target=str(tiny_target_dir),
        traffic=str(write_traffic(tmp_path)),
        drafters="medusa,hydra",
        max_new_tokens=16,
        budget=0.001,
        out=tmp_path / "out",
        device="cpu",
    )


def run(settings: AutoSettings) -> str:
    """Run a search, and return what it prints."""
    console = Console(width=200, record=True)
    auto.run(settings, console)
    return console.export_text()


def test_a_search_from_traffic_to_an_export(settings: AutoSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped after each training, goes on by the same command, and does nothing twice."""
    trained: list[tuple[str, int]] = []
    own = auto.train

    def stopped(config: Any) -> Path:
        trained.append((config.drafter.kind, config.run.steps))
        path = own(config)
        if len(trained) in (1, 3):
            raise KeyboardInterrupt
        return path

    monkeypatch.setattr(auto, "train", stopped)
    monkeypatch.setattr(auto, "why_over", lambda *_: None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    text = run(settings)
    assert [kind for kind, _ in trained[:3]] == ["medusa", "medusa", "hydra"]
    state = read_sealed(AutoState, settings.out / "auto.json", "")
    (rung,) = state.rungs
    assert state.final is not None
    assert rung.kept == [state.final.name]
    assert state.final.steps > rung.contenders[0].score.steps
    assert {score.name for score in state.lookups} == {"ngram", "suffix"}
    assert rung.decision in " ".join(text.split()) or rung.decision in (settings.out / "auto.html").read_text()
    assert (settings.out / "auto.html").stat().st_size < 500_000
    assert decision_made_again(settings, state) == rung
    before = len(trained)
    run(settings)
    assert len(trained) == before
    with pytest.raises(UserError, match="holds a search with .*--budget 0.001.*: give that to go on"):
        run(replace(settings, budget=1.0))


def decision_made_again(settings: AutoSettings, state: AutoState) -> Rung:
    """Return the first decision of a search as it follows from auto.json and costs/ alone, without any training."""
    probes = {score.name: score for score in state.probes}
    scores = {contender.score.name: contender.score for contender in state.rungs[0].contenders}

    def trained_already(kind: str, num_steps: int) -> tuple[Score, Costs]:
        assert scores[kind].steps == num_steps
        return scores[kind], SearchFolder(settings.out).costs(kind)

    conditions = Auto(settings, Console(quiet=True)).conditions
    return decided(1, run_rung(state.payable, probes, trained_already, conditions), state.lookups)


def test_an_sla_that_nothing_keeps_ends_the_race(settings: AutoSettings, tmp_path: Path) -> None:
    """A microsecond a token: nothing is trained beyond the first rung, and nothing is exported."""
    settings = replace(settings, sla_tpot_ms=0.001, traffic=str(write_traffic(tmp_path, 300)))
    text = run(settings)
    state = read_sealed(AutoState, settings.out / "auto.json", "")
    assert [score.within_sla for score in state.lookups] == [0.0, 0.0]
    assert state.over == (
        "no kind is forecast to keep the SLA for any request, however much it grew: training ends here"
    )
    assert "no drafter keeps the SLA on this traffic at this load" in text
    assert "plain decoding breaks the SLA" in text
    assert "No drafter keeps the SLA" in (settings.out / "auto.html").read_text()
    assert not (settings.out / "export").exists()
    with pytest.raises(UserError, match="--sla-tpot-ms 0.001.*: give that to go on"):
        run(replace(settings, sla_tpot_ms=None))


@pytest.mark.parametrize("tried", [pytest.param(20, marks=pytest.mark.long), 2])
def test_a_search_killed_at_any_change_comes_to_the_same_decisions(
    tried: int, settings: AutoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what a kill would leave at random moments the same command comes to what an uninterrupted one decided.

    Times are given here, not measured, because decisions follow them. `pytest -m long` tries twenty moments.
    """
    own = budget.timed_samples
    monkeypatch.setattr(budget, "time_step", lambda *_: StepTime(0.05, 0.1))
    monkeypatch.setattr(budget, "timed_samples", lambda plain, prompts, answers: (own(plain, prompts, answers)[0], 0.5))
    give_costs(monkeypatch, 0.1)
    monkeypatch.setattr(tuning, "measure_costs", lambda *_: costs_of(0.1))
    monkeypatch.setattr(auto, "why_over", lambda *_: None)
    with recorded_changes(settings.out) as states:
        run(settings)

    def decisions() -> tuple[AutoState, set[str]]:
        measured = ("comparison", "export")  # what stands in these follows times that are measured
        kept = {name for name in contents(settings.out) if not name.endswith(".lock")}
        return read_sealed(AutoState, settings.out / "auto.json", ""), {n for n in kept if not n.startswith(measured)}

    expected = decisions()
    assert expected[0].final is not None
    for number in sorted(random.Random(0).sample(range(len(states)), tried)):
        restore(settings.out, states[number])
        run(settings)
        assert decisions() == expected, f"killed before change {number} of {len(states)}"


@pytest.mark.long
def test_two_processes_search_together(python: str, settings: AutoSettings) -> None:
    """Both answer and train; the first one alone decides and tells."""
    start = [python, "-m", "accelerate.commands.launch", "--config_file", str(LAUNCH / "cpu.yaml")]
    start += ["--main_process_port", "0", "-m", "draftsmith.recipes.cli.main", "auto", "--target", str(settings.target)]
    start += ["--traffic", settings.traffic, "--drafters", settings.drafters, "--max-new-tokens", "16"]
    start += ["--budget", "0.001", "--device", "cpu", "--out", str(settings.out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("how it was found") == 1
    state = read_sealed(AutoState, settings.out / "auto.json", "")
    assert len(state.rungs) == 1 or state.over


def test_what_changes_the_output_is_not_exported(settings: AutoSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the finalists the best and what is exported are certified; where the latter fails, it stays where it is."""
    certified: list[str] = []

    def failing(evaluations: list[Evaluation], drafters: dict[str, Drafter], *_: Any) -> list[Evaluation]:
        certified.extend(drafters)
        failed = Certificate(greedy={}, sampled={}, passed=False, control_found=True)
        return [replace(each, certificate=failed if each.drafter in drafters else None) for each in evaluations]

    monkeypatch.setattr(comparison, "with_certificates", failing)
    monkeypatch.setattr(result, "does_pay", lambda measured: measured.drafter == "ngram")
    give_costs(monkeypatch, 20.0)
    assert "ngram did not pass its certificate of losslessness: nothing is exported" in run(settings)
    assert certified == ["ngram"]
    assert not (settings.out / "export").exists()


@pytest.mark.parametrize(
    ("draft_ms", "kind", "rows", "schedule"),
    [
        (2.0, "eagle3", [(1, 2), (8, 2)], Schedule(((1, 2), (8, 2)))),  # 1.96 / 1.4 is more than 2.31 / 1.8
        (0.0, "eagle3", [(1, 4), (8, 4)], Schedule(((1, 4), (8, 4)))),
        (9.0, "eagle3", [(1, 2), (8, 2)], Schedule(((1, 0), (8, 0)))),
        (2.0, "medusa", [(8, 2)], None),  # vLLM cannot change the number of heads
    ],
)
def test_drafts_are_served_by_the_times_of_the_engine_that_was_timed(
    draft_ms: float,
    kind: str,
    rows: list[tuple[int, int]],
    schedule: Schedule | None,
    settings: AutoSettings,
    tiny_target: Target,
) -> None:
    """Whatever the bundled decoder's own times say: by them nothing pays at eight requests."""
    folder, score = SearchFolder(settings.out), score_of("eagle3", 2.0)
    write_json(folder.costs_file("eagle3"), to_json(costs_of(draft_ms)))
    grid = [(size, cost, length) for size, cost in ((1, 1.0), (8, 99.0)) for length in (2, 4)]
    measured = [typed_result(0.6, cost, length=length, batch_size=size) for size, cost, length in grid]
    name = folder.drafter_of("eagle3", score.steps)
    environment = Environment({}, "cpu", 1, "float32", None, None, "")
    evaluation = Evaluation(target="t", drafter=name, drafter_kind=kind, environment=environment, results=measured)
    state = SimpleNamespace(finalists=[score])
    timed = replace(settings, engine="vllm", check="venv", batch_size=8)
    found = SearchResult(timed, tiny_target, state, ServingLoad(8, 100), Console())  # type: ignore[arg-type]
    kept, found_schedule = found.served_drafts(evaluation)
    assert [(row.setting.batch_size, row.setting.draft_length) for row in kept.results] == rows
    assert found_schedule == schedule


def test_what_broke_the_sla_is_not_served(settings: AutoSettings, tiny_target: Target) -> None:
    """Of four drafted tokens the tokens come late, though they are more a second."""
    rows = [measured("medusa", speedup, tpot, 20).results[0] for speedup, tpot in ((2.0, 9.0), (1.5, 4.0))]
    lengths = [replace(row, setting=replace(row.setting, draft_length=n)) for row, n in zip(rows, (4, 2), strict=True)]
    evaluation = replace(measured("medusa", 1.0, 1.0), results=lengths)
    load = ServingLoad(1, 100, Sla(tpot_ms=5.0))
    state: Any = SimpleNamespace(finalists=[])
    kept, _ = SearchResult(settings, tiny_target, state, load, Console()).served_drafts(evaluation)
    assert [row.setting.draft_length for row in kept.results] == [2]


def test_kinds_that_the_timed_engine_lacks_do_not_race(
    settings: AutoSettings, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vLLM of 0.33 has no Medusa; where it has none of the kinds, the search ends with that."""

    def costs(self: Any, name: str, *_: Any) -> Costs:
        if name == "medusa":
            raise UserError("vLLM failed: no such method")
        return costs_of(0.1)

    monkeypatch.setattr(auto.EngineTimes, "costs", costs)
    search = Auto(replace(settings, dry_run=True), Console(quiet=True))
    search.settings = replace(settings, engine="vllm", check="venv")
    del search.engine  # that there was none
    shutil.rmtree(settings.out / "costs")
    drafters = {kind: untrained(kind, tiny_target) for kind in ("medusa", "eagle3")}
    assert list(search.served_by_timed_engine(drafters)) == ["eagle3"]
    assert "medusa does not race: vLLM failed" in capsys.readouterr().err
    with pytest.raises(UserError, match="--check venv serves none of --drafters medusa,hydra"):
        search.served_by_timed_engine({"medusa": drafters["medusa"]})


def test_a_folder_whose_name_misleads_vllm_is_refused_before_anything_is_trained(settings: AutoSettings) -> None:
    with pytest.raises(UserError, match="vLLM would take the drafter for 'eagle3' by this name"):
        Auto(replace(settings, out=settings.out / "eagle3-study", drafters="medusa"), Console(quiet=True))


def test_a_lookup_that_the_engine_does_not_serve_is_no_rival(
    settings: AutoSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    search = Auto(replace(settings, engine="sglang", drafters="eagle3"), Console(quiet=True))
    assert search.rivals() == ["ngram"]
    assert "suffix is no rival: sglang does not serve it" in capsys.readouterr().err


def test_no_running_server_can_check_what_a_search_will_find(settings: AutoSettings) -> None:
    with pytest.raises(UserError, match="--check: no running server has the drafter yet.*`draftsmith export --check`"):
        replace(settings, engine="vllm", check="http://localhost:8000").refuse_mistakes()


def test_what_a_search_was_asked_for_can_be_given_again() -> None:
    """The words of the message are flags that are parsed to the same settings."""
    given = AutoSettings(traffic="t.jsonl", keep_personal_data=True, temperature=0.5, out=Path("out"))
    words = auto.asked(given).split()
    parsed = parse(["auto", *words, "--out", "out"]).settings
    assert isinstance(parsed, AutoSettings)
    assert parsed == given


def test_a_dry_run_trains_nothing(settings: AutoSettings) -> None:
    text = run(replace(settings, dry_run=True))
    assert "a step takes: medusa" in text
    assert "pays where drafted tokens are accepted at a rate of: medusa 0." in " ".join(text.split())
    assert sorted(path.name for path in settings.out.iterdir()) == ["auto.json", "costs", "prompts"]


def test_kinds_that_cannot_pay_do_not_train(settings: AutoSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting one token takes twice a plain step: lookups alone are measured."""
    give_costs(monkeypatch, 20.0)
    text = " ".join(run(settings).split())
    assert "medusa none is enough, it does not race" in text
    assert "no kind can pay at this load" in (settings.out / "auto.html").read_text()
    state = read_sealed(AutoState, settings.out / "auto.json", "")
    assert (state.rungs, state.final, [score.name for score in state.finalists]) == ([], None, ["ngram", "suffix"])


def test_what_is_measured_at_the_end_is_measured_at_smaller_batches_too(
    settings: AutoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the schedule; and a cascade of the winner, which no engine serves, is among it where none is named."""
    monkeypatch.setattr(auto, "why_over", lambda *_: None)
    give_costs(monkeypatch, 0.1)
    run(replace(settings, batch_size=3, drafters="medusa"))
    found = {path.parent.name: read_evaluation(path) for path in settings.out.glob("comparison/*/evaluation.json")}
    assert len(found) == 4
    assert {evaluation.drafter_kind for evaluation in found.values()} == {"medusa", "cascade", "ngram", "suffix"}
    for evaluation in found.values():
        assert {row.setting.batch_size for row in evaluation.results} == {1, 2, 3}
    tuned = read_sealed(AutoState, settings.out / "auto.json", "").tuned
    assert tuned
    assert not tuned.drafts
    assert "were tried: measuring costs needs" in tuned.text  # more tokens than this target's context has


def test_other_drafts_of_the_winner_are_measured_where_they_are_predicted_to_pay(
    settings: AutoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees cost little and are accepted more: one is measured at the load alone, and is not among what engines get."""
    monkeypatch.setattr(auto, "why_over", lambda *_: None)
    give_costs(monkeypatch, 0.1)
    monkeypatch.setattr(tuning, "measure_costs", lambda *_: costs_of(0.1))
    run(replace(settings, batch_size=2, drafters="medusa"))
    state = read_sealed(AutoState, settings.out / "auto.json", "")
    assert state.tuned
    assert state.tuned.tree
    found = [read_evaluation(path) for path in settings.out.glob("comparison/*/evaluation.json")]
    trees = {e.drafter_kind: [row.setting for row in e.results if row.setting.tree_nodes] for e in found}
    assert {kind for kind, rows in trees.items() if rows} == {"medusa"}
    assert [(row.batch_size, row.tree_nodes) for row in trees["medusa"]] == [(2, state.tuned.tree.num_nodes)]
    assert "predicted at draft length" in (settings.out / "auto.html").read_text()
    assert {row.setting.tree_nodes for e in chains_alone(found) for row in e.results} == {None}


def test_what_was_tuned_is_read_as_it_was_written() -> None:
    """A search goes on after it tuned its winner."""
    tuned = TunedDrafts("told", StaticTree(((0,), (1,), (0, 0))), Confident(longest=8, least=0.15))
    assert from_json(TunedDrafts, json.loads(json.dumps(to_json(tuned)))) == tuned


def test_a_drafter_is_left_out_of_drafts_that_it_cannot_make(tiny_target: Target, tmp_path: Path) -> None:
    """Medusa has three heads here: drafts of five tokens are measured with a lookup alone, or refused."""
    save_drafter(untrained("medusa", tiny_target, num_heads=3), tmp_path / "medusa")
    names, prompts = [str(tmp_path / "medusa"), "ngram"], [PromptSet("p", [[5, 6, 7, 5, 6]])]
    grid = [MeasureSettings(draft=length, max_new_tokens=8, repeats=1) for length in (2, 5)]
    options = comparison.EvaluationOptions(skips_impossible=True)
    medusa, ngram = comparison.evaluate_side_by_side(tiny_target, names, prompts, grid, tmp_path / "out", options)
    assert [row.setting.draft_length for row in medusa.results] == [2]
    assert [row.setting.draft_length for row in ngram.results] == [2, 5]
    with pytest.raises(UserError, match="5"):
        comparison.evaluate_side_by_side(tiny_target, names, prompts, grid, tmp_path / "other")
    options = comparison.EvaluationOptions(drafts={names[0]: [2], "ngram": [5]})
    own = comparison.evaluate_side_by_side(tiny_target, names, prompts, grid, tmp_path / "own", options)
    assert [[row.setting.draft_length for row in each.results] for each in own] == [[2], [5]]


def test_drafts_of_different_lengths_take_turns(tiny_target: Target, tmp_path: Path) -> None:
    """All stand beside the same plain decoding, and accept what they accept alone.

    `suffix` would accept more if it remembered the answer that it had just written with drafts of another length.
    """
    prompts = [PromptSet("p", [tiny_target.encode(text) for text in ("a b a b", "def f(", "iron", "so it is")])]
    grid = [MeasureSettings(batch_size=size, draft=n, max_new_tokens=24, repeats=1) for size in (1, 2) for n in (2, 5)]
    options = comparison.EvaluationOptions(drafts={"suffix": [2, 5], "ngram": [5]})
    together = comparison.evaluate_side_by_side(
        tiny_target, ["suffix", "ngram"], prompts, grid, tmp_path / "own", options
    )
    rows = [row for evaluation in together for row in evaluation.results]
    assert [len(evaluation.results) for evaluation in together] == [4, 2]
    for size in (1, 2):
        assert len({row.speed.baseline_tokens_per_second for row in rows if row.setting.batch_size == size}) == 1
    alone = comparison.evaluate_side_by_side(tiny_target, ["suffix", "ngram"], prompts, grid, tmp_path / "alone")
    expected = {(each.drafter, row.setting): row.acceptance for each in alone for row in each.results}
    for each in together:
        assert all(row.acceptance == expected[each.drafter, row.setting] for row in each.results)


def test_a_search_goes_on_for_its_own_target_alone(settings: AutoSettings, tmp_path: Path) -> None:
    """Answers and scores of other weights, under the same name, would mix with those of these."""
    target = tmp_path / "target"
    shutil.copytree(str(settings.target), target)
    settings = replace(settings, target=str(target), drafters="medusa", dry_run=True)
    run(settings)
    run(settings)
    weights = load_file(target / "model.safetensors")
    save_file({name: 1.1 * weights[name] for name in weights}, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="holds a search for .*target with other weights, config or dtype: give that"):
        run(settings)


@pytest.mark.parametrize(
    ("drafters", "reason"),
    [
        ("eagle3@2,draft_model@1", ""),
        ("eagle3@0", "--drafters eagle3@0: the number of layers"),
        ("eagle3@two", "--drafters eagle3@two: the number of layers"),
        ("mlp_speculator@2", "mlp_speculator has no number of layers to choose: leave out @2"),
        ("eagle4@2", "choose from"),
    ],
)
def test_sizes_are_named_with_their_kinds(drafters: str, reason: str, settings: AutoSettings) -> None:
    with pytest.raises(UserError, match=reason) if reason else contextlib.nullcontext():
        asked = replace(settings, drafters=drafters)
        asked.refuse_mistakes()
        served_kinds(asked)
    if not reason:
        assert isinstance(layers := budget.recipe_of_auto("eagle3@2", small=True).drafter, Eagle3Config)
        assert layers.num_layers == 2


def test_an_engine_lets_only_those_race_that_it_serves(settings: AutoSettings) -> None:
    found = auto.Auto(replace(settings, engine="sglang", drafters="eagle3,hydra,medusa", dry_run=True), Console())
    assert list(found.state.plan.step_seconds) == ["eagle3"]
