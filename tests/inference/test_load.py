"""The load test with a clock that ticks when it is read: arrivals, what is counted, and what is made of it."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from load_tests import stage, stage_at_rate

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.decoding.schedule import Adaptive, Schedule, schedule_from_json
from draftsmith.inference.measuring.results import Percentiles
from draftsmith.inference.traffic.load_test import Contender, LoadSettings, LoadTest, run_load_test
from draftsmith.inference.traffic.requests import (
    Lengths,
    Load,
    check_output_lengths,
    check_prompt_lengths,
    plan_requests,
)
from draftsmith.inference.traffic.serving import Answer, Clock, ServedRun, Step, serve
from draftsmith.inference.traffic.stages import (
    Sla,
    StageResult,
    gains,
    latency_text,
    operating_points,
    stage_result,
    time_running,
    verdict,
)
from draftsmith.models import DRAFTERS, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.recipes.cli.main import main, parse
from draftsmith.recipes.studies.load_test import load_settings

BASE = ["load-test", "--target", "t", "--drafter", "d", "--prompts", "p", "--out", "o"]
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17], [18]]


class Ticking:
    """A clock that goes on by a millisecond whenever it is read, and by what is waited."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        self.seconds += 0.001
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    def clock(self) -> Clock:
        return Clock(self.now, self.wait)


def decoder_of(name: str, target: Target) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, load_drafter(name, target))


def test_arrivals_are_poisson() -> None:
    """Gaps have mean and standard deviation 1 / rate and no memory; the plan depends on the seed alone."""
    plan = plan_requests(Load("rate", 4.0), PROMPTS, 20_000, 8, seed=1)
    gaps = np.diff([sent.seconds for sent in plan])
    assert plan[0].seconds == 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
    assert (gaps > 0.25).mean() == pytest.approx(np.exp(-1), abs=0.015)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    assert {sent.prompt for sent in plan} == {0, 1, 2, 3}
    assert plan == plan_requests(Load("rate", 4.0), PROMPTS, 20_000, 8, seed=1)
    assert plan != plan_requests(Load("rate", 4.0), PROMPTS, 20_000, 8, seed=2)
    slower = plan_requests(Load("rate", 2.0), PROMPTS, 20_000, 8, seed=1)  # the same requests, further apart
    assert [sent.prompt for sent in plan] == [sent.prompt for sent in slower]
    assert [2 * sent.seconds for sent in plan] == pytest.approx([sent.seconds for sent in slower])


def test_lengths_are_those_asked_for() -> None:
    """Prompts of the nearest length, limits cut at the most; half of a lognormal lies below its median."""
    lengths = Lengths(20, 0.5).draw(np.random.default_rng(0), 20_000)
    assert np.median(lengths) == pytest.approx(20, abs=1)
    assert np.log(lengths).std() == pytest.approx(0.5, abs=0.02)
    plan = plan_requests(Load("rate", 1.0), PROMPTS, 500, 30, 0, Lengths(2, 0.0), Lengths(20, 0.5))
    assert {sent.prompt for sent in plan} == {1}
    assert max(sent.max_new_tokens for sent in plan) == 30
    assert 1 <= min(sent.max_new_tokens for sent in plan) < 20


def share_refused(check: Callable[[], None]) -> float:
    """The percentage that the refusal names."""
    with pytest.raises(UserError) as error:
        check()
    return float(str(error.value).split(": ", 1)[1].split(" %")[0])


