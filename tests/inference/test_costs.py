"""The cost model: what it fits, what it predicts, and the counters and times that it must agree with."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reports import typed_result

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats
from draftsmith.inference.decoding.decoder import check_sampling, resolve_settings
from draftsmith.inference.decoding.schedule import Schedule
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet, measure
from draftsmith.inference.measuring.results import Phases
from draftsmith.inference.planning import cost_measurement
from draftsmith.inference.planning.best_draft import acceptance_length
from draftsmith.inference.planning.cost_measurement import (
    DRAFT_VISIT,
    LEAST_VISITS,
    PLAIN_VISIT,
    CostRange,
    RoundSetting,
    TimedGeneration,
    measure_costs,
    measure_costs_in_turns,
    start_generations,
)
from draftsmith.inference.planning.costs import (
    Costs,
    DraftChances,
    HeldOutErrors,
    HeldOutRound,
    RoundTimes,
    fit_costs,
    fit_terms,
    speedup_errors,
)
from draftsmith.inference.planning.costs_after_evaluation import costs_beside
from draftsmith.inference.planning.fixed_batches import RequestProfile, batch_milliseconds
from draftsmith.inference.planning.predictions import predicted_speedup, with_prediction
from draftsmith.inference.replay.forced_decoding import ForcedBatchEngine, start_forced
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import Chain, StaticTree
from draftsmith.models.storage.typed_json import from_json, to_json
from draftsmith.models.training_free.cascade import Cascade, CascadeConfig
from draftsmith.models.training_free.suffix import Suffix


def new_drafter(kind: str, target: Target) -> Drafter:
    return DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), target).eval()


def analytic(setting: RoundSetting) -> RoundTimes:
    """A device of known costs: weights of 2 ms that hide 16 tokens, products slow to start, and caches to read.

    Attention of 2 and 3 tokens a row costs more than that of 4, as on a CPU, and plain steps have a host of their own:
    shared terms were off by 24 % and 6 % for that.
    """
    slow = {1: 2.0, 2: 3.0}.get(setting.nodes, 1.0)
    tokens, keys = setting.batch * (setting.nodes + 1), setting.batch * setting.context * slow
    verify = 2 + 0.05 * max(0, tokens - 16) + 0.1 * min(tokens, 8) + 1e-4 * keys
    draft = setting.draft_length * (0.2 + 1e-3 * setting.batch)
    place = setting.draft_length, setting.batch, setting.context, setting.nodes, setting.tree is not None
    return RoundTimes(*place, draft, verify, draft + verify + (0.3 if setting.nodes else 0.45))


def test_known_costs_are_found_again(tiny_target: Target) -> None:
    """Also between and beyond what was measured, and the break-even is the ratio of the known times."""
    fitted, left_out = CostRange(batch=32, context=512, draft_length=8).settings(new_drafter("eagle3", tiny_target))
    assert not {(s.batch, s.context) for s in fitted} & {(s.batch, s.context) for s in left_out}
    costs = fit_costs([analytic(setting) for setting in fitted])
    assert speedup_errors(costs, [analytic(s) for s in left_out]).share_within_5_percent == 1
    for length, batch, context in itertools.product((1, 5, 8), (1, 6, 24, 48), (100, 800)):
        times, plain = analytic(RoundSetting(length, batch, context)), analytic(RoundSetting(0, batch, context))
        assert costs.round(length, batch, context) == pytest.approx(times.round_ms, rel=1e-6)
        assert costs.plain(batch, context) == pytest.approx(plain.round_ms, rel=1e-6)
        assert costs.speedup(3.0, length, batch, context) == pytest.approx(
            3 * plain.round_ms / times.round_ms, rel=1e-6
        )
        assert costs.speedup(costs.break_even(length, batch, context), length, batch, context) == pytest.approx(1)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cpu_verifies_as_much_as_the_longest_draft_has(batch: int) -> None:
    """A quarter of a request's rounds drafts, and half of its drafts have a second token."""
    verify = {"pass": 1.0, "token": 1.0}
    costs = Costs("", "", "", "", draft_ms={"step: pass": 0.5}, verify_ms=verify, host=0.2, drops_columns=True)
    some, two = 1 - 0.75**batch, 1 - 0.875**batch  # of the batch's rounds have a draft, and one of two tokens
    chances = DraftChances(0.25, 0.5)
    expected = 2 * 0.5 + 1 + batch * (1 + some + two) + 0.2
    assert costs.drafting_with(chances).round(2, batch, 10) == pytest.approx(expected)
    assert costs.drafting_with(chances).plain(batch, 10) == costs.plain(batch, 10)
    on_gpu = replace(costs, drops_columns=False)
    assert on_gpu.drafting_with(chances).round(2, batch, 10) == on_gpu.round(2, batch, 10)


