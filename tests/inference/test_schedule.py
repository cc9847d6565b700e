"""Schedules of draft lengths: what they say, in the engines' words too, and that following one changes nothing."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from drafters import admit, untrained
from exact_distributions import RULES, World, all_drafts, distances, independent, likeliest, outcomes, random_world

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.schedule import (
    Adaptive,
    AnySchedule,
    Confident,
    DraftLengths,
    Schedule,
    for_sglang,
    for_vllm,
    read_schedule,
)
from draftsmith.models import DRAFTERS, Drafter, Target, load_drafter
from draftsmith.models.drafter_parts.drafts import NO_TOKEN, Draft
from draftsmith.models.drafter_parts.tree_drafting import grow_chain
from draftsmith.models.drafters.draft_model import DraftModel
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, StaticTree
from draftsmith.models.training_free.draft_model_cascade import DraftModelCascade

SCHEDULE = Schedule(((1, 4), (8, 2), (24, 0)))


def test_draft_length_by_running_requests() -> None:
    assert [SCHEDULE.draft_length(n) for n in (1, 7, 8, 23, 24, 1000)] == [4, 4, 2, 2, 0, 0]
    assert SCHEDULE.longest == 4


@pytest.mark.parametrize("entries", [(), ((2, 4),), ((1, 4), (1, 2)), ((1, 4), (8, 2), (4, 1)), ((1, -1),)])
def test_schedules_with_gaps_are_refused(entries: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(UserError):
        Schedule(entries)


def test_engines_read_the_same_schedule() -> None:
    """Looked up as vLLM does (inclusive ranges, the last length carried on) and as SGLang does (the tier below)."""
    ranges, tiers = for_vllm(SCHEDULE), for_sglang(SCHEDULE)
    assert ranges[0][0] == 1
    for size in range(1, 64):
        in_vllm = next((length for first, last, length in ranges if first <= size <= last), ranges[-1][2])
        in_sglang = tiers[str(max(int(tier) for tier in tiers if int(tier) <= size))]["candidate_steps"]
        assert [in_vllm] == in_sglang == [SCHEDULE.draft_length(size)]
    # what SGLang's loader asks for: numbers as keys, lists of steps >= 0, --speculative-num-steps among them
    assert all(tier.isdigit() for tier in tiers)
    steps = [step for tier in tiers.values() for step in tier["candidate_steps"]]
    assert min(steps) >= 0
    assert SCHEDULE.longest in steps


@pytest.mark.parametrize(
    "schedule", [SCHEDULE, Adaptive((0, 1, 4), ((1, (1.0, 1.5, 2.0)), (8, (1.0, 2.0, 3.0))), 0.5), Confident(8, 0.4)]
)
def test_files(schedule: AnySchedule, tmp_path: Path) -> None:
    """As they are, or under "schedule" beside other choices."""
    for name, content in (
        ("a.json", schedule.to_json()),
        ("b.json", {"draft_length": 4, "schedule": schedule.to_json()}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert read_schedule(tmp_path / name) == schedule
    for text in (
        "",
        "[]",
        '{"draft_lengths": 4}',
        '{"adaptive": {"candidates": [2, 1]}}',
        '{"adaptive": {"x": 1}}',
        '{"confident": {"longest": 4}}',
    ):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(UserError):
            read_schedule(tmp_path / "wrong.json")


def test_adaptive_takes_what_promises_most_per_millisecond() -> None:
    """Tokens of a round are 1 + sum of products of the rates; times are those of the row for so many requests."""
    adaptive = Adaptive((0, 1, 2), ((1, (1.0, 1.4, 1.8)), (8, (1.0, 1.8, 2.6))))
    assert adaptive.best(1, [0.5, 0.5]) == 1  # 1, 1.5 / 1.4, 1.75 / 1.8
    assert adaptive.best(1, [0.9, 0.9]) == 2  # 1, 1.9 / 1.4, 2.71 / 1.8
    assert adaptive.best(8, [0.5, 0.5]) == 0
    assert adaptive.best(7, [0.3, 0.9]) == 0


def test_adaptive_follows_what_was_accepted() -> None:
    """It begins with long drafts, gives up on a drafter that is always wrong, probes it, and comes back."""
    lengths = DraftLengths(Adaptive((0, 4), decay=0.5, probe_every=10), 4)
    right, chosen = False, []
    for number in range(1, 61):
        right = right or number > 30
        chosen.append(lengths.next(num_running=2))
        lengths.finish_round(chosen[-1], [4 if right else 0] * 2)
    assert chosen[0] == 4
    assert [number for number, length in enumerate(chosen[5:30], 6) if length] == [10, 20, 30]
    assert chosen[39:] == [4] * 21  # the probe of round 40 was all right, and sufficed


def test_rates_are_conditional_and_of_what_was_offered() -> None:
    lengths = DraftLengths(Adaptive((0, 2, 3), decay=0.0), 3)
    lengths.finish_round(2, [0, 1, 2, 2])  # 3 of 4 accepted the first token, 2 of these 3 the second, none was third
    assert lengths.rates == [3 / 4, 2 / 3, 1.0]


# --- in the decoder

PROMPTS = [
    "The smith heats the iron",
    "def strike(iron):",
    "A draft is cheap, a draft is cheap, a",
    "x",
    "strike",
    "of",
]
BY_ROWS = Schedule(((1, 3), (2, 0), (3, 2), (4, 0)))  # as texts end, lengths go from 0 over 2 and 0 to 3
RESTLESS = Adaptive((0, 1, 3), decay=0.3, probe_every=4)  # untrained drafters are wrong: 0 with probes of 3 between
KINDS = [kind for kind in DRAFTERS if kind not in ("none", "lookahead")]  # whose drafts are chains
TRAINED = [kind for kind in KINDS if DRAFTERS[kind].depths is not Drafter.depths]
WITH_CACHE = ("draft_model", "eagle", "eagle3", "p_eagle")


@functools.lru_cache
def drafter_of(kind: str, target: Target) -> Drafter:
    if kind == DraftModelCascade.kind:  # a small model that is the large one: only confidence ends its chains
        return DraftModelCascade(*[cast(DraftModel, untrained("draft_model", target))] * 2)
    return untrained(kind, target)


@functools.lru_cache
def plain_answers(temperature: float, target: Target) -> list[list[int]]:
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    settings = resolve_settings(plain.drafter, Sampling(temperature), 14, seed=5)
    return plain.decode([target.encode(prompt) for prompt in PROMPTS], settings).token_ids


@pytest.mark.parametrize("schedule", [BY_ROWS, RESTLESS], ids=["by_rows", "restless"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_stays_what_it_is(kind: str, schedule: Schedule | Adaptive, tiny_target: Target) -> None:
    """Greedy and one-hot, token for token; rows change hands and empty, and the draft length changes in mid-text."""
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    drafter = drafter_of(kind, tiny_target)
    for sampling, mode in ((Sampling(), "greedy"), (Sampling(0.8), "one_hot")):
        answers = plain_answers(sampling.temperature, tiny_target)
        settings = resolve_settings(drafter, sampling, 14, schedule, mode, seed=5)
        generation = SpeculativeDecoder(tiny_target, drafter).start(prompts, settings, batch_size=4)
        limits = [5, 14, 9, 12, 7, 14]  # so that the number of running requests changes
        for request, limit in zip(generation.requests, limits, strict=True):
            request.max_new_tokens = limit
        while generation.running():
            generation.step()
        found = [request.token_ids for request in generation.requests]
        assert found == [answer[:limit] for answer, limit in zip(answers, limits, strict=True)]
        stats = [request.stats for request in generation.requests]
        total = sum(stats[1:], stats[0])
        assert len(total.acceptance_histogram) == 3 + 1
        assert 0 < total.num_drafts < total.num_rounds or kind not in TRAINED


@pytest.mark.parametrize("kind", TRAINED)
def test_a_drafter_that_was_off_drafts_as_one_that_never_was(
    kind: str, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and logits after it was off are those of one that has read the same text at once.

    As a control, one whose cache was not fed meanwhile drafts otherwise, if it has a cache.
    """
    drafter, slots = drafter_of(kind, tiny_target), 96
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS[:3]]
    settings = GenerationSettings(64, shape=Chain(3), stop_at_eos=False)

    def draft_after(texts: list[list[int]], draft_lengths: list[int]) -> tuple[BatchEngine, Draft]:
        engine = BatchEngine(tiny_target, drafter, settings, 3, slots)
        admit(engine, [0, 1, 2], texts)
        for draft_length in draft_lengths:
            engine.verify(engine.draft(draft_length))
        greedy = engine.draft(3)
        engine.state.sample_drafts, engine.state.sampling = True, Sampling(1.0)
        return engine, replace(greedy, logits=drafter.propose(engine.state, Chain(3)).logits)

    switched, found = draft_after(prompts, [3, 0, 0, 0, 1, 0, 2, 0, 0])
    ends = switched.state.lengths.tolist()
    texts = [row[: end - 1].tolist() for row, end in zip(switched.state.token_ids, ends, strict=True)]
    fresh, expected = draft_after(texts, [])
    assert fresh.state.newest().tolist() == switched.state.newest().tolist()  # greedy decoding is what it was
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)

    if kind in WITH_CACHE:
        prefill = type(drafter).prefill
        in_rows = lambda self, cache, ids, *rest: ids.shape[1] == slots or prefill(self, cache, ids, *rest)  # noqa: E731
        monkeypatch.setattr(type(drafter), "prefill", in_rows)  # of prompts only
        unfed = draft_after(prompts, [3, 0, 0, 0, 1, 0, 2, 0, 0])[1]
        assert (unfed.logits - expected.logits).abs().max() > 1e-3  # ten times what is allowed above


