"""Comparison of speculative output with plain decoding, token by token, near ties told apart.

A differently shaped matrix product rounds otherwise, and may turn the choice between two tokens around. So the first
difference of each output is re-scored in plain passes over the text before it: one in fp32, and `NUM_ROUNDINGS` in the
dtype of the run, which but for the first are rounded otherwise. There each layer's output is moved at random by up to
one unit in its last place (Monte Carlo arithmetic: Parker, Pierce and Eggert 2000), and tokens follow that the text
does not see, which give all products another shape. Where a model chooses, its experts or the tokens that it attends
to, a choice by a hair changes then as it does in decoding, and all logits with it.

Greedy: a computation that errs by up to e at each logit can prefer the one of two tokens or the other only while their
true logits are at most 2 e apart. Here e is what the run's dtype errs by at that place: the largest difference over the
vocabulary between its re-scored logits and fp32's, plus 2 ulp of fp32. Other shapes of the same products err otherwise,
which another factor of 2 allows for: two tokens are a near tie when they are at most 4 e apart in fp32.

Sampled on the same noise: the token is the one in whose share of the distribution function the uniform number lies. A
computation that errs by up to e in the mass of any set of tokens can draw another token only while the number lies at
most e outside that token's share. Here e is the largest total variation between the re-scored distributions of the
run's dtype and that of fp32, plus 2 ulp of fp32 at the largest logit over the temperature; with the same factor of 2,
two tokens are a near tie when the number lies at most 2 e outside the share of each. Where top-p cuts, the cut may fall
elsewhere: the limit grows by the mass of the tokens that stand within 2 e of its edge, with e of the distribution
before the cut.

Shapes: N passes in the dtype of the run, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.inference.measuring.results import Difference, LosslessCheck
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream, probabilities
from draftsmith.models.slots.forward import run_causal
from draftsmith.models.target.target import Target

GREEDY = GenerationSettings()
EPSILON = torch.finfo(torch.float32).eps
NUM_ROUNDINGS = 9  # passes in the dtype of the run


def compare_outputs(
    target: Target,
    prompts: list[list[int]],
    plain: list[list[int]],
    speculative: list[list[int]],
    settings: GenerationSettings = GREEDY,
) -> LosslessCheck:
    """Compare greedy outputs of the same prompts, or sampled ones on the same noise; a prompt's place is its id."""
    differences = [
        first_difference(target, settings, request, prompt, expected, actual)
        for request, (prompt, expected, actual) in enumerate(zip(prompts, plain, speculative, strict=True))
        if expected != actual
    ]
    near_ties = sum(difference.near_tie for difference in differences)
    num_differences = len(differences)
    return LosslessCheck(
        len(prompts), len(prompts) - num_differences, near_ties, num_differences - near_ties, differences
    )


def first_difference(
    target: Target,
    settings: GenerationSettings,
    request: int,
    prompt: list[int],
    expected: list[int],
    actual: list[int],
) -> Difference:
    """Find and re-score the first difference of two answers. It is no tie where one is the beginning of the other."""
    sampling = settings.sampling
    same = [a == b for a, b in zip(expected, actual, strict=False)]
    position = same.index(False) if False in same else len(same)
    plain, speculative = (answer[position] if position < len(answer) else None for answer in (expected, actual))
    text = torch.tensor([prompt + expected[:position]], device=target.device)
    logits = torch.stack([rounded_logits(target, text, number) for number in range(NUM_ROUNDINGS)])
    with in_fp32(target.model):
        exact = next_logits(target, text)
    token_gap = share_gap = None
    if plain is not None and speculative is not None:
        token_gap = (exact[plain] - exact[speculative]).abs().item()
        if not sampling.greedy:
            uniform, probability = target_uniform(settings.seed, request, text.shape[1]), probabilities(exact, sampling)
            share_gap = max(outside_share(probability, token, uniform) for token in (plain, speculative))
    gap = token_gap if sampling.greedy else share_gap
    tolerance = near_tie_gap(logits, exact) if sampling.greedy else near_tie_share(logits, exact, sampling)
    return Difference(
        request,
        position,
        plain,
        speculative,
        top_two_gap(logits[0]),
        top_two_gap(exact),
        token_gap,
        share_gap,
        tolerance,
        near_tie=gap is not None and gap <= tolerance,
    )