@pytest.mark.parametrize("mean", [1.0, 2.3, 4.0])
def test_lengths_of_drafts_have_the_mean_that_was_counted(mean: float) -> None:
    stats = Stats(4, num_drafts=50, num_draft_tokens=50 * mean, num_rounds=200)
    lengths = DraftChances.of(stats).longest_of(1, 4)
    assert sum(lengths) == pytest.approx(1)
    assert lengths[0] == pytest.approx(0.75)
    assert sum(length * chance for length, chance in enumerate(lengths)) == pytest.approx(0.25 * mean)


def test_held_out_error_is_that_of_the_speedup() -> None:
    """Times that are half as long again where nothing was fitted: speedups of 2/3, whatever the acceptance."""
    settings = [RoundSetting(length, batch, 64) for batch in (1, 4) for length in (0, 1, 2, 4)]
    costs = fit_costs([analytic(setting) for setting in settings])
    slow = [replace(analytic(s), round_ms=analytic(s).round_ms * (1.5 if s.draft_length else 1)) for s in settings[:4]]
    errors = speedup_errors(costs, slow)
    assert errors.median_error == pytest.approx(0.5, rel=1e-6)
    assert errors.share_within_5_percent == 0
    assert errors.settings == 3


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_meets_its_optimality_conditions(seed: int) -> None:
    """Karush, Kuhn and Tucker: no cost is negative, no gradient leads down, and one of each two is 0."""
    chance = np.random.default_rng(seed)
    counts, measured = chance.random((12, 7)), chance.random(12) + 0.1
    counts[:, 4] *= 1e6  # a term that is paid a million times as often
    counts[:, 6] = counts[:, 5]  # two terms that cannot be told apart
    rows = [dict(zip("abcdefg", row, strict=True)) for row in counts.tolist()]
    costs = fit_terms(rows, measured.tolist())
    x = np.array([costs.get(name, 0.0) for name in "abcdefg"])
    matrix = counts / measured[:, None]
    gradient = matrix.T @ (matrix @ x - 1) / np.linalg.norm(matrix, axis=0)
    assert (x >= 0).all()
    assert 0 < np.count_nonzero(x) < 7
    assert (gradient >= -1e-8).all()
    assert np.abs(x * gradient).max() < 1e-8


