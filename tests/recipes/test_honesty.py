"""Ratios that can be trusted: equal tokens, turns, a known drafter's known figures, intervals that cover."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from statistics import NormalDist

import numpy as np
import pytest
from families import target_and_plain_model
from torch import Tensor

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.counters import Interval, Stats, length_interval
from draftsmith.inference.decoding.decoder import Output, OutputStats, RequestTimes, Timing
from draftsmith.inference.measuring.bandwidth import bandwidth_floor_share
from draftsmith.inference.measuring.baselines import Baseline, make_baselines
from draftsmith.inference.measuring.interleaving import decode_in_turns, repeats_within
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.inference.measuring.speed import (
    bootstrap_ratio,
    counted,
    decode_speed,
    first_token_parts,
    milliseconds_per_round,
    time_per_token,
)
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_parts.drafts import DecodingState, Draft
from draftsmith.models.sampling.trees import Shape
from draftsmith.models.training_free.ngram import Ngram

TEXTS = ["a b a b a b", "def f(", "iron iron iron", "heats it again, and", "x", "return [", "strikes", "cheap to"]


class Clock:
    """Time passes only where a test says so: seconds of each draft and each verification; a plain step takes 1."""

    def __init__(self) -> None:
        self.now, self.costs = 0.0, {"draft": 0.0, "verify": 1.0}

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, draft, verify = Clock(), BatchEngine.draft, BatchEngine.verify

    def timed_draft(engine: BatchEngine, draft_length: int | None = None) -> Draft:
        clock.now += clock.costs["draft"] if engine.settings.shape.depth else 0
        return draft(engine, draft_length)

    def timed_verify(engine: BatchEngine, drafted: Draft) -> Tensor:
        clock.now += clock.costs["verify"] if engine.settings.shape.depth else 1.0
        return verify(engine, drafted)

    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", clock)
        patch.setattr(BatchEngine, "draft", timed_draft)
        patch.setattr(BatchEngine, "verify", timed_verify)
        yield clock


def prompt_set(target: Target, count: int = 4) -> PromptSet:
    return PromptSet("some", [target.encode(text) for text in (TEXTS * count)[:count]])


def untrained_medusa(target: Target) -> Drafter:
    return DRAFTERS["medusa"].from_target(DRAFTERS["medusa"].config_class(kind="medusa"), target).eval()


# --- a known drafter


def expected_rounds(chances: list[float], num_tokens: int) -> float:
    """Of writing so many tokens, where `chances[j]` is that of a round with j accepted ones."""
    rounds = [0.0]
    for n in range(1, num_tokens + 1):
        rounds.append(1 + sum(chance * rounds[max(0, n - 1 - j)] for j, chance in enumerate(chances)))
    return rounds[num_tokens]


def test_known_acceptance_gives_the_analytic_length_and_speedup(
    clock: Clock, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts kept at given chances, a round that costs 1.4 + 0.3 plain steps: both figures follow on paper."""
    monkeypatch.setattr(Target, "eos_token_ids", property(lambda self: []))
    rates, limit, clock.costs = (0.8, 0.6, 0.5), 41, {"draft": 0.3, "verify": 1.4}
    settings = MeasureSettings(
        draft=3, max_new_tokens=limit, repeats=1, verification_mode="synthetic", synthetic_rates=rates
    )
    prompts = prompt_set(tiny_target, 24)
    row = measure(tiny_target, {"d": untrained_medusa(tiny_target)}, prompts, settings)["d"]

    chances = [0.2, 0.8 * 0.4, 0.8 * 0.6 * 0.5, 0.8 * 0.6 * 0.5]
    length = 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.5
    deviation = np.sqrt(sum(p * (j + 1 - length) ** 2 for j, p in enumerate(chances)) / row.acceptance.num_drafts)
    assert abs(row.acceptance.mean_acceptance_length - length) < 3 * deviation
    speedup = (limit - 1) / (expected_rounds(chances, limit - 1) * 1.7)
    low, high = row.speed.speedup_ci95
    assert low <= speedup <= high
    assert high - low < 0.25
    assert astuple(row.speed.milliseconds_per_round) == pytest.approx((300, 1400, 0), abs=1e-6)
    assert row.speed.decode_speedup == pytest.approx(row.speed.speedup)  # reading a prompt took no time


