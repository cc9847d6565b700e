"""The chosen draft length, tree and schedule against trying everything; rank accuracies against the decoder."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, tokens_reach
from draftsmith.inference.measuring.measure import MeasureSettings, PromptSet
from draftsmith.inference.planning import tuning as tuning_module
from draftsmith.inference.planning.best_draft import (
    acceptance_length,
    best_draft_length,
    equal_rates,
    fit_schedule,
    fit_tree,
    rank_accuracies,
    tree_acceptance_length,
)
from draftsmith.inference.planning.costs import Costs, DraftChances, HeldOutErrors, HeldOutRound
from draftsmith.inference.planning.tuning import PredictedDraft, decode, tune
from draftsmith.models import DRAFTERS, Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import StaticTree


def costs(step: float = 0.2, token: float = 0.01, tree: float = 0.1) -> Costs:
    """A pass of 2 ms and `token` for each token, `step` for each drafted depth."""
    verify = {"pass": 2.0, "token": token, "tree": tree}
    return Costs("", "", "", "", draft_ms={"step: pass": step}, verify_ms=verify, host=0.2, held_out=errors(0.02))


def errors(size: float) -> HeldOutErrors:
    """Two settings left out of a fit, whose speedups were predicted too high and too low by this logarithm."""
    times = {"draft_length": 1, "batch": 1, "context": 9, "nodes": 1, "tree": False, "plain_ms": 1.0}
    times |= {"draft_ms": 1.0, "verify_ms": 1.0, "round_ms": 1.0}
    return HeldOutErrors(rows=[HeldOutRound(**times, speedup_error=math.expm1(sign * size)) for sign in (1, -1)])


def test_acceptance_length_is_one_and_the_sum_of_products() -> None:
    assert acceptance_length([0.5, 0.5, 1.0], 3) == 1 + 0.5 + 0.25 + 0.25
    assert acceptance_length([0.5, 0.5, 1.0], 1) == 1.5
    assert acceptance_length([0.5, 0.0, None], 3) == 1.5
    assert acceptance_length([0.5], 0) == 1
    with pytest.raises(UserError, match="draft_length 2"):
        acceptance_length([0.5], 2)


def test_a_choice_counts_the_rounds_without_a_draft(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """N-grams that are rarely found: what is predicted are the tokens of any round; the costs know how many draft."""
    milliseconds = {"draft_ms": {"step: pass": 0.01}, "verify_ms": {"pass": 2.0}, "host": 0.0}
    flat = Costs("", "", "", "", **milliseconds, drops_columns=True, held_out=errors(0.0))
    monkeypatch.setattr(tuning_module, "measure_costs", lambda *of_device: flat)
    prompts = PromptSet("p", [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]] * 6)  # enough to show a gain
    settings, ngram = MeasureSettings(max_new_tokens=40), load_drafter("ngram", tiny_target)
    tuning, found = tune(tiny_target, ngram, "ngram", prompts, settings, [1])
    total = decode(tiny_target, ngram, prompts, MeasureSettings(max_new_tokens=40, draft=8)).stats.total
    assert 0 < total.num_drafts < total.num_rounds
    assert total.num_accepted_tokens
    assert found.chances == DraftChances.of(total)
    predicted = prediction_of(tuning.predicted, total.conditional_acceptance_rates)
    assert predicted.acceptance_length == pytest.approx(1 + total.num_accepted_tokens / total.num_rounds)


def prediction_of(predicted: list[PredictedDraft], rates: list[float | None]) -> PredictedDraft:
    """The only one, of chains so long that no drafted token which was ever accepted is beyond them."""
    (draft,) = predicted
    assert not any(rates[draft.draft_length :])
    return draft


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.77, 1.0])
def test_equal_rates_invert_the_acceptance_length(rate: float) -> None:
    assert equal_rates(acceptance_length([rate] * 5, 5), 5) == pytest.approx([rate] * 5, abs=1e-9)


@pytest.mark.parametrize("rates", [[0.9] * 8, [0.6, 0.7, 0.8, 0.9], [0.5, 0.1, 0.9, 0.9, 0.9], [0.13], [0.05]])
def test_the_schedule_is_best_at_every_batch(rates: list[float]) -> None:
    """By the formula of the speedup, written out; off where the errors of costs and of acceptance explain the gain."""
    model, batches, length_reach = costs(), [1, 2, 4, 8, 16, 32, 64, 1024], 0.03
    shown = math.exp(math.hypot(4.30265 * 0.02, length_reach))  # Student's t of two errors
    schedule = fit_schedule(rates, model, batches, 100, length_reach)
    for batch in batches:
        speedups = [1.0]
        for length in range(1, len(rates) + 1):
            emitted = 1 + sum(math.prod(rates[:j]) for j in range(1, length + 1))
            round_ms = 0.2 * length + 2 + 0.01 * batch * (length + 1) + 0.2
            speedups.append(emitted * (2 + 0.01 * batch + 0.2) / round_ms)
        best = speedups.index(max(speedups))
        assert best_draft_length(rates, model, batch, 100) == best
        assert schedule.draft_length(batch) == (best if max(speedups) > shown else 0)
    if max(rates) < 0.2:
        assert schedule.draft_lengths == ((1, 0),)


def test_nothing_is_drafted_where_too_little_was_measured() -> None:
    """Of two prompts no error of acceptance is known, and none of the costs without settings left out of their fit."""
    rates, two_prompts = [0.9] * 4, [Stats(1, num_rounds=9, num_accepted_tokens=8)] * 2
    assert fit_schedule(rates, costs(), [1], 100, tokens_reach(two_prompts * 2)).draft_length(1) > 0
    assert fit_schedule(rates, costs(), [1], 100, tokens_reach(two_prompts)).draft_length(1) == 0
    unknown = replace(costs(), held_out=HeldOutErrors())
    assert fit_schedule(rates, unknown, [1], 100, tokens_reach(two_prompts * 2)).draft_length(1) == 0


def trees(most_nodes: int, depth: int, ranks: int) -> Iterator[StaticTree]:
    paths = [path for d in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=d)]
    for count in range(1, most_nodes + 1):
        for chosen in itertools.combinations(paths, count):
            try:
                yield StaticTree(chosen)
            except UserError:
                continue


@pytest.mark.parametrize("step", [0.05, 0.6])
@pytest.mark.parametrize("batch", [1, 20])
@pytest.mark.parametrize("accuracies", [[[0.7, 0.2], [0.6, 0.1]], [[0.4, 0.3], [0.5, 0.45]], [[0.9, 0.01], [0.2, 0.1]]])
def test_the_tree_is_the_best_of_all(accuracies: list[list[float]], batch: int, step: float) -> None:
    model = costs(step=step, token=0.03)

    def speedup(tree: StaticTree) -> float:
        length = tree_acceptance_length(tree, accuracies)
        return model.speedup(length, tree.depth, batch, 50, tree.num_nodes)

    chosen = fit_tree(accuracies, model, batch, 50, most_nodes=5)
    assert speedup(chosen) == pytest.approx(max(map(speedup, trees(5, 2, 2))), rel=1e-12)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "draft_model"])
def test_rank_accuracies_are_those_of_the_decoder(kind: str, tiny_target: Target) -> None:
    """One text, one depth, drafts of the first two ranks: the rounds that accept a token are those ranks' hits."""
    drafter = DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), tiny_target).eval()
    prompts = [tiny_target.encode(text) for text in ("The smith heats", "def", "iron iron iron")]
    plain = SpeculativeDecoder(tiny_target, load_drafter("none", tiny_target))
    answers = plain.generate(prompts, 20, stop_at_eos=False).token_ids
    texts = list(zip(prompts, answers, strict=True))
    found = rank_accuracies(drafter, tiny_target, texts, depth=2, most=3, batch_size=2)
    assert [len(row) for row in found] == [3, 3]
    assert all(0 <= row[2] <= row[1] <= row[0] and sum(row) <= 1 + 1e-9 for row in found)
    hits = total = 0
    for prompt, answer in texts:  # a draft of one token at each place, from the text so far
        for place in range(1, len(answer)):
            output = SpeculativeDecoder(tiny_target, drafter).generate(
                [prompt + answer[: place - 1]], 2, tree=StaticTree(((0,), (1,), (2,))), stop_at_eos=False
            )
            hits += output.stats.total.num_accepted_tokens
            total += 1
    assert sum(found[0]) == pytest.approx(hits / total)