def test_lengths_that_cannot_be_had_are_refused() -> None:
    """Prompts of 8 to 30 tokens stand for 8 / 1.5 to 30 * 1.5, a limit of 32 for answers of up to 48."""
    prompts = [[1] * length for length in range(8, 31)]
    check_prompt_lengths(Lengths(20, 0.2), prompts)
    assert share_refused(lambda: check_prompt_lengths(Lengths(400, 0.1), prompts)) == 100
    assert share_refused(lambda: check_prompt_lengths(Lengths(2, 0.1), prompts)) == 100
    outside = 1 - (NormalDist().cdf(math.log(45 / 20)) - NormalDist().cdf(math.log(8 / 1.5 / 20)))
    found = share_refused(lambda: check_prompt_lengths(Lengths(20, 1.0), prompts))
    assert found == pytest.approx(100 * outside, abs=2)
    check_output_lengths(Lengths(20, 0.5), 32)
    beyond = 1 - NormalDist().cdf(math.log(48 / 100) / 0.5)
    assert share_refused(lambda: check_output_lengths(Lengths(100, 0.5), 32)) == pytest.approx(100 * beyond, abs=1)


@pytest.mark.parametrize("load", [Load("rate", 40.0), Load("rate", 0.5), Load("concurrency", 3)])
@pytest.mark.parametrize("name", ["none", "ngram"])
def test_a_run(name: str, load: Load, tiny_target: Target) -> None:
    """Every request is answered as alone; its times are in order, and queue, prefill and decoding add up."""
    decoder, ticking = decoder_of(name, tiny_target), Ticking()
    settings = resolve_settings(decoder.drafter, Sampling(), 12, 3)
    plan = plan_requests(load, PROMPTS, 12, 12, 0, output_lengths=Lengths(8, 0.5))
    clock = ticking.clock()
    generation = Generation(decoder.engine_for(settings, 3, 7), now=clock.now)
    run = serve(generation, plan, PROMPTS, load, clock)
    alone = decoder_of("none", tiny_target)
    for sent, answer in zip(plan, run.answers, strict=True):
        expected = alone.generate([PROMPTS[sent.prompt]], sent.max_new_tokens).token_ids[0]
        assert answer.token_ids == expected
        assert answer.num_prompt_tokens == len(PROMPTS[sent.prompt])
        assert answer.arrived <= answer.admitted < answer.first_token <= answer.finished
        queue, prefill = answer.admitted - answer.arrived, answer.first_token - answer.admitted
        decoding = (answer.tpot or 0.0) * (len(answer.token_ids) - 1)
        assert answer.ttft == pytest.approx(queue + prefill)
        assert answer.finished - answer.arrived == pytest.approx(queue + prefill + decoding)
        if load.mode == "rate":
            assert answer.arrived == sent.seconds  # not when the decoder had time to look
    assert max(step.num_running for step in run.steps) <= 3
    assert sum(step.num_tokens for step in run.steps) == sum(len(answer.token_ids) for answer in run.answers)
    if load.mode == "concurrency":  # a client sends when its last answer has come
        events = sorted(itertools.chain(*(((a.arrived, 1), (a.finished, -1)) for a in run.answers)))
        assert max(itertools.accumulate(change for _, change in events)) == 3
    elif load.value == 0.5:
        assert all(answer.admitted - answer.arrived < 0.1 for answer in run.answers)  # nobody else is there
        assert run.steps[-1].ended > plan[-1].seconds > 5  # and it waited for them
    counted = stage_result(load, name, [run], Sla()).num_counted
    assert counted == (9 if load.mode == "concurrency" else 10)  # of 12, without the warm-up


def answer(arrived: float, queue: float, prefill: float, tpot: float, num_tokens: int) -> Answer:
    first = arrived + queue + prefill
    return Answer(arrived, arrived + queue, first, first + tpot * (num_tokens - 1), [0] * num_tokens, 30 - num_tokens)