class SlowNgram(Ngram):
    """Drafts the same, in as much time as a pass of the target takes."""

    clock: Clock

    def propose(self, state: DecodingState, shape: Shape) -> Draft:
        self.clock.now += 1.0
        return super().propose(state, shape)


def test_a_slowed_contender_shows_its_exact_ratio(clock: Clock, tiny_target: Target) -> None:
    fast = load_drafter("ngram", tiny_target)
    slow = SlowNgram(fast.config)
    slow.clock = clock
    rows = measure(tiny_target, {"fast": fast, "slow": slow}, prompt_set(tiny_target), MeasureSettings(repeats=2))
    assert rows["slow"].acceptance.mean_acceptance_length == rows["fast"].acceptance.mean_acceptance_length > 1
    assert rows["fast"].speed.speedup == pytest.approx(2 * rows["slow"].speed.speedup)
    assert rows["fast"].speed.milliseconds_per_round.draft == 0
    assert rows["slow"].speed.milliseconds_per_round.draft == pytest.approx(1000)


# --- equal tokens


def test_nothing_counts_behind_the_end_or_the_limit() -> None:
    assert counted([5, 6, 9, 7, 9], [9], 10) == [5, 6, 9]
    assert counted([5, 6, 9, 7], [9], 2) == [5, 6]
    assert counted([9], [9], 4) == [9]
    assert counted([5, 6, 7], [], 3) == [5, 6, 7]


class Chatty(Baseline):
    """Goes on behind the end of the text, at no cost of time."""

    def decode(self, prompt: list[int], settings: GenerationSettings, request_id: int) -> Output:
        output = super().decode(prompt, settings, request_id)
        return replace(output, token_ids=[ids + [7] * 50 for ids in output.token_ids])