@torch.no_grad()
def next_logits(target: Target, text: Tensor, unseen: int = 0) -> Tensor:
    """Return the target's logits after a text [1, T] without its last `unseen` tokens, in one pass: fp32 [V]."""
    end = text.shape[1] - unseen
    return target.logits(run_causal(target.model, text)[:, end - 1 : end])[0, 0].float()


def rounded_logits(target: Target, text: Tensor, number: int) -> Tensor:
    """Return the same logits, rounded in another way for each number; 0: not changed."""

    def move(layer: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        hidden = output if isinstance(output, Tensor) else output[0]
        generator = torch.Generator(hidden.device).manual_seed(next(seeds))
        share = torch.empty_like(hidden, dtype=torch.float32).uniform_(-1, 1, generator=generator)
        hidden = (hidden.float() * (1 + share * torch.finfo(hidden.dtype).eps)).to(hidden.dtype)
        return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

    seeds = count(number << 16)
    hooks = [layer.register_forward_hook(move) for layer in target.decoder_layers if number]
    try:
        unseen = min(number**2, target.context - text.shape[1])
        return next_logits(target, nn.functional.pad(text, (0, unseen)), unseen)
    finally:
        for hook in hooks:
            hook.remove()


def top_two_gap(logits: Tensor) -> float:
    highest = logits.topk(2).values
    return (highest[0] - highest[1]).item()


def near_tie_gap(logits: Tensor, exact: Tensor) -> float:
    """Return 4 e of logits [N, V] that should be `exact` [V]; see above."""
    return 4 * ((logits - exact).abs().max().item() + 2 * ulp(exact))


# --- sampled


def target_uniform(seed: int, request: int, position: int) -> float:
    """Return the number by which the target draws the token at a position of a request's text."""
    noise = Noise(seed, torch.tensor([request]))
    return noise.uniforms(torch.tensor([[position]]), Stream.TARGET).item()


def outside_share(probability: Tensor, token: int, uniform: float) -> float:
    """Return how far a number in (0, 1) lies outside the share of a token in the distribution function of [V]."""
    cumulative = probability.double().cumsum(0) / probability.double().sum()
    begin = cumulative[token - 1].item() if token else 0.0
    return max(begin - uniform, uniform - cumulative[token].item(), 0.0)


def near_tie_share(logits: Tensor, exact: Tensor, sampling: Sampling) -> float:
    """Return 2 e of the distributions of logits [N, V] that should be `exact` [V], more where top-p cuts; see above."""
    largest = 2 * distribution_error(logits, exact, sampling)
    if sampling.top_p < 1:
        moved = 2 * distribution_error(logits, exact, replace(sampling, top_p=1.0))
        edges = max(sampling.top_p - moved, EPSILON), min(sampling.top_p + moved, 1.0)
        largest += total_variation(*(probabilities(exact, replace(sampling, top_p=edge)) for edge in edges)).item()
    return largest


def distribution_error(logits: Tensor, exact: Tensor, sampling: Sampling) -> float:
    """Return e: what the mass of any set of tokens errs by."""
    variation = total_variation(probabilities(logits, sampling), probabilities(exact, sampling))
    return variation.max().item() + 2 * ulp(exact / sampling.temperature)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return (p.double() - q.double()).abs().sum(-1) / 2


def ulp(values: Tensor) -> float:
    """Return the unit in the last place of fp32 at the largest of some values."""
    return EPSILON * max(1.0, values.abs().max().item())


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Let a frozen model compute in fp32 meanwhile; each module's weights are widened for the time of its own call.

    So are its inputs, which some models cast to the dtype of the weights before the call.
    """
    kept: dict[nn.Module, list[Tensor]] = {}

    def widen(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        kept[module] = [parameter.data for parameter in module.parameters(recurse=False)]
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.float()
        return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def restore(module: nn.Module, _: object, __: object) -> None:
        for parameter, data in zip(module.parameters(recurse=False), kept.pop(module), strict=True):
            parameter.data = data

    hooks = []
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks += [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