def test_what_a_stage_shows() -> None:
    """Ten requests a second apart, of which two warm up; the sixth waits long, the eighth decodes slowly."""
    answers = [answer(float(i), 0.1, 0.2, 0.01, 11) for i in range(10)]
    answers[0] = answer(0.0, 50.0, 0.2, 1.0, 11)  # counts nowhere
    answers[5] = answer(5.0, 1.1, 0.2, 0.01, 11)
    answers[7] = answer(7.0, 0.1, 0.2, 0.05, 11)
    steps = [Step(i - 0.5, i + 0.5, 11, 2) for i in range(11)]
    run = ServedRun(answers, steps, Stats(2, num_drafts=4, num_draft_tokens=8, num_accepted_tokens=6, num_rounds=8))
    shown = stage_result(Load("rate", 1.0), "on", [run, run], Sla(ttft_ms=400, tpot_ms=20))
    assert shown.num_counted == 16
    assert shown.seconds == pytest.approx(2 * 7)  # from the third arrival to the tenth
    assert shown.throughput_tokens_per_second == pytest.approx(11)  # 7 steps begin between them
    assert shown.mean_running == pytest.approx(2)
    ttft = [300.0] * 7 + [1300.0]
    assert list(vars(shown.ttft_ms).values()) == pytest.approx([np.percentile(ttft * 2, q) for q in (50, 95, 99)])
    assert shown.tpot_ms.p50 == pytest.approx(10)
    assert shown.queue_ms.p50 == pytest.approx(100)
    assert shown.prefill_ms.p99 == pytest.approx(200)
    assert (shown.prompt_tokens.p50, shown.output_tokens.p95) == (19, 11)
    assert shown.sla_share == pytest.approx(6 / 8)
    assert shown.requests_per_second == pytest.approx(1)
    assert shown.goodput_requests_per_second == pytest.approx(6 / 8)
    assert shown.within_sla is None  # of 16 requests a 95th percentile is only the slowest
    assert stage_result(Load("rate", 1.0), "on", [run, run, run], Sla(400, 20)).within_sla is False
    assert stage_result(Load("rate", 1.0), "on", [run, run, run], Sla(2000, 60)).within_sla is True
    assert stage_result(Load("rate", 1.0), "on", [run], Sla()).within_sla is True
    assert [repeat.goodput_requests_per_second for repeat in shown.repeats] == pytest.approx([6 / 8, 6 / 8])
    closed = stage_result(Load("concurrency", 4), "on", [run], Sla())
    assert closed.num_counted == 6  # the first of each client is left out
    assert closed.seconds == pytest.approx(9.4 - 4)  # until the last is answered, and its client is idle
    assert closed.requests_per_second == pytest.approx(6 / 5.4)
    assert (shown.mean_acceptance_length, shown.mean_draft_length) == (2.5, 1.0)


def test_a_request_of_the_warm_up_may_end_the_time_that_counts() -> None:
    """Of two clients the one that is still answered its first request has none left when the last one arrives."""
    times = [(0.0, 7.0), (0.0, 2.0), (2.0, 4.0), (4.0, 6.0), (6.0, 12.0)]
    answers = [Answer(arrived, arrived, arrived + 1, finished, [0, 0], 1) for arrived, finished in times]
    run = ServedRun(answers, [Step(2.0, 7.0, 4, 2)], Stats(2))
    assert stage_result(Load("concurrency", 2), "on", [run], Sla()).seconds == 5


def test_answers_of_one_token_are_one_line() -> None:
    run = ServedRun([answer(float(i), 0.1, 0.2, 0.01, 1) for i in range(10)], [Step(0.0, 9.0, 11, 2)], Stats(2))
    with pytest.raises(UserError, match="every answer ended with its first token"):
        stage_result(Load("rate", 1.0), "on", [run], Sla())


@pytest.mark.parametrize(
    ("num_counted", "text"), [(19, "9.5/–/–"), (20, "9.5/20/–"), (99, "9.5/20/–"), (100, "9.5/20/30")]
)
def test_a_percentile_needs_a_request_beyond_it(num_counted: int, text: str) -> None:
    assert latency_text(Percentiles(9.5, 20.0, 30.0), num_counted) == text


@pytest.mark.parametrize(
    ("words", "num_requests"), [("--rate 1", 50), ("--concurrency 1 4", 50), ("--concurrency 16 8", 128)]
)
def test_every_client_sends_eight_requests(words: str, num_requests: int) -> None:
    assert load_settings(parse([*BASE, *words.split()]).settings).num_requests == num_requests