@pytest.fixture
def ends_early(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The target's texts end at tokens that it does write: the ends of some answers, not of all."""
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    texts = plain.generate([tiny_target.encode(text) for text in TEXTS[:4]], 24, stop_at_eos=False).token_ids
    ends = [texts[0][5], texts[1][9]]
    monkeypatch.setattr(Target, "eos_token_ids", property(lambda self: ends))
    return ends


def test_all_contenders_emit_the_same_tokens(tiny_target: Target, ends_early: list[int]) -> None:
    """Greedy, with transformers' decoding beside ours, and with one that goes on behind the end."""
    config = DRAFTERS["draft_model"].config_class(kind="draft_model", num_layers=2)
    drafters: dict[str, Drafter] = {
        "ngram": load_drafter("ngram", tiny_target),
        "draft_model": DRAFTERS["draft_model"].from_target(config, tiny_target).eval(),
    }
    baselines = make_baselines(["generate", "assisted", "prompt_lookup"], tiny_target, drafters)
    generate = baselines[0]
    baselines.append(Chatty("chatty", generate.model, generate.eos_token_ids))
    settings = MeasureSettings(max_new_tokens=24, repeats=1)
    rows = measure(tiny_target, drafters, prompt_set(tiny_target), settings, baselines=baselines)
    assert set(rows["ngram"].baselines) == {"generate", "prompt_lookup", "chatty"}
    assert set(rows["draft_model"].baselines) == {"generate", "assisted", "prompt_lookup", "chatty"}
    emitted = rows["ngram"].acceptance.num_emitted_tokens
    assert 4 < emitted < 4 * 24  # some answers ended early
    for row in rows.values():
        assert row.acceptance.num_emitted_tokens == emitted
        assert row.lossless.identical == 4
        for baseline in row.baselines.values():
            assert (baseline.num_emitted_tokens, baseline.identical) == (emitted, 4)
            assert baseline.speedup_over_plain > 0


def test_transformers_decodes_families_without_its_usual_attention() -> None:
    """Gemma-2 caps scores, which the fused attention of torch cannot."""
    target, _ = target_and_plain_model("gemma2", {})
    (generate,) = make_baselines(["generate"], target, {})
    assert generate.model.config._attn_implementation == "eager"
    settings = MeasureSettings(max_new_tokens=12).resolve(load_drafter("none", target))
    expected = SpeculativeDecoder(target, load_drafter("none", target)).generate([[5, 6, 7]], 12)
    assert generate.decode([5, 6, 7], settings, 0).token_ids == expected.token_ids


def test_baselines_sample_alike_in_every_repeat(tiny_target: Target) -> None:
    (generate,) = make_baselines(["generate"], tiny_target, {})
    settings = MeasureSettings(1.0, max_new_tokens=12).resolve(load_drafter("none", tiny_target))
    prompt = tiny_target.encode("iron")
    texts = [generate.decode(prompt, settings, request).token_ids for request in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


# --- turns


def output(answers: list[list[int]], times: list[RequestTimes], rounds: int = 1, verify: float = 1.0) -> Output:
    stats = [Stats(0, num_rounds=rounds) for _ in answers]
    phases = {"draft": 0.0, "verify": verify, "host": 0.0}
    return Output(answers, [], OutputStats(stats), Timing(1.0, 0.1, phases, times))


def test_contenders_take_turns() -> None:
    """Each batch by all before the next; over batches and repeats each contender stands in each place equally often."""
    calls: list[tuple[str, int]] = []

    def decode(name: str, batch: list[int]) -> Output:
        calls.append((name, batch[0]))
        return output([[1]], [])

    runs = {name: lambda batch, name=name: decode(name, batch) for name in "abc"}
    found = decode_in_turns(runs, [[0], [1], [2]], repeats=2)
    assert {name: [len(batch) for batch in outputs] for name, outputs in found.items()} == {n: [2, 2, 2] for n in "abc"}
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)][1:]  # the first was the warm-up
    assert [{batch for _, batch in turn} for turn in turns] == [{0}, {1}, {2}] * 2
    for place in range(3):
        names = [turn[place][0] for turn in turns]
        assert {name: names.count(name) for name in "abc"} == {"a": 2, "b": 2, "c": 2}


def test_a_time_limit_chooses_the_repeats(clock: Clock, tiny_target: Target) -> None:
    for num_batches, expected in ((7, [2, 2, 4, 5, 6]), (8, [1, 1, 4, 5, 6])):
        found = [repeats_within(seconds, 10.0, 6, num_batches) for seconds in (-5.0, 9.0, 39.0, 40.0, 900.0)]
        assert found == expected

    def run(batch: list[int]) -> Output:
        clock.now += 2.0
        return output([[1]], [])

    seconds = 2 + 5 * 2 * 3.0  # the warm-up, and five repeats of three batches
    assert len(decode_in_turns({"a": run}, [[0], [1], [2]], 25, seconds)["a"][0]) == 5


# --- intervals and latencies


@pytest.mark.parametrize("count", [3, 5, 24])
def test_the_interval_of_a_speedup_covers(count: int) -> None:
    """Of 400 evaluations of one distribution, prompts of unequal length and gain, about 95 % hold the true ratio.

    Of so few as five batches plain percentiles do in 81 % of cases, of three in 73 %.
    """
    chance = np.random.default_rng(count)

    def draw(size: int) -> list[np.ndarray]:
        tokens = chance.integers(8, 65, size)
        plain = tokens * 0.01 * chance.lognormal(0, 0.1, size)
        return [tokens, plain / chance.lognormal(0.6, 0.3, size), tokens, plain]

    def ratio(drawn: list[np.ndarray]) -> float:
        tokens, seconds, plain_tokens, plain_seconds = (values.sum() for values in drawn)
        return float(tokens / seconds * plain_seconds / plain_tokens)

    truth = ratio(draw(400_000))
    intervals = [bootstrap_ratio(*(values.tolist() for values in draw(count))) for _ in range(400)]
    assert 0.91 <= share_that_covers(truth, intervals) <= 0.985