def test_the_costs_of_a_cascade_are_those_of_asking_its_trained_half(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup, trained = new_drafter("suffix", tiny_target), new_drafter("medusa", tiny_target)
    assert isinstance(lookup, Suffix)
    asked = []
    monkeypatch.setattr(trained, "propose", lambda *how: asked.append(1) or type(trained).propose(trained, *how))
    setting = RoundSetting(3, 1, 32)
    (generation,) = start_generations(tiny_target, Cascade(CascadeConfig(), lookup, trained), [setting])
    for _ in range(8):
        generation.step()
    assert len(asked) == 8


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "ngram"])
def test_measured_costs_on_a_tiny_target(kind: str, tiny_target: Target) -> None:
    """All terms are measured, trees only where a drafter has them; costs.json gives the same costs back."""
    shares: list[float] = []
    reach = CostRange(batch=2, context=16, draft_length=3, tree_nodes=4, seconds=0.1)
    costs = measure_costs(tiny_target, new_drafter(kind, tiny_target), reach, on_progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert costs.drafter_kind == kind
    assert costs.held_out.settings > 0
    assert any(row.tree for row in costs.fitted_on) == (kind != "ngram")
    assert costs.plain(1, 16) > 0
    assert costs.round(3, 2, 16) > 0
    assert from_json(Costs, to_json(costs)) == costs
    with pytest.raises(UserError, match="context 128: measuring needs 104 tokens beyond it.*give at most 24"):
        measure_costs(tiny_target, new_drafter(kind, tiny_target), CostRange(context=tiny_target.context))
    with pytest.raises(UserError, match="needs 136 tokens beyond a request's own.*is 128: give shorter drafts"):
        measure_costs(tiny_target, new_drafter(kind, tiny_target), CostRange(context=-8, tree_nodes=32))


def test_the_model_of_costs_knows_chains_and_given_trees_only(tiny_target: Target) -> None:
    with pytest.raises(
        UserError, match="lookahead drafts in a shape of its own.*measure it with `draftsmith evaluate`"
    ):
        measure_costs(tiny_target, load_drafter("lookahead", tiny_target), CostRange(batch=1, context=16))


def test_trees_are_as_large_as_ranks_and_depth_allow(tiny_target: Target) -> None:
    """Eight children of each of nine nodes: of the 100 that an evaluated tree of two levels may have, 72."""
    fitted, _ = CostRange(draft_length=2, tree_nodes=100).settings(new_drafter("eagle3", tiny_target))
    assert {setting.nodes for setting in fitted if setting.tree} == {4, 16, 64}


def test_one_cache_has_room_for_the_largest_draft(tiny_target: Target) -> None:
    """A recorded round cannot make more, where states wait in columns."""
    settings = [RoundSetting(length, 1, 32) for length in (0, 1, 3)]
    generations = start_generations(tiny_target, new_drafter("medusa", tiny_target), settings)
    assert [generation.engine.cache.states.num_columns for generation in generations] == [4, 4, 4]
    assert len({id(generation.engine.cache) for generation in generations}) == 1


@pytest.mark.parametrize("kind", ["eagle3", "draft_model", "hydra", "dspark"])
def test_each_round_drafts_what_decoding_drafts_there(kind: str, tiny_target: Target) -> None:
    """Decoding the same text, cut anywhere, drafts the same tokens, though forced rounds accept nothing."""
    drafter = new_drafter(kind, tiny_target)
    prompts = [tiny_target.encode(text) for text in ("The smith heats", "def")]
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    answers = plain.generate(prompts, 12, stop_at_eos=False).token_ids
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    engine = ForcedBatchEngine(tiny_target, drafter, Chain(2), texts, 9)
    generation = start_forced(engine, prompts)
    settings = resolve_settings(drafter, check_sampling(0, 1, 0), 12, 2, stop_at_eos=False)
    for place in range(9):
        generation.step()
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            decoded = SpeculativeDecoder(tiny_target, drafter).start([text[: len(prompt) + place]], settings)
            decoded.step()
            assert engine.drafted[row].tolist() == decoded.engine.draft().tokens[0].tolist()


def test_synthetic_acceptance_has_its_analytic_length(tiny_target: Target) -> None:
    """1 + a1 + a1 a2 + a1 a2 a3 tokens a round, within four standard errors; the histogram follows the distribution."""
    rates = (0.8, 0.6, 0.7)
    drafter = new_drafter("medusa", tiny_target)
    prompts = [tiny_target.encode("iron")] * 12
    settings = resolve_settings(
        drafter, check_sampling(0, 1, 0), 100, 3, "synthetic", stop_at_eos=False, synthetic_rates=rates
    )
    stats = SpeculativeDecoder(tiny_target, drafter).decode(prompts, settings).stats.total
    expected = acceptance_length(rates, 3)
    assert expected == 1 + 0.8 + 0.8 * 0.6 + 0.8 * 0.6 * 0.7
    distribution = [0.2, 0.8 * 0.4, 0.8 * 0.6 * 0.3, 0.8 * 0.6 * 0.7]
    spread = math.sqrt(sum(p * (1 + n - expected) ** 2 for n, p in enumerate(distribution)) / stats.num_drafts)
    assert stats.mean_acceptance_length == pytest.approx(expected, abs=4 * spread)
    assert spread < 0.06
    for n, p in enumerate(distribution):
        share = stats.acceptance_histogram[n] / stats.num_drafts
        assert share == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / stats.num_drafts))