def test_idle_time_is_no_running_time() -> None:
    """Steps end at 1 and at 5 s and the second took 1 s: between them nothing ran."""
    assert time_running([Step(0.0, 1.0, 1, 3), Step(4.0, 5.0, 1, 2)], 0.5, 4.5) == pytest.approx(0.5 * 3 + 0.5 * 2)


def test_operating_point_and_verdict() -> None:
    """The largest throughput within the SLA, and the load from which speculation no longer pays."""
    speeds = {1: (100, 180), 4: (300, 400), 8: (500, 450), 16: (600, 500)}
    stages = []
    for load, (off, on) in speeds.items():
        stages += [stage(load, "off", off, 10.0), stage(load, "on", on, 10.0, within_sla=load < 16)]
    points = operating_points(stages)
    assert points["off"]
    assert points["on"]
    assert (points["off"].load, points["on"].load) == (16, 8)
    four, eight = "speculation pays up to 4 requests at once (1.33x [1.33, 1.34])", "(0.90x [0.90, 0.90])"
    assert verdict(stages) == f"{four}; it does not pay at 8 {eight}"
    assert verdict(stages[:4]) == f"{four}, the highest load tried"
    assert verdict(stages[4:]) == f"speculation does not pay at 8 requests at once {eight}"
    assert operating_points([stage(1, "on", 5.0, 1.0, within_sla=False)]) == {"on": None}
    at_rate = [stage_at_rate(2.0, name, 50, tpot) for name, tpot in (("off", 12.0), ("on", 8.0))]
    assert verdict(at_rate).startswith("speculation pays up to 2 requests a second (1.50x")


def test_a_gain_is_over_the_same_way_of_reading_prompts() -> None:
    speeds = {"off": 100, "on": 120, "off, in chunks": 80, "on, in chunks": 88}
    stages = [stage(1, name, speed, 10.0) for name, speed in speeds.items()]
    assert gains(stages, "on")[1].ratio == pytest.approx(1.2)
    assert gains(stages, "on, in chunks")[1].ratio == pytest.approx(1.1)


def test_a_gain_within_the_spread_of_repeats_is_not_called_one() -> None:
    """Student's interval of three differences -1, 11 and 23: 11 plus or minus 4.303 x 12 / sqrt(3), over 100."""
    off = stage(1, "off", 100, 10.0, spread=(1.0, 1.0, 1.0))
    stages = [off, stage(1, "on", 111, 10.0, spread=(99 / 111, 1.0, 123 / 111))]
    assert verdict(stages) == "speculation shows no clear gain at 1 request at once (1.11x [0.81, 1.41])"
    faster_each_time = [off, stage(1, "on", 111, 10.0, spread=(101 / 111, 1.0, 121 / 111))]
    assert "no clear gain" in verdict(faster_each_time)  # three of three by chance is one time in eight
    single = [stage(1, name, speed, 10.0, spread=(1.0,)) for name, speed in (("off", 100), ("on", 150))]
    assert verdict(single) == "speculation has too few repeats to tell at 1 request at once (1.50x)"


def test_the_verdict_keeps_to_the_sla() -> None:
    """It called faster what missed the limits, and kept what eight requests cannot show."""

    def at(load: float, off: bool | None, on: bool | None, goodput: tuple[float, float]) -> list[StageResult]:
        return [
            stage(load, "off", 100, 10.0, off, goodput=goodput[0]),
            stage(load, "on", 150, 10.0, on, goodput=goodput[1]),
        ]

    paying = at(1, True, True, (1.0, 1.0))
    assert verdict([*paying, *at(4, True, False, (1.0, 0.5))]) == (
        "speculation pays up to 1 request at once (1.50x [1.49, 1.51]); it misses the SLA at 4 (0.50x [0.49, 0.51])"
    )
    assert "misses the SLA, as plain decoding does, at 4" in verdict(at(4, False, False, (0.5, 0.6)))
    assert "pays up to 4 requests at once (1.20x" in verdict(at(4, False, True, (1.0, 1.2)))
    assert "pays up to 4 requests at once (plain decoding keeps none)" in verdict(at(4, False, True, (0.0, 1.2)))
    assert "too few requests to judge the SLA (48 counted, 20 needed)" in verdict(at(4, None, None, (1.0, 1.0)))
    assert operating_points(at(4, None, None, (1.0, 1.0))) == {"off": None, "on": None}


