"""Did speculation change the output? Token-by-token comparison with plain decoding, near-ties told apart."""

from dataclasses import asdict, dataclass

import torch

from draftsmith.models.slots import run_causal
from draftsmith.models.target import Target


@dataclass
class LosslessCheck:
    """Counts of requests whose output was compared."""

    checked: int = 0
    identical: int = 0
    near_tie_divergences: int = 0  # first difference between two tokens that the target holds equally likely
    divergences: int = 0  # any other first difference: a bug

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def near_tie_gap(dtype: torch.dtype, largest_logit: float) -> float:
    """Largest gap between two logits that rounding in a differently shaped matrix product can turn around."""
    return 8 * torch.finfo(dtype).eps * max(1.0, abs(largest_logit))


def compare(
    target: Target, prompts: list[list[int]], plain: list[list[int]], speculative: list[list[int]]
) -> LosslessCheck:
    """Compare greedy outputs of the same prompts."""
    check = LosslessCheck()
    for prompt, expected, found in zip(prompts, plain, speculative, strict=True):
        check.checked += 1
        if expected == found:
            check.identical += 1
        elif _is_near_tie(target, prompt, expected, found):
            check.near_tie_divergences += 1
        else:
            check.divergences += 1
    return check


@torch.no_grad()
def _is_near_tie(target: Target, prompt: list[int], expected: list[int], found: list[int]) -> bool:
    """Whether at the first difference the target's logits of the two tokens are equal up to rounding."""
    pairs = zip(expected, found, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:  # one is the beginning of the other: they stopped by different rules
        return False
    text = torch.tensor([prompt + expected[:first]], device=target.device)
    logits = target.logits(run_causal(target.model, text)[:, -1:])[0, 0].float()
    gap = (logits[expected[first]] - logits[found[first]]).abs().item()
    return gap <= near_tie_gap(target.dtype, logits.abs().max().item())