def test_a_clock_of_known_costs_gives_the_predicted_speedup(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real decoding at a set acceptance on a clock that draft and pass advance by known times.

    In a batch each row ends by itself; of three the one on the left is the last, so that the width of rounds falls.
    """
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    rates, drafter = (0.7, 0.5), new_drafter("medusa", tiny_target)
    plain = load_drafter("none", tiny_target)
    draft, run = type(drafter).propose, Target.run

    def propose(self: Any, state: Any, shape: Any) -> Any:
        now[0] += 0.4e-3 * shape.depth
        return draft(self, state, shape)

    def timed_run(self: Target, token_ids: Any, *args: Any) -> Any:
        now[0] += 2e-3 + 0.1e-3 * token_ids.numel()
        return run(self, token_ids, *args)

    monkeypatch.setattr(type(drafter), "propose", propose)
    monkeypatch.setattr(Target, "run", timed_run)
    costs = measure_costs(tiny_target, drafter, CostRange(batch=4, context=16, draft_length=4, seconds=1))
    assert costs.held_out.share_within_5_percent == 1

    synthetic = resolve_settings(
        drafter, check_sampling(0, 1, 0), 100, 2, "synthetic", stop_at_eos=False, synthetic_rates=rates
    )
    one_by_one = replace(synthetic, shape=Chain(0), verification_mode="greedy", synthetic_rates=())
    for texts in (["iron"], ["iron", "The smith"], ["The smith", "iron", "def"]):
        prompts = [tiny_target.encode(text) for text in texts]
        rounds = SpeculativeDecoder(tiny_target, drafter).decode(prompts, synthetic)
        steps = SpeculativeDecoder(tiny_target, plain).decode(prompts, one_by_one)
        for output, length in ((steps, 0), (rounds, 2)):
            profiles = [RequestProfile(4, 99, int(request.num_rounds)) for request in output.stats.requests]
            if len(texts) == 3 and length:
                assert profiles[0].num_rounds > max(profile.num_rounds for profile in profiles[1:])
            found = (output.timing.total - output.timing.to_first_token) * 1000
            assert batch_milliseconds(costs, length, profiles, drops_rows=True) == pytest.approx(found, rel=1e-6)

    texts = ["iron", "The smith", "def", "strikes the iron", "heats"]
    prompts = PromptSet("p", [tiny_target.encode(text) for text in texts])
    for batch, drafts in ((1, 2), (2, 3), (3, Schedule(((1, 2), (2, 1)))), (3, Schedule(((1, 1), (3, 0))))):
        longest = drafts if isinstance(drafts, int) else drafts.longest
        settings = MeasureSettings(batch_size=batch, draft=drafts, max_new_tokens=30, repeats=1, synthetic_rates=rates)
        settings = replace(settings, verification_mode="synthetic", synthetic_rates=(0.7,) * longest)
        row = measure(tiny_target, {"d": drafter}, prompts, settings)["d"]
        assert with_prediction(row, costs).predicted_speedup == pytest.approx(row.speed.speedup, rel=1e-6)
        # reading the prompts is a part of it: rounds alone gain more
        assert row.speed.decode_speedup is not None
        assert row.speed.decode_speedup > 1.005 * row.speed.speedup > 1


def test_drafts_that_a_schedule_shortened_are_not_taken_for_short_finds() -> None:
    """Half as long as the longest on average: a schedule's own lengths are predicted with, as on a GPU."""
    row = typed_result(0.5, 1.0)
    counts = replace(
        row.acceptance, num_drafts=row.acceptance.num_rounds, num_draft_tokens=2 * row.acceptance.num_rounds
    )
    row = replace(row, acceptance=counts)
    scheduled = replace(row, setting=replace(row.setting, schedule=Schedule(((1, 4),))))
    costs = Costs("", "", "", "", {"step: pass": 1.0}, {"token": 10.0}, 1.0, drops_columns=True)
    on_gpu = replace(costs, drops_columns=False)
    assert predicted_speedup(scheduled, costs) == predicted_speedup(scheduled, on_gpu)
    assert predicted_speedup(row, costs) > predicted_speedup(row, on_gpu)


def test_what_costs_cannot_tell_is_not_predicted() -> None:
    """Trees where no tree was timed, and rows without a draft; a file of before is predicted from its mean round."""
    row = typed_result(0.5, 1.0)
    costs = Costs("", "", "", "", {"step: pass": 1.0}, {"pass": 10.0}, 1.0, drops_columns=True)
    speedup = 11 * row.tokens_a_round / (10 + 4 + 1)
    assert with_prediction(row, costs).predicted_speedup == pytest.approx(speedup)
    tree = replace(row, setting=replace(row.setting, tree_nodes=8))
    for other in (tree, replace(row, acceptance=Stats(4))):
        assert with_prediction(other, costs) == other
    assert with_prediction(tree, replace(costs, fitted_on=[RoundTimes(4, 1, 64, 8, True, 1, 10, 12)])) != tree


def test_a_prediction_is_as_certain_as_those_that_could_be_checked() -> None:
    """Predictions that were off by a factor of 1.1, up and down, differ by that much in the mean square."""
    left_out = [HeldOutRound(4, 1, 64, 4, False, 1, 10, 12, 10, error) for error in (0.1, 1 / 1.1 - 1) * 50]
    costs = Costs("", "", "", "", {"step: pass": 1.0}, {"pass": 10.0}, 1.0, HeldOutErrors(100, rows=left_out))
    row = with_prediction(typed_result(0.5, 1.0), costs)
    assert row.predicted_speedup is not None
    assert row.predicted_speedup_ci95 is not None
    low, high = row.predicted_speedup_ci95
    assert (high / row.predicted_speedup, row.predicted_speedup / low) == pytest.approx((1.1**1.984,) * 2, rel=1e-3)
    few = replace(costs, held_out=HeldOutErrors(1, rows=left_out[:1]))
    assert with_prediction(row, few).predicted_speedup_ci95 is None


def test_rounds_of_a_setting_follow_each_other(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in decoding. Behind rounds with a draft, the first plain steps take up to 1.4 times as long."""
    order: list[int] = []
    step = TimedGeneration.step
    monkeypatch.setattr(TimedGeneration, "step", lambda self: (order.append(id(self)), step(self)))
    measure_costs(tiny_target, load_drafter("ngram", tiny_target), CostRange(batch=1, context=8, seconds=0.01))
    visits = [(one, len(list(rounds))) for one, rounds in itertools.groupby(order)]
    assert {rounds for _, rounds in visits} == {PLAIN_VISIT.rounds, DRAFT_VISIT.rounds}
    assert visits[: len(visits) // LEAST_VISITS] == visits[len(visits) // LEAST_VISITS :]  # and all take turns


def test_a_slow_turn_makes_no_drafter_look_slow(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of two drafters is measured the second time, everything takes three times as long."""
    slowness = iter([1, 1, 3, 1, 1, 1])

    def time_rounds(target: Target, drafter: Drafter, reach: CostRange, least_visits: int) -> list[RoundTimes]:
        slow = next(slowness)
        rows = [analytic(setting) for part in reach.settings(drafter) for setting in part]
        return [
            replace(row, draft_ms=slow * row.draft_ms, verify_ms=slow * row.verify_ms, round_ms=slow * row.round_ms)
            for row in rows
        ]

    monkeypatch.setattr(cost_measurement, "time_rounds", time_rounds)
    drafters = {name: new_drafter("eagle3", tiny_target) for name in ("disturbed", "other")}
    found = measure_costs_in_turns(tiny_target, drafters, CostRange(batch=4, context=16, draft_length=8))
    assert {name: costs.drafter for name, costs in found.items()} == {name: name for name in drafters}
    assert replace(found["disturbed"], drafter="other") == found["other"]
    assert found["other"].fitted_on[0] == analytic(RoundSetting(0, 1, 2))


def test_tree_costs_count_their_nodes() -> None:
    tree = StaticTree(((0,), (1,), (0, 0)))
    assert RoundSetting(2, 3, 10, tree).nodes == 3
    assert RoundSetting(2, 3, 10).nodes == 2


def test_costs_beside_an_evaluation_take_the_time_that_there_is(tiny_target: Target) -> None:
    """Seven drafts of 24 rounds and plain steps of three visits of 48, each of 2 ms at most: 0.62 s, or nothing."""
    row, prompts = typed_result(0.5, 1.0), PromptSet("p", [[5, 6, 7, 8]])
    speed = replace(row.speed, milliseconds_per_round=Phases(1.0, 0.8, 0.2))
    rows = [replace(row, setting=replace(row.setting, max_new_tokens=12), speed=speed)]
    ngram = load_drafter("ngram", tiny_target)
    assert costs_beside(tiny_target, ngram, "n", rows, prompts, 0.61) is None
    undrafted = replace(rows[0], acceptance=Stats(4))
    assert costs_beside(tiny_target, ngram, "n", [undrafted], prompts, 9.0) is None
    assert costs_beside(tiny_target, load_drafter("lookahead", tiny_target), "l", rows, prompts, 9.0) is None
    costs = costs_beside(tiny_target, ngram, "n", rows, prompts, 0.64)
    assert costs is not None
    assert {(row.batch, row.context) for row in costs.fitted_on} == {(1, 1), (1, 10)}
    assert costs.drops_columns