def test_on_off_and_scheduled_give_the_same_texts(tiny_target: Target) -> None:
    """Every contender serves the same requests of every stage and repeat, and answers them alike."""
    medusa = DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), tiny_target).eval()
    contenders = []
    for name, drafter, draft in (
        ("off", load_drafter("none", tiny_target), 0),
        ("on", medusa, 3),
        ("scheduled", medusa, Schedule(((1, 3), (2, 0)))),
    ):
        settings = resolve_settings(drafter, Sampling(), 6, draft)
        contenders.append(Contender(name, SpeculativeDecoder(tiny_target, drafter), settings))
    loads = LoadSettings((Load("concurrency", 1), Load("concurrency", 2)), num_requests=6, repeats=2)
    stages, answers = run_load_test(contenders, PROMPTS, loads, Ticking().clock())
    assert answers["on"] == answers["scheduled"] == answers["off"]
    assert len(answers["off"]) == 2 * 2 * 6
    names = ("off", "on", "scheduled")
    assert [(stage.load, stage.contender) for stage in stages] == list(itertools.product((1, 2), names))
    assert [stage.mean_draft_length > 0 for stage in stages] == [False, True, True, False, True, False]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--rate 1 --concurrency 1",
        "--concurrency 1 --max-batch 4",
        "--concurrency 8 --requests 12",
        "--rate 1 --output-lengths 0 1",
        "--rate 1 --output-lengths 100 0.1",
        "--rate 1 --drafter ngram",
    ],
)
def test_settings_that_would_be_ignored_are_refused(words: str) -> None:
    settings = parse([*BASE, *words.split()]).settings
    with pytest.raises(UserError, match="--"):
        load_settings(settings) if "lengths" in words else settings.refuse_mistakes()


@pytest.mark.parametrize("words", ["--rate 0", "--rate 1 --temperature 0 1", "--rate 1 --tree 4,2,2"])
def test_flags_that_it_does_not_take_are_refused(words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([*BASE, *words.split()])


def test_the_command(tiny_target: Target, tmp_path: Path) -> None:
    """From prompts to load.json, its figure and a verdict; without a schedule it measures costs for one."""
    (tmp_path / "p.txt").write_text("def f(x):\nThe smith heats the iron\n")
    words = ["--target", tiny_target.name, "--drafter", "ngram", "--prompts", str(tmp_path / "p.txt")]
    more = ["--concurrency", "1", "2", "--requests", "10", "--repeats", "1", "--max-new-tokens", "12"]
    more += ["--sla-tpot-ms", "1e6", "--prefill-chunk", "3", "--wait-ms", "1", "--device", "cpu"]
    assert main(["load-test", *words, *more, "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out/load.json").read_text())
    assert to_json(from_json(LoadTest, content)) == content
    assert [(row["load"], row["contender"]) for row in content["stages"]] == list(
        itertools.product((1, 2), (names := ("off", "on", "scheduled", "off, in chunks", "on, in chunks")))
    )
    assert content["identical"] == dict.fromkeys(names[1:], {"checked": 20, "identical": 20})
    assert content["operating_points"].keys() == set(names)
    schedule = schedule_from_json(content["schedule"])
    assert isinstance(schedule, Adaptive)
    assert schedule.candidates == (0, 1, 2, 4)
    assert (tmp_path / "out/load.png").read_bytes()[:4] == b"\x89PNG"