def test_what_a_schedule_cannot_go_with_is_refused(tiny_target: Target) -> None:
    decoder = SpeculativeDecoder(tiny_target, drafter_of("medusa", tiny_target))
    for settings in (
        {"tree": StaticTree(((0,), (1,)))},
        {"schedule": Schedule(((1, 9),))},
        {"schedule": Schedule(((1, 0),))},
        {"schedule": Confident(9, 0.5)},
    ):
        with pytest.raises(UserError):
            decoder.generate(PROMPTS, **{"schedule": SCHEDULE, **settings})


@pytest.mark.parametrize("kind", [*TRAINED, DraftModelCascade.kind])
def test_chains_end_by_confidence(kind: str, tiny_target: Target) -> None:
    """The tokens are those of whole chains, up to where the product of the confidences falls below the least."""
    engine = BatchEngine(tiny_target, drafter_of(kind, tiny_target), GenerationSettings(64, shape=Chain(3)), 3, 96)
    admit(engine, [0, 1, 2], [tiny_target.encode(prompt) for prompt in PROMPTS[:3]])
    state = engine.state
    state.confidence = torch.zeros(3, 3)
    whole = engine.drafter.propose(state, Chain(3)).tokens
    products = state.confidence.cumprod(1)
    assert (products > 0).all()
    assert (products < 1).all()
    for least in [*products.flatten().tolist(), 1.0]:
        state.least_confidence = least
        found = engine.drafter.propose(state, Chain(3)).tokens
        lengths = 1 + (products[:, :2] >= least).sum(1)
        assert found.shape[1] == lengths.max()  # where all rows have stopped the drafter has, too
        expected = whole.masked_fill(torch.arange(3) >= lengths[:, None], NO_TOKEN)
        assert found.tolist() == expected[:, : lengths.max()].tolist()


