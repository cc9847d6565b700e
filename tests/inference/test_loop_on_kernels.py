"""The whole decoder on its kernels, in Triton's interpreter or on a GPU, gives the plain path's tokens and counts.

On a GPU rounds are recorded in one run and launched anew in another. By default every verification mode meets every
shape, with drafters, batch sizes and lags taking turns. `pytest -m long` on this file tries every combination.
"""

import functools
import itertools
import os
from collections import Counter
from typing import get_args

import pytest
import torch
from drafters import build, loss_of, random_batch
from families import ALIKE, KINDS, target_and_plain_model

from draftsmith.inference.decoding.batch_engine import BatchEngine, GenerationSettings
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.decoding.generation import Generation
from draftsmith.inference.decoding.graphs import SWITCH as GRAPHS
from draftsmith.inference.verification.acceptance_rules import VerificationMode
from draftsmith.models import DRAFTERS, Drafter, Target
from draftsmith.models.errors import UserError
from draftsmith.models.kernels import SWITCH, runs_kernels
from draftsmith.models.losses.chain_loss import teacher_from
from draftsmith.models.losses.divergences import Teacher
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import DynamicTree, Shape, StaticTree

PRODUCTS = "DRAFTSMITH_PRODUCTS"  # says which products of few rows are one kernel
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# On a GPU enough for rounds to be recorded; in the interpreter, which is slow, for a round after a round.
NEW_TOKENS, NUM_SLOTS = (24, 64) if DEVICE.type == "cuda" else (3, 24)
GRAPHS_TRIED = ("off", "on") if DEVICE.type == "cuda" else ("off",)
SHAPES = {"chain": 3, "static": StaticTree(((0,), (1,), (0, 0), (0, 1))), "dynamic": DynamicTree(5, 3, 2)}
MODES = get_args(VerificationMode)
PROMPTS = [[5, 6, 7, 5, 6], [8, 9], [11]]
SMALL = {"draft_model": {"num_layers": 1}, "lookahead": {"window": 2, "candidates": 2, "pool": 16}}
CUT = {"block": (0.9, 20)}  # top_p and top_k of a mode; their kernels are slow in the interpreter
BY_DEFAULT = ("sparse attention", "chunks", "Kimi delta attention", "Mamba-2")  # all kernels, in few targets
OTHERS = sorted(KINDS.keys() - ALIKE - set(BY_DEFAULT))
Case = tuple[str, VerificationMode, str]
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="on a GPU kernels are compiled")


@pytest.fixture(scope="module")
def target_dir(make_target_dir) -> str:
    return str(make_target_dir(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1))


@functools.cache
def plain_target(directory: str) -> Target:
    return Target.from_pretrained(directory, "cpu", torch.float32)


@functools.cache
def target_on_kernels(directory: str, products: str) -> Target:
    """Load it once for each way of multiplying: its loader decodes on kernels, too, to check that it can."""
    assert DEVICE.type == "cuda" or os.environ[PRODUCTS] == products
    target = Target.from_pretrained(directory, DEVICE, torch.float32)
    assert runs_kernels(target.device)
    return target


def drafter_of(kind: str, target: Target, weights: Drafter | None = None) -> Drafter:
    """Return a drafter with noise in its weights, or with the weights of another."""
    drafter = build(kind, target, **SMALL.get(kind, {})).to(target.device)
    if weights is not None:
        drafter.load_state_dict(weights.state_dict())
    return drafter


@functools.cache
def drafter_to_ask(kind: str, directory: str) -> Drafter:
    return drafter_of(kind, plain_target(directory))


@functools.cache
def settings_of(case: Case, directory: str) -> GenerationSettings | None:
    """Return the settings of a case; None where the drafter cannot follow them."""
    kind, mode, shape_name = case
    sampling = Sampling() if mode in ("greedy", "synthetic") else Sampling(0.8, *CUT.get(mode, ()))
    shape: int | Shape = 0 if kind == "none" else SHAPES[shape_name]
    try:
        rates = (0.5, 0.3) if mode == "synthetic" else ()
        drafter = drafter_to_ask(kind, directory)
        return resolve_settings(drafter, sampling, NEW_TOKENS, shape, mode, synthetic_rates=rates)
    except UserError:
        return None


def decode(target: Target, drafter: Drafter, settings: GenerationSettings, num_rows: int, lag: int) -> list[tuple]:
    """Return the tokens and the counters of so many prompts and one more, in a queue through so many rows."""
    engine = BatchEngine(target, drafter, settings, num_rows, NUM_SLOTS)
    generation = Generation(engine, PROMPTS[: num_rows + 1], lag=lag)
    while generation.running():
        generation.step()
    return [(request.token_ids, request.stats) for request in generation.requests]