@pytest.mark.parametrize("count", [3, 4, 8, 16])
def test_the_interval_of_an_acceptance_length_covers(count: int) -> None:
    """Prompts of 10 to 40 drafts whose accepted tokens a draft vary by 0.5; percentiles cover 81 % of four."""
    chance = np.random.default_rng(count)

    def draw() -> list[Stats]:
        drafts = chance.integers(10, 40, count)
        accepted = drafts * chance.normal(1.1, 0.5, count).clip(0)
        return [Stats(4, num_drafts=n, num_accepted_tokens=m) for n, m in zip(drafts, accepted, strict=True)]

    mean = 1.1 * NormalDist().cdf(2.2) + 0.5 * NormalDist().pdf(2.2)  # of the normal distribution, cut at 0
    assert 0.91 <= share_that_covers(1 + mean, [length_interval(draw()) for _ in range(400)]) <= 0.985


def share_that_covers(truth: float, intervals: list[Interval]) -> float:
    return sum(low <= truth <= high for low, high in filter(None, intervals)) / len(intervals)


def test_latencies_are_those_of_requests() -> None:
    """As vLLM's: each request from its own first to its own last token, not the batch's longest."""
    times = [RequestTimes(0.1, 0.13, 0.5), RequestTimes(0.1, 0.12, 0.2), RequestTimes(0.1, None, 0.1)]
    outputs = [[output([[1] * 5, [1] * 3, [1]], times)]]
    assert time_per_token(outputs) == pytest.approx([100, 50])
    parts = first_token_parts(outputs, [0.001, 0.002, 0.009])
    assert astuple(parts) == pytest.approx((2, 100, 25))
    assert first_token_parts(outputs, []).tokenise is None


@pytest.mark.parametrize("pauses", [[0.0, 0.0, 7.0], [0.0, 3.0, 0.0, 7.0]])
def test_rounds_are_timed_as_the_speedup_is(pauses: list[float]) -> None:
    """A pause of one repeat is in neither: tokens a round over plain steps a round are the speedup of decoding."""

    def repeats(rounds: int, seconds: float, pauses: list[float]) -> list[Output]:
        answers, times = [[1] * 41], [RequestTimes(0.0, None, 1.0)]
        runs = [output(answers, times, rounds) for _ in pauses]
        phases = [{"draft": 0.0, "verify": 1000 * seconds, "host": 1000 * pause} for pause in pauses]
        timings = [Timing(seconds + pause, 0.0, own, times) for pause, own in zip(pauses, phases, strict=True)]
        return [replace(run, timing=timing) for run, timing in zip(runs, timings, strict=True)]

    drafted, plain = [repeats(16, 8.0, pauses)], [repeats(40, 10.0, pauses[::-1])]
    costs = [milliseconds_per_round(outputs).total for outputs in (drafted, plain)]
    assert 40 / 16 * costs[1] / costs[0] == pytest.approx(decode_speed(drafted) / decode_speed(plain))


def test_share_of_the_bandwidth(tiny_target: Target) -> None:
    """Ten passes over two texts, by hand: the tiny Llama has 4 layers of width 32, MLP 64, 4 and 2 heads of 8."""
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32  # q and o, k and v, the MLP, two norms
    weights = 4 * (4 * layer + 32 + 32 * tiny_target.vocab_size)  # fp32; the embedding is looked up, the head read
    per_token = 4 * 2 * 4 * 16
    answers, prompts = [[1] * 20, [1] * 10], [[1] * 8, [1] * 6]
    outputs = [[output(answers, [], rounds=10, verify=50.0)]]
    read = 10 * weights + per_token * 10 * ((8 + 10) + (6 + 5))
    share = bandwidth_floor_share(tiny_target, prompts, outputs, 1e9)
    assert share == pytest.approx(read / 1e9 / 0.05)
    assert bandwidth_floor_share(tiny_target, prompts, outputs, None) is None