@pytest.mark.parametrize("kind", TRAINED)
def test_ending_by_confidence_leaves_the_text(kind: str, tiny_target: Target) -> None:
    """Greedy and one-hot, token for token, in rows that change hands; some chains end early and some do not."""
    prompts = [tiny_target.encode(prompt) for prompt in PROMPTS]
    decoder = SpeculativeDecoder(tiny_target, drafter_of(kind, tiny_target))
    for sampling, mode in ((Sampling(), "greedy"), (Sampling(0.8), "one_hot")):
        answers = plain_answers(sampling.temperature, tiny_target)
        drafted = []
        for least in (1e-12, 0.02, 1.0):
            settings = resolve_settings(decoder.drafter, sampling, 14, Confident(3, least), mode, seed=5)
            output = decoder.decode(prompts, settings, batch_size=4)
            assert output.token_ids == answers
            total = output.stats.total
            drafted.append(total.num_draft_tokens / total.num_drafts)
        assert drafted[0] == 3
        assert drafted[0] >= drafted[1] >= drafted[2] == 1


def test_only_drafters_with_probabilities_are_confident(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="no probabilities"):
        resolve_settings(load_drafter("ngram", tiny_target), Sampling(), 8, Confident(4, 0.5))


# --- the distributions of Adaptive and Confident


def after(world: World, text: list[int]) -> World:
    """The distributions of what follows a text."""
    depth, row = world.context(text)
    widths = [world.vocab_size**length for length in range(len(world.p) - depth)]
    p, q = (
        [distributions[depth + i][row * width : (row + 1) * width] for i, width in enumerate(widths)]
        for distributions in (world.p, world.q)
    )
    return World(p, q)