def assert_kernels_agree(case: Case, num_rows: int, lag: int, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_target(directory)
    settings = settings_of(case, directory)
    assert settings is not None
    drafter = drafter_of(case[0], plain)
    expected = decode(plain, drafter, settings, num_rows, lag)
    products = "fused" if num_rows == 1 and lag else "separate"  # fused ones are slow in the interpreter
    if DEVICE.type == "cpu":
        monkeypatch.setenv(SWITCH, "interpreter")
        monkeypatch.setenv(PRODUCTS, products)
    on_kernels = target_on_kernels(directory, products)
    for graphs in GRAPHS_TRIED:
        monkeypatch.setenv(GRAPHS, graphs)
        found = decode(on_kernels, drafter_of(case[0], on_kernels, drafter), settings, num_rows, lag)
        assert found == expected, (case, graphs)


def followed_cases(directory: str) -> list[Case]:
    """Return every combination that its drafter can follow."""
    shapes = ((kind, shape) for kind in DRAFTERS for shape in SHAPES if kind != "none" or shape == "chain")
    every = [(kind, mode, shape) for (kind, shape), mode in itertools.product(shapes, MODES)]
    return [case for case in every if settings_of(case, directory) is not None]


def covering_cases(directory: str) -> list[Case]:
    """Return one case for each mode and shape, of the drafter that was taken least before and follows the fewest.

    Behind them stands one of each drafter that was never taken.
    """
    taken: Counter[str] = Counter()
    followed = Counter(case[0] for case in followed_cases(directory))
    chosen = []
    by_mode = sorted(followed_cases(directory), key=lambda case: case[1:])
    for _, group in itertools.groupby(by_mode, lambda case: case[1:]):
        case = min(group, key=lambda case: (taken[case[0]], followed[case[0]]))
        taken[case[0]] += 1
        chosen.append(case)
    left = set(DRAFTERS) - set(taken)
    chosen += [next(case for case in by_mode if case[0] == kind) for kind in sorted(left)]
    assert {case[0] for case in chosen} == set(DRAFTERS)
    return chosen


@pytest.mark.parametrize("part", range(4))
def test_the_loop_on_kernels_is_the_plain_loop(part: int, target_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, case in enumerate(covering_cases(target_dir)):
        if number % 4 == part:
            with monkeypatch.context() as environment:
                assert_kernels_agree(case, (1, 3)[number // 4 % 2], number % 2, target_dir, environment)


@pytest.mark.parametrize("kind", [*BY_DEFAULT, *(pytest.param(kind, marks=pytest.mark.long) for kind in OTHERS)])
def test_targets_of_each_kind_on_kernels(kind: str, target_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts, one after the other in a row; `synthetic` verification keeps branches of a tree."""
    target, _ = target_and_plain_model(*KINDS[kind])
    settings = settings_of(("medusa", "synthetic", "static"), target_dir)
    drafter = drafter_of("medusa", target)
    assert settings is not None
    expected = decode(target, drafter, settings, 1, 0)
    assert any(stats.num_accepted_tokens for _, stats in expected)
    if DEVICE.type == "cpu":
        monkeypatch.setenv(SWITCH, "interpreter")
    on_kernels = target_and_plain_model(*KINDS[kind], device=DEVICE)[0] if DEVICE.type == "cuda" else target
    for graphs in GRAPHS_TRIED:
        monkeypatch.setenv(GRAPHS, graphs)
        assert decode(on_kernels, drafter_of("medusa", on_kernels, drafter), settings, 1, 0) == expected, graphs


@pytest.mark.long
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("lag", [0, 1])
def test_the_loop_on_kernels_in_every_combination(
    num_rows: int, lag: int, target_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in followed_cases(target_dir):
        with monkeypatch.context() as environment:
            assert_kernels_agree(case, num_rows, lag, target_dir, environment)


def loss_and_gradients(target: Target) -> list[torch.Tensor]:
    """Return the loss, its sums and the gradients of a drafter on a random batch."""
    drafter = build("eagle3", target)
    sums = loss_of(drafter, random_batch(target), target)
    sums["loss"][0].backward()
    gradients = [parameter.grad for parameter in drafter.parameters() if parameter.grad is not None]
    return [tensor.detach() for pair in sums.values() for tensor in pair] + gradients


@interpreted
def test_a_training_loss_on_kernels_is_the_plain_loss(target_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = plain_target(target_dir)
    expected = loss_and_gradients(target)
    monkeypatch.setenv(SWITCH, "interpreter")
    assert not isinstance(teacher_from(torch.ones(1, 4), None, True), Teacher)
    torch.testing.assert_close(loss_and_gradients(target), expected, atol=1e-5, rtol=1e-4)


@interpreted
def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runs_kernels(torch.device("cpu"))
    monkeypatch.setenv(SWITCH, "interpreter")
    assert runs_kernels(torch.device("cpu"))
    assert not runs_kernels(torch.device("meta"))
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(UserError, match="give interpreter"):
        runs_kernels(torch.device("cpu"))
    monkeypatch.setenv(SWITCH, "interpreter")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="before Python starts"):
        runs_kernels(torch.device("cpu"))
