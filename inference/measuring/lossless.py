"""Did speculation change the output? Token-by-token comparison with plain decoding, near ties told apart.

A differently shaped matrix product rounds otherwise, and may turn the choice between two tokens around. So the first
difference of each output is re-scored in one plain pass over the text before it: in the dtype of the run, and in fp32.

Greedy: a computation that errs by up to e at each logit can prefer the one of two tokens or the other only while their
true logits are at most 2 e apart. Here e is what the run's dtype errs by at that place: the largest difference over the
vocabulary between its re-scored logits and fp32's, plus 2 ulp of fp32. Other shapes of the same products err otherwise,
which another factor of 2 allows for: two tokens are a near tie when they are at most 4 e apart in fp32.

Sampled on the same noise: the token is the one in whose share of the distribution function the uniform number lies. A
computation that errs by up to e in the mass of any set of tokens can draw another token only while the number lies at
most e outside that token's share. Here e is the total variation between the re-scored laws of the run's dtype and of
fp32, plus 2 ulp of fp32 at the largest logit over the temperature; with the same factor of 2, two tokens are a near tie
when the number lies at most 2 e outside the share of each. Where top-p cuts, the cut may fall elsewhere: the limit
grows by the mass of the tokens that stand within 2 e of its edge, with e of the law before the cut.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.inference.decoding.batch_engine import GenerationSettings
from draftsmith.models.sampling.sampling import Noise, Sampling, Stream, probabilities
from draftsmith.models.target.slots import run_causal
from draftsmith.models.target.target import Target

GREEDY = GenerationSettings()
EPSILON = torch.finfo(torch.float32).eps


@dataclass
class Difference:
    """Where an output first differs from plain decoding, and what the target holds of the two tokens."""

    request: int  # place among the prompts
    position: int  # in the answer, from 0
    plain_token: int | None  # None: the answer had ended
    speculative_token: int | None
    top_two_gap: float  # between the target's two highest logits there, in the dtype of the run
    top_two_gap_fp32: float
    token_gap_fp32: float | None  # between the two tokens
    share_gap_fp32: float | None  # sampled: how far the uniform number lies outside the share of one of them
    near_tie_gap: float  # the largest that counts as a near tie: of token_gap_fp32, where sampled of share_gap_fp32
    near_tie: bool


@dataclass
class LosslessCheck:
    """Counts of requests whose output was compared."""

    checked: int = 0
    identical: int = 0
    near_tie_divergences: int = 0  # first difference between two tokens that the target holds equally likely
    divergences: int = 0  # any other first difference: a bug
    first_differences: list[Difference] = field(default_factory=list)  # of all outputs that are not identical

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    target: Target,
    prompts: list[list[int]],
    plain: list[list[int]],
    speculative: list[list[int]],
    settings: GenerationSettings = GREEDY,
) -> LosslessCheck:
    """Compare greedy outputs of the same prompts, or sampled ones on the same noise; a prompt's place is its id."""
    check = LosslessCheck(checked=len(prompts))
    for request, (prompt, expected, found) in enumerate(zip(prompts, plain, speculative, strict=True)):
        if expected == found:
            check.identical += 1
            continue
        difference = first_difference(target, settings, request, prompt, expected, found)
        check.first_differences.append(difference)
        check.near_tie_divergences += difference.near_tie
        check.divergences += not difference.near_tie
    return check


def first_difference(
    target: Target,
    settings: GenerationSettings,
    request: int,
    prompt: list[int],
    expected: list[int],
    found: list[int],
) -> Difference:
    """Find and re-score the first difference of two answers. It is no tie where one is the beginning of the other."""
    sampling = settings.sampling
    same = [a == b for a, b in zip(expected, found, strict=False)]
    position = same.index(False) if False in same else len(same)
    plain, speculative = (answer[position] if position < len(answer) else None for answer in (expected, found))
    text = torch.tensor([prompt + expected[:position]], device=target.device)
    logits = next_logits(target, text)
    with in_fp32(target.model):
        exact = next_logits(target, text)
    token_gap = share_gap = None
    if plain is not None and speculative is not None:
        token_gap = (exact[plain] - exact[speculative]).abs().item()
        if not sampling.greedy:
            uniform, law = target_uniform(settings.seed, request, text.shape[1]), probabilities(exact, sampling)
            share_gap = max(outside_share(law, token, uniform) for token in (plain, speculative))
    gap = token_gap if sampling.greedy else share_gap
    tolerance = near_tie_gap(logits, exact) if sampling.greedy else near_tie_share(logits, exact, sampling)
    return Difference(
        request,
        position,
        plain,
        speculative,
        top_two_gap(logits),
        top_two_gap(exact),
        token_gap,
        share_gap,
        tolerance,
        near_tie=gap is not None and gap <= tolerance,
    )


@torch.no_grad()
def next_logits(target: Target, text: Tensor) -> Tensor:
    """The target's logits after a text [1, T], in one pass without a cache: fp32 [V]."""
    return target.logits(run_causal(target.model, text)[:, -1:])[0, 0].float()


def top_two_gap(logits: Tensor) -> float:
    highest = logits.topk(2).values
    return (highest[0] - highest[1]).item()


def near_tie_gap(logits: Tensor, exact: Tensor) -> float:
    """4 e of logits [V] that should be `exact` [V]; see above."""
    return 4 * ((logits - exact).abs().max().item() + 2 * ulp(exact))


# --- sampled


def target_uniform(seed: int, request: int, position: int) -> float:
    """The number by which the target draws the token at a position of a request's text."""
    noise = Noise(seed, torch.tensor([request]))
    return noise.uniforms(torch.tensor([[position]]), Stream.TARGET).item()


def outside_share(law: Tensor, token: int, uniform: float) -> float:
    """How far a number in (0, 1) lies outside the share of a token in the distribution function of a law [V]."""
    cumulative = law.double().cumsum(0) / law.double().sum()
    begin = cumulative[token - 1].item() if token else 0.0
    return max(begin - uniform, uniform - cumulative[token].item(), 0.0)


def near_tie_share(logits: Tensor, exact: Tensor, sampling: Sampling) -> float:
    """2 e of the law of logits [V] that should be `exact` [V], and more where top-p cuts; see above."""
    largest = 2 * law_error(logits, exact, sampling)
    if sampling.top_p < 1:
        moved = 2 * law_error(logits, exact, replace(sampling, top_p=1.0))
        edges = max(sampling.top_p - moved, EPSILON), min(sampling.top_p + moved, 1.0)
        largest += total_variation(*(probabilities(exact, replace(sampling, top_p=edge)) for edge in edges))
    return largest


def law_error(logits: Tensor, exact: Tensor, sampling: Sampling) -> float:
    """e: what the mass of any set of tokens errs by."""
    found = total_variation(probabilities(logits, sampling), probabilities(exact, sampling))
    return found + 2 * ulp(exact / sampling.temperature)


def total_variation(p: Tensor, q: Tensor) -> float:
    return (p.double() - q.double()).abs().sum().item() / 2


def ulp(values: Tensor) -> float:
    """Of fp32, at the largest of some values."""
    return EPSILON * max(1.0, values.abs().max().item())


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """A frozen model computes in fp32 meanwhile; each module's weights are widened for the time of its own call."""
    kept: dict[nn.Module, list[Tensor]] = {}

    def widen(module: nn.Module, _: object) -> None:
        kept[module] = [parameter.data for parameter in module.parameters(recurse=False)]
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.float()

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