def distance_of_adaptive(mode: str, cheats: bool = False) -> float:
    """Total variation between the distribution of three tokens that rounds of adaptive length write, and the target's.

    Exact: over every draft and all coins of every round. After a first round of two drafts the costs are such that
    speculation is switched off if none was accepted, and one token is drafted if one was. The cheat drops a drafted
    token 1 before it is verified.
    """
    world, length = random_world("any", 5, 3, seed=3), 3
    adaptive = Adaptive((0, 1, 2), ((1, (1.0, 1.3, 1.6)),), decay=0.2, probe_every=3)
    draw, rule = (likeliest if mode == "one_hot" else independent), RULES[mode]
    distribution = -world.continuations([], length)
    chances = {((), ()): 1.0}  # of each text with its rounds: (draft length, number accepted)
    chosen = set()
    while chances:
        (text, rounds), chance = chances.popitem()
        if len(text) >= length:
            distribution[world.context(list(text[:length]))[1]] += chance
            continue
        lengths = DraftLengths(adaptive, 2)
        for draft_length, num_accepted in rounds:
            assert lengths.next(1) == draft_length
            lengths.finish_round(draft_length, [num_accepted])
        draft_length = lengths.next(1)
        chosen.add((rounds[:1], draft_length))
        here, parents = after(world, list(text)), list(range(-1, draft_length - 1))
        drafts = all_drafts(here, parents, draw)
        if cheats:
            drafts = [(weight, [NO_TOKEN if token == 1 else token for token in tokens]) for weight, tokens in drafts]
        for outcome in outcomes(rule, parents, [(here, drafts)]):
            key = (*text, *outcome.emitted), (*rounds, (draft_length, len(outcome.path)))
            chances[key] = chances.get(key, 0.0) + chance * outcome.probability
    assert {(((2, 0),), 0), (((2, 1),), 1)} <= chosen  # what was accepted decides
    return float(distribution.abs().sum() / 2)


@pytest.mark.parametrize("mode", ["one_hot", "probabilistic", "block"])
def test_adaptive_lengths_leave_the_distribution(mode: str) -> None:
    assert distance_of_adaptive(mode) < 1e-8  # a few integrations, each within EXACT


def test_a_length_that_looks_at_the_token_offered_is_found() -> None:
    assert distance_of_adaptive("probabilistic", cheats=True) > 0.01


def distance_of_confident(mode: str, seed: int, cheats: bool = False) -> float:
    """Return the total variation between what a round of chains that end by confidence leads to, and the target.

    Exact, over every draft of up to three tokens, as `grow_chain` ends it, and all coins. The cheat asks for the
    chance of the drawn tokens themselves, the one offered among them.
    """
    world, parents = random_world("any", 4, 3, seed), [-1, 0, 1]
    drafts = all_drafts(world, parents, likeliest if mode == "one_hot" else independent)
    tokens = torch.tensor([tokens for _, tokens in drafts])

    def distribution(depth: int) -> torch.Tensor:
        """[drafts, 1, V] what the drafter holds behind the first tokens of each draft"""
        return torch.stack([world.q[depth][world.context(row[:depth])[1]] for row in tokens.tolist()])[:, None]

    products = distribution(0).amax(-1) * distribution(1).amax(-1)  # what the third token hangs on, by way of the first
    depths, least = iter((1, 2)), 0.99 * products.max().item()

    def choose(logits: torch.Tensor, depth: int, out: torch.Tensor) -> torch.Tensor:
        out.copy_(tokens[:, depth])
        return logits

    state = SimpleNamespace(least_confidence=least, confidence=None, choose=choose)
    ended = grow_chain(3, distribution(0).log(), lambda *_: distribution(next(depths)).log(), state).tokens  # type: ignore[arg-type]
    ended = torch.nn.functional.pad(ended, (0, 3 - ended.shape[1]), value=NO_TOKEN)
    if cheats:
        chances = torch.cat(
            [distribution(depth)[:, 0].gather(1, tokens[:, depth, None]) for depth in range(3)], 1
        ).cumprod(1)
        ended = tokens.masked_fill(chances < least, NO_TOKEN)
    lengths = (ended != NO_TOKEN).sum(1)
    assert cheats or mode == "one_hot" or set(lengths.tolist()) == {2, 3}
    (distance,) = distances(
        RULES[mode], parents, [(world, [(w, x) for (w, _), x in zip(drafts, ended.tolist(), strict=True)])]
    )
    return distance


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("mode", ["one_hot", "probabilistic", "block"])
def test_ending_by_confidence_leaves_the_distribution(mode: str, seed: int) -> None:
    assert distance_of_confident(mode, seed) < 1e-8


def test_ending_by_the_chance_of_the_token_offered_is_found() -> None:
    assert max(distance_of_confident("probabilistic", seed, cheats=True) for seed in (1, 2, 3)) > 0.01
