"""Did speculation change the output? Token-by-token comparison with plain decoding, near ties told apart.

In low precision a differently shaped matrix product may turn two nearly equal logits around. So the first difference
of each output is re-scored in one plain pass over the text before it: in the dtype of the run, and in fp32.

A computation that errs by up to e at each logit can prefer the one of two tokens or the other only while their true
logits are at most 2 e apart. Here e is what the run's dtype errs by at that place: the largest difference over the
vocabulary between its re-scored logits and fp32's, plus 2 ulp of fp32. Other shapes of the same products err otherwise,
which another factor of 2 allows for: two tokens are a near tie when they are at most 4 e apart in fp32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.models.slots import run_causal
from draftsmith.models.target import Target


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
    near_tie_gap: float  # the largest that counts as a near tie
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
    target: Target, prompts: list[list[int]], plain: list[list[int]], speculative: list[list[int]]
) -> LosslessCheck:
    """Compare greedy outputs of the same prompts."""
    check = LosslessCheck(checked=len(prompts))
    for request, (prompt, expected, found) in enumerate(zip(prompts, plain, speculative, strict=True)):
        if expected == found:
            check.identical += 1
            continue
        difference = first_difference(target, request, prompt, expected, found)
        check.first_differences.append(difference)
        check.near_tie_divergences += difference.near_tie
        check.divergences += not difference.near_tie
    return check


def first_difference(
    target: Target, request: int, prompt: list[int], expected: list[int], found: list[int]
) -> Difference:
    """Find and re-score the first difference of two answers. It is no tie where one is the beginning of the other."""
    same = [a == b for a, b in zip(expected, found, strict=False)]
    position = same.index(False) if False in same else len(same)
    plain, speculative = (answer[position] if position < len(answer) else None for answer in (expected, found))
    text = torch.tensor([prompt + expected[:position]], device=target.device)
    logits = next_logits(target, text)
    with in_fp32(target.model):
        exact = next_logits(target, text)
    gap = None
    if plain is not None and speculative is not None:
        gap = (exact[plain] - exact[speculative]).abs().item()
    tolerance = near_tie_gap(logits, exact)
    return Difference(
        request,
        position,
        plain,
        speculative,
        top_two_gap(logits),
        top_two_gap(exact),
        gap,
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
    ulp = torch.finfo(torch.float32).eps * max(1.0, exact.abs().max().item())
    return 4 * ((logits - exact).abs().max().item() + 2 * ulp)


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
